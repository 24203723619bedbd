"""`docs/api.md`, generated from the tables of fields: `python -m scripts.api_page > docs/api.md`."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lab.pages.markdown import Page, escaped, table
from orca_jax.serve.openai.schema import PARSERS
from orca_jax.serve.openai.schema.components import request_schemas
from orca_jax.serve.openai.schema.nested import NESTED
from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.serve.openai.schema.sampling import CompletionFields, SamplingFields
from orca_jax.serve.openai.schema.unused import UnusedField, UnusedFields

Schema = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[1]

_HEAD = """# Fields of the API

Generated from the tables in `orca_jax/serve/openai/schema` by `python -m scripts.api_page > docs/api.md`.
The same tables check every request and produce `/openapi.json`; a route that counts or shows the tokens of a request
takes the fields of this request. The first table of an endpoint or object lists the
supported fields. The second table lists fields of other servers and of client libraries that cannot change an answer
here: every value is accepted and ignored. The answer names them in the header `x-orca-ignored-fields`, and the metric
`orca_jax_ignored_fields_total` counts them, except at values that request nothing. The third table lists fields that
could change an answer and are not supported: only the listed values are accepted, others are answered with 400
(`unsupported_parameter`).

Any other field is answered with 400 (`unknown_parameter`), or ignored in the same way with `--unknown-fields ignore`.
`null` means that a field is not given, for all fields, known or not. A number such as `16.0` is accepted as an integer.
"Model's `generation_config.json`" is the file in the model directory, or the one set by `--generation-config`.
"""
_INT_ENDS = {2**63 - 1: "2^63 - 1", -(2**63): "-2^63", 2**31 - 1: "2^31 - 1"}


def api_page() -> str:
    """The text of the page, in Markdown."""
    schemas = request_schemas(["a served name"], {})
    parts = [_HEAD]
    for route, parser in PARSERS.items():
        parts.append(f"## {route}\n")
        parts.append(_fields(schemas[parser.kind.__name__], _in_order(parser)))
        parts += _unused(parser.unused)
    parts.append("## Nested objects\n")
    requests = {parser.kind.__name__ for parser in PARSERS.values()}
    for name in sorted(set(schemas) - requests):
        parts.append(f"### {name}\n")
        parts.append(str(schemas[name].get("description", "")) + "\n")
        unused = NESTED.get(name, {})
        if names := [one for one in schemas[name].get("properties", ()) if one not in unused]:
            parts.append(_fields(schemas[name], names))
        parts += _unused(unused)
    return "\n".join(parts)


def _in_order(parser: BodyParser[Any]) -> list[str]:
    """The model, then the fields of this body alone, then the shared ones."""
    names: tuple[str, ...] = parser.kind.__struct_fields__
    base = next(
        (base for base in (CompletionFields, SamplingFields) if issubclass(parser.kind, base)), None
    )
    shared = () if base is None else base.__struct_fields__
    return [
        "model",
        *(n for n in names if n not in shared and n != "model"),
        *(n for n in shared if n != "model"),
    ]


def _fields(schema: Schema, names: Iterable[str]) -> str:
    required = schema.get("required", ())
    rows = []
    for name in names:
        known = schema["properties"][name]
        meaning = str(known.get("description", ""))
        rows.append(
            (
                f"`{name}`",
                kind(known),
                (("Required. " if name in required else "") + meaning).strip(),
            )
        )
    return _table(("field", "type and range", "meaning"), rows)


def _unused(unused: UnusedFields) -> Iterator[str]:
    ignored = {name: known for name, known in unused.items() if known.is_ignored}
    refused = {name: known for name, known in unused.items() if not known.is_ignored}
    if ignored:
        yield "Accepted and ignored:\n"
        yield _table(
            ("field", "values that request nothing", "reason"),
            ((f"`{name}`", _values(known), known.reason) for name, known in ignored.items()),
        )
    if refused:
        yield "Accepted at these values only:\n"
        yield _table(
            ("field", "accepted values", "reason"),
            ((f"`{name}`", _values(known), known.reason) for name, known in refused.items()),
        )


def _values(known: UnusedField) -> str:
    return ", ".join(f"`{msgspec.json.encode(one).decode()}`" for one in (*known.values, None))


def kind(schema: Schema) -> str:
    """The type and range of a JSON schema in words, without `null`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(
            f"`{msgspec.json.encode(one).decode()}`" for one in values if one is not None
        )
    match schema.get("type"):
        case "integer" | "number" as name:
            return f"{name}{_range(schema)}"
        case "string":
            return (
                "string"
                + _length(schema, "minLength", "maxLength", " characters")
                + _pattern(schema)
            )
        case "array":
            what = f"list of ({kind(schema['items'])})" if schema.get("items") else "list"
            return what + _length(schema, "minItems", "maxItems", "")
        case "object":
            values = schema.get("additionalProperties")
            what = (
                f"object of ({kind(values)})"
                if isinstance(values, Mapping) and values
                else "object"
            )
            return what + _length(schema, "minProperties", "maxProperties", "")
        case "boolean":
            return "true or false"
        case "null":
            return "`null`"
        case _:
            return "any value"


def _range(schema: Schema) -> str:
    low = schema.get("minimum")
    high = schema.get("maximum")
    opening = "["
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"]
        opening = "("
    if low is None and high is None:
        return ""
    if high is None:
        return f", {_number(low)} or more"
    return f" in {opening}{_number(low)}, {_number(high)}]"


def _number(value: Any) -> str:
    return _INT_ENDS.get(value, f"{value:g}" if isinstance(value, float) else str(value))


def _length(schema: Schema, least: str, most: str, unit: str) -> str:
    low = schema.get(least)
    high = schema.get(most)
    if low is None and high is None:
        return ""
    if high is None:
        return f", {low} or more{unit}"
    return f", {low or 0} to {high}{unit}"


def _pattern(schema: Schema) -> str:
    return f" of the form `{schema['pattern']}`" if "pattern" in schema else ""


def _table(head: tuple[str, str, str], rows: Iterable[tuple[str, str, str]]) -> str:
    return table(head, [[escaped(text) for text in row] for row in rows])


PAGE = Page(
    ROOT / "docs" / "api.md", lambda _: api_page(), "python -m scripts.api_page > docs/api.md"
)

if __name__ == "__main__":
    sys.stdout.write(api_page())
