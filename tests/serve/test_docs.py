"""`docs/serving.md` says what the code does."""

import re
from pathlib import Path

from orca_jax.serve.schema import MAX_PROMPTS, MAX_STOP_STRINGS, NEUTRAL, CompletionRequest

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_field_is_documented() -> None:
    table, _, rest = section("Fields of a completion").partition("These may be sent")
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == CompletionRequest.__struct_fields__
    assert tuple(re.findall(r"`(\w+)`", rest)) == tuple(NEUTRAL)
    assert f"up to {MAX_PROMPTS}" in table and f"up to {MAX_STOP_STRINGS}" in table
