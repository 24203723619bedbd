"""Schemas as Pydantic, zod and the SDKs write them are taken, and enforced but for few."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.values.errors import RequestError
from tests.text.schemas.answers import compiled, faults, read

FOLDER = Path(__file__).with_name("forms")
FILES = {
    name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("pydantic", "zod")
}
FORMS: list[dict[str, Any]] = [form for file in FILES.values() for form in file["forms"]]


def outcome(schema: dict[str, Any]) -> str:
    found = read(schema)
    if found is None:
        return "refused"
    try:
        compiled(found.schema)
    except RequestError:
        return "refused"
    if found.left_out:
        return "left out"
    return "annotations" if found.annotations else "enforced"


def test_most_forms_are_enforced_and_almost_all_are_taken() -> None:
    """The counts of docs/serving.md. `pytest -s` prints them."""
    counts = {kind: 0 for kind in ("enforced", "annotations", "left out", "refused")}
    for form in FORMS:
        counts[outcome(form["schema"])] += 1
    print(counts)
    assert len(FORMS) >= 110 and {form["source"] for form in FORMS} >= {
        "pydantic",
        "zod",
        "openai",
        "anthropic",
        "ai",
    }
    assert counts["enforced"] + counts["annotations"] >= 0.85 * len(FORMS)
    assert counts["refused"] <= 0.1 * len(FORMS)


def test_forms_that_sdks_send_with_strict_are_enforced() -> None:
    strict = [form for form in FORMS if form.get("strict")]
    assert len(strict) > 20
    assert [
        form["name"]
        for form in strict
        if outcome(form["schema"]) not in ("enforced", "annotations")
    ] == []


@pytest.mark.slow
def test_answers_to_all_forms_are_valid() -> None:
    for form in FORMS:
        kind, wrong = faults(form["schema"], range(4))
        assert kind != "refused" and not wrong, (form["source"], form["name"], wrong[:1])
