"""The pages about the API are whole."""

import re
from pathlib import Path

from orca_jax.serve.openai.schema import PARSERS
from scripts.api_page import api_page
from tests.serve.played import on_stage, saying
from tests.serve.test_openapi import routes_of

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_has_every_field() -> None:
    text = api_page()
    for parser in PARSERS.values():
        for name in (*parser.kind.__struct_fields__, *parser.unused):
            assert f"| `{name}` |" in text, name
    for target in re.findall(r"\]\(#(\w+)\)", text):
        assert re.search(rf"^### {target}$", text, re.MULTILINE | re.IGNORECASE), (
            f"a link without a target: {target}"
        )


def test_routes_are_listed() -> None:
    text = (DOCS / "serving.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(?:GET|POST) (\S+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(on_stage(saying("x"), routes_of))
