"""Imports go down the floors of docs/architecture.md, in one direction, and the deciding floors need no JAX."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.project.source import ROOT, SourceFile, each, python_files

FACTS = frozenset(
    {
        "cache_hints",
        "cache_spec",
        "checks",
        "errors",
        "config",
        "layer_config",
        "lora_request",
        "platforms",
        "request",
        "resumed",
        "speculation",
        "startup",
        "step",
    }
)

# The floors, from the ground up: part of the package -> the other parts it may import.
FLOORS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "checks": frozenset({"errors"}),
    "layer_config": frozenset(),
    "speculation": frozenset({"checks", "errors"}),
    "cache_hints": frozenset({"errors"}),
    "config": frozenset({"cache_spec", "checks", "errors", "layer_config", "speculation"}),
    "platforms": frozenset({"config"}),
    "values": frozenset(),
    "helpers": frozenset(),
    "tools": frozenset(),
    "request": frozenset({"cache_hints", "checks", "errors"}),
    "lora_request": frozenset({"checks", "errors", "request"}),
    "resumed": frozenset({"request"}),
    "cache_spec": frozenset(),
    "step": frozenset({"request"}),
    "startup": frozenset(),
    "file_state": frozenset(),
    "gguf_file": FACTS | {"file_state"},
    "hub": FACTS | {"console"},
    "orbax_names": frozenset(),
    "buckets": FACTS | {"hub", "orbax_names"},
    "bundled": FACTS | {"hub", "buckets"},
    "flags": FACTS | {"bundled", "server_config"},
    "logs": FACTS | {"server_config"},
    "cache_files": frozenset({"checks"}),
    "console": frozenset(),
    "processor": frozenset(),
    "reporting": FACTS | {"processor"},
    "server_config": FACTS | {"text"},
    "sched": FACTS,
    "policy": FACTS | {"sched"},
    "kernels": FACTS | {"cache_files", "processor"},
    "text": FACTS | {"bundled", "gguf_file"},
    "model": FACTS
    | {"bundled", "buckets", "file_state", "gguf_file", "hub", "orbax_names", "console", "kernels"},
    "exec": FACTS | {"bundled", "cache_files", "processor", "console", "model", "kernels"},
    "ranker": FACTS | {"bundled"},
    "sim": FACTS,
    "cluster": FACTS | {"bundled", "flags"},
    "observer": FACTS | {"sched"},
    "engine": FACTS | {"sched", "observer"},
    "timeline": FACTS | {"console", "flags", "sched", "sim", "observer", "engine", "reporting"},
    "assembly": FACTS
    | {
        "bundled",
        "cache_files",
        "processor",
        "console",
        "policy",
        "sched",
        "kernels",
        "text",
        "model",
        "exec",
        "sim",
        "cluster",
        "engine",
    }
    | {"hub", "orbax_names", "timeline"},
    "llm": FACTS | {"bundled", "flags", "console", "assembly", "engine", "text", "link"},
    "link": FACTS
    | {
        "bundled",
        "console",
        "server_config",
        "logs",
        "policy",
        "cluster",
        "observer",
        "engine",
        "timeline",
        "assembly",
    },
    "telemetry": FACTS | {"server_config", "engine", "link"},
    "openai": FACTS | {"bundled", "server_config", "text", "link", "telemetry"},
    "playground": FACTS | {"bundled", "processor", "server_config", "timeline", "link", "openai"},
    "serve": FACTS
    | {
        "console",
        "server_config",
        "flags",
        "logs",
        "text",
        "link",
        "telemetry",
        "openai",
        "playground",
    },
    "deploy": FACTS
    | {
        "cluster",
        "console",
        "flags",
        "logs",
        "server_config",
        "link",
        "telemetry",
        "openai",
        "serve",
    },
    "batch": FACTS
    | {
        "console",
        "flags",
        "server_config",
        "engine",
        "assembly",
        "link",
        "telemetry",
        "openai",
    },
    "bench": FACTS
    | {"console", "flags", "processor", "reporting", "sched", "exec", "sim", "engine", "timeline"}
    | {"assembly", "pictures", "plan"},
    "simulate": FACTS
    | {
        "bench",
        "plan",
        "pictures",
        "console",
        "flags",
        "llm",
        "policy",
        "reporting",
        "sched",
        "sim",
        "engine",
        "timeline",
        "assembly",
    },
    "plan": FACTS
    | {"bundled", "console", "flags", "processor", "kernels", "model", "exec", "sim", "assembly"},
    "calibrate": FACTS | {"flags", "llm", "text"},
    "convert": FACTS
    | {"bundled", "console", "flags", "hub", "orbax_names", "model", "text", "assembly"},
    "pictures": FACTS
    | {"console", "engine", "flags", "observer", "reporting", "sched", "sim", "timeline"},
    "__main__": frozenset({"cli"}),
    "async_llm": FACTS | {"server_config", "text", "link", "llm"},
    "cli": FACTS | {"bundled", "console", "flags", "text", "llm"},
    "__init__": FACTS | {"llm", "async_llm", "text"},
}
HOUSES: Mapping[str, Collection[str]] = {
    "values": FACTS,
    "helpers": {
        "buckets",
        "bundled",
        "cache_files",
        "console",
        "file_state",
        "gguf_file",
        "hub",
        "logs",
        "orbax_names",
        "processor",
        "reporting",
    },
    "sched": {"observer"},
    "serve": {"openai", "playground", "telemetry"},
    "llm": {"async_llm"},
    "tools": {"bench", "calibrate", "convert", "deploy", "plan", "ranker", "simulate"},
}
"""Folders whose parts have floors of their own."""
MAX_ENTRIES = 24  # of the package
MAX_MODULES = 20  # of a folder, `__init__` included
# imports between modules of the folder; more of them, and it is two folders
MAX_ARROWS_OF_SERVE = 40
STANDARD_LIBRARY_ONLY = FACTS | {"bundled", "sched", "observer", "engine"}
NO_JAX = STANDARD_LIBRARY_ONLY | {
    "hub",
    "text",
    "sim",
    "console",
    "link",
    "telemetry",
    "openai",
    "playground",
    "serve",
    "deploy",
    "server_config",
    "flags",
}
NO_HTTP_SERVER = frozenset({"link", "openai", "telemetry"})
HTTP_SERVERS = frozenset({"starlette", "uvicorn"})
JAX_FAMILY = frozenset({"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "tensorstore"})

LADDER = list(TopologicalSorter(FLOORS).static_order())  # CycleError: the table itself has a ring
FILES = python_files("orca_jax")
MODULES = frozenset(file.module for file in FILES)


def part_of(module: str) -> str:
    """`orca_jax.sched.kv` -> `sched`, `orca_jax.tools.plan.memory` -> `plan`; `__init__` is a part too."""
    names = module.split(".")
    within = names[2] if len(names) > 2 else ""
    if names[1:2] == ["tools"] and within == "timeline":
        return "pictures"
    if within and within in HOUSES.get(names[1], ()):
        return within
    return names[1] if len(names) > 1 else "__init__"


def imports(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also in functions and under TYPE_CHECKING."""
    package = (
        file.module.split(".") if file.path.name == "__init__.py" else file.module.split(".")[:-1]
    )
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            source = ".".join(name for name in (base, node.module) if name)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield node.lineno, submodule if submodule in MODULES else source


def reason(part: str, name: str) -> str:
    """The fault of an import that the table does not allow."""
    other = part_of(name)
    if other not in FLOORS:
        return f"{other} has no floor"
    return (
        "it climbs the ladder"
        if LADDER.index(other) > LADDER.index(part)
        else "the ladder does not list it"
    )


def own(name: str) -> bool:
    return name.split(".")[0] == "orca_jax"


def folder_of(file: SourceFile) -> str:
    """`orca_jax.exec.sampling` for a module there; a module at the top of the package is a folder of its own."""
    return file.module if len(file.path.parts) == 2 else ".".join(file.path.parts[:-1])


def nested(one: str, other: str) -> bool:
    """True if one folder is the other, or contains it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def ring(graph: Mapping[str, set[str]]) -> list[str]:
    """The nodes of one ring of a graph, the first of them twice; empty if there is no ring."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@each(FILES)
def test_imports_go_down(file: SourceFile) -> None:
    part = part_of(file.module)
    assert part in FLOORS, f"{part} has no floor: give it one here and in docs/architecture.md"
    for line, name in imports(file):
        if own(name) and part_of(name) != part:
            assert part_of(name) in FLOORS[part], (
                f"{file}:{line}: {part} may not import {name}: {reason(part, name)}"
            )


@each(FILES)
def test_deciding_floors_need_no_array_library(file: SourceFile) -> None:
    part = part_of(file.module)
    for line, name in imports(file):
        top = name.split(".")[0]
        if part in STANDARD_LIBRARY_ONLY and not own(name):
            assert top in sys.stdlib_module_names, (
                f"{file}:{line}: {part} uses the standard library only, not {name}"
            )
        if part in NO_JAX:
            assert top not in JAX_FAMILY, f"{file}:{line}: {part} may not import {name}"
        if part in NO_HTTP_SERVER:
            assert top not in HTTP_SERVERS, (
                f"{file}:{line}: {part} may not import {name}: move it to serve"
            )


@each(FILES)
def test_no_wildcard_imports(file: SourceFile) -> None:
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"{file}:{node.lineno}"


def test_no_import_cycles() -> None:
    graph = {
        file.module: {name for _, name in imports(file) if name in MODULES} - {file.module}
        for file in FILES
    }
    found = ring(graph)
    assert not found, " <- ".join(found)


def test_no_rings_of_parts() -> None:
    graph = defaultdict[str, set[str]](set)
    for file in FILES:
        part = part_of(file.module)
        graph[part] |= {part_of(name) for _, name in imports(file) if own(name)} - {part}
    found = ring(graph)
    assert not found, " <- ".join(found)


def test_no_rings_of_folders() -> None:
    """Sub-folders count too. A folder and one within it may import each other: together they are one part."""
    folders = {file.module: folder_of(file) for file in FILES}
    graph = defaultdict[str, set[str]](set)
    for file in FILES:
        here = folder_of(file)
        graph[here] |= {
            folders[name]
            for _, name in imports(file)
            if name in folders and not nested(folders[name], here)
        }
    found = ring(graph)
    assert not found, " <- ".join(found)


@pytest.mark.parametrize("folder", ["orca_jax", "lab", "tests"])
def test_folders_are_small(folder: str) -> None:
    sizes = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")
    )
    assert not {path: size for path, size in sizes.items() if size > MAX_MODULES}


def test_serve_has_few_arrows() -> None:
    arrows = {
        (file.module, name)
        for file in FILES
        for _, name in imports(file)
        if name in MODULES
        and part_of(name) == part_of(file.module) == "serve"
        and name != file.module
    }
    assert len(arrows) < MAX_ARROWS_OF_SERVE, sorted(arrows)


FAULTS = {
    "it climbs the ladder": (
        ("sched", "orca_jax.engine"),
        ("link", "orca_jax.serve.openai.errors"),
        ("errors", "orca_jax"),
    ),
    "the ladder does not list it": (("exec", "orca_jax.text.stream"),),
    "cellar has no floor": (("sched", "orca_jax.cellar.wine"),),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_reason(fault: str) -> None:
    for part, name in FAULTS[fault]:
        assert part_of(name) not in FLOORS[part]
        assert reason(part, name) == fault


@pytest.mark.parametrize(
    ("graph", "nodes"),
    [
        ({"a": {"b"}, "b": {"c"}}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, {"a", "b", "c"}),
    ],
)
def test_ring(graph: dict[str, set[str]], nodes: set[str]) -> None:
    assert set(ring(graph)) == nodes


def test_nested() -> None:
    assert nested("orca_jax.exec", "orca_jax.exec.sampling") and nested(
        "orca_jax.exec.sampling", "orca_jax.exec"
    )
    assert nested("orca_jax.exec", "orca_jax.exec")
    assert not nested("orca_jax.exec", "orca_jax.executor")
    assert not nested("orca_jax.tools.bench.online", "orca_jax.tools.bench.workload")


LOADS = """
import sys
from importlib import import_module
for part, absent, modules in {parts!r}:
    for module in modules:
        import_module(module)
    print(part, *sorted(absent & set(sys.modules)))
"""


def test_importing_does_not_load_jax_or_an_http_server() -> None:
    """One process imports all parts, those that may load an HTTP server last."""
    order = sorted(NO_JAX, key=lambda part: (part not in NO_HTTP_SERVER, part))
    parts = [
        (
            part,
            set(JAX_FAMILY | (HTTP_SERVERS if part in NO_HTTP_SERVER else frozenset())),
            sorted(module for module in MODULES if part_of(module) == part),
        )
        for part in order
    ]
    assert all(modules for _, _, modules in parts)
    program = LOADS.format(parts=parts)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == order


SIMULATOR = ("orca_jax.tools.simulate.check", "orca_jax.timeline.html")
"""What a simulation in a browser imports, without packages and without a device."""
OUTSIDE_PACKAGES = """
import sys
from importlib import import_module
before = set(sys.modules)
for module in {modules!r}:
    import_module(module)
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(names - sys.stdlib_module_names - {{"orca_jax"}}))
"""


def test_the_simulator_needs_the_standard_library_alone() -> None:
    def loaded(*modules: str) -> list[str]:
        program = OUTSIDE_PACKAGES.format(modules=modules)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert loaded(*SIMULATOR) == []
    assert "msgspec" in loaded("orca_jax.timeline.read")


@each(FILES)
def test_the_package_never_imports_the_lab(file: SourceFile) -> None:
    assert not [
        line
        for line, module in imports(file)
        if module.split(".")[0] in ("lab", "scripts", "tests")
    ]


def test_the_package_has_few_entries() -> None:
    entries = [path.name for path in (ROOT / "orca_jax").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


@each([file for file in FILES if not file.module.startswith(("orca_jax.tools", "orca_jax.cli"))])
def test_nothing_imports_the_tools(file: SourceFile) -> None:
    """Only the command line does."""
    assert not [line for line, name in imports(file) if name.startswith("orca_jax.tools")]
