"""langchain-openai: `ChatOpenAI` and `OpenAI`, tools, structured output, streams, batches and errors."""

import asyncio
import sys
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import TOOLS, check_weather, wait_idle


class Subject:
    """Models with the address and the key filled in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def _common(self, **fields: Any) -> dict[str, Any]:
        base = {
            "base_url": f"{self.settings.url}/v1",
            "api_key": self.settings.api_key,
            "max_retries": 0,
        }
        return {**base, "model": self.settings.model, "timeout": 60, "max_tokens": 16, **fields}

    def chat(self, **fields: Any) -> Any:
        """The chat model with further fields."""
        return ChatOpenAI(**self._common(**fields))

    def text(self, **fields: Any) -> Any:
        """The text model with further fields."""
        return OpenAI(**self._common(**fields))


class City(BaseModel):
    """A city with bounded fields."""

    name: Literal["Bern", "Oslo"]
    size: int = Field(ge=0, le=9)


TALK = [SystemMessage("You are brief."), HumanMessage("How are you?")]


def invoke(s: Subject) -> None:
    answer = s.chat().invoke(TALK)
    expect(
        isinstance(answer, AIMessage) and answer.usage_metadata["output_tokens"] <= 16, f"{answer}"
    )
    expect(
        answer.response_metadata["finish_reason"] in ("stop", "length"),
        f"{answer.response_metadata}",
    )


def stream(s: Subject) -> None:
    model = s.chat(temperature=0)
    text = "".join(chunk.content for chunk in model.stream(TALK))
    expect(text == model.invoke(TALK).content, "a stream is the same text")


def stream_usage(s: Subject) -> None:
    chunks = list(s.chat(stream_usage=True).stream(TALK))
    expect(
        sum(chunk.usage_metadata["input_tokens"] for chunk in chunks if chunk.usage_metadata) > 0,
        "no usage",
    )


def batch(s: Subject) -> None:
    expect(len(s.chat().batch([TALK] * 5)) == 5, "five answers")


def ainvoke(s: Subject) -> None:
    async def several() -> list[Any]:
        model = s.chat()
        return await asyncio.gather(*(model.ainvoke(TALK) for _ in range(5)))

    expect(len(asyncio.run(several())) == 5, "five answers")


def logprobs(s: Subject) -> None:
    answer = s.chat(logprobs=True, top_logprobs=2).invoke(TALK)
    expect(
        len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2,
        f"{answer.response_metadata}",
    )


def generations(s: Subject) -> None:
    expect(len(s.chat(n=2).generate([TALK]).generations[0]) == 2, "two generations")


def tools(s: Subject) -> None:
    for choice in ("required", "get_time"):
        answer = (
            s.chat(max_tokens=200)
            .bind_tools(TOOLS, tool_choice=choice, parallel_tool_calls=False)
            .invoke(TALK)
        )
        expect(answer.tool_calls and not answer.invalid_tool_calls, f"{answer}")
        for call in answer.tool_calls:
            check_weather(call["args"])


def tools_stream(s: Subject) -> None:
    model = s.chat(max_tokens=200).bind_tools(
        TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    chunks = list(model.stream(TALK))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    expect(whole.tool_calls, f"{whole}")
    for call in whole.tool_calls:
        check_weather(call["args"])


def tool_results(s: Subject) -> None:
    model = s.chat(max_tokens=200).bind_tools(TOOLS, tool_choice="get_time")
    answer = model.invoke(TALK)
    result = ToolMessage("noon", tool_call_id=answer.tool_calls[0]["id"])
    expect(s.chat().invoke([*TALK, answer, result]) is not None, "the result is accepted")


def structured_output(s: Subject) -> None:
    for method in ("json_schema", "function_calling"):
        city = s.chat(max_tokens=200).with_structured_output(City, method=method).invoke(TALK)
        expect(isinstance(city, City), f"{method}: {city}")


def text(s: Subject) -> None:
    expect(isinstance(s.text().invoke("Hello"), str), "a text")
    expect(len(s.text().generate(["a", "b"]).generations) == 2, "two prompts")


def text_stream(s: Subject) -> None:
    model = s.text(temperature=0)
    expect("".join(model.stream("Hello")) == model.invoke("Hello"), "a stream is the same text")


def errors(s: Subject) -> None:
    for kind, fields in (
        (openai.BadRequestError, {"temperature": 9}),
        (openai.AuthenticationError, {"api_key": "not-the-key"}),
        (openai.NotFoundError, {"model": "missing"}),
    ):
        try:
            s.chat(**fields).invoke(TALK)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__} for {fields}")


def timeout(s: Subject) -> None:
    model = s.chat(timeout=0.2, max_tokens=4000, extra_body={"ignore_eos": True})
    try:
        model.invoke(TALK)
    except openai.APITimeoutError:
        wait_idle(s.settings.url)
    else:
        raise AssertionError("4000 tokens within 0.2 seconds")


CHECKS = [
    invoke, stream, stream_usage, batch, ainvoke, logprobs, generations, tools, tools_stream, tool_results,
    structured_output, text, text_stream, errors, timeout,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    return checks.run(CHECKS, Subject(settings), ["langchain-openai", "openai"], settings.report)


if __name__ == "__main__":
    sys.exit(main())
