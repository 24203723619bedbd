"""Pydantic AI over chats and responses: three turns with a tool, whole and streamed, and a discriminated union."""

import asyncio
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import QUIET

ASK = ("How are you?", "And there?", "And tomorrow?")


class Cat(BaseModel):
    """One member of a union."""

    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    """The other one."""

    kind: Literal["dog"]
    is_good: bool


class Pet(BaseModel):
    """A discriminated union in a field."""

    animal: Annotated[Cat | Dog, Field(discriminator="kind")]


class Subject:
    """The two models of the server."""

    def __init__(self, settings: Settings) -> None:
        provider = OpenAIProvider(base_url=f"{settings.url}/v1", api_key=settings.api_key)
        self.models = [OpenAIChatModel(settings.model, provider=provider)]
        self.models.append(OpenAIResponsesModel(settings.model, provider=provider))
        self.loop = asyncio.Runner()  # one loop, to which the client's connections belong
        self.calls: list[str] = []

    def agent(self, model: Any, **fields: Any) -> Any:
        made = Agent(model, instructions="You are brief.", retries=8, **fields)

        @made.tool_plain
        def get_weather(unit: Literal["celsius", "kelvin"]) -> str:
            """Ask for the weather."""
            self.calls.append(unit)
            return "fair"

        return made


def settings(context: Any) -> Any:
    """Settings of one step."""
    return {"max_tokens": 100, "parallel_tool_calls": False, "extra_body": QUIET}


def call_once(context: Any) -> Any:
    """Settings that force a call after a question, and forbid it after a result."""
    is_asked = any(isinstance(part, UserPromptPart) for part in context.messages[-1].parts)
    return {
        **settings(context),
        "extra_body": {**QUIET, "tool_choice": "required" if is_asked else "none"},
    }


async def three_turns(s: Subject, agent: Any, streamed: bool, settings_of: Any) -> list[Any]:
    """The answers of three turns; the agent sends its own messages."""
    history: list[Any] = []
    answers: list[Any] = []
    for asked in ASK:
        if streamed:
            async with agent.run_stream(
                asked, message_history=history, model_settings=settings_of
            ) as result:
                answers.append(await result.get_output())
        else:
            result = await agent.run(asked, message_history=history, model_settings=settings_of)
            answers.append(result.output)
        history = result.all_messages()
    return answers


def turns(s: Subject) -> None:
    """Each turn has a call, its result, and an answer."""
    for model in s.models:
        for streamed in (False, True):
            before = len(s.calls)
            answers = s.loop.run(three_turns(s, s.agent(model), streamed, call_once))
            expect(len(s.calls) == before + len(ASK), f"{s.calls[before:]}")
            expect([type(answer) for answer in answers] == [str] * len(ASK), f"{answers}")


def union(s: Subject, output: Any) -> None:
    """Turns of an agent with a tool, whose answers are of a discriminated union."""
    for model in s.models:
        for streamed in (False, True):
            answers = s.loop.run(
                three_turns(s, s.agent(model, output_type=output), streamed, settings)
            )
            expect(all(isinstance(answer.animal, Cat | Dog) for answer in answers), f"{answers}")


def union_as_a_tool(s: Subject) -> None:
    union(s, ToolOutput(Pet))


def union_as_a_format(s: Subject) -> None:
    union(s, NativeOutput(Pet))


CHECKS = [turns, union_as_a_tool, union_as_a_format]


def main() -> int:
    """Run the checks."""
    given = checks.settings(__doc__)
    return checks.run(CHECKS, Subject(given), ["pydantic-ai-slim", "openai"], given.report)


if __name__ == "__main__":
    sys.exit(main())
