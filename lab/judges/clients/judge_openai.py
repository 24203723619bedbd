"""openai-python: every method for the server's routes, its typed exceptions, retries, timeouts and disconnects."""

import asyncio
import dataclasses
import sys
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import (
    JSON_SCHEMA_FORMAT,
    QUIET,
    TALK,
    TOOLS,
    check_city,
    check_weather,
    wait_idle,
)
from lab.judges.clients.judge_openai_errors import ERRORS
from lab.judges.clients.judge_openai_responses import RESPONSES


@dataclasses.dataclass
class Subject:
    """A client and its settings."""

    client: OpenAI
    settings: Settings

    def complete(self, prompt: Any = "Hello", **fields: Any) -> Any:
        return self.client.completions.create(model=self.settings.model, prompt=prompt, **fields)

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.settings.model, **{"messages": TALK, **fields}
        )


def models_list(s: Subject) -> None:
    names = [model.id for model in s.client.models.list()]
    expect(s.settings.model in names, f"{s.settings.model} is not in {names}")


def models_retrieve(s: Subject) -> None:
    model = s.client.models.retrieve(s.settings.model)
    expect((model.id, model.object) == (s.settings.model, "model"), f"{model}")


def completion(s: Subject) -> None:
    answer = s.complete()
    expect(answer.usage.completion_tokens <= 16, "16 tokens are the default at most")
    expect(answer.choices[0].finish_reason in ("stop", "length"), f"{answer}")
    expect(answer._request_id, "no request id")


def completion_batches(s: Subject) -> None:
    for prompt in (["a", "b", "c"], [[1, 2], [3, 4], [5, 6]]):
        answer = s.complete(prompt, max_tokens=3)
        expect([choice.index for choice in answer.choices] == [0, 1, 2], f"{answer}")
    expect(s.complete([1, 2, 3], max_tokens=2).usage.prompt_tokens == 3, "one prompt of three ids")


def completion_n_and_best_of(s: Subject) -> None:
    expect(len(s.complete(n=3, max_tokens=4).choices) == 3, "three choices")
    expect(len(s.complete(n=2, best_of=3, max_tokens=4).choices) == 2, "the two best of three")


def completion_logprobs(s: Subject) -> None:
    answer = s.complete(logprobs=3, max_tokens=4, temperature=0)
    logprobs = answer.choices[0].logprobs
    expect(
        logprobs is not None and len(logprobs.tokens) == answer.usage.completion_tokens,
        f"{logprobs}",
    )
    expect(all(value <= 0 for value in logprobs.token_logprobs), f"{logprobs.token_logprobs}")


def completion_echo(s: Subject) -> None:
    answer = s.complete("Hello", echo=True, logprobs=1, max_tokens=2, temperature=0)
    logprobs = answer.choices[0].logprobs
    expect(answer.choices[0].text.startswith("Hello"), f"{answer.choices[0].text!r}")
    expect(logprobs.token_logprobs[0] is None, "the first token has nothing before it")
    expect(
        len(logprobs.tokens) == answer.usage.total_tokens,
        "one entry for every token of prompt and answer",
    )


def completion_scores_only(s: Subject) -> None:
    answer = s.complete("Hello", echo=True, logprobs=1, max_tokens=0)
    expect(answer.usage.completion_tokens == 0, f"{answer.usage}")
    expect(answer.choices[0].text == "Hello", f"{answer.choices[0].text!r}")


def completion_stop(s: Subject) -> None:
    whole = s.complete(temperature=0, max_tokens=32).choices[0].text
    stop = next(letter for letter in whole[1:] if letter.isascii())
    answer = s.complete(temperature=0, max_tokens=32, stop=[stop])
    expect(answer.choices[0].finish_reason == "stop", f"{answer}")
    expect(
        answer.choices[0].text == whole.partition(stop)[0],
        f"{answer.choices[0].text!r} of {whole!r}",
    )


def completion_seed(s: Subject) -> None:
    texts = {s.complete(seed=7, temperature=1, max_tokens=12).choices[0].text for _ in range(3)}
    expect(len(texts) == 1, f"one seed, several texts: {texts}")


def completion_penalties_and_bias(s: Subject) -> None:
    s.complete(presence_penalty=0.5, frequency_penalty=-0.5, max_tokens=4, user="a-user")
    forced = s.complete(logit_bias={"65": 100}, temperature=0, max_tokens=3, logprobs=0)
    expect(forced.usage.completion_tokens == 3, f"{forced.usage}")


def completion_extra_body(s: Subject) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    answer = s.complete(max_tokens=5, extra_body=extra)
    expect(answer.usage.completion_tokens == 5, "ignore_eos generates everything")


def completion_stream(s: Subject) -> None:
    pieces = list(s.complete(stream=True, temperature=0, max_tokens=20))
    text = "".join(piece.choices[0].text for piece in pieces)
    expect(
        text == s.complete(temperature=0, max_tokens=20).choices[0].text,
        "a stream is the same text",
    )
    expect(pieces[-1].choices[0].finish_reason in ("stop", "length"), f"{pieces[-1]}")


def completion_stream_usage(s: Subject) -> None:
    pieces = list(
        s.complete(stream=True, n=2, max_tokens=5, stream_options={"include_usage": True})
    )
    expect(pieces[-1].choices == [] and pieces[-1].usage.prompt_tokens > 0, f"{pieces[-1]}")
    expect(all(piece.usage is None for piece in pieces[:-1]), "usage comes once")


def chat(s: Subject) -> None:
    answer = s.chat(max_completion_tokens=8)
    expect(answer.choices[0].message.role == "assistant", f"{answer}")
    expect(answer.usage.completion_tokens <= 8, f"{answer.usage}")


def chat_content_parts(s: Subject) -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}]
    answer = s.chat(messages=[TALK[0], {"role": "user", "content": parts}], max_tokens=4)
    expect(answer.choices[0].message.content is not None, f"{answer}")


def chat_n_and_logprobs(s: Subject) -> None:
    answer = s.chat(n=2, logprobs=True, top_logprobs=2, max_tokens=4)
    expect(len(answer.choices) == 2, "two choices")
    for choice in answer.choices:
        expect(
            all(len(token.top_logprobs) == 2 for token in choice.logprobs.content),
            f"{choice.logprobs}",
        )


def chat_stream(s: Subject) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    deltas = [chunk.choices[0] for chunk in s.chat(stream=True, **options)]
    text = "".join(choice.delta.content or "" for choice in deltas)
    expect(deltas[0].delta.role == "assistant", f"{deltas[0]}")
    expect(text == s.chat(**options).choices[0].message.content, "a stream is the same text")


def chat_stream_usage(s: Subject) -> None:
    chunks = list(s.chat(stream=True, max_tokens=4, stream_options={"include_usage": True}))
    expect(chunks[-1].choices == [] and chunks[-1].usage.completion_tokens <= 4, f"{chunks[-1]}")


def chat_stream_helper(s: Subject) -> None:
    # The answer must end by itself: for the helper, an answer at its limit is an error.
    body: dict[str, Any] = {
        "messages": TALK,
        "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}},
    }
    with s.client.chat.completions.stream(model=s.settings.model, max_tokens=8, **body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    expect(
        "chunk" in kinds and final.choices[0].message.content in ("yes", "no"), f"{kinds} {final}"
    )


def tools_required(s: Subject) -> None:
    answer = s.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = answer.choices[0].message.tool_calls
    expect(answer.choices[0].finish_reason == "tool_calls", f"{answer}")
    check_weather(call.function.arguments)


def tools_in_parallel(s: Subject) -> None:
    choice = s.chat(tools=TOOLS, tool_choice="required", max_tokens=200, extra_body=QUIET).choices[
        0
    ]
    calls = choice.message.tool_calls
    expect(calls, "at least one call")
    # A model that does not stop calling reaches its limit, which may cut the last call.
    for call in calls[:-1] if choice.finish_reason == "length" else calls:
        check_weather(call.function.arguments)


def tools_named(s: Subject) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    (call,) = s.chat(tools=TOOLS, tool_choice=choice, max_tokens=200).choices[0].message.tool_calls
    expect(call.function.name == "get_time", f"{call}")
    check_weather(call.function.arguments)


def tools_none_and_auto(s: Subject) -> None:
    for choice in ("none", "auto"):
        message = s.chat(tools=TOOLS, tool_choice=choice, max_tokens=6).choices[0].message
        expect(message.content is not None or message.tool_calls, f"{choice}: {message}")


def tools_stream(s: Subject) -> None:
    names = ""
    arguments = ""
    reason = None
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for chunk in s.chat(tools=TOOLS, tool_choice=choice, max_tokens=200, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            names += call.function.name or ""
            arguments += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    expect(names == "get_weather" and reason in ("tool_calls", "stop"), f"{names!r}, {reason}")
    check_weather(arguments)


def tools_answered(s: Subject) -> None:
    answer = (
        s.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
        .choices[0]
        .message
    )
    (call,) = answer.tool_calls
    told = [
        *TALK,
        answer.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "fair"},
    ]
    expect(
        s.chat(messages=told, tools=TOOLS, max_tokens=4).choices, "the call's result is accepted"
    )


def json_schema(s: Subject) -> None:
    answer = s.chat(response_format=JSON_SCHEMA_FORMAT, max_tokens=200)
    expect(answer.choices[0].finish_reason == "stop", f"{answer}")
    check_city(answer.choices[0].message.content)


def json_object(s: Subject) -> None:
    choice = s.chat(response_format={"type": "json_object"}, max_tokens=60).choices[0]
    expect((choice.message.content or "").lstrip().startswith("{"), f"{choice}")


class City(BaseModel):
    """A pydantic model for `parse`."""

    is_capital: bool
    is_old: bool


def parsed(s: Subject) -> None:
    answer = s.client.chat.completions.parse(
        model=s.settings.model,
        messages=TALK,  # type: ignore[arg-type]
        response_format=City,
        max_tokens=200,
    )
    expect(isinstance(answer.choices[0].message.parsed, City), f"{answer}")


def timeout(s: Subject) -> None:
    hurried = s.client.with_options(timeout=0.2, max_retries=0)
    try:
        hurried.completions.create(
            model=s.settings.model, prompt="Hello", max_tokens=4000, extra_body={"ignore_eos": True}
        )
    except openai.APITimeoutError:
        wait_idle(s.settings.url)
    else:
        raise AssertionError("4000 tokens within 0.2 seconds")


def hang_up(s: Subject) -> None:
    for create in (s.complete, s.chat):
        stream = create(stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    wait_idle(s.settings.url)


def concurrent(s: Subject) -> None:
    async def one(client: AsyncOpenAI, i: int) -> int:
        stream = await client.completions.create(
            model=s.settings.model,
            prompt=f"Hello {i}",
            max_tokens=16,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return len([piece async for piece in stream])

    async def all_of_them() -> list[int]:
        async with AsyncOpenAI(base_url=s.client.base_url, api_key=s.settings.api_key) as client:
            return await asyncio.gather(*(one(client, i) for i in range(16)))

    expect(all(asyncio.run(all_of_them())), "sixteen streams at once")


CHECKS = [
    models_list, models_retrieve, completion, completion_batches, completion_n_and_best_of, completion_logprobs,
    completion_echo, completion_scores_only, completion_stop, completion_seed, completion_penalties_and_bias,
    completion_extra_body, completion_stream, completion_stream_usage, chat, chat_content_parts, chat_n_and_logprobs,
    chat_stream, chat_stream_usage, chat_stream_helper, tools_required, tools_in_parallel, tools_named,
    tools_none_and_auto, tools_stream,
    tools_answered, json_schema, json_object, parsed, *RESPONSES, *ERRORS, timeout, hang_up, concurrent,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    client = OpenAI(base_url=f"{settings.url}/v1", api_key=settings.api_key, timeout=60)
    return checks.run(CHECKS, Subject(client, settings), ["openai"], settings.report)


if __name__ == "__main__":
    sys.exit(main())
