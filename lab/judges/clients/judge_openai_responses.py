"""openai-python's `responses`: turns with tools, whole and streamed, formats, the store, counts and hang-ups."""

from typing import Any

from pydantic import BaseModel

from lab.judges.clients.checks import expect
from lab.judges.clients.client_common import (
    CITY_SCHEMA,
    FLAT_TOOLS,
    QUIET,
    check_city,
    check_weather,
    wait_idle,
)

__all__ = ["RESPONSES"]

ASK: list[Any] = [
    {"role": "developer", "content": "You are brief."},
    {"role": "user", "content": "How are you?"},
]


class Fate(BaseModel):
    """A pydantic model for `parse`."""

    is_old: bool
    is_capital: bool


def create(s: Any, **fields: Any) -> Any:
    given = {
        "model": s.settings.model,
        "input": ASK,
        "max_output_tokens": 200,
        "extra_body": QUIET,
        **fields,
    }
    return s.client.responses.create(**given)


def stream(s: Any, **fields: Any) -> Any:
    """The whole response, from the last event of a stream; the deltas before it make its text."""
    events = list(create(s, stream=True, **fields))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(text == events[-1].response.output_text, f"{text!r} is streamed, {events[-1]}")
    return events[-1].response


def response(s: Any) -> None:
    answer = create(s, max_output_tokens=8, extra_body={"ignore_eos": True})
    expect(
        (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens"),
        f"{answer}",
    )
    expect(answer.usage.output_tokens == 8, f"{answer.usage}")


def response_stream(s: Any) -> None:
    fields = {"max_output_tokens": 20, "temperature": 0}
    expect(
        stream(s, **fields).output_text == create(s, **fields).output_text,
        "a stream is the same text",
    )


def response_turns_with_tools(s: Any) -> None:
    """Three turns, with the whole conversation in each call and with the server's store."""
    for ask in (create, stream):
        for stored in (False, True):
            talk: list[Any] = [*ASK]
            previous = None
            for _ in range(3):
                once: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
                answer = ask(
                    s,
                    input=talk,
                    tools=FLAT_TOOLS,
                    store=stored,
                    previous_response_id=previous,
                    **once,
                )
                (call,) = [item for item in answer.output if item.type == "function_call"]
                check_weather(call.arguments)
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
                talk = [result] if stored else [*talk, *answer.output, result]
                previous = answer.id if stored else None
            told = ask(
                s, input=talk, tools=FLAT_TOOLS, tool_choice="none", previous_response_id=previous
            )
            expect(told.output[-1].type == "message", f"{told}")


def response_format(s: Any) -> None:
    form = {
        "format": {"type": "json_schema", "name": "city", "schema": CITY_SCHEMA, "strict": True}
    }
    check_city(create(s, text=form).output_text)
    parsed = s.client.responses.parse(
        model=s.settings.model, input=ASK, text_format=Fate, max_output_tokens=200, extra_body=QUIET
    )
    expect(isinstance(parsed.output_parsed, Fate), f"{parsed}")


def response_stream_helper(s: Any) -> None:
    given: dict[str, Any] = {
        "input": ASK,
        "text_format": Fate,
        "max_output_tokens": 200,
        "extra_body": QUIET,
    }
    with s.client.responses.stream(model=s.settings.model, **given) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    expect(
        "response.output_text.done" in kinds and isinstance(final.output_parsed, Fate),
        f"{kinds} {final}",
    )


def response_store(s: Any) -> None:
    answer = create(s, max_output_tokens=4)
    kept = s.client.responses.retrieve(answer.id)
    expect(kept.output == answer.output and kept.usage == answer.usage, f"{kept} and {answer}")
    expect(
        len(s.client.responses.input_items.list(answer.id).data) == len(ASK),
        "the items of the input",
    )
    s.client.responses.delete(answer.id)
    try:
        s.client.responses.retrieve(answer.id)
    except Exception as error:
        expect(type(error).__name__ == "NotFoundError", f"{error!r}")
    else:
        raise AssertionError("it was deleted")


def response_logprobs(s: Any) -> None:
    answer = create(
        s, top_logprobs=2, include=["message.output_text.logprobs"], max_output_tokens=4
    )
    expect(
        all(len(token.top_logprobs) == 2 for token in answer.output[-1].content[0].logprobs),
        f"{answer}",
    )


def response_count(s: Any) -> None:
    fields: dict[str, Any] = {"input": ASK, "tools": FLAT_TOOLS}
    counted = s.client.responses.input_tokens.count(model=s.settings.model, **fields).input_tokens
    expect(
        counted == create(s, tools=FLAT_TOOLS, max_output_tokens=1).usage.input_tokens, f"{counted}"
    )


def response_hang_up(s: Any) -> None:
    events = create(s, stream=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(events))
    events.close()
    wait_idle(s.settings.url)


RESPONSES = [
    response, response_stream, response_turns_with_tools, response_format, response_stream_helper, response_store,
    response_logprobs, response_count, response_hang_up,
]  # fmt: skip
