"""A class name stands for one thing in the whole package."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.source import SourceFile, python_files

FILES = python_files("orca_jax")

# Names that may stand for several things, each with its reason.
EXCEPTIONS: dict[str, str] = {}

CLASS_NAME = re.compile(r"_*[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
MAKERS = frozenset({"NewType", "namedtuple", "NamedTuple", "TypedDict", "Enum", "make_dataclass"})


def classes(file: SourceFile) -> Iterator[tuple[str, str, str]]:
    """(name without leading underscores, meaning, `file:line`) of every class; each has a meaning of its own."""
    for node in file.nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), f"{file}:{node.lineno}", f"{file}:{node.lineno}"


def aliases(file: SourceFile) -> Iterator[tuple[str, str, str]]:
    """The same of every type alias at the top of a module; its meaning is its definition."""
    for node in file.tree.body:
        if isinstance(node, ast.TypeAlias):
            yield node.name.id.lstrip("_"), ast.unparse(node.value), f"{file}:{node.lineno}"
        elif (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and is_type(node.value)
        ):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and CLASS_NAME.fullmatch(target.id):
                    yield target.id.lstrip("_"), ast.unparse(node.value), f"{file}:{node.lineno}"


def is_type(value: ast.expr) -> bool:
    """True for expressions that make types, such as `Any`, `list[int]`, `str | None` or `NewType(...)`."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in MAKERS
    return isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp)


def meanings(files: list[SourceFile]) -> dict[str, dict[str, str]]:
    """Name -> its meanings, each with the last place where it is defined."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for file in files:
        for name, meaning, place in (*classes(file), *aliases(file)):
            found[name][meaning] = place
    return found


def test_a_name_is_one_thing() -> None:
    several = {
        name: found
        for name, found in meanings(FILES).items()
        if len(found) > 1 and name not in EXCEPTIONS
    }
    lines = [
        f"{name}: {', '.join(sorted(found.values()))}" for name, found in sorted(several.items())
    ]
    assert not lines, "\n" + "\n".join(lines)


def test_exceptions_are_needed() -> None:
    found = meanings(FILES)
    assert not [name for name in EXCEPTIONS if len(found[name]) < 2]


def source(name: str, text: str) -> SourceFile:
    file = SourceFile(Path(name))
    file.__dict__["text"] = text  # as if it had been read
    return file


@pytest.mark.parametrize(
    ("first", "second", "several"),
    [
        ("class Page: pass", "class _Page: pass", True),
        ("class Page: pass", "def make():\n    class Page: pass", True),
        ("class Page: pass", "type Page = list[int]", True),
        ("class Page: pass", "Page = int | None", True),
        ("Page = list[int]", "_Page = tuple[int, ...]", True),
        ("Page: TypeAlias = list[int]", "Page = NewType('Page', int)", True),
        ("Page = list[int]", "type Page = list[int]", False),
        ("class Page: pass", "class Pages: pass", False),
        ("class Page: pass", "PAGE = list[int]", False),
        ("class Page: pass", "Page = make_page(3)", False),
        ("class Page: pass", "def use():\n    Page = x[3]", False),
    ],
)
def test_meanings(first: str, second: str, several: bool) -> None:
    found = meanings([source("a.py", first), source("b.py", second)])
    assert (len(found["Page"]) > 1) == several


BARE = frozenset({"add", "take", "run"})
"""Verbs that say nothing without an object."""
OWNED = frozenset({"pool", "executor", "scheduler", "observer"})
"""Parts of the engine, which its methods alone replace."""


def bare_methods(file: SourceFile) -> Iterator[str]:
    """The methods of public classes that are named by a verb of `BARE` alone."""
    for kind in file.nodes:
        if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_"):
            methods = (
                each
                for each in kind.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            yield from (
                f"{file}:{each.lineno}: {kind.name}.{each.name}"
                for each in methods
                if each.name in BARE
            )


def replaced_parts(file: SourceFile) -> Iterator[str]:
    """The assignments to parts of an engine, such as `built.engine.pool = pool`, also by a patch of tests."""
    for node in file.nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [
            one
            for each in targets
            for one in (each.elts if isinstance(each, ast.Tuple) else [each])
        ]
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("setattr")
            and len(node.args) > 2
        ):
            owner, name = node.args[0], node.args[1]
            targets = [ast.Attribute(owner, name.value)] if isinstance(name, ast.Constant) else []
        for target in [
            each for each in targets if isinstance(each, ast.Attribute) and each.attr in OWNED
        ]:
            if ast.unparse(target.value).split(".")[-1] == "engine":
                yield f"{file}: {ast.unparse(target)}"


def test_methods_of_public_classes_have_an_object() -> None:
    found = [place for file in FILES for place in bare_methods(file)]
    assert not found, "\n".join(found)


def test_parts_of_the_engine_are_not_replaced_from_outside() -> None:
    found = [
        place
        for file in python_files("orca_jax", "lab", "scripts", "tests")
        for place in replaced_parts(file)
    ]
    assert not found, "use `Engine.reschedule` and `Engine.observed_by`:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("class Pool:\n    def add(self): pass\n    async def run(self): pass", 2),
        ("class Pool:\n    def add_request(self): pass", 0),
        ("class _Work:\n    def run(self): pass", 0),
        ("def run(): pass", 0),
    ],
)
def test_bare_methods(text: str, count: int) -> None:
    assert len(list(bare_methods(source("a.py", text)))) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("built.engine.pool = pool", 1),
        ("engine.pool, engine.scheduler = pool, other", 2),
        ("monkeypatch.setattr(engine, 'scheduler', other)", 1),
        ("self.scheduler = scheduler", 0),
        ("monkeypatch.setattr(engine, 'clock', other)", 0),
        ("pool = engine.pool", 0),
    ],
)
def test_replaced_parts(text: str, count: int) -> None:
    assert len(list(replaced_parts(source("a.py", text)))) == count
