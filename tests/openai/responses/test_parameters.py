"""The sampling fields of chats are fields of responses: each reaches the engine, or has its effect."""

import json
from typing import Any

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.responses.played import prompt_of, respond
from tests.openai.test_parameters import PASSED_ON
from tests.serve.played import News, saying

READING = ServerConfig(EngineConfig(model="m", scheduler="tests.policy.turns:Reading"))


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return "".join(part["text"] for item in answer.json()["output"] for part in item["content"])


@pytest.mark.conforms(
    "responses.temperature", "responses.top_p", "responses.top_k", "responses.min_p"
)
@pytest.mark.conforms(
    "responses.presence_penalty", "responses.frequency_penalty", "responses.repetition_penalty"
)
@pytest.mark.conforms(
    "responses.seed", "responses.logit_bias", "responses.allowed_token_ids", "responses.bad_words"
)
@pytest.mark.conforms(
    "responses.stop_token_ids",
    "responses.ignore_eos",
    "responses.min_tokens",
    "responses.cache_salt",
)
@pytest.mark.conforms(
    "responses.max_output_tokens", "responses.priority", "responses.user", "responses.timeout"
)
@pytest.mark.conforms("responses.structured_outputs", "responses.vllm_xargs")
def test_passed_on_to_the_engine() -> None:
    fields = {
        "max_output_tokens" if name == "max_tokens" else name: value for name, value, _ in PASSED_ON
    }
    more = {"bad_words": ["ab"], "cache_salt": "s", "structured_outputs": {"regex": "a+"}}
    urgency = {
        "priority": 5,
        "user": "u",
        "timeout": 9.0,
        "vllm_xargs": {"program": "p", "ttft": 0.5},
    }
    answer, link = respond("x", READING, **fields, **more, **urgency)
    assert answer.status_code == 200, answer.text
    (submit,) = link.submitted
    for name, _, expected in PASSED_ON:
        value = getattr(submit.params, name)
        assert (list(value) if isinstance(value, tuple) else value) == expected, name
    assert submit.params.bad_token_ids and submit.params.cache_salt == "s"
    assert (submit.params.structured.kind, submit.params.structured.value) == ("regex", "a+")
    assert (submit.urgency.priority, submit.urgency.tenant, submit.urgency.deadline) == (
        5,
        "u",
        9.0,
    )
    assert (submit.urgency.program, submit.urgency.ttft) == ("p", 0.5)
    assert answer.json()["temperature"] == 0.5 and answer.json()["top_p"] == 0.25


@pytest.mark.conforms("responses.stop", "responses.include_stop_str_in_output")
@pytest.mark.conforms("responses.skip_special_tokens", "responses.add_special_tokens")
def test_fields_of_the_text() -> None:
    assert text_of(respond("a stop b", stop=["stop"])[0]) == "a "
    assert text_of(respond("a stop b", stop="stop", include_stop_str_in_output=True)[0]) == "a stop"
    for fields in ({"skip_special_tokens": False}, {"add_special_tokens": True}):
        assert text_of(respond("a", **fields)[0]) == "a"


@pytest.mark.conforms("responses.queue_timeout", "responses.timeout")
@pytest.mark.parametrize(("field", "status"), [("queue_timeout", 503), ("timeout", 408)])
def test_deadlines(field: str, status: int) -> None:
    def silent(submit: Any) -> list[News]:
        return []

    answer, link = respond(silent, **{field: 0.05})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, field)
    assert link.aborted == [link.submitted[0].request_id]


@pytest.mark.parametrize(
    "field", ["max_output_tokens", "temperature", "top_logprobs", "tools", "truncation"]
)
def test_a_wrong_value_is_named(field: str) -> None:
    answer, link = respond(saying("x"), **{field: "wrong"})
    assert (
        answer.status_code == 400
        and answer.json()["error"]["param"] == field
        and not link.submitted
    )


@pytest.mark.parametrize(
    ("field", "longest", "longer"),
    [
        ("safety_identifier", "s" * 1024, "s" * 1025),
        ("metadata", {"k": "v" * 512}, {"k": "v" * 513}),
        ("metadata", {"k" * 64: "v"}, {"k" * 65: "v"}),
        (
            "metadata",
            dict.fromkeys(map(str, range(16)), "v"),
            dict.fromkeys(map(str, range(17)), "v"),
        ),
    ],
    ids=["text", "value", "key", "keys"],
)
def test_texts_of_clients_have_a_length(field: str, longest: Any, longer: Any) -> None:
    answer, link = respond(saying("x"), **{field: longer})
    assert answer.status_code == 400 and not link.submitted
    assert answer.json()["error"]["param"].startswith(field)
    assert respond(saying("x"), **{field: longest})[0].json()[field] == longest


def test_a_limit_of_zero_is_named_as_in_the_body() -> None:
    error = respond("x", max_output_tokens=0)[0].json()["error"]
    assert error["param"] == "max_output_tokens" and error["message"].startswith(
        "max_output_tokens"
    )


@pytest.mark.conforms("responses.enable_response_messages")
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_as_ids(stream: bool) -> None:
    answer, link = respond("hello", enable_response_messages=True, stream=stream)
    found = json.loads(answer.text.rpartition("data: ")[2])["response"] if stream else answer.json()
    (asked,), (said,) = found["input_messages"], found["output_messages"]
    assert asked["tokens"] == link.submitted[0].prompt_ids and asked["message"] == prompt_of(link)
    assert said["tokens"] == [*b"hello", 256] and said["type"] == "raw_message_tokens"
    assert "input_messages" not in respond("hello")[0].json()
