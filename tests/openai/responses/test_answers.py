"""Answers of `/v1/responses`, whole and streamed: each field and event by the client's own types."""

import json
from typing import Any

import msgspec
import pytest

from orca_jax.serve.openai.generation import Piece
from orca_jax.serve.openai.responses.items import MessageItem, ModelResponse
from orca_jax.serve.openai.responses.renderer import ResponseRenderer
from orca_jax.serve.openai.schema.answers import Usage
from orca_jax.server_config import ServerConfig
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.text.tools import ToolCall
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import TokenLogprobs
from tests.openai.chats import CALL
from tests.openai.responses.played import (
    FUNCTION,
    checked_event,
    checked_response,
    events_of,
    prompt_of,
    respond,
)
from tests.serve.played import Script, saying, update

HEADER = "x-orca-ignored-fields"
NAMESPACE = {
    "type": "namespace",
    "name": "geo",
    "description": "places",
    "tools": [{**FUNCTION, "strict": None}],
}


def whole(script: Script | str, **fields: Any) -> dict[str, Any]:
    answer, _ = respond(script, **fields)
    assert answer.status_code == 200, answer.text
    checked_response(answer.json())
    found: dict[str, Any] = answer.json()
    return found


def streamed(script: Script | str, **fields: Any) -> list[dict[str, Any]]:
    answer, _ = respond(script, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


@pytest.mark.conforms(
    "POST /v1/responses", "responses.model", "responses.metadata", "responses.stream"
)
def test_a_text() -> None:
    fields: dict[str, Any] = {
        "metadata": {"a": "b"}, "instructions": "be short", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.25
    }  # fmt: skip
    answer = whole("hello", **fields)
    (message,) = answer["output"]
    assert message["content"] == [
        {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    ]
    assert (message["status"], answer["status"], answer["error"]) == (
        "completed",
        "completed",
        None,
    )
    assert {name: answer[name] for name in fields} == fields
    assert answer["usage"] == {
        "input_tokens": answer["usage"]["input_tokens"], "output_tokens": 6,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer["usage"]["input_tokens"] + 6,
    }  # fmt: skip
    events = streamed(saying("hel", "lo"), **fields)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    last = events[-1]["response"]
    assert (
        without_ids(last["output"]) == without_ids(answer["output"])
        and last["usage"] == answer["usage"]
    )
    assert (
        events[0]["response"]["status"] == "in_progress"
        and events[0]["response"]["id"] == last["id"]
    )
    assert last["id"].startswith("resp_") and len(last["id"]) == 5 + 32
    assert answer["text"] == {"format": {"type": "text"}} and answer["truncation"] == "disabled"


def test_an_empty_answer_has_a_message() -> None:
    assert whole(saying())["output"][0]["content"][0]["text"] == ""
    assert streamed(saying())[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_cut_answer_is_incomplete() -> None:
    answer = whole(saying("hel", reason="length"))
    assert (answer["status"], answer["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert answer["output"][0]["status"] == "incomplete"
    last = streamed(saying("hel", reason="length"))[-1]
    assert (
        last["type"] == "response.incomplete" and last["response"]["incomplete_details"] is not None
    )


@pytest.mark.conforms("responses.tools", "responses.tool_choice")
def test_calls() -> None:
    text = f"Let me see. {CALL}"
    answer = whole(text, tools=[FUNCTION])
    message, call = answer["output"]
    assert message["content"][0]["text"] == "Let me see. "
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "weather",
        '{"city": "Oslo"}',
    )
    assert (
        call["status"] == "completed"
        and call["call_id"].startswith("call_")
        and call["id"].startswith("fc_")
    )
    assert (
        answer["tools"] == [FUNCTION]
        and answer["tool_choice"] == "auto"
        and answer["status"] == "completed"
    )
    events = streamed(saying(*[text[i : i + 7] for i in range(0, len(text), 7)]), tools=[FUNCTION])
    assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])
    kinds = [event["type"] for event in events]
    assert kinds.index("response.output_text.done") < kinds.index(
        "response.function_call_arguments.delta"
    )


@pytest.mark.conforms("responses.tool_choice", "responses.parallel_tool_calls")
def test_a_forced_call_is_streamed_in_pieces_and_cut_by_the_limit() -> None:
    fields: dict[str, Any] = {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    events = streamed(saying('{"city"', ': "Oslo"}'), **fields)
    deltas = [
        event["delta"]
        for event in events
        if event["type"] == "response.function_call_arguments.delta"
    ]
    assert "".join(deltas) == '{"city": "Oslo"}' and len(deltas) >= 2
    assert events[-1]["response"]["tool_choice"] == fields["tool_choice"]
    cut = whole(saying('{"city": "Os', reason="length"), **fields)
    assert (cut["status"], cut["output"][0]["arguments"]) == ("incomplete", '{"city": "Os')
    assert cut["output"][0]["status"] == "incomplete"
    one = whole(CALL + CALL, tools=[FUNCTION], parallel_tool_calls=False)
    assert len(one["output"]) == 1 and one["parallel_tool_calls"] is False


def test_a_function_of_a_namespace() -> None:
    text = CALL.replace("weather", "geo__weather")
    answer, link = respond(text, tools=[NAMESPACE, {"type": "web_search"}])
    checked_response(answer.json())
    (call,) = answer.json()["output"]
    assert (call["name"], call["namespace"]) == ("weather", "geo")
    assert "geo__weather" in prompt_of(link) and "web_search" not in prompt_of(link)
    assert answer.headers[HEADER] == "tools.web_search" and len(answer.json()["tools"]) == 1
    back = [
        {"role": "user", "content": "x"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"},
    ]
    again, link = respond("dry", tools=[NAMESPACE], input=back)
    assert (
        again.status_code == 200 and "geo__weather" in prompt_of(link) and "rain" in prompt_of(link)
    )


@pytest.mark.conforms("responses.text")
@pytest.mark.parametrize("stream", [False, True])
def test_a_format(stream: bool) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    format_ = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer, link = respond('{"x": 1}', text={"format": format_}, stream=stream)
    structured = link.submitted[0].params.structured
    assert structured.kind == "json_schema" and json.loads(structured.value)["required"] == ["x"]
    found = events_of(answer.text)[-1]["response"] if stream else answer.json()
    response = checked_response(found)
    assert response.output_text == '{"x": 1}'
    assert found["text"]["format"] == {**format_, "description": None}


def scored(submit: Any) -> list[Any]:
    one = TokenLogprobs(-0.5, 1, (104, 105), (-0.5, -1.5))
    return [
        update(submit, 104, logprobs=(one,)),
        update(submit, 105, logprobs=(one,)),
        update(submit, 256, logprobs=(one,), finish_reason="stop"),
    ]


@pytest.mark.conforms("responses.include", "responses.top_logprobs")
def test_log_probabilities() -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = whole(scored, **fields)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in logprobs][:2] == ["h", "i"] and len(
        logprobs[0]["top_logprobs"]
    ) == 2
    assert answer["top_logprobs"] == 2
    events = streamed(scored, **fields)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert sum(len(event["logprobs"]) for event in deltas) == len(logprobs)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs
    without, _ = respond("x", top_logprobs=2, include=["reasoning.encrypted_content"])
    assert without.headers[HEADER] == "include, top_logprobs"
    assert without.json()["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(stream: bool) -> None:
    # more tokens than the context, and too many characters to count
    for text in ("x" * 3000, "x" * 20_000):
        answer, link = respond("never", input=text, stream=stream)
        assert not link.submitted
        if stream:
            created, failed = events_of(answer.text)
            assert answer.status_code == 200 and failed["type"] == "response.failed"
            error = failed["response"]["error"]
            assert failed["response"]["id"] == created["response"]["id"]
        else:
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "input"
        assert error["code"] == "context_length_exceeded"


def test_a_failure_in_the_middle_of_a_stream() -> None:
    def script(submit: Any) -> list[Any]:
        return [update(submit, *b"hel"), update(submit, finish_reason="error", error="logits")]

    events = streamed(script)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] in ("server_error", "invalid_prompt")
    answer, _ = respond(script)
    assert answer.status_code >= 400


def test_a_wrong_field_is_refused_before_a_stream() -> None:
    answer, _ = respond("x", stream=True, tools=[{**FUNCTION, "parameters": {"type": "array"}}])
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools")
    answer, _ = respond("x", input=[])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input"
    answer, _ = respond("x", model="other")
    error = answer.json()["error"]
    assert (
        answer.status_code == 404
        and "'m'" in error["message"]
        and "--served-model-name" in error["message"]
    )


def test_a_late_system_message_reaches_the_prompt() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "b"},
    ]
    _, link = respond("x", input=items, instructions="first")
    prompt = prompt_of(link)
    assert prompt.index("first") < prompt.index("a") < prompt.index("be kind") < prompt.rindex("b")


def test_the_judge_is_judged() -> None:
    """A key that the client does not know, and a missing one, are found."""
    answer = whole("x")
    with pytest.raises(AssertionError, match="has no"):
        checked_response({**answer, "strange": 1})
    with pytest.raises(ValueError, match="parallel_tool_calls"):
        checked_response(
            {name: value for name, value in answer.items() if name != "parallel_tool_calls"}
        )
    event = {
        "type": "response.function_call_arguments.delta",
        "item_id": "a",
        "output_index": 0,
        "delta": "x",
    }
    with pytest.raises(ValueError, match="sequence_number"):
        checked_event(event)


CONFIG = ServerConfig(EngineConfig(model="m"), unknown_fields="ignore")


def test_unknown_fields_are_ignored_if_the_server_says_so() -> None:
    answer, _ = respond("x", CONFIG, strange=1, tools=[{"type": "web_search"}])
    assert answer.status_code == 200 and answer.headers[HEADER] == "strange, tools.web_search"


def test_text_after_a_call_is_an_item_of_its_own() -> None:
    for found in (
        whole(CALL + "done", tools=[FUNCTION]),
        streamed(CALL + "done", tools=[FUNCTION])[-1]["response"],
    ):
        assert [item["type"] for item in found["output"]] == ["function_call", "message"]


def test_log_probabilities_of_a_call_belong_to_no_text() -> None:
    kept: list[ModelResponse] = []
    begun = msgspec.convert({**whole("x"), "output": [], "usage": None}, ModelResponse)
    renderer = ResponseRenderer(
        begun,
        load_tokenizer("byte"),
        num_top=0,
        names={},
        new_call_id=lambda: "call_1",
        prompt=None,
        streams=True,
        summarizes=False,
        telemetry=None,
        keep=lambda response, answer: kept.append(response),
    )
    score = TokenLogprobs(-0.5, 1, (), ())
    renderer.chunk(Piece(0, "", ids=[99], logprobs=[score], parts=[ToolCall("f", "{}")]), None)
    renderer.chunk(Piece(0, "", ids=[97], logprobs=[score]), None)  # its text is held back
    renderer.chunk(Piece(0, "ab", "stop", [98], [score]), None)
    renderer.end(Usage(1, 3, 4))
    (response,) = kept
    _, message = response.output
    assert isinstance(message, MessageItem)
    assert [one.token for one in message.content[0].logprobs] == ["a", "b"]


def test_a_json_object_is_echoed_without_a_schema() -> None:
    answer, _ = respond('{"x": 1}', text={"format": {"type": "json_object"}})
    assert answer.json()["text"] == {"format": {"type": "json_object"}}
