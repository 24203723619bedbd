"""The cases of the compliance tests of Open Responses, held to the types of the package openresponses-types.

Its two cases with an image and a file of the user must be refused by name: the models read text alone.
"""

import json
import sys
import urllib.error
import urllib.request
from typing import Any

import openresponses_types as types
import pydantic

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect
from lab.judges.clients.client_common import FLAT_TOOLS, QUIET

EVENTS = pydantic.TypeAdapter(
    types.ResponseCreatedStreamingEvent
    | types.ResponseInProgressStreamingEvent
    | types.ResponseCompletedStreamingEvent
    | types.ResponseIncompleteStreamingEvent
    | types.ResponseOutputItemAddedStreamingEvent
    | types.ResponseOutputItemDoneStreamingEvent
    | types.ResponseContentPartAddedStreamingEvent
    | types.ResponseContentPartDoneStreamingEvent
    | types.ResponseOutputTextDeltaStreamingEvent
    | types.ResponseOutputTextDoneStreamingEvent
    | types.ResponseFunctionCallArgumentsDeltaStreamingEvent
    | types.ResponseFunctionCallArgumentsDoneStreamingEvent
)
# The toy model does not end an answer by itself: it may write one choice alone.
SHORT: dict[str, Any] = {"structured_outputs": {"choice": ["Hello there, Alice."]}}
FORCED: dict[str, Any] = {
    "tools": FLAT_TOOLS[:1],
    "tool_choice": {"type": "function", "name": "get_weather"},
    **QUIET,
}


class Caller:
    """Sends calls without a client library, as the compliance tests do."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def send(self, **fields: Any) -> tuple[int, str]:
        """The status and the body of the answer to one call."""
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {self.settings.api_key}",
        }
        body = json.dumps({"model": self.settings.model, **fields}).encode()
        request = urllib.request.Request(f"{self.settings.url}/v1/responses", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def whole(self, **fields: Any) -> types.ResponseResource:
        """A whole response, complete and with an output."""
        status, body = self.send(**fields)
        expect(status == 200, body)
        return held(json.loads(body))

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream, each held to its type."""
        status, body = self.send(stream=True, **fields)
        expect(status == 200, body)
        lines = [
            line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")
        ]
        found = [json.loads(line) for line in lines]
        for event in found:
            EVENTS.validate_python(event)
        return found


def held(answer: dict[str, Any]) -> types.ResponseResource:
    """A response of the type of the package, complete and with an output."""
    response = types.ResponseResource.model_validate(answer)
    expect(response.status == "completed" and response.completed_at, f"{response.status}")
    expect(response.output, "the response has no output")
    return response


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


def basic_response(s: Caller) -> None:
    s.whole(input=[user("Say hello.")], **SHORT)


def streaming_response(s: Caller) -> None:
    held(s.events(input=[user("Count from 1 to 5.")], **SHORT)[-1]["response"])


def system_prompt(s: Caller) -> None:
    s.whole(
        input=[{"type": "message", "role": "system", "content": "You are brief."}, user("Hello.")],
        **SHORT,
    )


def multi_turn(s: Caller) -> None:
    said = {"type": "message", "role": "assistant", "content": "Hello Alice!"}
    s.whole(input=[user("My name is Alice."), said, user("What is my name?")], **SHORT)


def tool_calling(s: Caller) -> None:
    found = s.whole(input=[user("The weather?")], **FORCED)
    expect([item.type for item in found.output] == ["function_call"], f"{found.output}")


def tool_calling_streaming(s: Caller) -> None:
    events = s.events(input=[user("The weather?")], **FORCED)
    kinds = {event["type"] for event in events}
    needed = (
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    )
    expect({f"response.{name}" for name in needed} <= kinds, f"{kinds}")
    held(events[-1]["response"])


def function_call_round_trip(s: Caller) -> None:
    (call,) = s.whole(input="The weather?", **FORCED).output
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 20}',
    }
    sent = call.model_dump(mode="json", exclude_none=True)
    s.whole(input=[user("The weather?"), sent, result], **SHORT)


def previous_response_id(s: Caller) -> None:
    first = s.whole(input="Remember this word: papaya.", **SHORT)
    expect(first.store, "it is stored")
    second = s.whole(input="Which word was it?", previous_response_id=first.id, **SHORT)
    expect(second.previous_response_id == first.id, f"{second.previous_response_id}")


def image_and_file_are_refused_by_name(s: Caller) -> None:
    for kind in ("input_image", "input_file"):
        status, body = s.send(input=[user([{"type": "input_text", "text": "?"}, {"type": kind}])])
        expect(
            status == 400 and json.loads(body)["error"]["param"] == "input[0].content[1].type", body
        )


CHECKS = [
    basic_response, streaming_response, system_prompt, multi_turn, tool_calling, tool_calling_streaming,
    function_call_round_trip, previous_response_id, image_and_file_are_refused_by_name,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    return checks.run(CHECKS, Caller(settings), ["openresponses-types"], settings.report)


if __name__ == "__main__":
    sys.exit(main())
