"""The labs of the course: the check of each fails on the unsolved notebook, and passes on the solved one."""

import json
import sys
from types import ModuleType
from typing import Any

import nbformat
import pytest

from tests.course.solutions import SOLUTIONS
from tests.project.source import ROOT

COURSE = ROOT / "examples" / "course"


def run_lab(name: str, solution: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells of a notebook in order; a solution takes the place of the reader's part."""
    module = ModuleType("lab_of_the_course")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for cell in json.loads((COURSE / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and "%pip" not in text:
            part = text if solution is None or not text.startswith("# Your part") else solution
            exec(compile(part, f"{name}: {cell['id']}", "exec"), module.__dict__)


@pytest.mark.parametrize("name", SOLUTIONS)
def test_the_unsolved_lab_fails_and_the_solved_one_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((NotImplementedError, AssertionError)):
        run_lab(name, None, monkeypatch)
    run_lab(name, SOLUTIONS[name], monkeypatch)


def test_each_lab_is_a_notebook_with_one_part_and_without_outputs() -> None:
    paths = sorted(COURSE.glob("*.ipynb"))
    assert [path.stem for path in paths] == sorted(SOLUTIONS) and len(paths) == 5
    for path in paths:
        notebook: Any = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert sum(cell.source.startswith("# Your part") for cell in cells) == 1
        assert not any(cell.outputs for cell in cells)
