"""A wheel holds everything that the package needs, and works without the source tree."""

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import trove_classifiers
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.covering import slow
from tests.project.source import ROOT

DEMO = ROOT / "checkpoints" / "demo"
needs_demo = pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in this tree")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without the library in C, whose compilation takes long."""
    return built_wheel(tmp_path_factory.mktemp("dist"), {"HATCH_BUILD_NO_HOOKS": "true"})


def built_wheel(folder: Path, variables: Mapping[str, str]) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, check=True, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return path


def names_under(wheel: Path, prefix: str) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix)}


def files_under(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


def test_holds_the_package_and_its_data(wheel: Path) -> None:
    mapped = ("_demo/", "_demo_length_ranker/")
    names = {name for name in names_under(wheel, "orca_jax/") if not name.startswith(mapped)}
    assert names == files_under(ROOT / "orca_jax")
    assert {"py.typed", "engine.py", "model/presets.json"} <= names
    assert any(name.startswith("serve/playground/") and name.endswith(".html") for name in names)


def test_installs_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "orca-jax = orca_jax.cli.main:main" in archive.read(name).decode().splitlines()


def test_holds_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_under(wheel, "")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"orca_jax"}
    assert len(tops) == 2
    with zipfile.ZipFile(wheel) as archive:
        sizes = {each.filename: each.compress_size for each in archive.infolist()}
    models = sum(size for name, size in sizes.items() if "/_demo" in name)
    assert models <= 6_400_000
    assert wheel.stat().st_size - models <= 1_666_000


@needs_demo
def test_holds_the_demo_model(wheel: Path) -> None:
    assert names_under(wheel, "orca_jax/_demo/") == files_under(DEMO)
    ranker = files_under(DEMO.with_name("demo_length_ranker"))
    assert ranker and names_under(wheel, "orca_jax/_demo_length_ranker/") == ranker


@needs_demo
@pytest.mark.parametrize("model", ["preset:toy", slow("demo")])
def test_generates_outside_the_tree(model: str, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    settings = {} if model == "preset:toy" else {"tensor_parallel_size": 1, "compile_cache": None}
    program = f"""
import orca_jax
from orca_jax.exec import buckets
from orca_jax.llm import LLM
from orca_jax.values.request import SamplingParams

buckets._MIN_LARGEST_WIDTH, buckets._FINE, buckets._COARSE = 8, (4,), (4,)  # fewer programs to compile
llm = LLM(model="{model}", max_num_seqs=2, max_num_batched_tokens=4, **{settings})
(output,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
print(orca_jax.__file__)
print(len(output.outputs[0].token_ids))
"""
    # The folder of the program comes first on sys.path, before the editable install of the tree.
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles in half of the time
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=quick,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "orca_jax" / "__init__.py"), "4"]


def test_the_metadata_are_complete(wheel: Path) -> None:
    """`Metadata` refuses what an index would refuse: unknown fields, wrong versions, licences and requirements."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(archive.read(name), validate=True)
        licences = {
            name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/licenses/" in name
        }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (found.name, str(found.version), found.summary) == (
        "orca-jax",
        project["version"],
        project["description"],
    )
    assert found.license_expression == "Apache-2.0 AND MIT"
    assert licences == {"LICENSE", "NOTICE"}
    assert (
        found.description_content_type == "text/markdown"
        and found.description == (ROOT / "README.md").read_text()
    )
    assert str(found.requires_python) == project["requires-python"] and found.keywords
    assert found.classifiers and set(found.classifiers) <= trove_classifiers.classifiers
    assert set(found.provides_extra or ()) == set(project["optional-dependencies"])
    needed = {
        canonicalize_name(one.name) for one in found.requires_dist or () if one.marker is None
    }
    assert needed == {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}


def test_versions_of_python_are_those_of_the_classifiers(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        text.rpartition(" ")[2]
        for text in project["classifiers"]
        if text.startswith("Programming Language")
    ]
    assert all(SpecifierSet(project["requires-python"]).contains(version) for version in named)
    assert f">={named[0]}" == project["requires-python"]
