"""Small changes of the package's code, each of which a test should find."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.project.source import SourceFile

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement of a file.

    Attributes:
        file: the file.
        kind: name of the change.
        node: what is replaced.
        change: what stands in its place.
    """

    file: SourceFile
    kind: str
    node: ast.expr | ast.stmt
    change: ast.AST

    @property
    def new(self) -> str:
        """The code in its place."""
        return ast.unparse(self.change)

    @property
    def place(self) -> str:
        """Path and line."""
        return f"{self.file}:{self.node.lineno}"

    def lines(self) -> range | None:
        """Lines of its code; None if this runs when the module is imported."""
        if self.node.end_lineno is None or not self._is_in_a_function():
            return None
        return range(self.node.lineno, self.node.end_lineno + 1)

    def _is_in_a_function(self) -> bool:
        line = self.node.lineno
        functions = self.file.functions()
        return any(each.body[0].lineno <= line <= (each.end_lineno or 0) for each in functions)

    @property
    def old(self) -> str:
        """The code that is replaced."""
        return ast.get_source_segment(self.file.text, self.node) or ""

    def text(self) -> str:
        """The whole file with the change."""
        node, lines = self.node, self.file.text.encode().splitlines(keepends=True)
        assert node.end_lineno is not None and node.end_col_offset is not None
        before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
        last = lines[node.end_lineno - 1]
        after = last[node.end_col_offset :] + b"".join(lines[node.end_lineno :])
        return (before + self.new.encode() + after).decode()


def mutants(file: SourceFile) -> Iterator[Mutant]:
    """All mutants of a file, in the order of its code."""
    for node in _code(file.tree):
        for kind, place, new in _changes(node):
            yield Mutant(file, kind, place, new)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run and that a test can see: no annotations, texts of errors, imports and parts of f-strings.

    `strict` of `zip` is left out too: it matters for what is wrong already.
    """
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """The kind of each change of a node, the part that is replaced, and the new part."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=comparators):
            flipped = FLIPPED[type(operator)]()
            yield "comparison flipped", node, ast.Compare(left, [flipped], comparators)
        case ast.Constant(value=bool() | int() | float()):
            yield "constant changed", node, ast.Constant(_other(node.value))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "branch negated", test, ast.UnaryOp(ast.Not(), test)
        case ast.Call(keywords=[*kept, ast.keyword(arg=name)]) if name != "strict":
            yield "argument dropped", node, ast.Call(node.func, node.args, kept)
        case ast.Call(args=[first, *kept, _]):
            yield "argument dropped", node, ast.Call(node.func, [first, *kept], node.keywords)
        case ast.Return(value=ast.expr() as value):
            if not isinstance(value, ast.Constant):
                yield "return replaced", value, ast.Constant(None)


def _other(value: object) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float)
    return value + 1
