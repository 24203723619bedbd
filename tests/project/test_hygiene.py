"""Rules for the tree as a whole: forbidden imports and calls, the form of scripts, the README's tree, links."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.project.source import ROOT, SourceFile, each, python_files

FILES = python_files("orca_jax", "scripts", "lab")
PACKAGE_FILES = python_files("orca_jax")
TEXT_FILES = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "*.toml",
        "docs/**/*.md",
        "scripts/**/*",
        "lab/**/*",
        "orca_jax/**/*.py",
        "tests/**/*.py",
        ".ci/*",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and "__pycache__" not in path.parts
)

# Unpickling runs code from the file; torch belongs in the environments of peers, not here.
FORBIDDEN_IMPORTS = frozenset(
    {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch"}
)
# its files are machine code within pickles, from JAX's own serializer
HOLDS_CODE = "orca_jax/exec/program_store.py"
RUNS_CODE_OF_THE_READER = "scripts/arena/browser.py"  # in the reader's own browser
SETS_REQUESTS = "orca_jax/helpers/buckets/environment.py"  # TensorStore has no other settings
PASSES_FEW_ON = "orca_jax/text/template.py"  # variables to its processes, which else inherit all
READS_A_KEY = (
    "orca_jax/tools/bench/online/key.py"  # a secret, which would be seen by others as a flag
)
FORBIDDEN_CALLS = frozenset(
    {"eval", "exec", "__import__", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}
)
OF_EXTRAS = {  # imported only if a flag requires it
    "orca_jax/serve/telemetry/otel.py": {"opentelemetry"},
    "orca_jax/helpers/reporting.py": {"matplotlib"},
    "orca_jax/tools/timeline/plot.py": {"matplotlib"},
    "orca_jax/tools/deploy/gang.py": {"ray"},
    "orca_jax/tools/deploy/ray_serve.py": {"ray"},
}
HOME_OR_SCRATCH = re.compile(r"(?<![\w.~$}])/(home|root|Users|tmp|mnt|opt|work|workspace)/\w")


def called_name(node: ast.Call) -> str:
    """`yaml.load(...)` -> `yaml.load`; an empty string if the callee is not a dotted name."""
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def imported_packages(file: SourceFile) -> set[str]:
    names: set[str] = set()
    for node in file.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@each(FILES)
def test_no_forbidden_import(file: SourceFile) -> None:
    # These run in environments of their own: the named ones use transformers, the others are the peers.
    makers = (
        "make_adapters.py",
        "make_reference.py",
        "recorded_answers.py",
        "record_families.py",
        "record_hybrids.py",
        "record_saved.py",
        "record_published.py",
        "record_smollm2.py",
        "record_transformers.py",
    )
    named = (*makers, "judge_lm_eval.py", "peer.py")
    is_named = file.path.name in named
    has_torch = is_named or file.path.is_relative_to("lab/peers/programs")
    allowed = {"torch"} if has_torch else {"pickle"} if str(file) == HOLDS_CODE else set()
    assert not imported_packages(file) & (FORBIDDEN_IMPORTS - allowed)


@each(FILES)
def test_no_forbidden_call(file: SourceFile) -> None:
    allowed = {"exec"} if str(file) == RUNS_CODE_OF_THE_READER else set()
    for node in file.nodes:
        if isinstance(node, ast.Call):
            assert called_name(node) not in FORBIDDEN_CALLS - allowed, f"{file}:{node.lineno}"
            for keyword in node.keywords:
                risky = (
                    keyword.arg in ("shell", "allow_pickle")
                    and ast.unparse(keyword.value) != "False"
                )
                assert not risky, f"{file}:{node.lineno}: {keyword.arg}"


@each(PACKAGE_FILES)
def test_behaviour_does_not_depend_on_the_environment(file: SourceFile) -> None:
    exempt = (HOLDS_CODE, READS_A_KEY, PASSES_FEW_ON, SETS_REQUESTS)
    if str(file) in ("orca_jax/exec/memory.py", *exempt):
        # JAX takes its share of a GPU's memory, and XLA its flags, from the environment alone
        return
    for node in file.nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            assert name not in ("os.environ", "os.getenv", "os.putenv", "environ", "getenv"), (
                f"{file}:{node.lineno}"
            )


@each(FILES)
def test_functions_have_return_types(file: SourceFile) -> None:
    for node in file.functions():
        assert node.returns is not None, f"{file}:{node.lineno}: {node.name}"


@each(FILES)
def test_no_unfinished_work(file: SourceFile) -> None:
    for number, line in enumerate(file.text.splitlines(), start=1):
        assert not re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", line), f"{file}:{number}"


@each(TEXT_FILES)
def test_no_path_of_a_local_machine(path: Path) -> None:
    for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
        assert not HOME_OR_SCRATCH.search(line), f"{path}:{number}: {line.strip()}"


def test_imports_are_declared() -> None:
    """Every import of the package is a dependency of a bare `pip install`, not of the dev extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    imported_as = {"orbax-checkpoint": "orbax", "pyyaml": "yaml", "pyzmq": "zmq"}
    importable = {imported_as.get(name, name.replace("-", "_")) for name in declared}
    used = set[str]().union(
        *(imported_packages(file) - OF_EXTRAS.get(str(file), set()) for file in PACKAGE_FILES)
    )
    assert used - importable - set(sys.stdlib_module_names) <= {"orca_jax"}


@pytest.mark.parametrize("extra", ["", "dev"])
def test_direct_dependencies_are_pinned(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["optional-dependencies"][extra] if extra else project["dependencies"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in requirements} <= pinned
    assert not [line for line in lines if "://" in line or line.startswith("-")]


@pytest.mark.parametrize(
    "name",
    [
        "scripts/serve",
        "scripts/test",
        "scripts/check",
        "scripts/docs",
        ".ci/run",
    ],
)
def test_shell_scripts_run_and_stop_at_errors(name: str) -> None:
    path = ROOT / name
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert path.stat().st_mode & 0o111


def test_every_script_is_executable_or_python() -> None:
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and path.suffix != ".py":
            assert path.read_text(encoding="utf-8").startswith("#!"), path.name
            assert path.stat().st_mode & 0o111, path.name


@each([path for path in TEXT_FILES if path.suffix == ".md"])
def test_links_inside_the_tree_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / path).read_text(encoding="utf-8")):
        assert "://" in target or ((ROOT / path).parent / target).exists(), target


def readme_tree() -> dict[str, str]:
    """Path -> phrase of the README's file tree: two blanks per level, `names   phrase`; names may share a phrase."""
    block = re.search(
        r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert block, "README.md has no ```text block with the file tree"
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names, _, phrase = line.strip().partition("  ")
        folders = folders[:depth]
        for name in names.split():
            found["/".join([*folders, name.rstrip("/")])] = phrase.strip()
        if names.endswith("/"):
            folders.append(names.rstrip("/"))
    return found


def test_readme_tree_is_true() -> None:
    tree = readme_tree()
    assert not [path for path in tree if not (ROOT / path).exists()], (
        "in the README's tree, but not there"
    )
    assert not [path for path, phrase in tree.items() if not phrase], "without a phrase"
    parts = {f"orca_jax/{file.path.parts[1]}" for file in PACKAGE_FILES} - {"orca_jax/__init__.py"}
    assert not parts - set(tree), "there, but not in the README's tree"


@each(python_files("orca_jax"))
def test_bytes_that_cannot_be_decoded_are_caught_by_one_name(file: SourceFile) -> None:
    """msgspec raises UnicodeDecodeError and RecursionError too, which its own classes leave out: `UNREADABLE`."""
    wrong = re.findall(r"except .*msgspec\.(?:DecodeError|MsgspecError)", file.text)
    assert not wrong, wrong
