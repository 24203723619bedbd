"""`/v1/messages` through Anthropic's own client, on the toy."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.openai.messages.talks import TOOLS
from tests.serve.played import user
from tests.serve.running import MODEL, Server

# of grammars, which allow blanks
QUIET: dict[str, Any] = {"logit_bias": {str(blank): -100 for blank in b" \t\n\r"}}
FIXED: dict[str, Any] = {"seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as made:
        yield made


def test_whole_and_streamed_answers_are_equal(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 40,
        "system": "Be brief.",
        "messages": [user("Hello")],
    }
    whole = client.messages.create(**fields, extra_body=FIXED)
    with client.messages.stream(**fields, extra_body=FIXED) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert whole.stop_reason == streamed.stop_reason == "max_tokens" and whole._request_id
    counted = client.messages.count_tokens(
        model=MODEL, system="Be brief.", messages=fields["messages"]
    ).input_tokens
    for usage in (whole.usage, streamed.usage):
        kept = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert usage.input_tokens + kept == counted and usage.output_tokens == 40
    again = [*fields["messages"], {"role": "assistant", "content": whole.content}, user("Go on")]
    assert client.messages.create(model=MODEL, max_tokens=2, messages=again).content, (
        "a message may come back"
    )


def test_three_turns_with_tools(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [user("Weather?")]
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "tools": TOOLS}
    fields["extra_body"] = {**QUIET, "seed": 0}  # one without a long object for the clock
    for turn in range(3):
        choice: Any = (
            {"type": "tool", "name": "weather"}
            if turn
            else {"type": "any", "disable_parallel_tool_use": True}
        )
        if turn == 1:
            with client.messages.stream(messages=messages, tool_choice=choice, **fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=messages, tool_choice=choice, **fields)
        (block,) = answer.content
        assert (
            answer.stop_reason == "tool_use"
            and block.type == "tool_use"
            and block.name in ("weather", "clock")
        )
        assert block.name == "clock" or block.input["city"] in ("Oslo", "Rome")
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    assert client.messages.create(model=MODEL, max_tokens=3, messages=messages).usage.output_tokens


def test_beta_models_and_formats(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).lifecycle == "active"
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    }
    answer = client.beta.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "Where?"}],
        output_config={
            "format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
        },
        betas=["some-beta-2026-01-01"],
        extra_body=QUIET,
    )
    assert answer.content[0].text in ('{"city":"Oslo"}', '{"city":"Rome"}')  # type: ignore[union-attr]


def test_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="preset:toy") as missing:
        client.messages.create(
            model="claude", max_tokens=2, messages=[{"role": "user", "content": "x"}]
        )
    assert missing.value.request_id and missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9") as long:
        client.messages.create(
            model=MODEL,
            max_tokens=2,
            messages=[{"role": "user", "content": "x" * 9000}],
            stream=True,
        )
    assert long.value.type == "invalid_request_error"
