"""The table of fields and routes in docs/conformance.md, made of the server's own tables and of marks on tests.

    python -m tests.serve.conformance       writes the page

A test names the items it checks by `@pytest.mark.conforms("completions.temperature", ...)`. Marks are read from the
source without importing it, so their arguments must be plain strings.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from lab.pages.markdown import Page, between, escaped, table
from orca_jax.serve.openai.schema import PARSERS
from orca_jax.serve.openai.schema.components import described
from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.serve.openapi import openapi_document
from tests.project.source import ROOT, SourceFile, python_files

BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"

METHODS = ("get", "post", "delete")
UNUSED = "without effect"


def routes() -> dict[str, str]:
    """Every route of the server's own document, with its summary."""
    paths = openapi_document(["model"], {}, has_keys=True)["paths"]
    found = ((path, method, paths[path].get(method)) for path in paths for method in METHODS)
    return {f"{method.upper()} {path}": str(one["summary"]) for path, method, one in found if one}


def descriptions(parser: BodyParser) -> dict[str, str]:
    """Every field of a body, with its description; fields without effect are one row."""
    properties = described([parser.kind])[parser.kind.__name__]["properties"]
    fields = {name: str(field.get("description", "")) for name, field in properties.items()}
    if parser.unused:
        fields[UNUSED] = (
            "The fields that api.md lists as ignored, or as accepted at some values only."
        )
    return fields


def prefix_of(route: str) -> str:
    """The first word of the items of a body: `chat` for `POST /v1/chat/completions`."""
    return route.partition("/")[2].removeprefix("v1/").partition("/")[0]


@cache
def items() -> dict[str, str]:
    """Every row: `chat.seed` or a route, with its description."""
    found = routes()
    for route, parser in PARSERS.items():
        found |= {f"{prefix_of(route)}.{name}": text for name, text in descriptions(parser).items()}
    return found


@cache
def marks() -> dict[str, list[str]]:
    """The tests marked with each item, in a stable order."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in python_files("tests"):
        for item, test in marks_of(file):
            if test not in found[item]:
                found[item].append(test)
    return dict(found)


def marks_of(file: SourceFile) -> Iterator[tuple[str, str]]:
    """Pairs (item, test) of one file. A mark of the module or in a table counts for the file."""
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                yield from ((item, f"{file}::{node.name}") for item in marked(decorator, file))
        elif isinstance(node, ast.Assign) and any(
            ast.unparse(target) == "pytestmark" for target in node.targets
        ):
            for part in ast.walk(node.value):
                yield from ((item, str(file)) for item in marked(part, file))


def marked(node: ast.AST, file: SourceFile) -> Iterator[str]:
    """The items of a mark; nothing if the node is not a mark. Raises AssertionError for anything but plain strings."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.conforms"):
        for argument in node.args:
            plain = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            assert plain, f"{file}:{node.lineno}: conforms takes plain strings"
            assert isinstance(argument, ast.Constant)
            yield str(argument.value)


def rows(prefix: str, found: Mapping[str, list[str]]) -> Iterator[Sequence[str]]:
    """The rows of one table."""
    for item, text in items().items():
        name = item.removeprefix(f"{prefix}.")
        if (name != item) if prefix else " /" in item:
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in found.get(item, ()))
            yield f"`{name}`", escaped(text), tests


def tables() -> str:
    """The text between the marks of the page."""
    found = marks()
    head = ("what it does here", "tested by, under `tests/`")
    parts = [f"### Routes\n\n{table(('route', *head), rows('', found))}"]
    for route in PARSERS:
        fields = table(("field", *head), rows(prefix_of(route), found))
        parts.append(f"### `{route}`\n\n{fields}")
    return "\n".join(parts)


def page(text: str) -> str:
    """The page with current tables."""
    return between(text, BEGIN, END, f"\n{tables()}")


PAGE = Page(ROOT / "docs" / "conformance.md", page, "python -m tests.serve.conformance")


def main() -> int:
    """Write the page; return 1 if a row has no test."""
    PAGE.write()
    untested = sorted(set(items()) - set(marks()))
    for item in untested:
        print(f"no test: {item}", file=sys.stderr)
    return int(bool(untested))


if __name__ == "__main__":
    sys.exit(main())
