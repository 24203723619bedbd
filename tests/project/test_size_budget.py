"""Files and functions stay small enough to be read at once, as CONTRIBUTING.md asks."""

import ast
from statistics import median, quantiles

from tests.project.source import SourceFile, each, python_files

MAX_FILE = 400
MAX_KERNEL_FILE = 700  # a kernel is one argument from start to end
MEDIAN_FILE = 130
P90_FILE = 250
MAX_FUNCTION = 60
MEDIAN_FUNCTION = 10
P90_FUNCTION = 30

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
