"""Chats with gpt-oss: messages with channels, which are reasoning, calls or the answer."""

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.config import EngineConfig
from tests.openai.chats import TOOLS, deltas, message_of
from tests.serve.played import chat, saying
from tests.text.accepting import accepts

CONFIG = ServerConfig(EngineConfig(model="m"), tool_call_parser="openai")
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes."
CALL = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": 1}}}


def cut(text: str) -> list[str]:
    return [text[at : at + 5] for at in range(0, len(text), 5)]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
def test_reasoning_and_answer(fields: dict[str, object]) -> None:
    message = message_of(chat(saying(*cut(ANALYSIS + FINAL)), CONFIG, **fields)[0])
    assert (message["content"], message["reasoning"]) == ("Yes.", "Let me see.")
    pieces = deltas(chat(saying(*cut(ANALYSIS + FINAL)), CONFIG, stream=True, **fields)[0])
    assert "".join(piece.get("content") or "" for piece in pieces) == "Yes."
    assert "".join(piece.get("reasoning") or "" for piece in pieces) == "Let me see."


def test_a_call() -> None:
    message = message_of(chat(saying(*cut(ANALYSIS + CALL)), CONFIG, tools=TOOLS)[0])
    assert message["content"] is None and message["reasoning"] == "Let me see."
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


def test_a_format_is_that_of_the_final_message() -> None:
    for fields in ({}, {"tools": TOOLS}):
        answer, link = chat(
            saying("<|channel|>final<|message|>1"), CONFIG, response_format=FORMAT, **fields
        )
        assert message_of(answer)["content"] == "1"
        structured = link.submitted[0].params.structured
        assert structured is not None
        for text, fits in (("1", True), ("2", False)):
            assert (
                accepts(structured, f"<|channel|>final<|message|>{text}", ByteTokenizer()) == fits
            )
        assert accepts(structured, CALL, ByteTokenizer()) == bool(fields)


def test_the_name_of_the_parser_of_reasoning_suffices() -> None:
    config = ServerConfig(EngineConfig(model="m"), reasoning_parser="openai_gptoss")
    message = message_of(chat(saying(ANALYSIS + FINAL), config)[0])
    assert (message["content"], message["reasoning"]) == ("Yes.", "Let me see.")
