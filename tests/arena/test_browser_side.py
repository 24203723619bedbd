"""What runs in the browser, run here: two policies, faults of a text, the check, and the labs."""

import json
import sys
from typing import Any

import pytest

from scripts.arena import browser, build
from tests.course.solutions import SOLUTIONS

CONTENT = build.content()
LOAD = {"requests": 16, "batch": 4, "rows": 8, "pages": 0, "gap_ms": 0, "seed": 0}
BROKEN = """\
class Broken:
    api, reads, may_starve = 1, frozenset(), True
    def decide(self, view):
        return 1 / 0
    def started(self, job, num_tokens):
        pass
    def ended(self, job):
        pass
"""


def compared(first: str, second: str, **load: int) -> str:
    def chosen(name: str) -> dict[str, str]:
        return {"name": name, "text": CONTENT["policies"].get(name.removeprefix("own "), "")}

    asked = {"policies": [chosen(first), chosen(second)], "load": LOAD | load}
    page: str = json.loads(browser.compare(json.dumps(asked)))["html"]
    return page


@pytest.mark.parametrize("name", CONTENT["policies"])
def test_each_policy_of_the_list_runs(name: str) -> None:
    assert "16 requests" in compared(name, "request_level")
    assert "5 requests" in compared(name, "chunked", requests=5, pages=24, gap_ms=30)


def test_iteration_level_scheduling_takes_fewer_iterations() -> None:
    page = compared("orca", "request_level", rows=4)
    assert "16 requests, 95 iterations" in page and "16 requests, 157 iterations" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "line 1: "),
        ("import nowhere", "bad, line 1: ModuleNotFoundError"),
        ("x = 1", "bad has no class with `decide` or `key`"),
        ("class A:\n    def decide(self, view): ...", "bad: scheduler: A lacks api"),
        (BROKEN, "division by zero at line 4"),
    ],
)
def test_a_fault_has_its_line(text: str, message: str) -> None:
    asked = {"policies": [{"name": "bad", "text": text}, {"name": "orca"}], "load": LOAD}
    with pytest.raises(browser.Fault, match=message.replace("(", r"\(")):
        browser.compare(json.dumps(asked))


def checked(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(browser.check(json.dumps({"name": "one", "text": text})))
    return found


def test_a_check_finds_the_fault_of_a_policy() -> None:
    assert checked(CONTENT["policies"]["sarathi"]) == {
        "text": f"No fault in {browser.CASES} cases.",
        "isFault": False,
    }
    found = checked(BROKEN)
    assert found["isFault"] and "smallest case" in found["text"]


def run_lab(lab: Any, solution: str | None) -> dict[str, str]:
    cells = [cell for cell in lab["cells"] if cell["kind"] != "text"]
    texts = [solution if solution and cell["kind"] == "part" else cell["text"] for cell in cells]
    answer: dict[str, str] = json.loads(browser.run_lab(json.dumps(texts)))
    return answer


@pytest.mark.parametrize("lab", CONTENT["labs"], ids=lambda lab: lab["name"])
def test_a_lab_fails_unsolved_and_passes_solved(lab: Any) -> None:
    before = {*sys.modules["__main__"].__dict__}
    with pytest.raises(browser.Fault, match=r"(?m)^cell \d+, line \d+: (NotImpl|Assertion)"):
        run_lab(lab, None)
    answer = run_lab(lab, SOLUTIONS[lab["name"]])
    assert answer["text"].strip()
    assert bool(answer["html"]) is (lab["name"] == "3_chunks")
    assert {*sys.modules["__main__"].__dict__} == before


def test_output_is_bounded() -> None:
    answer = json.loads(browser.run_lab(json.dumps(["for n in range(10_000): print(n)"])))
    assert len(answer["text"]) == browser.MOST_OUTPUT
