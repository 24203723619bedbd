"""Tests that can see a change of a module: those that run its line, its folder's, and those that import it."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from tests.mutants.mutations import Mutant
from tests.mutants.seen import Seen
from tests.project.source import ROOT, SourceFile, python_files, source_file

MOST_TESTS = 200
"""More take long to begin."""


def chosen(mutant: Mutant, seen: Seen, seconds: float) -> list[str]:
    """Names of tests that take at most so long in all; none if no test runs the line.

    First come those that run the line, then others that import the module: a test may use what an earlier one has
    built. Of both, the quickest case of each test comes first, and then the second one of each. Code that runs when
    the module is imported counts as all of its lines.
    """
    file = mutant.file
    lines = mutant.lines()
    running = seen.tests(file.path, lines or range(1, file.num_lines + 1))
    if lines and not running:
        return []
    near = set(near_tests(file))
    others = [test for test in seen.seconds if test not in running and _path(test) in near]
    in_order = [*_by_round(running, file, seen), *_by_round(others, file, seen)]
    return list(islice(_within(seconds, seen, in_order), MOST_TESTS))


def _by_round(tests: Iterable[str], file: SourceFile, seen: Seen) -> list[str]:
    """The quickest case of each test, then the second one of each: in each round the nearest tests first."""
    rounds = Counter[str]()
    places: dict[str, tuple[object, ...]] = {}
    for test in sorted(tests, key=lambda test: (seen.seconds[test], test)):
        function = test.partition("[")[0]
        distance = _distance(source_file(Path(_path(test))), file)[:3]
        places[test] = rounds[function], distance, seen.seconds[test], test
        rounds[function] += 1
    return sorted(places, key=places.__getitem__)


def _within(seconds: float, seen: Seen, tests: Iterable[str]) -> Iterator[str]:
    """The tests for which there is time, and the first one in any case."""
    for number, test in enumerate(tests):
        if number == 0 or seen.seconds[test] <= seconds:
            seconds -= seen.seconds[test]
            yield test


def _path(test: str) -> str:
    return test.partition("::")[0]


def near_tests(file: SourceFile) -> list[str]:
    """Paths of test files, the nearest first: of the module's name, of its folder, then all others.

    If there are none, these are the tests of the folders within its folder.
    """
    folder = _folder(file.path.parts[1:-1])
    found = [
        test for test in _test_files() if test.path.parent == folder or _imports(test, file.module)
    ]
    if not found:
        found = [test for test in _test_files() if test.path.is_relative_to(folder)]
    return [str(test) for test in sorted(found, key=lambda test: _distance(test, file))]


@cache
def _distance(test: SourceFile, file: SourceFile) -> tuple[bool, bool, bool, str]:
    is_near = test.path.is_relative_to(_folder(file.path.parts[1:-1]))
    is_named = test.path.stem == f"test_{file.path.stem}"
    return not (is_named and is_near), not is_near, not _names(test, file.module), str(test)


@cache
def _folder(parts: tuple[str, ...]) -> Path:
    """Folder of tests for a folder of the package: of its whole path, or of the longest part that there is."""
    for end in range(len(parts), 0, -1):
        for start in range(end):
            folder = Path("tests", *parts[start:end])
            if (ROOT / folder).is_dir():
                return folder
    return Path("tests")


@cache
def _test_files() -> list[SourceFile]:
    return [file for file in python_files("tests") if file.path.name.startswith("test_")]


def _names(file: SourceFile, module: str) -> bool:
    """True if the file itself imports the module, or a name of it."""
    return module in _imported(file)


def _imports(file: SourceFile, module: str) -> bool:
    """True if the file imports the module, or a helper that does."""
    helpers = [name for name in _imported(file) if name.startswith("tests.")]
    files = [Path(*name.split(".")).with_suffix(".py") for name in helpers]
    named = [_names(source_file(path), module) for path in files if path.is_file()]
    return _names(file, module) or any(named)


@cache
def _imported(file: SourceFile) -> frozenset[str]:
    return frozenset(_imported_names(file))


def _imported_names(file: SourceFile) -> Iterator[str]:
    """Modules, and names of modules, which may be modules too."""
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
