"""litellm: the server as an `openai/` provider and as a text completion provider, with litellm's exceptions."""

import asyncio
import sys
from typing import Any

import litellm

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, catch, expect
from lab.judges.clients.client_common import (
    JSON_SCHEMA_FORMAT,
    QUIET,
    TALK,
    TOOLS,
    check_city,
    check_weather,
    wait_idle,
)


class Subject:
    """Calls with the address and the key filled in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.common: dict[str, Any] = {
            "api_base": f"{settings.url}/v1",
            "api_key": settings.api_key,
            "timeout": 60,
            "num_retries": 0,
        }

    def chat(self, **fields: Any) -> Any:
        """Request one chat completion."""
        given = {
            **self.common,
            "model": f"openai/{self.settings.model}",
            "messages": TALK,
            **fields,
        }
        return litellm.completion(**given)

    def complete(self, **fields: Any) -> Any:
        """Request one text completion."""
        given = {
            **self.common,
            "model": f"text-completion-openai/{self.settings.model}",
            "prompt": "Hello",
            **fields,
        }
        return litellm.text_completion(**given)


def chat(s: Subject) -> None:
    answer = s.chat(max_tokens=8)
    expect(answer.choices[0].message.role == "assistant", f"{answer}")
    expect(answer.usage.completion_tokens <= 8, f"{answer.usage}")


def chat_options(s: Subject) -> None:
    answer = s.chat(
        n=2, temperature=0.5, top_p=0.9, stop=["#"], seed=3, presence_penalty=0.1, max_tokens=8
    )
    expect(len(answer.choices) == 2, f"{answer}")


def chat_stream(s: Subject) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in s.chat(stream=True, **options))
    expect(text == s.chat(**options).choices[0].message.content, "a stream is the same text")


def chat_stream_usage(s: Subject) -> None:
    chunks = list(s.chat(stream=True, max_tokens=5, stream_options={"include_usage": True}))
    expect(any(getattr(chunk, "usage", None) for chunk in chunks), "no usage")


def chat_async(s: Subject) -> None:
    async def one(i: int) -> Any:
        talk = [{"role": "user", "content": f"{i}"}]
        return await litellm.acompletion(
            model=f"openai/{s.settings.model}", messages=talk, max_tokens=4, **s.common
        )

    async def several() -> list[Any]:
        return await asyncio.gather(*map(one, range(8)))

    expect(len(asyncio.run(several())) == 8, "eight at once")


def tools(s: Subject) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
        message = (
            s.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
            .choices[0]
            .message
        )
        for call in message.tool_calls:
            check_weather(call.function.arguments)


def second_turn(s: Subject) -> None:
    """An agent sends the messages of earlier answers back as they are, with the results of its tools."""
    options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200}
    first = s.chat(tool_choice="required", **options).choices[0].message
    (call,) = first.tool_calls
    talk: list[Any] = [*TALK, first, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = s.chat(messages=talk, tools=TOOLS, tool_choice="none", max_tokens=8).choices[0].message
    for message in (second, second.model_dump(), s.chat(max_tokens=4).choices[0].message):
        again = s.chat(
            messages=[*talk, message, {"role": "user", "content": "Go on."}], max_tokens=4
        )
        expect(again.choices[0].message.role == "assistant", f"{again}")


def streamed(s: Subject, **fields: Any) -> Any:
    """The whole answer, joined by litellm from the pieces of a stream."""
    return litellm.stream_chunk_builder(
        list(s.chat(stream=True, **fields)), messages=fields["messages"]
    )


def three_turns(s: Subject) -> None:
    """Each turn has a call, its result, and an answer; all are litellm's own messages."""
    options: dict[str, Any] = {
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "extra_body": QUIET,
    }
    for ask in (s.chat, lambda **fields: streamed(s, **fields)):
        talk: list[Any] = [TALK[0]]
        for _ in range(3):
            talk.append(TALK[1])
            called = ask(messages=talk, tool_choice="required", **options).choices[0].message
            (call,) = called.tool_calls
            check_weather(call.function.arguments)
            talk += [called, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
            told = (
                ask(messages=talk, tool_choice="none", **{**options, "max_tokens": 8})
                .choices[0]
                .message
            )
            expect(not told.tool_calls, f"{told}")
            talk.append(told)


def json_schema(s: Subject) -> None:
    check_city(
        s.chat(response_format=JSON_SCHEMA_FORMAT, max_tokens=200).choices[0].message.content
    )


def text(s: Subject) -> None:
    answer = s.complete(max_tokens=6, logprobs=2)
    expect(answer.choices[0].finish_reason in ("stop", "length"), f"{answer}")


def text_stream(s: Subject) -> None:
    pieces = list(s.complete(max_tokens=6, stream=True))
    expect("".join(piece.choices[0].text or "" for piece in pieces), "no text")


def errors(s: Subject) -> None:
    catch(litellm.BadRequestError, s.chat, temperature=9)
    catch(litellm.AuthenticationError, s.chat, api_key="not-the-key")
    catch(litellm.NotFoundError, s.chat, model="openai/missing")
    catch(litellm.BadRequestError, s.chat, messages=[{"role": "user", "content": "word " * 60_000}])


def timeout(s: Subject) -> None:
    catch(litellm.Timeout, s.chat, max_tokens=4000, timeout=0.2, extra_body={"ignore_eos": True})
    wait_idle(s.settings.url)


def hang_up(s: Subject) -> None:
    stream = s.chat(stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.completion_stream.close()
    wait_idle(s.settings.url)


CHECKS = [
    chat, chat_options, chat_stream, chat_stream_usage, chat_async, tools, second_turn, three_turns, json_schema, text,
    text_stream, errors, timeout, hang_up,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return checks.run(CHECKS, Subject(settings), ["litellm", "openai"], settings.report)


if __name__ == "__main__":
    sys.exit(main())
