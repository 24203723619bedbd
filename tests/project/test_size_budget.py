"""Files and functions stay small enough to be read at once, and code does not tire: CONTRIBUTING.md asks for both.

The density of code counts for 1,000 lines of it, without blank lines, comments and docstrings. A bar is today's value,
rounded up; it may fall, and does not rise. The aims in the package are 12 conditional expressions and 0.5 nested
comprehensions.
"""

import ast
import io
import tokenize
from statistics import median, quantiles
from typing import NamedTuple

import pytest

from tests.project.source import SourceFile, each, python_files

MAX_FILE = 500
MAX_KERNEL_FILE = 700  # a kernel is one argument from start to end
MEDIAN_FILE = 130
P90_FILE = 300
MAX_FUNCTION = 80
MEDIAN_FUNCTION = 10
P90_FUNCTION = 30

WIDTH = 100
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Density(NamedTuple):
    """Counts for 1,000 lines of code."""

    tuple_assignments: float  # of unrelated values
    conditional_expressions: float
    nested_comprehensions: float
    wide_lines: float


BARS = {
    "orca_jax": Density(1.5, 15.5, 0.2, 8.0),
    "lab": Density(2.2, 19.5, 0.3, 11.5),
    "scripts": Density(2.4, 17.6, 0.7, 10.0),
}

FILES = python_files("orca_jax", "scripts", "lab")


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, less the docstring: this test is no reason to shorten it."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None and len(node.body) > 1:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def p90(lengths: list[int]) -> float:
    return quantiles(lengths, n=10, method="inclusive")[-1]


@each(FILES)
def test_file(file: SourceFile) -> None:
    limit = MAX_KERNEL_FILE if "kernels" in file.path.parts else MAX_FILE
    assert file.num_lines <= limit


@each(FILES)
def test_functions(file: SourceFile) -> None:
    for node in file.functions():
        assert function_lines(node) <= MAX_FUNCTION, f"{file}:{node.lineno}: {node.name}"


def test_files_together() -> None:
    lengths = [file.num_lines for file in FILES]
    assert median(lengths) <= MEDIAN_FILE
    assert p90(lengths) <= P90_FILE


def test_functions_together() -> None:
    lengths = [function_lines(node) for file in FILES for node in file.functions()]
    assert median(lengths) <= MEDIAN_FUNCTION
    assert p90(lengths) <= P90_FUNCTION


def code_lines(file: SourceFile) -> set[int]:
    """The numbers of the lines with code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in file.nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return found


def assigns_unrelated(node: ast.AST) -> bool:
    """Whether written-out values go to several targets; a swap is one thought."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = sorted(ast.unparse(part) for part in target.elts)
    return names != sorted(ast.unparse(part) for part in node.value.elts)


def is_nested(node: ast.AST) -> bool:
    if not isinstance(node, COMPREHENSIONS):
        return False
    inner = [part for part in ast.walk(node) if isinstance(part, COMPREHENSIONS)]
    return len(inner) > 1 or len(node.generators) > 1


def density(files: list[SourceFile]) -> Density:
    code = 0
    counts = [0, 0, 0, 0]
    for file in files:
        numbers = code_lines(file)
        lines = file.text.splitlines()
        code += len(numbers)
        counts[3] += sum([len(lines[number - 1]) > WIDTH for number in numbers])
        for node in file.nodes:
            counts[0] += assigns_unrelated(node)
            counts[1] += isinstance(node, ast.IfExp)
            counts[2] += is_nested(node)
    return Density(*[1000 * count / code for count in counts])


@pytest.mark.parametrize("folder", BARS)
def test_density(folder: str) -> None:
    found = density(python_files(folder))
    assert all([value <= bar for value, bar in zip(found, BARS[folder], strict=True)]), found


def test_the_counts_see_what_tires() -> None:
    text = "a, b = f(), g()\na, b = b, a\nc = 1 if a else 2\nd = [[e for e in f] for f in a]\n"
    tree = ast.parse(text)
    assert [assigns_unrelated(node) for node in tree.body] == [True, False, False, False]
    assert sum([isinstance(node, ast.IfExp) for node in ast.walk(tree)]) == 1
    assert sum([is_nested(node) for node in ast.walk(tree)]) == 1
