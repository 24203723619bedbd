"""LlamaIndex: an agent with a tool over chats and responses, three turns, whole and streamed; and typed answers."""

import asyncio
import sys
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.workflow import Context
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import QUIET

ASK = ("How are you?", "And there?", "And tomorrow?")


class City(BaseModel):
    """A city with bounded fields."""

    name: Literal["Bern", "Oslo"]
    size: int = Field(ge=0, le=9)


def get_weather(unit: Literal["celsius", "kelvin"]) -> str:
    """Ask for the weather."""
    return f"fair, in {unit}"


class Subject:
    """Models with the address and the key filled in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def chat(self) -> Any:
        more = {
            "context_window": 8192,
            "is_chat_model": True,
            "is_function_calling_model": True,
            "max_tokens": 60,
        }
        return OpenAILike(**self._common(), **more, additional_kwargs={"extra_body": QUIET})

    def responses(self) -> Any:
        more = {
            "context_window": 8192,
            "max_output_tokens": 60,
            "additional_kwargs": {"extra_body": QUIET},
        }
        return OpenAIResponses(**self._common(), **more)

    def _common(self) -> dict[str, Any]:
        base = {
            "api_base": f"{self.settings.url}/v1",
            "api_key": self.settings.api_key,
            "timeout": 60,
        }
        return {**base, "model": self.settings.model, "max_retries": 0}


async def three_turns(llm: Any, streamed: bool) -> None:
    """The first call of each turn is forced; then the model may choose."""
    once = {"initial_tool_choice": "required", "allow_parallel_tool_calls": False}
    agent = FunctionAgent(
        tools=[get_weather], llm=llm, system_prompt="Be brief.", streaming=streamed, **once
    )
    context = Context(agent)
    for asked in ASK:
        run = agent.run(asked, ctx=context)
        events = [event async for event in run.stream_events()]
        expect(any(isinstance(event, ToolCallResult) for event in events), f"{events}")
        expect((await run).response.role == "assistant", "an answer")


def agent(s: Subject) -> None:
    for streamed in (False, True):
        asyncio.run(three_turns(s.chat(), streamed))


def agent_with_responses(s: Subject) -> None:
    for streamed in (False, True):
        asyncio.run(three_turns(s.responses(), streamed))


def chat(s: Subject) -> None:
    talk = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content=ASK[0]),
    ]
    for llm in (s.chat(), s.responses()):
        expect(llm.chat(talk).message.role == "assistant", "whole")
        *_, last = llm.stream_chat(talk)
        expect(last.message.role == "assistant", "streamed")


def typed(s: Subject) -> None:
    talk = [ChatMessage(role="user", content=ASK[0])]
    expect(isinstance(s.chat().as_structured_llm(City).chat(talk).raw, City), "a City")


CHECKS = [chat, typed, agent, agent_with_responses]


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    packages = [
        "llama-index-core",
        "llama-index-llms-openai-like",
        "llama-index-llms-openai",
        "openai",
    ]
    return checks.run(CHECKS, Subject(settings), packages, settings.report)


if __name__ == "__main__":
    sys.exit(main())
