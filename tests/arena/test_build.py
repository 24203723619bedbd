"""The folder of the arena: all its files are there, its modules are enough, and its Pyodide is the pinned one."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orca_jax.values.config import SCHEDULERS
from scripts.arena import build
from scripts.website import __main__ as website
from tests.arena.built import stand_in
from tests.course.solutions import SOLUTIONS
from tests.project.source import ROOT


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "DIGEST", stand_in(tmp_path / "kept"))
    build.add_arena(tmp_path / "arena", tmp_path / "kept")
    build.add_arena(tmp_path / "arena", tmp_path / "kept")  # again, over the old one
    return tmp_path / "arena"


def test_the_page_is_built_and_its_files_are_all_there(arena: Path) -> None:
    named = set[str]()
    for path in [*arena.glob("*.html"), *arena.glob("*.js")]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'(?:src|href|from|fetch\(|Worker\() ?=?"(?:\./)?([\w./]+)"', text))
    inside = {name for name in named if not name.startswith("../")}
    assert {"style.css", "arena.js", "worker.js", "content.json", "modules.zip"} <= inside
    assert "pyodide/pyodide.mjs" in inside
    assert [name for name in inside if not (arena / name).is_file()] == []
    assert {path.name for path in (arena / "pyodide").iterdir()} == {*build.PYODIDE}
    outside = {name.partition("#")[0] for name in named - inside}
    pages = {name.removeprefix("../").replace(".html", ".md") for name in outside}
    assert pages and all((ROOT / "docs" / page).is_file() for page in pages)


def test_its_modules_are_enough(arena: Path, tmp_path: Path) -> None:
    """They run alone, without the packages of this environment."""
    with zipfile.ZipFile(arena / "modules.zip") as archive:
        archive.extractall(tmp_path / "modules")
    content = json.loads((arena / "content.json").read_text(encoding="utf-8"))
    load = {"requests": 3, "batch": 2, "rows": 2, "pages": 0, "gap_ms": 0, "seed": 0}
    asked = {
        "policies": [{"name": "orca", "text": content["policies"]["orca"]}, {"name": "chunked"}],
        "load": load,
    }
    program = "import arena, sys; print(len(arena.compare(sys.argv[1])))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = ['.']; {program}"]
    done = subprocess.run(
        [*command, json.dumps(asked)], cwd=tmp_path / "modules", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000


def test_its_content_is_that_of_the_repository(arena: Path) -> None:
    content = json.loads((arena / "content.json").read_text(encoding="utf-8"))
    assert content["own"] == [*SCHEDULERS]
    assert {"orca", "sarathi", "mc_sf"} <= {*content["policies"]}
    assert [lab["name"] for lab in content["labs"]] == [*SOLUTIONS]
    for lab in content["labs"]:
        kinds = [cell["kind"] for cell in lab["cells"]]
        assert kinds.count("part") == 1 and kinds[-1] == "code"
        assert not any("%pip" in cell.get("text", "") for cell in lab["cells"])
        assert "Nothing is installed" not in json.dumps(lab)


def test_another_package_is_refused(tmp_path: Path) -> None:
    stand_in(tmp_path)
    with pytest.raises(SystemExit, match=f"must have {build.DIGEST}"):
        build.add_arena(tmp_path / "arena", tmp_path)
    assert not (tmp_path / "arena").exists()


def test_without_npm_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"install Node\.js with npm, or give --no-arena"):
        build.fetched(tmp_path)


@pytest.mark.parametrize("words", [[], ["--no-arena"]])
def test_the_site_has_the_arena_unless_it_is_left_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(website, "build", lambda out: 0)
    monkeypatch.setattr(website.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["docs", "build", "--out", str(tmp_path), *words])
    assert website.main() == (0 if words else 3)
    expected = ["-m", "scripts.arena.build", str(tmp_path / "arena")]
    assert commands == ([] if words else [expected])
