"""anthropic-sdk-python and `ChatAnthropic`: turns with tools, formats, counts, streams, models, errors and hang-ups."""

import json
import sys
from typing import Any, Literal

import anthropic
from anthropic import Anthropic, beta_tool
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import (
    CITY_SCHEMA,
    QUIET,
    WEATHER,
    check_city,
    check_weather,
    wait_idle,
)

TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "Ask for it.", "input_schema": WEATHER},
    {"name": "get_time", "input_schema": WEATHER},
]
TALK: list[Any] = [{"role": "user", "content": "How are you?"}]
CHAIN = [SystemMessage("You are brief."), HumanMessage("How are you?")]


class Subject:
    """A client, and models with the address and the key filled in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = Anthropic(base_url=settings.url, api_key=settings.api_key, max_retries=0)

    def create(self, **fields: Any) -> Any:
        return self.client.messages.create(**self._filled(fields))

    def stream(self, **fields: Any) -> Any:
        """The whole message, joined by the client from the events of a stream."""
        with self.client.messages.stream(**self._filled(fields)) as stream:
            return stream.get_final_message()

    def chain(self, **fields: Any) -> Any:
        common = {"base_url": self.settings.url, "api_key": self.settings.api_key, "max_retries": 0}
        return ChatAnthropic(**{**common, "model": self.settings.model, "max_tokens": 16, **fields})

    def _filled(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.settings.model, "max_tokens": 16, "messages": TALK, **fields}


def message(s: Subject) -> None:
    answer = s.create(system="You are brief.", extra_body={"ignore_eos": True})
    expect(answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 16, f"{answer}")
    expect(answer._request_id, "no request id")


def stream(s: Subject) -> None:
    fields: dict[str, Any] = {"extra_body": {"seed": 3, "ignore_eos": True}}
    whole = s.create(**fields)
    streamed = s.stream(**fields)
    expect(streamed.content[0].text == whole.content[0].text, "a stream is the same text")
    expect(streamed.usage.output_tokens == whole.usage.output_tokens, f"{streamed.usage}")


def count_tokens(s: Subject) -> None:
    fields: dict[str, Any] = {"system": "You are brief.", "tools": TOOLS}
    usage = s.create(**fields).usage
    counted = s.client.messages.count_tokens(
        model=s.settings.model, messages=TALK, **fields
    ).input_tokens
    expect(counted == usage.input_tokens + usage.cache_read_input_tokens, f"{counted} and {usage}")


def three_turns_with_tools(s: Subject) -> None:
    choices: list[dict[str, Any]] = [
        {"type": "any"},
        {"type": "tool", "name": "get_time"},
        {"type": "any"},
    ]
    for ask in (s.create, s.stream):
        messages: list[dict[str, Any]] = [*TALK]
        for choice in choices:
            forced = {**choice, "disable_parallel_tool_use": True}
            answer = ask(
                messages=messages, tools=TOOLS, tool_choice=forced, max_tokens=200, extra_body=QUIET
            )
            expect(answer.stop_reason == "tool_use", f"{answer}")
            call = answer.content[-1]
            check_weather(call.input)
            result = {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": "noon"}],
            }
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
        expect(
            ask(messages=messages, tools=TOOLS, tool_choice={"type": "none"}).content is not None,
            "no answer",
        )


def output_format(s: Subject) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    check_city(s.create(output_config=form, max_tokens=200, extra_body=QUIET).content[0].text)


def beta(s: Subject) -> None:
    answer = s.client.beta.messages.create(
        model=s.settings.model,
        max_tokens=4,
        messages=TALK,
        betas=["context-management-2025-06-27"],
        system="Be brief.",
    )
    expect(answer.type == "message", f"{answer}")


def tool_runner(s: Subject) -> None:
    """It begins with a `thread`, is refused by the code for that, and goes on without it."""
    units: list[str] = []

    @beta_tool
    def get_weather(unit: Literal["celsius", "kelvin"], days: Literal[1, 2]) -> str:
        """Return the weather.

        Args:
            unit: of the temperature.
            days: from today on.
        """
        units.append(unit)
        return "rain"

    runner = s.client.beta.messages.tool_runner(
        model=s.settings.model,
        max_tokens=200,
        messages=TALK,
        tools=[get_weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=3,
        extra_body=QUIET,
    )
    reasons = [message.stop_reason for message in runner]
    expect(reasons == ["tool_use"] * 3, f"{reasons}")
    expect(len(units) >= 2 and set(units) <= {"celsius", "kelvin"}, f"{units}")


def models(s: Subject) -> None:
    names = [model.id for model in s.client.models.list()]
    expect(s.settings.model in names, f"{s.settings.model} is not in {names}")
    expect(s.client.models.retrieve(s.settings.model).lifecycle == "active", "it is active")


def errors(s: Subject) -> None:
    stranger = Anthropic(base_url=s.settings.url, api_key="not-the-key", max_retries=0)
    for kind, call in (
        (anthropic.BadRequestError, lambda: s.create(extra_body={"temperature": 9})),
        (anthropic.NotFoundError, lambda: s.create(model="missing")),
        (anthropic.AuthenticationError, lambda: stranger.models.list()),
        (
            anthropic.AuthenticationError,
            lambda: stranger.messages.create(model="m", max_tokens=1, messages=TALK),
        ),
    ):
        try:
            call()
        except kind as error:
            expect(json.loads(error.response.text)["type"] == "error", f"{error}")
            continue
        raise AssertionError(f"no {kind.__name__}")


def hang_up(s: Subject) -> None:
    events = s.create(max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    next(iter(events))
    events.close()
    wait_idle(s.settings.url)


def chain_invoke_and_stream(s: Subject) -> None:
    model = s.chain(max_tokens=20, model_kwargs={"extra_body": {"temperature": 0}})
    whole = model.invoke(CHAIN)
    expect(whole.usage_metadata["output_tokens"] <= 20, f"{whole}")
    text = "".join(chunk.text for chunk in model.stream(CHAIN))
    expect(text == whole.text, "a stream is the same text")


def joined(chunks: Any) -> Any:
    """The message that a stream makes."""
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def chain_tools(s: Subject) -> None:
    model = s.chain(max_tokens=200, model_kwargs={"extra_body": QUIET}).bind_tools(
        TOOLS, tool_choice="get_time"
    )
    for ask in (model.invoke, lambda talk: joined(model.stream(talk))):
        talk: list[Any] = [*CHAIN]
        for _ in range(3):
            answer = ask(talk)
            expect(not answer.invalid_tool_calls, f"{answer}")
            (call,) = answer.tool_calls
            check_weather(call["args"])
            talk += [answer, ToolMessage("noon", tool_call_id=call["id"])]


CHECKS = [
    message, stream, count_tokens, three_turns_with_tools, output_format, beta, tool_runner, models, errors, hang_up,
    chain_invoke_and_stream, chain_tools,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    return checks.run(
        CHECKS, Subject(settings), ["anthropic", "langchain-anthropic"], settings.report
    )


if __name__ == "__main__":
    sys.exit(main())
