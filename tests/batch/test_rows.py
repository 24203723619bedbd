"""Lines: what is a row, and what is said of those that are none."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.batch import input as input_module
from orca_jax.batch import rows
from orca_jax.batch.input import check_readable, examine, read_lines
from orca_jax.batch.rows import MAX_CUSTOM_ID, BadLine, Row, RowReader
from orca_jax.values.errors import ConfigError
from tests.project.source import ROOT
from tests.run.examples import holds_for

READER = RowReader("jsonl", "m", {"max_tokens": 5})
GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "x"},
}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def line(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def test_a_body_stays_as_it_is() -> None:
    text = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{ "model" : "x", "n":1.0}}'
    assert READER.read(7, text) == Row(7, "a", "/v1/chat/completions", b'{ "model" : "x", "n":1.0}')


def test_a_prompt_becomes_a_body() -> None:
    row = READER.read(7, b'{"prompt": [1, 2], "top_k": 3, "max_tokens": 9}')
    assert isinstance(row, Row) and (row.custom_id, row.url) == ("line-7", "/v1/completions")
    assert json.loads(row.body) == {"model": "m", "max_tokens": 9, "prompt": [1, 2], "top_k": 3}
    text = RowReader("text", "m", {"max_tokens": 5}).read(2, b'{"no": "JSON"} here ')
    assert isinstance(text, Row)
    assert json.loads(text.body) == {
        "model": "m",
        "max_tokens": 5,
        "prompt": '{"no": "JSON"} here ',
    }


@pytest.mark.parametrize(
    ("text", "code", "param", "custom_id"),
    [
        (None, "line_too_long", None, None),
        (b"", "empty_line", None, None),
        (b" \t", "empty_line", None, None),
        (b'{"custom_id": "a"', "invalid_json", None, None),
        (b'{"custom_id": "a"} {}', "invalid_json", None, None),
        (b"[" * 100_000, "not_an_object", None, None),
        (b'"a"', "not_an_object", None, None),
        (b'{"custom_id": "\xff"}', "invalid_utf8", None, None),
        (b'{"custom_id": "a", "custom_id": "b"}', "duplicate_field", "custom_id", None),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_field", "prompt", None),
        ({"n": 1}, "missing_required_parameter", "body", None),
        (without("custom_id"), "missing_required_parameter", "custom_id", None),
        ({**GOOD, "custom_id": 7}, "invalid_custom_id", "custom_id", None),
        ({**GOOD, "custom_id": ""}, "invalid_custom_id", "custom_id", None),
        ({**GOOD, "custom_id": "a" * (MAX_CUSTOM_ID + 1)}, "invalid_custom_id", "custom_id", None),
        (b'{"custom_id": "\\ud800", "body": {}}', "invalid_json", None, None),
        (without("method"), "missing_required_parameter", "method", "a"),
        (without("url"), "missing_required_parameter", "url", "a"),
        (without("body"), "missing_required_parameter", "body", "a"),
        ({**GOOD, "method": "GET"}, "invalid_method", "method", "a"),
        ({**GOOD, "url": "/v1/embeddings"}, "invalid_url", "url", "a"),
        ({**GOOD, "url": None}, "invalid_url", "url", "a"),
        ({**GOOD, "body": "prompt"}, "invalid_body", "body", "a"),
        ({**GOOD, "prompt": "x"}, "unknown_parameter", "prompt", "a"),
    ],
)
def test_what_is_wrong_is_named(
    text: Any, code: str, param: str | None, custom_id: str | None
) -> None:
    bad = READER.read(3, None if text is None else line(text))
    assert isinstance(bad, BadLine), bad
    assert (bad.line, bad.code, bad.param, bad.custom_id) == (3, code, param, custom_id)
    assert len(bad.message) > 14


@holds_for(
    100,
    text=st.binary(max_size=60)
    | st.recursive(st.none() | st.text(), lambda x: st.dictionaries(st.text(), x)).map(line),
)
def test_every_line_is_a_row_or_says_why_not(text: bytes) -> None:
    read = READER.read(1, text)
    assert read.line == 1
    if isinstance(read, Row):
        assert isinstance(json.loads(read.body), dict)


@given(
    st.lists(st.binary(max_size=30).map(lambda text: text.replace(b"\n", b"")), min_size=1),
    st.booleans(),
)
def test_lines_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in"
    data = b"\n".join(lines) + b"\n" * ends
    path.write_bytes(data)
    if not data:
        with pytest.raises(ConfigError, match="is empty"):
            check_readable(path)
        return
    source = examine(path, lambda done, total: None)
    whole = data.removesuffix(b"\n").removeprefix(b"\xef\xbb\xbf")
    assert list(read_lines(source)) == [text.removesuffix(b"\r") for text in whole.split(b"\n")]
    assert source.size == len(data)


def test_a_long_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_module, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in"
    path.write_bytes(b"x" * 10 + b"\r\n" + b"x" * 11 + b"\n" + b"x" * 3_000_000 + b"\nend")
    assert list(read_lines(examine(path, lambda done, total: None))) == [
        b"x" * 10,
        None,
        None,
        b"end",
    ]


@pytest.mark.parametrize("change", ["edited", "shorter", "longer", "replaced"])
def test_a_change_of_the_input_is_noticed_before_a_line_of_it_is_used(
    tmp_path: Path, change: str
) -> None:
    """Also one of equal length and time of modification."""
    path, line = tmp_path / "in", b"x" * 99 + b"\n"
    path.write_bytes(line * 40_000)
    status, source = path.stat(), examine(path, lambda done, total: None)
    lines = read_lines(source)
    read = [next(lines)]
    match change:
        case "edited":
            with path.open("r+b") as file:
                file.seek(3_000_000)
                file.write(b"y")
        case "shorter":
            os.truncate(path, 3_000_000)
        case "longer":
            with path.open("ab") as file:
                file.write(line)
        case "replaced":
            path.write_bytes(b"y" * 99 + b"\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(
        ConfigError, match=r"was changed while it was read; .* start again with --overwrite"
    ) as error:
        read.extend(lines)
    assert error.value.param == "input" and set(read) == {line[:-1]} and len(read) < 40_000


def test_the_documentation_shows_rows_and_names_the_errors() -> None:
    text = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
    block = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert block
    for shown in block[1].splitlines():
        assert isinstance(READER.read(3, shown.encode()), Row), shown
    written = Path(rows.__file__).read_text(encoding="utf-8")
    codes = {
        *re.findall(r'_Wrong\(\s*"(\w+)"', written),
        *re.findall(r'row.custom_id, "(\w+)"', written),
    }
    assert codes == set(
        re.findall(r"`([a-z0-9]+_[a-z_0-9]+)`", text[text.index("Codes are") :].split("\n- ")[0])
    )
