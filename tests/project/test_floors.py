"""Imports go down the floors of docs/architecture.md, in one direction, and the thinking floors need no JAX."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.project.source import ROOT, SourceFile, python_files

FACTS = frozenset({"errors", "config", "request", "step"})

# The ladder, from the ground up: part of the package -> the other parts it may import.
FLOORS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "step": frozenset(),
    "config": frozenset(),
    "request": frozenset({"errors", "step"}),
    "bundled": frozenset({"errors"}),
    "flags": FACTS,
    "logs": FACTS | {"server_config"},
    "progress": frozenset(),
    "reporting": frozenset(),
    "server_config": FACTS,
    "sched": FACTS,
    "kernels": FACTS,
    "text": FACTS | {"bundled"},
    "model": FACTS | {"bundled", "progress", "kernels"},
    "exec": FACTS | {"progress", "model", "kernels"},
    "ranker": FACTS | {"bundled"},
    "sim": FACTS,
    "observer": FACTS | {"sched"},
    "engine": FACTS | {"sched", "observer"},
    "timeline": FACTS | {"sched", "sim", "observer", "engine", "reporting"},
    "build": FACTS
    | {"bundled", "progress", "sched", "kernels", "text", "model", "exec", "ranker", "sim", "engine", "timeline"},
    "llm": FACTS | {"build", "engine", "text"},
    "link": FACTS | {"bundled", "server_config", "logs", "engine", "build"},
    "telemetry": FACTS | {"server_config", "engine", "link"},
    "openai": FACTS | {"bundled", "server_config", "text", "link", "telemetry"},
    "serve": FACTS | {"server_config", "flags", "logs", "text", "link", "telemetry", "openai"},
    "batch": FACTS | {"flags", "progress", "server_config", "build", "link", "telemetry", "openai"},
    "bench": FACTS
    | {"bundled", "flags", "reporting", "sched", "text", "exec", "ranker", "sim", "observer", "engine", "timeline"}
    | {"build", "batch"},
    "trace": frozenset({"timeline", "bench"}),
    "__init__": FACTS | {"llm"},
}
MAX_MODULES = 20
STANDARD_LIBRARY_ONLY = FACTS | {"bundled", "sched", "observer", "engine"}
NO_JAX = STANDARD_LIBRARY_ONLY | {
    "text",
    "sim",
    "progress",
    "link",
    "telemetry",
    "openai",
    "serve",
    "server_config",
    "flags",
}
JAX_FAMILY = frozenset({"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "tensorstore"})

LADDER = list(TopologicalSorter(FLOORS).static_order())  # CycleError: a ring between parts, in the table itself
FILES = python_files("orca_jax")
MODULES = frozenset(file.module for file in FILES)


def part_of(module: str) -> str:
    """`orca_jax.sched.kv` -> `sched`; the package's own `__init__` is a part too."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imports(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also in functions and under TYPE_CHECKING."""
    package = file.module.split(".") if file.path.name == "__init__.py" else file.module.split(".")[:-1]
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            source = ".".join(name for name in (base, node.module) if name)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield node.lineno, submodule if submodule in MODULES else source


def reason(part: str, name: str) -> str:
    """What is wrong with an import that the table does not allow."""
    other = part_of(name)
    if other not in FLOORS:
        return f"{other} has no floor"
    return "it climbs the ladder" if LADDER.index(other) > LADDER.index(part) else "the ladder does not list it"


def own(name: str) -> bool:
    return name.split(".")[0] == "orca_jax"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_down(file: SourceFile) -> None:
    part = part_of(file.module)
    assert part in FLOORS, f"{part} has no floor: give it one here and in docs/architecture.md"
    for line, name in imports(file):
        if own(name) and part_of(name) != part:
            assert part_of(name) in FLOORS[part], f"{file}:{line}: {part} may not import {name}: {reason(part, name)}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_thinking_floors_need_no_array_library(file: SourceFile) -> None:
    part = part_of(file.module)
    for line, name in imports(file):
        top = name.split(".")[0]
        if part in STANDARD_LIBRARY_ONLY and not own(name):
            assert top in sys.stdlib_module_names, f"{file}:{line}: {part} uses the standard library only, not {name}"
        if part in NO_JAX:
            assert top not in JAX_FAMILY, f"{file}:{line}: {part} may not import {name}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_no_wildcard_imports(file: SourceFile) -> None:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"{file}:{node.lineno}"


def test_no_import_cycles() -> None:
    graph = {file.module: {name for _, name in imports(file) if name in MODULES} - {file.module} for file in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("part", sorted(NO_JAX))
def test_importing_does_not_load_jax(part: str) -> None:
    if not any(part_of(module) == part for module in MODULES):
        pytest.skip(f"no {part} in this version")
    modules = sorted(module for module in MODULES if part_of(module) == part)
    program = f"import sys\nimport {', '.join(modules)}\nprint(*sorted({set(JAX_FAMILY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
