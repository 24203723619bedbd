"""Flags: what contradicts itself is refused by name. And what a run shows while it works."""

import io
import json
import os
from pathlib import Path

import pytest

from orca_jax.batch.__main__ import main
from orca_jax.batch.args import parse_args
from orca_jax.batch.display import Display, time_text
from orca_jax.values.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        (["--concurrency", "0"], "concurrency"),
        (["--max-logprobs", "21"], "max_logprobs"),
        (["--body", "[]"], "body"),
        (["--body", "{"], "body"),
        (["--body", '{"prompt": "x"}'], "body"),
        (["--body", '{"max_tokens": 0}'], None),  # may be meant, with echo
        (["--body", '{"max_token": 5}'], "body"),
        (["--max-retries", "2"], "max_retries"),
        (["--api-key-file", "key"], "api_key_file"),
        *[
            (["--base-url", url], "base_url")
            for url in ("localhost:8000", "ftp://h", "http://", "http://h:port", "http://h?key=1")
        ],
        (["--base-url", "http://h", "--max-num-seqs", "8"], "max_num_seqs"),
        (["--base-url", "http://h", "--chat-template", "t"], "chat_template"),
        (
            [
                "--base-url",
                "http://h",
                "--served-model-name",
                "m",
                "--no-progress",
                "--max-retries",
                "0",
            ],
            None,
        ),
        (["--base-url", "http://h", "--max-retries", "-1"], "max_retries"),
        (["--base-url", "http://h", "--request-timeout", "0"], "request_timeout"),
        (["--base-url", "http://h", "--body", '{"min_tokens_of_theirs": 1}'], None),
    ],
)
def test_flags(flags: list[str], param: str | None) -> None:
    argv = ["-i", "in.jsonl", "-o", "out.jsonl", *flags]
    if param is None:
        parse_args(argv)
        return
    with pytest.raises(ConfigError) as error:
        parse_args(argv)
    assert error.value.param == param


def test_files_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.txt"
    source.write_text("hi\n")
    empty, pipe = tmp_path / "empty", tmp_path / "pipe"
    empty.touch()
    os.mkfifo(pipe)
    for given, made, told in [
        (
            source,
            source,
            "error: --output: is the same file as --input; choose another output file\n",
        ),
        (
            tmp_path / "no",
            tmp_path / "out",
            f"error: --input: {tmp_path}/no cannot be read: No such file or directory; check the path\n",
        ),
        (
            empty,
            tmp_path / "out",
            f"error: --input: {empty} is empty; it must contain one request per line\n",
        ),
        (
            pipe,
            tmp_path / "out",
            f"error: --input: {pipe} is not a regular file; it is read twice, so it must be a file on disk\n",
        ),
        (
            source,
            tmp_path,
            f"error: --output: {tmp_path} is not a regular file; rows are appended and read again to resume, "
            "so give the name of a file\n",
        ),
        (
            source,
            tmp_path / "a" / "b",
            f"error: --output: {tmp_path}/a is not a directory; create it first\n",
        ),
    ]:
        assert main(["-i", str(given), "-o", str(made), "--model", "preset:toy"]) == 2
        assert capsys.readouterr().err == told
    assert not (tmp_path / "out").exists()


def test_the_line_says_how_far_it_is_and_how_fast() -> None:
    now, out = 100.0, io.StringIO()
    display = Display(1200, 200, out, enabled=True, clock=lambda: now)
    assert display.line() == "200 of 1,200 rows, 0 tokens/s, unknown time left"
    for _ in range(100):
        display.add_row(30)
    now = 102.0
    assert display.line() == "300 of 1,200 rows, 1,500 tokens/s, 0:18 left"
    display.close()
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    display = Display(4, 2, out, enabled=True)
    display.add_row(5)
    display.close()
    assert "3/4" in out.getvalue()


def test_times_are_short() -> None:
    assert [time_text(seconds) for seconds in (0, 59.6, 754, 3723)] == [
        "0:00",
        "1:00",
        "12:34",
        "1:02:03",
    ]


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        (["--model", "demo"], 1000),
        (["--model", "demo", "--itl-target-ms", "70"], 70),
        (["--model", "demo", "--scheduler", "orca"], None),
        (["--model", "demo", "--max-num-batched-tokens", "256"], None),
        (["--model", "preset:toy"], None),
    ],
)
def test_a_batch_has_a_late_target_for_tokens(
    tmp_path: Path, flags: list[str], target: float | None
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\n")
    config = parse_args(["-i", str(source), "-o", str(tmp_path / "out.jsonl"), *flags])
    assert config.server.engine.itl_target_ms == target


def test_a_file_of_settings_may_have_a_mapping_for_the_body(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("body:\n  max_tokens: 5\n")
    config = parse_args(["-i", "in.jsonl", "-o", "out.jsonl", "--config", str(path)])
    assert json.loads(config.body) == {"max_tokens": 5}
