"""The project's own source as data, for tests of its shape."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "orca_jax"


@dataclass(frozen=True)
class SourceFile:
    """One Python file; `path` is relative to the project's root."""

    path: Path

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, in the order of `ast.walk`, which takes longer than most rules."""
        return list(ast.walk(self.tree))

    @cached_property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        """The dotted name; of a package, the name of its folder."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [
            node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]

    def __str__(self) -> str:
        return self.path.as_posix()


source_file = cache(SourceFile)  # read and parsed once for all tests


def python_files(*folders: str) -> list[SourceFile]:
    """The Python files under the folders in a stable order, without empty ones."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    files = (source_file(path.relative_to(ROOT)) for path in sorted(paths))
    return [file for file in files if file.text.strip()]


def each(items: Iterable[Any]) -> Callable[[Callable[[Any], None]], Callable[[str], None]]:
    """Make a test of one file a test of all files of a folder: thousands of tests of a millisecond take a minute.

    `items` are paths or have one as their text. A failure names the file.
    """
    folders: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        folders[Path(str(item)).parent.as_posix()].append(item)

    def of_folders(test: Callable[[Any], None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("folder", sorted(folders))
        def run(folder: str) -> None:
            for item in folders[folder]:
                try:
                    test(item)
                except AssertionError as error:
                    error.add_note(f"in {item}")
                    raise

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return of_folders
