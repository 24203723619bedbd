"""The rows of "Files to touch" in CONTRIBUTING.md name what there is, and a change that follows one passes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.rows.engine_walks import FAMILY, ORDERING, SCHEDULER
from tests.project.rows.serving_walks import METRIC, ROUTE, SAMPLING_FIELD
from tests.project.rows.table import Row, rows
from tests.project.rows.walk import Walk
from tests.project.source import ROOT

WALKS = (SCHEDULER, ORDERING, FAMILY, SAMPLING_FIELD, ROUTE, METRIC)
of_walks = pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.row)
COPIED = ("orca_jax", "tests", "lab", "scripts", "docs", "deploy", "examples", "checkpoints")


@pytest.mark.parametrize("row", rows().values(), ids=rows())
def test_a_row_names_what_there_is(row: Row) -> None:
    files = [ROOT / path for path in row.paths if "NAME" not in path]
    assert [file for file in files if not file.exists()] == []
    folders = [(ROOT / path).parent for path in row.paths if "NAME" in path]
    assert [folder for folder in folders if not folder.parent.exists()] == []
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    assert [name for name in row.names if not any(name in text for text in texts)] == []
    for heading, page in row.headings:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(rf"^#+ {heading}$|\*\*{heading}\.\*\*", text, re.MULTILINE), heading


@of_walks
def test_a_walk_edits_the_files_of_its_row(walk: Walk) -> None:
    row = rows()[walk.row]
    known = [re.escape(path).replace("NAME", r"\w+") for path in row.paths]
    unknown = [file for file in walk.files if not any(re.match(path, file) for path in known)]
    assert unknown == [], "the row does not name them"
    touched = [*walk.files, *[test for test in walk.tests if test.startswith("tests/")]]
    for group in row.groups:
        wanted = re.compile("|".join(re.escape(path).replace("NAME", r"\w+") for path in group))
        assert any(wanted.match(path) for path in touched), f"the walk leaves out {group}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@of_walks
def test_the_tests_of_a_row_pass(walk: Walk, tmp_path: Path) -> None:
    """In a copy of the project, after the edits and the commands of the row."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]:
        shutil.copy(file, tmp_path)
    for edit in walk.edits:
        edit.apply(tmp_path)
    if walk.program:
        run(tmp_path, f"-c {shlex.quote(walk.program)}")
    for command in rows()[walk.row].commands:
        run(tmp_path, command.removeprefix("python "))
    run(tmp_path, f"-m pytest -q -x -n 0 {shlex.join(walk.tests)}")


def run(root: Path, words: str) -> None:
    """Run Python in the copy by a shell. Raises AssertionError if it fails, with what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = f"{shlex.quote(sys.executable)} {words}"
    done = subprocess.run(
        command, shell=True, cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
