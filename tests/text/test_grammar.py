"""Structured outputs: texts drawn from the allowed ids match, and malicious grammars are harmless."""

import json
import random
import re
import threading
import time
from collections.abc import Sequence
from enum import Enum

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.helpers.bundled import demo_directory
from orca_jax.text.grammar import MAX_SOURCE, GrammarConstraint, GrammarFactory
from orca_jax.text.schemas.prepared import MAX_NESTING
from orca_jax.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from orca_jax.values.errors import RequestError
from orca_jax.values.request import StructuredOutput

END = 256
VOCAB = 300  # more than the tokenizer's 257
BYTES = GrammarFactory(ByteTokenizer(), VOCAB, (END,))


@pytest.fixture(scope="module")
def demo() -> tuple[GrammarFactory, Tokenizer, int]:
    tokenizer = load_tokenizer(demo_directory())
    assert tokenizer.eos_id is not None
    return (
        GrammarFactory(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,)),
        tokenizer,
        tokenizer.eos_id,
    )


def ids_of(tokens: int) -> list[int]:
    return [token for token in range(tokens.bit_length()) if tokens >> token & 1]


def walk(
    constraint: GrammarConstraint, tokenizer: Tokenizer, end: int, seed: int, limit: int = 300
) -> bytes | None:
    """A randomly drawn text with a preference for ends; None if it did not end."""
    chance, text = random.Random(seed), b""
    for _ in range(limit):
        ids = ids_of(constraint.allowed())
        assert ids, "nothing may follow"
        closing = [i for i in ids if i == end or tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]")]
        token = chance.choice(closing if closing and chance.random() < 0.4 else ids)
        if token == end:
            return text
        text += tokenizer.token_bytes(token)
        constraint.accept(token)
    return None


def follow(constraint: GrammarConstraint, ids: Sequence[int]) -> int:
    """The number of ids allowed one after another."""
    for count, token in enumerate(ids):
        if not constraint.allowed() >> token & 1:
            return count
        constraint.accept(token)
    return len(ids)


EXPRESSIONS = [
    r"[a-z]{3}-[0-9]{4}",
    r"^(ab|cd)+$",
    r"(a|b)*c?",
    r"[^a-z]{2}",
    r"[a-z_]+@[a-z]+\.(com|org)",
    r"é+|漢字",
    r"(?i)yes|no",
    r'"[/\\]"\n',
    r"",
]


@settings(max_examples=60, deadline=None)
@given(expression=st.sampled_from(EXPRESSIONS), seed=st.integers(0, 999), use_bytes=st.booleans())
def test_expressions_match_whole(demo, expression: str, seed: int, use_bytes: bool) -> None:
    factory, tokenizer, end = (BYTES, ByteTokenizer(), END) if use_bytes else demo
    text = walk(factory.compile(StructuredOutput("regex", expression)), tokenizer, end, seed)
    if text is not None:
        assert re.fullmatch(expression, text.decode()), text


class Colour(Enum):
    RED = "red"
    NONE = 'n"one\\é'


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    colours: list[Colour]
    size: int | None
    inner: "Thing | None" = None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), use_bytes=st.booleans())
def test_schemas_match(demo, seed: int, use_bytes: bool) -> None:
    factory, tokenizer, end = (BYTES, ByteTokenizer(), END) if use_bytes else demo
    schema = json.dumps(msgspec.json.schema(Thing))
    text = walk(factory.compile(StructuredOutput("json_schema", schema)), tokenizer, end, seed)
    if text is not None:
        thing = msgspec.json.decode(text, type=Thing)
        assert json.loads(text)["name"] == thing.name
        assert b", " not in text.replace(json.dumps(thing.name).encode(), b""), (
            "no blanks between values"
        )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999))
def test_json_objects(demo, seed: int) -> None:
    factory, tokenizer, end = demo
    text = walk(factory.compile(StructuredOutput("json_object")), tokenizer, end, seed)
    if text is not None:
        assert isinstance(json.loads(text), dict)


CHOICES = ["yes", "yes and no", 'q"\\\n', "\x01\x7f$()/[", "😀 é", "a|b"]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_can_be_made(choice: str) -> None:
    constraint = BYTES.compile(StructuredOutput("choice", json.dumps(CHOICES)))
    assert follow(constraint, [*choice.encode(), END]) == len(choice.encode()) + 1


@given(seed=st.integers(0, 99))
def test_nothing_but_a_choice_is_made(seed: int) -> None:
    constraint = BYTES.compile(StructuredOutput("choice", json.dumps(CHOICES)))
    text = walk(constraint, ByteTokenizer(), END, seed)
    assert text is not None and text.decode() in CHOICES


@settings(deadline=None)
@given(seed=st.integers(0, 99))
def test_lark(seed: int) -> None:
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'
    text = walk(BYTES.compile(StructuredOutput("grammar", lark)), ByteTokenizer(), END, seed)
    if text is not None:
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*", text.decode())


def test_after_the_end_only_the_end() -> None:
    constraint = BYTES.compile(StructuredOutput("regex", "ab"))
    assert [ids_of(constraint.allowed())] == [[ord("a")]]
    assert follow(constraint, b"ab") == 2
    for _ in range(3):  # also if the request continues, with ignore_eos
        assert ids_of(constraint.allowed()) == [END]
        constraint.accept(END)


def test_a_text_that_may_end_or_go_on() -> None:
    constraint = BYTES.compile(StructuredOutput("regex", "a+"))
    assert follow(constraint, b"a") == 1
    assert ids_of(constraint.allowed()) == [ord("a"), END]
    constraint.accept(END)
    assert ids_of(constraint.allowed()) == [END], "an end is final"


def test_every_end_token_may_end_and_unknown_ids_never_come() -> None:
    factory = GrammarFactory(ByteTokenizer(), VOCAB, (END, 280))
    constraint = factory.compile(StructuredOutput("regex", "a"))
    assert follow(constraint, b"a") == 1
    for end in (280, END, 280):
        assert ids_of(constraint.allowed()) == [END, 280]
        constraint.accept(end)
    lark = factory.compile(StructuredOutput("grammar", 'start: <[270]> | "a" | <[280]>'))
    assert ids_of(lark.allowed()) == [ord("a"), 280], "270 has no text"


def test_special_tokens_are_no_text(demo) -> None:
    factory, tokenizer, _ = demo
    for special in tokenizer.special_ids:
        text = tokenizer.token_bytes(special).decode()
        constraint = factory.compile(StructuredOutput("choice", json.dumps([text])))
        assert not constraint.allowed() >> special & 1


def test_a_small_model_masks_what_it_lacks() -> None:
    constraint = GrammarFactory(ByteTokenizer(), 100, (99,)).compile(
        StructuredOutput("regex", "[a-z]")
    )
    assert ids_of(constraint.allowed()) == [ord("a"), ord("b")], "and c is its end token"


def nested(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", "(ab", "unclosed group"),
        ("regex", r"(a)\1", "without look-around and backreferences"),
        ("regex", "a(?=b)", "look-ahead"),
        ("regex", "\ud800", "half of a surrogate pair"),
        ("regex", "a" * (MAX_SOURCE + 1), f"at most {MAX_SOURCE}"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", '{"a": NaN}', "NaN"),
        ("json_schema", "[]", "a schema must be a JSON object"),
        ("json_schema", "[" * 50_000, "not JSON"),
        ("json_schema", nested(MAX_NESTING // 2), f"more than {MAX_NESTING} levels"),
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "leave out unsupported keywords"),
        ("json_schema", '{"$ref": "http://127.0.0.1/"}', "leave out unsupported keywords"),
        (
            "json_schema",
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
            "no text can match",
        ),
        ("json_schema", '{"type": "string", "enum": ["\\ud800"]}', "surrogate"),
        ("choice", "yes", "not JSON"),
        ("choice", '"yes"', "a list of at least one"),
        ("choice", "[]", "a list of at least one"),
        ("choice", '["a", ""]', "non-empty"),
        ("choice", '["a", 5]', "strings"),
        ("grammar", "start: other", "unknown name"),
        ("grammar", "", "Empty grammar"),
        ("grammar", "][", "the Lark syntax of llguidance"),
    ],
)
def test_wrong_structures_are_rejected_with_a_reason(kind, value: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        BYTES.compile(StructuredOutput(kind, value))
    assert caught.value.param == "structured_outputs"
    assert message in caught.value.message
    assert len(caught.value.message) < 700


def test_the_deepest_schema_is_taken() -> None:
    BYTES.compile(StructuredOutput("json_schema", nested(MAX_NESTING // 2 - 1)))


def test_a_model_without_end_tokens_has_no_structured_output() -> None:
    with pytest.raises(RequestError, match="end token"):
        GrammarFactory(ByteTokenizer(), VOCAB, ()).compile(StructuredOutput("json_object"))


def doubling(count: int, name: str) -> str:
    rules = [f"{name}{n}: {name}{n + 1} {name}{n + 1}" for n in range(count)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{count}: "a"'])


def schema_of(**fields: object) -> str:
    return json.dumps(fields)


BOMBS = {
    "repetitions": ("regex", "(((((a{1,100}){1,100}){1,100}){1,100}){1,100})"),
    "a million": ("regex", "(a|b|ab){1,1000000}"),
    "exponential automaton": ("regex", "(a|b)*a(a|b){20}"),
    "classes": ("regex", r"(\p{L}{1,500}\p{N}){1,500}"),
    "alternatives": ("regex", "|".join(f"x{n}" for n in range(8000))),
    "catastrophic": ("regex", "((a+)+)+b"),
    "doubled rules": ("grammar", doubling(40, "r")),
    "doubled terminals": ("grammar", doubling(40, "R")),
    "ambiguous": ("grammar", 'start: start start | "a" | '),
    "repeated": ("grammar", 'start: ("a"{1,10000}){1,10000}'),
    "long literal": ("grammar", f'start: "{"a" * 60_000}"'),
    "optional": (
        "json_schema",
        schema_of(type="object", properties={f"k{n}": {} for n in range(2000)}),
    ),
    "many": ("json_schema", schema_of(type="array", minItems=10**7, items={"type": "string"})),
    "long": ("json_schema", schema_of(type="string", maxLength=10**9)),
    "pattern": ("json_schema", schema_of(type="string", pattern="((a{1,100}){1,100}){1,100}")),
    "product": (
        "json_schema",
        schema_of(
            allOf=[
                {"anyOf": [{"properties": {f"{n}-{m}": {"type": "string"}}} for m in range(3)]}
                for n in range(12)
            ]
        ),
    ),
    "references": (
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/a0",
                "$defs": {
                    **{
                        f"a{n}": {"anyOf": [{"items": {"$ref": f"#/$defs/a{n + 1}"}}] * 2}
                        for n in range(30)
                    },
                    "a30": {"type": "null"},
                },
            }
        ),
    ),
    "enumeration": ("json_schema", schema_of(enum=[f"v{n}" for n in range(6000)])),
    "choices": ("choice", json.dumps([f"v{n}" for n in range(6000)])),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_do_not_go_off(demo, name: str) -> None:
    factory, tokenizer, end = demo
    kind, value = BOMBS[name]
    start = time.process_time()
    try:
        constraint = factory.compile(StructuredOutput(kind, value))
        walk(constraint, tokenizer, end, seed=1, limit=30)
    except RequestError as error:
        assert error.param == "structured_outputs" and len(error.message) < 700
    assert time.process_time() - start < 5


def test_out_of_fuel_in_the_middle_is_an_error_of_the_request() -> None:
    options = [{"type": "object", "properties": {f"k{n}": {}}} for n in range(2500)]
    constraint = BYTES.compile(
        StructuredOutput("json_schema", schema_of(type="array", items={"anyOf": options}))
    )
    with pytest.raises(RequestError, match="became too complex") as caught:
        follow(constraint, b'[{"k1":1}]')
    assert caught.value.param == "structured_outputs"


def test_threads_share_a_factory() -> None:
    factory, texts = (
        GrammarFactory(ByteTokenizer(), VOCAB, (END,)),
        [f"[{a}-z]{{2}}" for a in "abcdefgh"],
    )
    allowed: dict[str, list[int]] = {}

    def compile_one(expression: str) -> None:
        allowed[expression] = ids_of(
            factory.compile(StructuredOutput("regex", expression)).allowed()
        )

    threads = [threading.Thread(target=compile_one, args=(expression,)) for expression in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allowed == {
        expression: list(range(ord(expression[1]), ord("z") + 1)) for expression in texts
    }
