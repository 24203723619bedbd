"""Grammars for calls that a model may make by its own choice: beside a format, or with strict arguments.

The arguments of a tool with `strict` match its schema. Those of another tool are any object.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orca_jax.request import StructuredOutput
from orca_jax.text.calls.dialects import DIALECTS, Tools
from orca_jax.text.calls.harmony import HARMONY
from orca_jax.text.calls.members import TAGS, kinds_of
from orca_jax.text.composed import composed, literal
from orca_jax.text.tools import call_schema, is_strict, parameters_of, tool_name

_ANY = "ANY: /(?s:.*)/"
# Keywords of a schema that allows strings of any form.
_STRING_ONLY = {"type", "anyOf", "oneOf", "description", "title", "default", "examples", "$defs"}
_ROOT = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "$schema"}


class CannotEnforceError(ValueError):
    """The form of the calls has no grammar for the schema of a strict tool."""


class _Form(NamedTuple):
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


def calls_or_format(
    name: str, tools: Tools, answer: StructuredOutput, specials: Mapping[str, int], parallel: bool
) -> StructuredOutput:
    """Return the constraint on an answer that is either calls or a text in a format.

    Args:
        name: the name of the dialect of the calls, one of `DIALECTS`.
        tools: the tools of the request; those with strict arguments after `prepared_tool`.
        answer: the format.
        specials: the id of each special token by its text.
        parallel: True if there may be several calls.

    Raises:
        CannotEnforceError: the dialect has no grammar for a strict tool.
    """
    if name == HARMONY:
        return harmony_form(tools, answer, specials)
    form = _form(name, tools, specials, parallel)
    mark = literal(form.marker, specials) if form.marker else ""
    call = f"{form.before} {mark} {form.call}"
    further = f"({form.between} {call})*" if parallel else ""
    rules = [f"start: calls | @format\ncalls: {form.begin} {call} {further} {form.end}", *form.rules, _ANY]
    return composed("\n".join(rules), {"format": answer, **form.parts})


def text_with_calls(name: str, tools: Tools, specials: Mapping[str, int], parallel: bool) -> StructuredOutput:
    """Return the constraint on free text with calls; arguments for those of the function above. It has no format.

    From the marker of a call on, the text is a call.
    """
    if name == HARMONY:
        return harmony_form(tools, None, specials)
    form = _form(name, tools, specials, parallel)
    if form.marker in specials:
        head = f"head: TEXT? {literal(form.marker, specials)}\nTEXT: /(?s:.+)/"
    else:
        head = f"head[lazy]: ANY {literal(form.marker, specials)}"
    if form.marker:
        times = "*" if parallel else "?"
        start = f"start: (head {form.call}){times} tail?\ntail: ANY\n{head}"
    else:
        further = f"({form.between} {form.call})*" if parallel else ""
        start = f"start: {form.begin} {form.call} {further} {form.end} | OTHER\nOTHER: /{form.others}/"
    return composed("\n".join([start, *form.rules, _ANY]), form.parts)


def harmony_form(tools: Tools, answer: StructuredOutput | None, specials: Mapping[str, int]) -> StructuredOutput:
    """Return the constraint on the messages of gpt-oss: reasoning, and then a call or an answer, which may be free."""
    channel, message, start, call = (
        literal(f"<|{mark}|>", specials) for mark in ("channel", "message", "start", "call")
    )
    constrain, parts = literal("<|constrain|>", specials), dict[str, StructuredOutput]()
    if answer is not None:
        parts["format"] = answer
    rules = [
        f'start: ({channel} "analysis" {message} thought {start} "assistant")? ({"call | " if tools else ""}final)',
        f'final: {channel} "final" {message} {"TEXT?" if answer is None else "@format"}',
        _up_to("thought", "<|end|>", specials),
        "WORDS: /(?s:.+)/\nTEXT: /(?s:.+)/",
        _ANY,
    ]
    if tools:
        schemas = {tool_name(tool): parameters_of(tool) if is_strict(tool) else {"type": "object"} for tool in tools}
        one, of_tools = _named(schemas, f'"NAME" " "? {constrain}? "json"? {message} @arguments')
        rules.append(f'call: {channel} "commentary to=functions." {one} {call}?')
        parts |= of_tools
    return composed("\n".join(rules), parts)


def _form(name: str, tools: Tools, specials: Mapping[str, int], parallel: bool) -> _Form:
    assert name in DIALECTS, "the name is of a known dialect"
    schemas = {tool_name(tool): parameters_of(tool) if is_strict(tool) else {"type": "object"} for tool in tools}
    more = "+" if parallel else ""
    match name:
        case "hermes":
            end = literal("</tool_call>", specials)
            parts = {"call": _schema(call_schema(schemas))}
            return _Form("<tool_call>", f'"\\n"? @call "\\n"? {end}', '"\\n"?', parts=parts)
        case "llama3_json":
            parts = {"call": _schema(call_schema(schemas, "parameters"))}
            tag = literal("<|python_tag|>", specials)
            begin = f"{tag}?" if "<|python_tag|>" in specials else ""
            return _Form("", "@call", '"; "', begin=begin, others=_not_begun("{"), parts=parts)
        case "mistral":
            return _mistral(schemas, specials)
        case "deepseek_v3":
            begin, end, last, mark = (
                literal(f"<｜tool▁{part}｜>", specials) for part in ("call▁begin", "call▁end", "calls▁end", "sep")
            )
            old = f'"function" {mark} "NAME\\n```json\\n" @arguments "\\n```"'
            one, parts = _named(schemas, f'({old} | "NAME" {mark} @arguments)')
            return _Form("<｜tool▁calls▁begin｜>", f"({begin} {one} {end}){more} {last}", parts=parts)
        case "kimi_k2":
            begin, end, last, mark = (
                literal(f"<|tool_{part}|>", specials)
                for part in ("call_begin", "call_end", "calls_section_end", "call_argument_begin")
            )
            one, parts = _named(schemas, f'"functions.NAME:" /[0-9]{{1,4}}/ {mark} @arguments')
            return _Form("<|tool_calls_section_begin|>", f"({begin} {one} {end}){more} {last}", parts=parts)
        case "qwen3_coder" | "seed_oss" | "minimax_m2":
            return _tagged(name, tools, specials, more)
        case "granite" | "nemotron_json" | "hunyuan_a13b" | "cohere_command3":
            return _in_list(name, schemas, specials, parallel)
        case "glm45":
            return _keyed(tools, specials)
        case "gemma4" | "functiongemma":
            return _braced(name, tools, specials)
        case "lfm2":
            end, marks = literal("<|tool_call_end|>", specials), ('"["', '", "', '"]"')
            return _in_python("<|tool_call_start|>", end, tools, marks, parallel)
        case "olmo3":
            end, marks = literal("</function_calls>", specials), ('"\\n"?', '"\\n"', '"\\n"?')
            return _in_python("<function_calls>", end, tools, marks, parallel)
    return _pythonic(tools)


def _named(schemas: Mapping[str, Mapping[str, Any]], call: str) -> tuple[str, dict[str, StructuredOutput]]:
    """Return the calls of all tools in Lark, from a call with NAME and @arguments; and the parts that they need."""
    calls = [
        call.replace("NAME", name).replace("@arguments", f"@arguments{number}") for number, name in enumerate(schemas)
    ]
    parts = {f"arguments{number}": _schema(schema) for number, schema in enumerate(schemas.values())}
    return f"({' | '.join(calls)})", parts


def _keyed(tools: Tools, specials: Mapping[str, int]) -> _Form:
    key, key_end, value = (literal(tag, specials) for tag in ("<arg_key>", "</arg_key>", "<arg_value>"))
    value_end, parts = literal("</arg_value>", specials), dict[str, StructuredOutput]()
    between = f'{key_end} "\\n"? {value}'
    rules = [
        f'any_member: "\\n"? {key} KEY {between} any_value',
        _up_to("any_value", "</arg_value>", specials),
        "KEY: /[^<>\\n]{1,128}/",
        "WORDS: /(?s:.+)/",
    ]

    def member(rule: str, name: str, schema: Any) -> str:
        return f'"\\n"? {key} {json.dumps(name)} {between} {_tagged_value(rule, schema, rules, parts, value_end)}'

    for number, tool in enumerate(tools):
        members = _rules_of_members(number, tool, rules, member)
        rules.append(f'tool{number}: {json.dumps(tool_name(tool))} {members} "\\n"?')
    call = " | ".join([f"tool{number}" for number in range(len(tools))])
    end = literal("</tool_call>", specials)
    return _Form("<tool_call>", f"({call}) {end}", '"\\n"?', rules=rules, parts=parts)


def _rules_of_members(number: int, tool: Any, rules: list[str], written: Callable[[str, str, Any], str]) -> str:
    """Return the arguments of a call of a tool; a strict tool gets a rule for each, from its name and its schema."""
    if not is_strict(tool):
        return "any_member*"
    members = []
    for at, (name, schema, is_required) in enumerate(_members(parameters_of(tool))):
        rule = f"member{number}_{at}"
        members.append(rule if is_required else f"{rule}?")
        rules.append(f"{rule}: {written(rule, name, schema)}")
    return " ".join(members)


def _braced(name: str, tools: Tools, specials: Mapping[str, int]) -> _Form:
    if any([is_strict(tool) for tool in tools]):
        raise CannotEnforceError("texts between markers have no form")
    start, end = ("<|tool_call>", "<tool_call|>")
    if name == "functiongemma":
        start, end = ("<start_function_call>", "<end_function_call>")
    names = " | ".join([json.dumps(tool_name(tool)) for tool in tools])
    rules = [_up_to("members", end, specials), "WORDS: /(?s:.+)/"]
    return _Form(start, f'"call:" ({names}) "{{" members', rules=rules)


def _up_to(rule: str, end: str, specials: Mapping[str, int]) -> str:
    """Return a rule for any text up to `end`."""
    mark = literal(end, specials)
    return f"{rule}: WORDS? {mark}" if end in specials else f"{rule}[lazy]: ANY {mark}"


def _listed(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a list of calls."""
    return {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}


def _in_list(name: str, schemas: Mapping[str, Mapping[str, Any]], specials: Mapping[str, int], parallel: bool) -> _Form:
    [(start, _)], after = DIALECTS[name].markers.items(), DIALECTS[name].after["json"]["]"]
    call = call_schema(schemas)
    if name == "cohere_command3":
        call = call_schema(schemas, "parameters")
        for one in call["anyOf"]:
            called, arguments = one["properties"].values()
            one["properties"] = {"tool_call_id": {"type": "string"}, "tool_name": called, "parameters": arguments}
            one["required"] = ["tool_name", "parameters"]
    listed = _listed(call) | ({} if parallel else {"maxItems": 1})
    end = "" if isinstance(after, str) else literal(next(iter(after)), specials)
    return _Form(start, f"@list {end}", parts={"list": _schema(listed)})


def _mistral(schemas: Mapping[str, Mapping[str, Any]], specials: Mapping[str, int]) -> _Form:
    arguments = literal("[ARGS]", specials)
    named = [f"{json.dumps(name)} {arguments} @arguments{number}" for number, name in enumerate(schemas)]
    parts = {f"arguments{number}": _schema(schema) for number, schema in enumerate(schemas.values())}
    parts["list"] = _schema(_listed(call_schema(schemas)))
    return _Form("[TOOL_CALLS]", f'(" "? @list | {" | ".join(named)})', parts=parts)


def _tagged(name: str, tools: Tools, specials: Mapping[str, int], more: str) -> _Form:
    [(outer, inner), *_] = DIALECTS[name].markers.items()
    assert isinstance(inner, Mapping)
    [(first, kind)] = inner.items()
    tags, parts = TAGS[str(kind)], dict[str, StructuredOutput]()
    line = "\n" if tags.has_lines else ""
    rules = [
        f'any_member: {json.dumps(tags.key)} KEY {json.dumps(tags.value)} any_value "\\n"?',
        f"any_value[lazy]: ANY {json.dumps(tags.end)}",
        'KEY: /[^<>"\\n]{1,128}/',
    ]

    def member(rule: str, key: str, schema: Any) -> str:
        value = _tagged_value(rule, schema, rules, parts, json.dumps(line + tags.end))
        return f'{json.dumps(tags.key + key + tags.value + line)} {value} "\\n"?'

    for number, tool in enumerate(tools):
        called = json.dumps(tool_name(tool) + tags.value)
        rules.append(f'tool{number}: {called} "\\n"? {_rules_of_members(number, tool, rules, member)}')
    call = f"({' | '.join([f'tool{number}' for number in range(len(tools))])}) {json.dumps(tags.ends[0])}"
    mark, end = literal(outer, specials), literal(tags.ends[-1], specials)
    if name == "qwen3_coder":  # the outer tags may be missing
        before = f'({mark} "\\n"?)?'
        return _Form(first, f'{call} ("\\n"? {end})?', '"\\n"?', before=before, rules=rules, parts=parts)
    return _Form(outer, f'("\\n"? {json.dumps(first)} {call}){more} "\\n"? {end}', '"\\n"?', rules=rules, parts=parts)


def _tagged_value(
    rule: str, schema: Mapping[str, Any], rules: list[str], parts: dict[str, StructuredOutput], end: str
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


def _pythonic(tools: Tools) -> _Form:
    rules, parts, names = [], {}, []
    for number, tool in enumerate(tools):
        name = f"tool{number}"
        names.append(name)
        members = _members(parameters_of(tool)) if is_strict(tool) else None
        if members is None:
            rules.append(f'{name}: {json.dumps(tool_name(tool) + "(")} any_members? ")"')
            continue
        rules.append(f'{name}: {json.dumps(tool_name(tool) + "(")} {name}_first0 ")"')
        for at, (key, schema, is_required) in enumerate(members):
            parts[f"{name}_{at}"] = _schema(schema)
            one = f"{json.dumps(key + '=')} @{name}_{at} {name}_rest{at + 1}"
            skipped = "" if is_required else f" | {name}_first{at + 1}"
            rules.append(f"{name}_first{at}: {one}{skipped}")
            skipped = "" if is_required else f" | {name}_rest{at + 1}"
            rules.append(f'{name}_rest{at}: ", " {one}{skipped}')
        rules += [f'{name}_{place}{len(members)}: ""' for place in ("first", "rest")]
    parts["any"] = _schema({})
    rules += ['any_members: KEY "=" @any (", " KEY "=" @any)*', "KEY: /[A-Za-z_][A-Za-z0-9_]{0,127}/"]
    call = f"({' | '.join(names)})"
    return _Form("", call, '", "', begin='"["', end='"]"', others=_not_begun("\\["), rules=rules, parts=parts)


def _in_python(start: str, end: str, tools: Tools, marks: tuple[str, str, str], parallel: bool) -> _Form:
    """Return calls as in Python between two markers, with `marks` in Lark before them, between them and after them."""
    form, (left, comma, right) = _pythonic(tools), marks
    further = f"({comma} {form.call})*" if parallel else ""
    return _Form(start, f"{left} {form.call} {further} {right} {end}", rules=form.rules, parts=form.parts)


def _members(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return name, schema and need of each member of plain arguments. Raises CannotEnforceError."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not set(schema) <= _ROOT or not isinstance(properties, Mapping) or not isinstance(required, list):
        raise CannotEnforceError("its schema is more than properties")
    definitions = schema.get("$defs", {})
    members = []
    for key, value in properties.items():
        if not isinstance(value, Mapping) or any(character in key for character in "<>=()\n "):
            raise CannotEnforceError(f"the property {key!r} has no form")
        found = definitions.get(str(value.get("$ref")).removeprefix("#/$defs/"), value)
        members.append((key, {**found, "$defs": definitions} if definitions else found, key in required))
    return members


def _not_begun(bracket: str) -> str:
    """Return a regular expression for text that does not begin with a bracket, apart from blanks."""
    return rf"[ \t\r\n]*([^{bracket} \t\r\n](?s:.*))?"


def _schema(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema, ensure_ascii=False))
