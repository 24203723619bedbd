"""The locks of `requirements/`: complete, current, and without anything that has no hash."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from scripts.lock import EXTRAS, fits, lines_of, needs
from tests.project.source import ROOT

LOCKS = ("run", *EXTRAS)
FILES = (
    *(f"requirements/{name}.txt" for name in (*LOCKS, "smollm2")),
    "tests/aot/requirements.txt",
)
ENTRY = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>[\w.+]+)(?: ; [^\\]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+"
)


def pins_of(path: str) -> dict[str, str]:
    """Name and version of each entry; an entry without a hash fails."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("#", "-r run.txt"))]
    rest = ENTRY.sub(" ", "\n".join(lines))
    assert not rest.strip(), f"{path} has other lines than pins with hashes: {rest.strip()[:200]}"
    pins = [(found["name"], found["version"]) for found in ENTRY.finditer(text)]
    assert len(pins) == len(dict(pins)), "a package is there twice"
    return dict(pins)


def test_locked_versions_satisfy_the_project() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    pins = {
        name: version
        for lock in LOCKS
        for name, version in pins_of(f"requirements/{lock}.txt").items()
    }
    texts = [*settings["project"]["dependencies"], *settings["build-system"]["requires"]]
    wanted = [
        Requirement(text) for text in texts + [text for extra in EXTRAS for text in extras[extra]]
    ]
    other = [
        f"{one}: {pins[one.name]}" for one in wanted if not one.specifier.contains(pins[one.name])
    ]
    assert wanted and not other, "run: .venv/bin/python scripts/lock.py"


def names_in(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("path", FILES)
def test_every_file_has_a_hash_and_the_pinned_version(path: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    found = pins_of(path)
    other = {
        name: version for name, version in found.items() if pinned.get(name, version) != version
    }
    assert not other, f"{path} is older than constraints.txt; run: .venv/bin/python scripts/lock.py"
    assert found and (
        path.startswith("tests/") or not (ROOT / path).read_text(encoding="utf-8").count("://")
    )


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_have_all_direct_dependencies(lock: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    needed = names_in(project["dependencies"]) | names_in(settings["build-system"]["requires"])
    needed |= names_in(project["optional-dependencies"].get(lock, []))
    run, added = pins_of("requirements/run.txt"), pins_of(f"requirements/{lock}.txt")
    assert needed <= run.keys() | added.keys(), "run: .venv/bin/python scripts/lock.py"
    assert lock == "run" or not run.keys() & added.keys()
    assert lock == "run" or "\n-r run.txt\n" in (ROOT / f"requirements/{lock}.txt").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("wheel", "holds"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp314-cp314-manylinux_2_28_aarch64.whl", True),
        ("a-1-cp39-abi3-macosx_11_0_arm64.whl", True),
        ("a-1-cp313-cp313-macosx_10_13_universal2.whl", True),
        ("a-1-py3-none-manylinux_2_27_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp314-cp314t-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp315-abi3-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp312-cp312-win_amd64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp312-cp312-manylinux_2_17_i686.whl", False),
        ("a-1-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl", False),
    ],
)
def test_wheels_of_supported_machines(wheel: str, holds: bool) -> None:
    assert fits(wheel) == holds


def test_markers() -> None:
    assert all(needs(None)) and all(needs("sys_platform != 'win32'"))
    assert not any(needs("sys_platform == 'win32'")) and not any(
        needs("implementation_name == 'pypy'")
    )
    assert (
        {True, False} == {*needs("sys_platform == 'darwin'")} == {*needs("python_version < '3.13'")}
    )


def test_lines() -> None:
    def package(name: str, *wheels: str, **more: str) -> dict[str, object]:
        found = [
            {"url": f"a/{wheel}", "hashes": {"sha256": digest}}
            for digest, wheel in enumerate(wheels)
        ]
        return {"name": name, "version": "1", "wheels": found, **more}

    pure = "b-1-py3-none-any.whl"
    mac = package("b", "b-1-cp312-cp312-win32.whl", pure, marker="sys_platform == 'darwin'")
    assert lines_of([mac, package("a", pure)]) == [
        "a==1 \\\n    --hash=sha256:0",
        "b==1 ; sys_platform == 'darwin' \\\n    --hash=sha256:1",
    ]
    with pytest.raises(AssertionError, match="c 1 has no wheel"):
        lines_of([package("c", "c-1-cp312-cp312-win32.whl")])
