"""Checks of shapes in tests: jaxtyping's import hook, for the functions that name shapes.

By itself the hook checks all functions against all types, as mypy does, at each call, and decorates a nested function
again at each call of the outer one. A fifth of the functions name shapes.
"""

import ast
from collections.abc import Sequence
from typing import Any

import jaxtyping
from jaxtyping import install_import_hook
from jaxtyping._import_hook import JaxtypingTransformer

_decorate = JaxtypingTransformer.visit_FunctionDef


def check_shapes(packages: Sequence[str]) -> None:
    """Check the functions of packages that are not yet imported, for the rest of the process."""
    JaxtypingTransformer.visit_FunctionDef = _visit
    install_import_hook(packages, "beartype.beartype")


def names_shapes(function: ast.FunctionDef) -> bool:
    """True if an argument or the result has a type such as `Float[Array, "T H"]`."""
    annotations = ast.walk(ast.Module([ast.Expr(each) for each in _annotations(function)], []))
    return any(isinstance(node, ast.Subscript) and _is_shaped(node.value) for node in annotations)


def _annotations(function: ast.FunctionDef) -> list[ast.expr]:
    arguments = [node.annotation for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    return [each for each in (*arguments, function.returns) if each is not None]


def _is_shaped(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and hasattr(jaxtyping, value.id)


def _visit(self: Any, node: ast.FunctionDef) -> ast.FunctionDef:
    if names_shapes(node):
        _decorate(self, node)
    else:
        self.generic_visit(node)
    return node
