"""LangChain's Responses mode and LangGraph's agents: three turns with a tool, whole and streamed, and formats."""

import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, Field

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import QUIET, TALK, TOOLS, check_weather

ASK = ("How are you?", "And there?", "And tomorrow?")


class City(BaseModel):
    """A city with bounded fields."""

    name: Literal["Bern", "Oslo"]
    size: int = Field(ge=0, le=9)


@tool
def get_weather(unit: Literal["celsius", "kelvin"]) -> str:
    """Ask for the weather."""
    return f"fair, in {unit}"


@wrap_model_call
def call_once(request: Any, handler: Callable[[Any], Any]) -> Any:
    """Force a call after a question; forbid it after a result."""
    is_asked = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="required" if is_asked else "none"))


class Subject:
    """Models with the address and the key filled in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def model(self, **fields: Any) -> Any:
        base = {
            "base_url": f"{self.settings.url}/v1",
            "api_key": self.settings.api_key,
            "max_retries": 0,
        }
        more = {"model": self.settings.model, "timeout": 60, "max_tokens": 200}
        more["extra_body"] = {**QUIET, "parallel_tool_calls": False}
        return ChatOpenAI(**{**base, **more, **fields})


def joined(chunks: Any) -> Any:
    """The message that a stream makes."""
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def turns_with_tools(s: Subject, **fields: Any) -> None:
    """Three turns of a model with tools, in the Responses mode."""
    model, brief = (s.model(use_responses_api=True, max_tokens=most, **fields) for most in (200, 8))
    calling = model.bind_tools(TOOLS, tool_choice="required")
    asks = (lambda model, talk: model.invoke(talk), lambda model, talk: joined(model.stream(talk)))
    for ask in asks:
        talk: list[Any] = []
        for question in ASK:
            talk.append(HumanMessage(question))
            answer = ask(calling, talk)
            expect(
                answer.response_metadata["id"].startswith("resp_"), f"{answer.response_metadata}"
            )
            (call,) = answer.tool_calls
            check_weather(call["args"])
            talk += [answer, ToolMessage("noon", tool_call_id=call["id"])]
            told = ask(brief, talk)
            expect(told.usage_metadata["output_tokens"] <= 8 and not told.tool_calls, f"{told}")
            talk.append(told)


def responses_turns(s: Subject) -> None:
    turns_with_tools(s)


def responses_turns_with_the_store(s: Subject) -> None:
    turns_with_tools(s, use_previous_response_id=True)


def responses_turns_as_chat_messages(s: Subject) -> None:
    turns_with_tools(s, output_version="v0")


def responses_structured(s: Subject) -> None:
    model = s.model(use_responses_api=True)
    for method in ("json_schema", "function_calling"):
        expect(
            isinstance(model.with_structured_output(City, method=method).invoke(TALK), City), method
        )


def agent_turns(s: Subject, **fields: Any) -> None:
    """Three turns of an agent, whole and streamed, kept by its checkpointer."""
    agent = create_agent(
        s.model(**fields),
        [get_weather],
        middleware=[call_once],
        checkpointer=InMemorySaver(),
        system_prompt="Be brief.",
    )
    for streamed in (False, True):
        config = {"configurable": {"thread_id": f"{streamed}"}}
        for number, question in enumerate(ASK, 1):
            asked = {"messages": [HumanMessage(question)]}
            if streamed:
                pieces = [piece for piece, _ in agent.stream(asked, config, stream_mode="messages")]
                expect(len(pieces) > 3, f"{pieces}")
            else:
                agent.invoke(asked, config)
            messages = agent.get_state(config).values["messages"]
            kinds = [type(message) for message in messages]
            expect(
                kinds == [HumanMessage, AIMessage, ToolMessage, AIMessage] * number, f"{messages}"
            )
            expect(messages[-3].tool_calls and not messages[-1].tool_calls, f"{messages}")


def agent(s: Subject) -> None:
    agent_turns(s)


def agent_with_responses(s: Subject) -> None:
    agent_turns(s, use_responses_api=True)


def agent_with_a_format(s: Subject) -> None:
    """Tools and a format in one call: the answer after the tool's result is of the type."""
    for more in ({}, {"use_responses_api": True}):
        built = create_agent(
            s.model(**more),
            [get_weather],
            middleware=[call_once],
            response_format=ProviderStrategy(City),
        )
        found = built.invoke({"messages": [HumanMessage(ASK[0])]})
        expect(isinstance(found["structured_response"], City), f"{found}")


CHECKS = [
    responses_turns, responses_turns_with_the_store, responses_turns_as_chat_messages, responses_structured, agent,
    agent_with_responses, agent_with_a_format,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    return checks.run(
        CHECKS, Subject(settings), ["langchain", "langgraph", "langchain-openai"], settings.report
    )


if __name__ == "__main__":
    sys.exit(main())
