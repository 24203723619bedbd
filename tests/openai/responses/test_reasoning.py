"""Reasoning in responses: items of their own, whole and streamed, counted, and given back to the template."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import TokenLogprobs
from tests.openai.chat.test_reasoning import TEMPLATE, THOUGHT, cut
from tests.openai.responses.played import FUNCTION, checked_response, events_of, prompt_of, respond
from tests.serve.played import Script, saying, update

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return ServerConfig(EngineConfig(model="m"), chat_template=str(path), tool_call_parser="hermes")


def answered(
    script: Script, config: ServerConfig, *, stream: bool, **fields: Any
) -> dict[str, Any]:
    answer, _ = respond(script, config, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = events_of(answer.text)[-1]["response"] if stream else answer.json()
    checked_response(found)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "kind"), [("Yes.", "message"), (CALL, "function_call")])
def test_reasoning_is_an_item_before_the_answer(
    config: ServerConfig, stream: bool, text: str, kind: str
) -> None:
    answer = answered(saying(*cut(THOUGHT + text)), config, stream=stream, tools=[FUNCTION])
    thought, said = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert (thought["type"], thought["summary"], thought["status"]) == (
        "reasoning",
        [],
        "completed",
    )
    assert said["type"] == kind and (kind != "message" or said["content"][0]["text"] == "Yes.")
    details = answer["usage"]["output_tokens_details"]
    assert 11 <= details["reasoning_tokens"] < answer["usage"]["output_tokens"]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_text_after_the_reasoning(
    config: ServerConfig, stream: bool, size: int
) -> None:
    """With one token in an update, and with all in one."""
    ids = [*(THOUGHT + "Yes.").encode(), 256]

    def scored(submit: Any) -> list[Any]:
        cuts = [ids[at : at + size] for at in range(0, len(ids), size)]
        *begun, last = [
            (cut, [TokenLogprobs(-0.5, 1, (one,), (-0.5,)) for one in cut]) for cut in cuts
        ]
        updates = [update(submit, *cut, logprobs=tuple(scores)) for cut, scores in begun]
        return [*updates, update(submit, *last[0], logprobs=tuple(last[1]), finish_reason="stop")]

    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer, _ = respond(scored, config, stream=stream, **fields)
    if stream:
        deltas = [
            event
            for event in events_of(answer.text)
            if event["type"] == "response.output_text.delta"
        ]
        assert deltas and all(event["logprobs"] for event in deltas), (
            "each delta has those of its tokens"
        )
    _, message = (events_of(answer.text)[-1]["response"] if stream else answer.json())["output"]
    tokens = [one["token"] for one in message["content"][0]["logprobs"]]
    assert "".join(tokens[:6]) == "\n\nYes." and len(tokens) == 7, (
        "the breaks after the end tag, and the end token"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_cut_is_incomplete(config: ServerConfig, stream: bool) -> None:
    answer = answered(saying("<think>\nLet me", reason="length"), config, stream=stream)
    (thought,) = answer["output"]
    assert (answer["status"], thought["status"]) == ("incomplete", "incomplete")
    assert thought["content"][0]["text"] == "Let me"


def test_reasoning_is_given_back_to_the_template(config: ServerConfig) -> None:
    first = answered(
        saying(*cut(THOUGHT + CALL)), config, stream=False, tools=[FUNCTION], store=True
    )
    result = {
        "type": "function_call_output",
        "call_id": first["output"][1]["call_id"],
        "output": "rain",
    }
    items = [{"role": "user", "content": "x"}, *first["output"], result]
    answer, link = respond("Yes.", config, input=items, tools=[FUNCTION])
    assert answer.status_code == 200 and "<think>Let me see.</think>" in prompt_of(link)
    assert "x-orca-ignored-fields" not in answer.headers
    unread, _ = respond("Yes.", input=items, tools=[FUNCTION])
    assert unread.headers["x-orca-ignored-fields"] == "input.reasoning", (
        "its template has no place for it"
    )


@pytest.mark.conforms("responses.reasoning")
@pytest.mark.parametrize("field", ["summary", "generate_summary"])
def test_reasoning_is_a_summary_too_if_the_call_asks(config: ServerConfig, field: str) -> None:
    fields = {"reasoning": {field: "auto"}}
    answer, _ = respond(saying(*cut(THOUGHT + "Yes.")), config, stream=True, **fields)
    events = events_of(answer.text)
    assert "x-orca-ignored-fields" not in answer.headers
    kinds = [event["type"].removeprefix("response.") for event in events]
    begin, end = (
        kinds.index("reasoning_summary_part.added"),
        kinds.index("reasoning_summary_part.done"),
    )
    assert kinds[begin - 1] == "output_item.added" and kinds[end + 1] == "output_item.done"
    assert kinds[end - 1] == "reasoning_summary_text.done"
    deltas = [event for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "Let me see." and len(deltas) > 1
    assert {event["summary_index"] for event in deltas} == {0}
    assert kinds.count("reasoning_text.delta") == len(deltas), (
        "clients that read the text itself still can"
    )
    part = {"type": "summary_text", "text": "Let me see."}
    assert events[end]["part"] == part and events[begin]["part"] == {**part, "text": ""}
    whole = answered(saying(*cut(THOUGHT + "Yes.")), config, stream=False, **fields)
    for response in (whole, events[-1]["response"]):
        assert response["output"][0]["summary"] == [part]
        assert response["reasoning"] == {"effort": None, "summary": "auto"}


def test_a_summary_that_comes_back_is_read_once(config: ServerConfig) -> None:
    fields = {"reasoning": {"summary": "detailed"}}
    first = answered(saying(*cut(THOUGHT + "Yes.")), config, stream=False, **fields)
    items = [{"role": "user", "content": "x"}, *first["output"], {"role": "user", "content": "y"}]
    _, link = respond("Yes.", config, input=items)
    assert prompt_of(link).count("Let me see.") == 1


def test_a_kind_of_summary_that_is_not_known_is_refused(config: ServerConfig) -> None:
    answer, _ = respond("x", config, reasoning={"summary": "long"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning.summary"
