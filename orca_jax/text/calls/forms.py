"""Grammars of the calls that a model may make by its own choice: beside a format, or with strict arguments.

A form has the calls of one dialect in Lark. The arguments of a tool with `strict` match its schema. Those of another
tool are any object.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orca_jax.text.calls.members import Tags
from orca_jax.text.calls.offered import (
    Schemas,
    Tools,
    call_schema,
    is_strict,
    parameters_of,
    tool_name,
)
from orca_jax.text.calls.values import kinds_of
from orca_jax.text.composed import composed, literal
from orca_jax.values.request import StructuredOutput

ANY = "ANY: /(?s:.*)/"
# Keywords of a schema that allows strings of any form.
_STRING_ONLY = {"type", "anyOf", "oneOf", "description", "title", "default", "examples", "$defs"}
_ROOT = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "description",
    "title",
    "$defs",
    "$schema",
}


class CannotEnforceError(ValueError):
    """The form of the calls has no grammar for the schema of a strict tool."""


class Offer(NamedTuple):
    """The tools that a model may call by its own choice.

    Attributes:
        tools: those with strict arguments after `prepared_tool`.
        specials: the id of each special token of the tokenizer by its text.
        parallel: True if there may be several calls.
    """

    tools: Tools
    specials: Mapping[str, int]
    parallel: bool

    @property
    def schemas(self) -> Schemas:
        """The schemas of the arguments by the names of the tools; any object for a tool without `strict`."""
        return {
            tool_name(tool): parameters_of(tool) if is_strict(tool) else {"type": "object"}
            for tool in self.tools
        }

    @property
    def times(self) -> str:
        """The operator of Lark behind a rule of one call."""
        return "+" if self.parallel else ""

    def mark(self, text: str) -> str:
        """Return a text in Lark."""
        return literal(text, self.specials)

    def up_to(self, rule: str, end: str) -> str:
        """Return a rule for any text up to `end`. It needs the terminals WORDS and ANY."""
        if end in self.specials:
            return f"{rule}: WORDS? {self.mark(end)}"
        return f"{rule}[lazy]: ANY {self.mark(end)}"


class Form(NamedTuple):
    """The calls of a dialect in Lark: `begin` MARKER `call`, and `between` before each further one, up to `end`."""

    marker: str  # text; empty if calls are the whole text
    call: str  # after the marker
    between: str = ""
    before: str = ""  # the marker
    begin: str = ""
    end: str = ""
    others: str = ""  # a regular expression for text that is no call, without a marker
    rules: Sequence[str] = ()
    parts: Mapping[str, StructuredOutput] = {}

    def or_format(self, offer: Offer, answer: StructuredOutput) -> StructuredOutput:
        """Return the constraint on an answer that is either calls or a text in a format."""
        mark = offer.mark(self.marker) if self.marker else ""
        call = f"{self.before} {mark} {self.call}"
        further = f"({self.between} {call})*" if offer.parallel else ""
        rules = [
            f"start: calls | @format\ncalls: {self.begin} {call} {further} {self.end}",
            *self.rules,
            ANY,
        ]
        return composed("\n".join(rules), {"format": answer, **self.parts})

    def in_text(self, offer: Offer) -> StructuredOutput:
        """Return the constraint on free text with calls. From the marker of a call on, the text is a call."""
        if self.marker:
            start = self._after_markers(offer)
        else:
            further = f"({self.between} {self.call})*" if offer.parallel else ""
            calls = f"{self.begin} {self.call} {further} {self.end}"
            start = f"start: {calls} | OTHER\nOTHER: /{self.others}/"
        return composed("\n".join([start, *self.rules, ANY]), self.parts)

    def _after_markers(self, offer: Offer) -> str:
        mark = offer.mark(self.marker)
        head = f"head[lazy]: ANY {mark}"
        if self.marker in offer.specials:
            head = f"head: TEXT? {mark}\nTEXT: /(?s:.+)/"
        times = "*" if offer.parallel else "?"
        return f"start: (head {self.call}){times} tail?\ntail: ANY\n{head}"


def in_json(offer: Offer, start: str, end: str) -> Form:
    """Return calls as JSON objects, each between two markers."""
    call = f'"\\n"? @call "\\n"? {offer.mark(end)}'
    return Form(start, call, '"\\n"?', parts={"call": _schema(call_schema(offer.schemas))})


def plain_json(offer: Offer, tag: str) -> Form:
    """Return calls as JSON objects with "parameters"; `tag` may stand before the first, if it is a token."""
    begin = f"{offer.mark(tag)}?" if tag in offer.specials else ""
    parts = {"call": _schema(call_schema(offer.schemas, "parameters"))}
    return Form("", "@call", '"; "', begin=begin, others=_not_begun("{"), parts=parts)


def in_section(offer: Offer, start: str, call: str, end: str) -> Form:
    """Return named calls between one marker before all of them and one after all.

    Args:
        offer: of the tools.
        start: the first marker.
        call: one call in Lark, with NAME and @arguments.
        end: the last marker.
    """
    one, parts = named(offer.schemas, call)
    return Form(start, f"({one}){offer.times} {offer.mark(end)}", parts=parts)


def mistral(offer: Offer) -> Form:
    """Return calls of Mistral: a list of JSON objects, or a name and arguments."""
    arguments = offer.mark("[ARGS]")
    calls, parts = named(offer.schemas, f'"NAME" {arguments} @arguments')
    parts["list"] = _schema(_listed(call_schema(offer.schemas)))
    return Form("[TOOL_CALLS]", f'(" "? @list | {calls})', parts=parts)


def in_list(offer: Offer, start: str, end: str = "", *, is_cohere: bool = False) -> Form:
    """Return a marker and a list of JSON objects, perhaps with a marker after it."""
    call = call_schema(offer.schemas)
    if is_cohere:
        call = call_schema(offer.schemas, "parameters")
        for one in call["anyOf"]:
            called, arguments = one["properties"].values()
            one["properties"] = {
                "tool_call_id": {"type": "string"},
                "tool_name": called,
                "parameters": arguments,
            }
            one["required"] = ["tool_name", "parameters"]
    listed = _listed(call)
    if not offer.parallel:
        listed["maxItems"] = 1
    last = offer.mark(end) if end else ""
    return Form(start, f"@list {last}", parts={"list": _schema(listed)})


def keyed(offer: Offer, start: str, tags: Tags) -> Form:
    """Return calls with a tag around each key and each value."""
    parts = dict[str, StructuredOutput]()
    key = offer.mark(tags.key)
    between = f'{offer.mark(tags.key_end)} "\\n"? {offer.mark(tags.value)}'
    end = offer.mark(tags.end)
    rules = [
        f'any_member: "\\n"? {key} KEY {between} any_value',
        offer.up_to("any_value", tags.end),
        "KEY: /[^<>\\n]{1,128}/",
        "WORDS: /(?s:.+)/",
    ]

    def member(rule: str, name: str, schema: Any) -> str:
        value = _tagged_value(rule, schema, rules, parts, end)
        return f'"\\n"? {key} {json.dumps(name)} {between} {value}'

    for number, tool in enumerate(offer.tools):
        members = _rules_of_members(number, tool, rules, member)
        rules.append(f'tool{number}: {json.dumps(tool_name(tool))} {members} "\\n"?')
    call = f"({_any_tool(offer)}) {offer.mark(tags.ends[-1])}"
    return Form(start, call, '"\\n"?', rules=rules, parts=parts)


def tagged(offer: Offer, outer: str, tags: Tags, *, may_lack_outer: bool = False) -> Form:
    """Return calls with tags around them and around each value, in outer tags, which may be missing."""
    parts = dict[str, StructuredOutput]()
    line = "\n" if tags.has_lines else ""
    rules = [
        f'any_member: {json.dumps(tags.key)} KEY {json.dumps(tags.value)} any_value "\\n"?',
        f"any_value[lazy]: ANY {json.dumps(tags.end)}",
        'KEY: /[^<>"\\n]{1,128}/',
    ]

    def member(rule: str, key: str, schema: Any) -> str:
        value = _tagged_value(rule, schema, rules, parts, json.dumps(line + tags.end))
        return f'{json.dumps(tags.key + key + tags.value + line)} {value} "\\n"?'

    for number, tool in enumerate(offer.tools):
        called = json.dumps(tool_name(tool) + tags.value)
        members = _rules_of_members(number, tool, rules, member)
        rules.append(f'tool{number}: {called} "\\n"? {members}')
    call = f"({_any_tool(offer)}) {json.dumps(tags.ends[0])}"
    mark = offer.mark(outer)
    end = offer.mark(tags.ends[-1])
    between = '"\\n"?'
    if may_lack_outer:
        before = f'({mark} "\\n"?)?'
        call = f'{call} ("\\n"? {end})?'
        return Form(tags.first, call, between, before=before, rules=rules, parts=parts)
    call = f'("\\n"? {json.dumps(tags.first)} {call}){offer.times} "\\n"? {end}'
    return Form(outer, call, between, rules=rules, parts=parts)


def braced(offer: Offer, start: str, end: str) -> Form:
    """Return calls of Gemma: a name and members up to a marker.

    Raises:
        CannotEnforceError: a tool is strict.
    """
    if any([is_strict(tool) for tool in offer.tools]):
        raise CannotEnforceError("texts between markers have no form")
    names = " | ".join([json.dumps(tool_name(tool)) for tool in offer.tools])
    rules = [offer.up_to("members", end), "WORDS: /(?s:.+)/"]
    return Form(start, f'"call:" ({names}) "{{" members', rules=rules)


def pythonic(offer: Offer) -> Form:
    """Return a list of calls as in Python, which is the whole text."""
    rules = list[str]()
    parts = {"any": _schema({})}
    for number, tool in enumerate(offer.tools):
        _add_python_call(f"tool{number}", tool, rules, parts)
    rules += [
        'any_members: KEY "=" @any (", " KEY "=" @any)*',
        "KEY: /[A-Za-z_][A-Za-z0-9_]{0,127}/",
    ]
    return Form(
        "",
        f"({_any_tool(offer)})",
        '", "',
        begin='"["',
        end='"]"',
        others=_not_begun("\\["),
        rules=rules,
        parts=parts,
    )


def _add_python_call(
    name: str, tool: Any, rules: list[str], parts: dict[str, StructuredOutput]
) -> None:
    """Add the rule `name`, a call of a tool as in Python, and what it needs."""
    begin = json.dumps(tool_name(tool) + "(")
    if not is_strict(tool):
        rules.append(f'{name}: {begin} any_members? ")"')
        return
    members = _members(parameters_of(tool))
    rules.append(f'{name}: {begin} {name}_first0 ")"')
    for at, (key, schema, is_required) in enumerate(members):
        parts[f"{name}_{at}"] = _schema(schema)
        one = f"{json.dumps(key + '=')} @{name}_{at} {name}_rest{at + 1}"
        for place, comma in (("first", ""), ("rest", '", " ')):
            skipped = "" if is_required else f" | {name}_{place}{at + 1}"
            rules.append(f"{name}_{place}{at}: {comma}{one}{skipped}")
    rules += [f'{name}_{place}{len(members)}: ""' for place in ("first", "rest")]


def in_python(offer: Offer, start: str, end: str, marks: tuple[str, str, str]) -> Form:
    """Return calls as in Python between two markers, with `marks` in Lark before them, between them and after them."""
    form = pythonic(offer)
    left, comma, right = marks
    further = f"({comma} {form.call})*" if offer.parallel else ""
    call = f"{left} {form.call} {further} {right} {offer.mark(end)}"
    return Form(start, call, rules=form.rules, parts=form.parts)


def named(
    schemas: Mapping[str, Mapping[str, Any]], call: str
) -> tuple[str, dict[str, StructuredOutput]]:
    """Return the calls of all tools in Lark, from a call with NAME and @arguments; and the parts that they need."""
    calls = [
        call.replace("NAME", name).replace("@arguments", f"@arguments{number}")
        for number, name in enumerate(schemas)
    ]
    parts = {
        f"arguments{number}": _schema(schema) for number, schema in enumerate(schemas.values())
    }
    return f"({' | '.join(calls)})", parts


def _any_tool(offer: Offer) -> str:
    return " | ".join([f"tool{number}" for number in range(len(offer.tools))])


def _rules_of_members(
    number: int, tool: Any, rules: list[str], written: Callable[[str, str, Any], str]
) -> str:
    """Return the arguments of a call of a tool; a strict tool gets a rule for each, from its name and its schema."""
    if not is_strict(tool):
        return "any_member*"
    members = []
    for at, (name, schema, is_required) in enumerate(_members(parameters_of(tool))):
        rule = f"member{number}_{at}"
        members.append(rule if is_required else f"{rule}?")
        rules.append(f"{rule}: {written(rule, name, schema)}")
    return " ".join(members)


def _listed(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a list of calls."""
    return {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": call["anyOf"]},
        "$defs": call["$defs"],
    }


def _tagged_value(
    rule: str,
    schema: Mapping[str, Any],
    rules: list[str],
    parts: dict[str, StructuredOutput],
    end: str,
) -> str:
    """Return the value of a member in Lark, with its end, and add what it needs to `rules` and `parts`."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return f"({' | '.join(map(json.dumps, values))}) {end}"
    if "string" in kinds_of(schema) or not kinds_of(schema):
        plain = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
        if any([not set(part) <= _STRING_ONLY for part in plain if "string" in kinds_of(part)]):
            raise CannotEnforceError("a string in tags has no form")
        rules.append(f"{rule}_text[lazy]: ANY {end}")
        return f"{rule}_text"
    parts[rule] = _schema(schema)
    return f"@{rule} {end}"


def _members(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return name, schema and need of each member of plain arguments. Raises CannotEnforceError."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if (
        not set(schema) <= _ROOT
        or not isinstance(properties, Mapping)
        or not isinstance(required, list)
    ):
        raise CannotEnforceError("its schema is more than properties")
    definitions = schema.get("$defs", {})
    members = []
    for key, value in properties.items():
        if not isinstance(value, Mapping) or any(character in key for character in "<>=()\n "):
            raise CannotEnforceError(f"the property {key!r} has no form")
        found = definitions.get(str(value.get("$ref")).removeprefix("#/$defs/"), value)
        members.append(
            (key, {**found, "$defs": definitions} if definitions else found, key in required)
        )
    return members


def _not_begun(bracket: str) -> str:
    """Return a regular expression for text that does not begin with a bracket, apart from blanks."""
    return rf"[ \t\r\n]*([^{bracket} \t\r\n](?s:.*))?"


def _schema(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema, ensure_ascii=False))
