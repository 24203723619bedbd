"""The readers of callers' bytes, each with input that is as hard as its size allows. See `test_steps.py`."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from orca_jax.serve.openai.constraints import enforced_tools
from orca_jax.serve.openai.conversation import plain_messages, settled_system
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import whole_parts
from orca_jax.serve.openai.messages.conversion import understood
from orca_jax.serve.openai.responses.api import messages_of
from orca_jax.serve.openai.responses.store import ResponseStore, stored_response, with_ids
from orca_jax.serve.openai.responses.truncation import cuts_of, without
from orca_jax.serve.openai.schema import (
    chat_parser,
    completion_parser,
    messages_parser,
    responses_parser,
    tokenize_parser,
)
from orca_jax.serve.openai.schema.chat import (
    AssistantMessage,
    ChatMessage,
    SystemMessage,
    UserMessage,
)
from orca_jax.serve.openai.schema.input_items import CallOutput, InputCall, InputMessage
from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.serve.openai.schema.surrogates import lone_surrogate
from orca_jax.text.bad_words import bad_word_ids
from orca_jax.text.calls.dialects import DIALECTS, required_parser, tool_parser
from orca_jax.text.calls.harmony import HarmonyParser
from orca_jax.text.calls.parts import ToolParser
from orca_jax.text.json_end import cut_object
from orca_jax.text.reasoning import TAGS, ReasoningParser, opening_of
from orca_jax.text.schemas.keywords import WrongSchemaError
from orca_jax.text.schemas.prepared import prepared
from orca_jax.text.stream import OutputStream
from orca_jax.text.template import _cut_after_final_message, _with_parsed_arguments
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.text.tools import Reasoning, ToolCall, check_tools, forced_tools_schema
from orca_jax.values.errors import RequestError
from tests.linear.counting import Work
from tests.text.tool_calls import TOOLS

type Reader = Callable[[int], Work]
"""Makes the work on input of a size."""

THINK = TAGS["qwen3"]


def parsing(parser: BodyParser[Any], body: bytes, *, ignores_unknown: bool = False) -> Work:
    def parse() -> None:
        with suppress(ApiError):
            parser.parse(body, ignores_unknown=ignores_unknown)

    return parse


def names_of(size: int, value: str = "1") -> str:
    return ",".join([f'"{number:x}":{value}' for number in range(size)])


def bodies() -> Mapping[str, Reader]:
    """Bodies of JSON, by what is hard about them."""
    completion = partial(parsing, completion_parser)
    chat = partial(parsing, chat_parser)
    ignoring = partial(parsing, completion_parser, ignores_unknown=True)
    user = '{"role":"user","content":"x"}'
    return {
        "names beside an escape": lambda n: completion(
            f'{{"prompt":"\\u0041",{names_of(n)}}}'.encode()
        ),
        "names, the last one twice": lambda n: completion(
            f'{{"prompt":"x",{names_of(n)},"0":2}}'.encode()
        ),
        "one name again": lambda n: completion(
            ("{" + ",".join(['"prompt":"x"'] * n) + "}").encode()
        ),
        "names with commas": lambda n: ignoring(
            ("{" + ",".join([f'"{i},":1' for i in range(n)]) + "}").encode()
        ),
        "ignored names": lambda n: ignoring(f'{{"prompt":"x",{names_of(n)}}}'.encode()),
        "logit_bias": lambda n: completion(
            f'{{"prompt":"x","logit_bias":{{{names_of(n)}}}}}'.encode()
        ),
        "wrong logit_bias": lambda n: completion(
            f'{{"prompt":"x","logit_bias":{{{names_of(n, "[]")}}}}}'.encode()
        ),
        "ids": lambda n: completion(f'{{"prompt":[{",".join(["1"] * n)}]}}'.encode()),
        "floats as ids": lambda n: completion(f'{{"prompt":[{",".join(["1.0"] * n)}]}}'.encode()),
        "prompts": lambda n: completion(f'{{"prompt":[{",".join(["null"] * n)}]}}'.encode()),
        "bad_words": lambda n: completion(
            f'{{"prompt":"x","bad_words":[{",".join(['"x"'] * n)}]}}'.encode()
        ),
        "stop": lambda n: completion(f'{{"prompt":"x","stop":[{",".join(['"x"'] * n)}]}}'.encode()),
        "messages": lambda n: chat(f'{{"messages":[{",".join([user] * n)}]}}'.encode()),
        "unused fields": lambda n: chat(
            f'{{"messages":[{",".join([user[:-1] + ',"id":"a"}'] * n)}]}}'.encode()
        ),
        "a half of a character": lambda n: chat(
            f'{{"messages":[{",".join([user] * n)},{{"role":"user","content":"\\ud800"}}]}}'.encode()
        ),
        "blocks": lambda n: parsing(
            messages_parser,
            f'{{"max_tokens":1,"messages":[{",".join([user] * n)}],"system":[{{"type":"text","text":"x"}}]}}'.encode(),
        ),
        "items": lambda n: parsing(
            responses_parser, f'{{"input":[{",".join([user] * n)}]}}'.encode()
        ),
        "unknown items": lambda n: parsing(
            responses_parser,
            f'{{"input":[{",".join(['{"type":"web_search_call"}'] * n)}]}}'.encode(),
        ),
        "a text": lambda n: parsing(tokenize_parser, f'{{"prompt":"{"x" * n}"}}'.encode()),
        "a deep body": lambda n: completion(b'{"a":' * n + b"1" + b"}" * n),
    }


def preparing(schema: Mapping[str, Any]) -> Work:
    def prepare() -> None:
        with suppress(WrongSchemaError):
            prepared(schema)

    return prepare


def named(count: int, make: Callable[[int], object]) -> dict[str, object]:
    return {f"a{number}": make(number) for number in range(count)}


def ref(number: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/a{number}"}


def of_enums(count: int, values: Callable[[int], Sequence[object]]) -> dict[str, object]:
    return {"oneOf": [{"enum": list(values(number))} for number in range(count)]}


def records(
    count: int, make: Callable[[int], Mapping[str, object]], **others: object
) -> dict[str, object]:
    return {"type": "object", "properties": named(count, make), **others}


def schemas() -> Mapping[str, Reader]:
    """JSON schemas, by what is hard about them."""
    wide = partial(records, make=lambda i: {"type": "string"})
    makers: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
        "a union of enums": lambda n: of_enums(n, lambda i: [f"{i}-{j}" for j in range(10)]),
        "a union of equal enums": lambda n: of_enums(n, lambda i: range(10)),
        "a union of enums with a common value": lambda n: of_enums(
            n, lambda i: [0, *range(i * 9 + 1, i * 9 + 10)]
        ),
        "a union of a few enums": lambda n: of_enums(
            9, lambda i: [0, *range(i * n + 1, i * n + n)]
        ),
        "a union of ranges": lambda n: {
            "oneOf": [{"type": "integer", "minimum": i, "maximum": i} for i in range(n)]
        },
        "a union of objects": lambda n: {
            "oneOf": [
                records(3, lambda j: {"type": "integer"}, required=[f"a{i % 3}"]) for i in range(n)
            ]
        },
        "a union with names in common": lambda n: {
            "oneOf": [wide(n, required=[f"a{i}" for i in range(n)])] * 3
        },
        "a union of references": lambda n: {
            "oneOf": [{"$ref": "#/$defs/a"}] * n,
            "$defs": {"a": wide(n, required=[f"a{i}" for i in range(n)])},
        },
        "a long allOf in a union": lambda n: {
            "oneOf": [{"allOf": [{"minimum": 1}] * n}, {"type": "string"}]
        },
        "many unions": lambda n: records(n, lambda i: {"oneOf": [{"const": 1}, {"const": 2}]}),
        "a chain of references": lambda n: {
            "properties": named(n, ref),
            "required": [f"a{i}" for i in range(n)],
            "$defs": named(n, lambda i: ref(i + 1) if i < n - 1 else {}),
        },
        "a chain of references from its end": lambda n: {
            "allOf": [ref(i) for i in reversed(range(n))],
            "$defs": named(n, lambda i: ref(i + 1) if i < n - 1 else {}),
        },
        "a chain of arrays": lambda n: {
            **ref(0),
            "$defs": named(
                n, lambda i: {"type": "array", "items": ref(i + 1) if i < n - 1 else {}}
            ),
        },
        "a circle of references": lambda n: {
            **ref(0),
            "$defs": named(n, lambda i: ref((i + 1) % n)),
        },
        "references to one schema": lambda n: {
            "allOf": [{"$ref": "#/$defs/a", "unevaluatedProperties": False}] * n,
            "$defs": {"a": wide(n)},
        },
        "names by reference": lambda n: {
            "allOf": [
                {"propertyNames": {"$ref": "#/$defs/a"}, "additionalProperties": {"type": "string"}}
            ]
            * n,
            "$defs": {"a": {"enum": [f"a{i}" for i in range(n)]}},
        },
        "names and others": lambda n: wide(
            n, required=[f"a{i}" for i in range(n)], propertyNames={"enum": [*map(str, range(n))]}
        ),
        "names that are constants of an enum": lambda n: {
            "propertyNames": {"const": "a", "enum": [*map(str, range(n))]}
        },
        "names after what is left out": lambda n: {
            "allOf": [*[{"uniqueItems": True}] * n, *[{"propertyNames": {"minLength": 1}}] * n]
        },
        "definitions of one name": lambda n: {
            "allOf": [{"$ref": f"#/$defs/x/allOf/{i}/properties/same"} for i in range(n)],
            "$defs": {"x": {"allOf": [{"properties": {"same": {"type": "string"}}}] * n}},
        },
        "definitions named as copies": lambda n: {
            "allOf": [
                {"properties": {f"p{i}": {}}, **{"$ref": f"#/$defs/closed-{i}"}} for i in range(n)
            ],
            "$defs": {f"closed-{i}": {"properties": {"a": {}}} for i in range(n)},
        },
        "one list of types": lambda n: {
            "oneOf": [{"type": ["string"] * n}, {"type": "integer"}, {"type": "null"}]
        },
        "an enum": lambda n: {"enum": [*range(n)]},
        "properties": lambda n: wide(n, required=[f"a{i}" for i in range(n)]),
        "optional properties": wide,
        "patterns": lambda n: {"patternProperties": {f"^a{i}$": {} for i in range(n)}},
        "one pattern": lambda n: {"pattern": "(a|b)?" * n},
        "anyOf": lambda n: {"anyOf": [{"properties": {f"a{i}": {}}} for i in range(n)]},
        "allOf with parts": lambda n: {"allOf": [{"properties": {f"a{i}": {}}} for i in range(n)]},
        "a far reference": lambda n: {"$ref": "#/anyOf/" + "9" * n, "anyOf": [{}]},
        "keywords that are left out": lambda n: {"allOf": [{"uniqueItems": True}] * n},
        "unknown keywords": lambda n: {f"k{i}": 1 for i in range(n)},
    }
    return {name: lambda n, make=make: preparing(make(n)) for name, make in makers.items()}


def reading(parser: Callable[[], ToolParser], pieces: Sequence[str]) -> Work:
    def read() -> None:
        reader = parser()
        found = [part for piece in pieces for part in reader.push(piece)]
        whole_parts([*found, *reader.finish()])

    return read


def answers() -> Mapping[str, Reader]:
    """Generated text, which a caller may choose by `logit_bias` or by its prompt."""

    def thinking(opening: Any, *texts: str) -> Reader:
        return lambda n: reading(
            lambda: ReasoningParser(THINK, opening, None), [*texts[:-1], *[texts[-1]] * n]
        )

    def harmony(begin: str, text: str) -> Reader:
        return lambda n: reading(lambda: HarmonyParser({"f"}), [begin, *[text] * n])

    def stream(text: str, *stops: str) -> Reader:
        def read(n: int) -> Work:
            ids = [*text.encode()] * (n // len(text))
            return lambda: (
                [OutputStream(ByteTokenizer(), stops).push([i]) for i in ids[:1]]
                + _pushed(ids, stops)
            )

        return read

    return {
        "blanks in reasoning": thinking("open", "words", " "),
        "blanks before reasoning": thinking("free", " "),
        "blanks at the begin of reasoning": thinking("open", " "),
        "begins of the end tag": thinking("open", "a</thin"),
        "begins of the tag": thinking("free", "<thi"),
        "blanks after reasoning": thinking("open", "a</think>", " "),
        "messages of harmony": harmony("", "<|channel|>final<|message|>a<|end|>"),
        "begins of marks in harmony": harmony("<|channel|>analysis<|message|>", "a<|en"),
        "blanks of harmony": harmony("<|channel|>analysis<|message|>", " "),
        "text without a mark": harmony("", "<|channel|>"),
        "stop strings": stream("aaaaaaab", "aaaaaaaaac", "b" * 1000),
        "blanks with stop strings": stream(" ", " \n"),
    }


def _pushed(ids: Sequence[int], stops: Sequence[str]) -> list[str]:
    output = OutputStream(ByteTokenizer(), stops)
    return [output.push([i]) for i in ids]


CALLS = (
    '<tool_call>{"name": "f", "arguments": {"x": "',
    '<tool_call>{"arguments": {"x": "',
    '<tool_call>{"id": "',
    "<tool_call>f<arg_key>x</arg_key><arg_value>",
    "<tool_call>\n<function=f>\n<parameter=x>\n",
    '[TOOL_CALLS]f[ARGS]{"a": "',
    "<|python_tag|>f(x='",
    "[f(x='",
    "call:f{x:<escape>",
    "<tool_call>",
    "",
)
FILLINGS = (
    " ",
    "a",
    "{",
    "}",
    '"',
    "\\",
    "<",
    "</",
    "</parameter",
    "[",
    "(x=1,",
    "x:1,",
    "<tool_call>",
    '{"name":"f"},',
    "<arg_key>x</arg_key><arg_value>1</arg_value>",
)


def calls() -> Mapping[str, Reader]:
    """Tool calls, in each form of each dialect."""
    made: dict[str, Reader] = {}
    for dialect in DIALECTS:
        for number, begin in enumerate(CALLS):
            made[f"{dialect} {number}"] = _of_fillings(partial(tool_parser, dialect, TOOLS), begin)
    made["forced"] = _of_fillings(
        partial(required_parser, TOOLS), '[{"name": "f", "arguments": {"x": "'
    )
    return made


def _of_fillings(parser: Callable[[], ToolParser], begin: str) -> Reader:
    def read(n: int) -> Work:
        works = [
            reading(parser, [begin, *[filling] * (n // len(FILLINGS))]) for filling in FILLINGS
        ]
        return lambda: [work() for work in works]

    return read


def conversations() -> Mapping[str, Reader]:
    """Messages, templates and stored responses."""

    def continued(n: int) -> Work:
        text = "a" * 3 * n + "aa</think>\n" + "a" * n
        messages = [{"role": "assistant", "content": "aa</think>" + "a" * n}]

        def cut() -> None:
            with suppress(RequestError):
                _cut_after_final_message(text, messages)

        return cut

    def settled(make: Callable[[int], ChatMessage]) -> Reader:
        return lambda n: partial(
            settled_system,
            plain_messages([UserMessage("x"), *map(make, range(n))]),
            keeps_late=False,
        )

    def truncated(n: int) -> Work:
        messages = plain_messages([UserMessage("x"), AssistantMessage("y")] * n)

        def cut() -> None:
            cuts = cuts_of(messages)
            without(messages, cuts[-1])

        return cut

    def stored(n: int) -> ResponseStore:
        store = ResponseStore(2**40)
        for number in range(n):
            items = with_ids([InputMessage("user", "x")] * 4)
            one = stored_response(b"{}", items, [], None if number == 0 else str(number - 1))
            store.put(None, str(number), one)
        return store

    def history(n: int) -> Work:
        store = stored(n)
        return lambda: [one.items() for one in store.history(None, str(n - 1)) or ()]

    def referred(n: int) -> Work:
        store = ResponseStore(2**40)
        items = with_ids([InputMessage("user", "x")] * n)
        store.put(None, "a", stored_response(b"{}", items, [], None))
        return lambda: store.items(None, [str(item.id) for item in items])

    def agent(n: int) -> Work:
        items = [
            one
            for i in range(n)
            for one in (InputCall(f"c{i}", "f", "{}"), CallOutput(f"c{i}", "x"))
        ]
        return lambda: messages_of(None, items)

    def parted(n: int) -> Work:
        turns = [
            {"role": role, "content": "x"}
            for _ in range(n)
            for role in ("user", "system", "assistant")
        ]
        call, _ = messages_parser.parse(
            json.dumps({"max_tokens": 1, "messages": turns[:4096]}).encode()
        )
        return lambda: understood(call, keeps_late_system=False)

    def tools(n: int) -> Work:
        made = [
            {
                "type": "function",
                "function": {"name": f"f{i}", "parameters": {"properties": named(n, lambda j: {})}},
            }
            for i in range(8)
        ]

        def read() -> None:
            with suppress(ApiError, RequestError):
                check_tools(made)
                found, _ = enforced_tools(made, is_forced=True)
                forced_tools_schema(found, "required")

        return read

    def parts(n: int) -> Work:
        said = [
            one
            for _ in range(n)
            for one in ("a", "b", Reasoning("c"), ToolCall("f", "d"), ToolCall(None, "e"))
        ]
        return lambda: whole_parts([*said, *["a"] * n, *[ToolCall(None, "a" * 9)] * n])

    cut = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    return {
        "a message to continue": continued,
        "late system messages": settled(lambda i: SystemMessage("x" * 99)),
        "late system messages between others": settled(
            lambda i: (SystemMessage, UserMessage)[i % 2]("x")
        ),
        "parts of an oldest conversation": truncated,
        "a stored conversation": history,
        "references to items": referred,
        "calls and results": agent,
        "turns": parted,
        "tools": tools,
        "parts of an answer": parts,
        "arguments that were cut": lambda n: partial(cut_object, '{"a":[' + '"x",' * n),
        "arguments with brackets": lambda n: partial(cut_object, '{"a":' * n),
        "arguments of one text": lambda n: partial(cut_object, '{"a":"' + '\\"' * n),
        "arguments of a call": lambda n: (
            lambda: _with_parsed_arguments(
                {**cut, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}] * n}
            )
        ),
        "the end of a prompt": lambda n: partial(opening_of, "<think>" * n + " " * n, THINK, True),
        "bad words": lambda n: partial(bad_word_ids, ByteTokenizer(), ["x" * n]),
        "halves of characters": lambda n: partial(
            lone_surrogate, b'{"a":[' + b'"\\ud83d\\ude00",' * n + b"1]}"
        ),
    }


READERS: Mapping[str, Reader] = {
    f"{kind}: {name}": reader
    for kind, readers in (
        ("body", bodies()),
        ("schema", schemas()),
        ("answer", answers()),
        ("call", calls()),
        ("conversation", conversations()),
    )
    for name, reader in readers.items()
}
