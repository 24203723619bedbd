"""Reasoning before an answer: found between its tags in all divisions into pieces, and left free by constraints."""

import json
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.serve.openai.generation import whole_parts
from orca_jax.server_config import ServerConfig
from orca_jax.text.calls.dialects import tool_parser
from orca_jax.text.calls.parts import OutputPart, Reasoning
from orca_jax.text.reasoning import (
    TAGS,
    Opening,
    ReasoningParser,
    ThinkTags,
    inferred_tags,
    opening_of,
    tags_of,
    thinking_first,
)
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.errors import RequestError
from orca_jax.values.request import StructuredKind, StructuredOutput
from tests.text.accepting import WithTokens, accepts
from tests.text.tool_calls import TOOLS, A

THINK = TAGS["qwen3"]


def read(parser: ReasoningParser, pieces: list[str]) -> list[OutputPart]:
    """The output, with adjacent parts of a kind joined."""
    return whole_parts(
        [*(part for piece in pieces for part in parser.push(piece)), *parser.finish()]
    )


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TABLE: list[tuple[Opening, str, list[OutputPart]]] = [
    ("free", "<think>\nhm\nso\n</think>\n\nYes.", [Reasoning("hm\nso"), "Yes."]),
    ("free", "\n<think>hm</think>Yes.\n", [Reasoning("hm"), "Yes.\n"]),
    ("free", "<think>\n\n</think>\n\nYes.", ["Yes."]),
    ("free", "Yes. <think>no</think>", ["Yes. <think>no</think>"]),
    ("free", "<thin", ["<thin"]),
    ("free", " \n", [" \n"]),
    ("free", "<think> hm </thi", [Reasoning("hm </thi")]),
    ("free", "<think> hm \n", [Reasoning("hm")]),
    ("free", f"<think>hm</think>\n{CALL}", [Reasoning("hm"), A]),
    ("free", CALL, [A]),
    ("free", f"<think>{CALL}</think>no", [Reasoning(CALL), "no"]),
    ("open", "hm</think>\n\nYes.</think>", [Reasoning("hm"), "Yes.</think>"]),
    ("open", "\nhm, 1 < 2", [Reasoning("hm, 1 < 2")]),
    ("open", "</think>\n\n", []),
    ("open", "", []),
    ("closed", "<think>hm</think>", ["<think>hm</think>"]),
]


@pytest.mark.parametrize(("opening", "text", "expected"), TABLE)
def test_table(opening: Opening, text: str, expected: list[OutputPart]) -> None:
    for step in (1, 2, 5, 100):
        parser = ReasoningParser(THINK, opening, tool_parser("hermes", TOOLS))
        assert read(parser, [text[at : at + step] for at in range(0, len(text), step)]) == expected


words = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "b"]), max_size=12
)


@given(words.map("".join), st.sampled_from(get_args(Opening)), st.lists(st.integers(0, 60)))
def test_pieces_do_not_matter(text: str, opening: Opening, cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    assert read(ReasoningParser(THINK, opening, None), pieces) == read(
        ReasoningParser(THINK, opening, None), [text]
    )


def test_reasoning_goes_out_as_it_comes() -> None:
    parser = ReasoningParser(THINK, "free", None)
    assert [
        parser.push(text) for text in ("<think>", "\nLet", " me ", "see", "</", "think>\n", "\nYes")
    ] == [
        [],
        [Reasoning("Let")],
        [Reasoning(" me")],
        [Reasoning(" see")],
        [],
        [],
        ["Yes"],
    ]


@pytest.mark.parametrize(
    ("prompt", "continues", "opening"),
    [
        ("user: hi\nassistant:", False, "free"),
        ("user: hi <think>\nassistant:", False, "free"),
        ("user: hi\nassistant:<think>\n", False, "open"),
        ("user: hi\nassistant:<think>\n\n</think>\n\n", False, "closed"),
        ("user: hi\nassistant: Yes", True, "closed"),
        ("user: hi\nassistant: <think>hm", True, "open"),
        ("user: hi\nassistant: <think>hm</think> Yes", True, "closed"),
    ],
)
def test_the_prompt_says_where_an_answer_begins(
    prompt: str, continues: bool, opening: Opening
) -> None:
    assert opening_of(prompt, THINK, continues) == opening


def test_tags_come_from_the_template_or_the_flag() -> None:
    assert inferred_tags("{{ '<think>\\n' }}{{ content.split('</think>') }}") == THINK
    assert inferred_tags("[THINK]{{ x }}[/THINK]") == TAGS["mistral"]
    assert inferred_tags("<seed:think></seed:think>") == TAGS["seed_oss"]
    for template in ("{{ messages }}", "<think>", "<think></think>[THINK][/THINK]"):
        assert inferred_tags(template) is None
    assert (
        tags_of("none", "<think></think>") is None
        and tags_of("mistral", "<think></think>") == TAGS["mistral"]
    )
    kind = get_type_hints(ServerConfig)["reasoning_parser"]
    assert set(get_args(get_args(kind)[0])) == {*TAGS, "none", "openai_gptoss"}


OBJECT = StructuredOutput(
    "json_schema", json.dumps({"properties": {"x": {"type": "integer"}}, "required": ["x"]})
)
PARTS: dict[StructuredKind, tuple[StructuredOutput, str]] = {
    "json_schema": (OBJECT, '{"x":1}'),
    "json_object": (StructuredOutput("json_object"), "{}"),
    "regex": (StructuredOutput("regex", "a+"), "aa"),
    "choice": (StructuredOutput("choice", '["left", "right"]'), "left"),
    "grammar": (StructuredOutput("grammar", 'start: "a" "b"'), "ab"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_constraint_begins_after_the_reasoning(kind: StructuredKind) -> None:
    answer, text = PARTS[kind]
    tokenizer = ByteTokenizer()
    for opening, begin in (
        ("open", "hm </thi {\n</think>"),
        ("free", "<think>{</think>"),
        ("closed", ""),
    ):
        form = thinking_first(answer, THINK, opening, {})  # type: ignore[arg-type]
        assert accepts(form, begin + text, tokenizer)
        assert accepts(form, f"{begin}\n\n{text}", tokenizer) == (opening != "closed")
        assert not accepts(form, f"{begin}?", tokenizer) and not accepts(form, "hm", tokenizer)
        assert accepts(form, text, tokenizer) == (opening != "open")


@pytest.mark.parametrize(
    ("kind", "value"), [("json_schema", '{"type": "nonsense"}'), ("regex", "(")]
)
def test_a_wrong_part_is_an_error_of_the_caller(kind: StructuredKind, value: str) -> None:
    with pytest.raises(
        RequestError,
        match=r"^(json_schema|the format, or the schema of a strict tool,) cannot be used",
    ) as caught:
        accepts(
            thinking_first(StructuredOutput(kind, value), THINK, "open", {}), "", ByteTokenizer()
        )
    assert caught.value.param == "structured_outputs"


def test_a_composed_output_has_parts() -> None:
    with pytest.raises(RequestError, match="it is not a composed output"):
        accepts(StructuredOutput("composed", "{}"), "", ByteTokenizer())


SPECIAL = WithTokens({257: "[THINK]", 258: "[/THINK]"})


def test_tags_may_be_special_tokens() -> None:
    form = thinking_first(
        OBJECT, ThinkTags("[THINK]", "[/THINK]"), "free", {"[THINK]": 257, "[/THINK]": 258}
    )
    thought, answer = list(b"hm [/THINK]"), list(b'{"x":1}')
    assert accepts(form, [257, *thought, 258, *answer], SPECIAL)
    assert accepts(form, [257, 258, *answer], SPECIAL) and accepts(form, answer, SPECIAL)
    assert not accepts(form, [257, *thought, *answer], SPECIAL)
    assert not accepts(form, [258, *answer], SPECIAL)
