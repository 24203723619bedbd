"""OpenAI's Agents SDK, over responses (its default) and chats: turns with a tool, a session and an `output_type`."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import QUIET

# The toy model ends its answers: to the SDK a stream that was cut by a limit is an error.
ENDING = {"logit_bias": {**QUIET["logit_bias"], "256": 100}, "min_tokens": 4}
ASK = ("How are you?", "And there?", "And tomorrow?")


class City(BaseModel):
    """The type of an answer."""

    name: Literal["Bern", "Oslo"]
    size: int = Field(ge=0, le=9)


class Subject:
    """Runs of an agent. Its first call in each turn is forced; then the SDK leaves the choice to the model."""

    def __init__(self, settings: Settings, client: AsyncOpenAI) -> None:
        self.settings = settings
        self.client = client
        self.calls: list[str] = []
        self.loop = asyncio.Runner()  # one loop, to which the client's connections belong

    def agent(self, model: Any = None, **fields: Any) -> Any:
        @function_tool
        def get_weather(unit: Literal["celsius", "kelvin"]) -> str:
            """Ask for the weather.

            Args:
                unit: of the temperature
            """
            self.calls.append(unit)
            return "fair"

        forced = ModelSettings(
            tool_choice="required", max_tokens=60, parallel_tool_calls=False, extra_body=ENDING
        )
        model = model or self.settings.model
        given = {
            "instructions": "You are brief.",
            "tools": [get_weather],
            "model_settings": forced,
            **fields,
        }
        return Agent(name="judge", model=model, **given)

    async def run_turn(self, agent: Any, asked: Any, streamed: bool, **fields: Any) -> Any:
        """One turn: at least one call, and an answer."""
        before = len(self.calls)
        if streamed:
            result = Runner.run_streamed(agent, asked, **fields)
            events = [event async for event in result.stream_events()]
            expect(any(event.type == "raw_response_event" for event in events), "no pieces")
        else:
            result = await Runner.run(agent, asked, **fields)
        expect(len(self.calls) > before, f"no call in {result.new_items}")
        return result


async def with_a_session(s: Subject, agent: Any, streamed: bool) -> list[Any]:
    session = SQLiteSession("judge")
    found = [
        (await s.run_turn(agent, asked, streamed, session=session)).final_output for asked in ASK
    ]
    expect(
        len(await session.get_items()) >= 4 * len(ASK),
        "each turn has a question, a call, a result, an answer",
    )
    return found


async def with_the_store(s: Subject, agent: Any, streamed: bool) -> list[Any]:
    found: list[Any] = []
    previous = None
    for asked in ASK:
        chained = {"previous_response_id": previous, "auto_previous_response_id": True}
        result = await s.run_turn(agent, asked, streamed, **chained)
        previous = result.last_response_id
        found.append(result.final_output)
    return found


async def with_own_items(s: Subject, agent: Any, streamed: bool) -> list[Any]:
    found: list[Any] = []
    items: list[Any] = []
    for asked in ASK:
        result = await s.run_turn(agent, [*items, {"role": "user", "content": asked}], streamed)
        items = result.to_input_list()
        found.append(result.final_output)
    return found


def both(turns: Callable[..., Any], s: Subject, agent: Any, kind: type = str) -> None:
    """The turns, whole and streamed."""
    for streamed in (False, True):
        answers = s.loop.run(turns(s, agent, streamed))
        expect(
            len(answers) == len(ASK) and all(isinstance(one, kind) for one in answers), f"{answers}"
        )


def session(s: Subject) -> None:
    both(with_a_session, s, s.agent())


def session_with_output_type(s: Subject) -> None:
    both(with_a_session, s, s.agent(output_type=City), City)


def own_items(s: Subject) -> None:
    both(with_own_items, s, s.agent())


def store(s: Subject) -> None:
    both(with_the_store, s, s.agent())


def chat_session(s: Subject) -> None:
    both(with_a_session, s, s.agent(OpenAIChatCompletionsModel(s.settings.model, s.client)))


def chat_session_with_output_type(s: Subject) -> None:
    model = OpenAIChatCompletionsModel(s.settings.model, s.client)
    both(with_a_session, s, s.agent(model, output_type=City), City)


def default_is_responses(s: Subject) -> None:
    """The checks above without a model class went to `/v1/responses`."""
    agent = s.agent()
    found = s.loop.run(s.run_turn(agent, ASK[0], False)).raw_responses
    expect(all((one.response_id or "").startswith("resp_") for one in found), f"{found}")


CHECKS = [
    session, session_with_output_type, own_items, store, default_is_responses, chat_session,
    chat_session_with_output_type,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    set_tracing_disabled(True)
    client = AsyncOpenAI(
        base_url=f"{settings.url}/v1", api_key=settings.api_key, timeout=60, max_retries=0
    )
    set_default_openai_client(client, use_for_tracing=False)
    return checks.run(
        CHECKS, Subject(settings, client), ["openai-agents", "openai"], settings.report
    )


if __name__ == "__main__":
    sys.exit(main())
