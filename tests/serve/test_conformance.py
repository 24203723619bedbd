"""Every row of docs/conformance.md has a test."""

from pathlib import Path

import pytest

from orca_jax.serve.openai.schema import PARSERS
from tests.project.source import SourceFile
from tests.serve.conformance import items, marks, marks_of, routes


def test_every_field_and_route_has_a_test() -> None:
    assert sorted(set(items()) - set(marks())) == []


def test_marks_name_what_there_is() -> None:
    assert sorted(set(marks()) - set(items())) == []


def test_every_row_says_what_the_server_does() -> None:
    assert [item for item, text in items().items() if not text] == []


def test_routes_are_those_of_the_document() -> None:
    assert set(PARSERS) <= set(routes())
    assert {"GET /health", "GET /metrics", "GET /v1/models"} <= set(routes())


def test_marks_are_read_from_functions_and_modules(tmp_path: Path) -> None:
    source = tmp_path / "test_it.py"
    source.write_text(
        "import pytest\n"
        'pytestmark = pytest.mark.conforms("a")\n'
        '@pytest.mark.conforms("b", "c")\n'
        "def test_one() -> None: ...\n"
        "@pytest.mark.slow\n"
        "def test_two() -> None: ...\n",
        encoding="utf-8",
    )
    assert set(marks_of(SourceFile(source))) == {
        ("a", str(source)),
        ("b", f"{source}::test_one"),
        ("c", f"{source}::test_one"),
    }
    source.write_text(
        "@pytest.mark.conforms(NAME)\ndef test_one() -> None: ...\n", encoding="utf-8"
    )
    with pytest.raises(AssertionError, match="plain strings"):
        list(marks_of(SourceFile(source)))
