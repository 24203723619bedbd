"""Calls of every kind to a server on the toy, and the part of their answers that a second server would give too."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "preset:toy"
_UNEQUAL = {
    "id", "created", "created_at", "completed_at", "item_id", "call_id", "response_id", "sequence_number",
    "prompt_tokens_details", "input_tokens_details", "input_tokens", "cache_read_input_tokens",
    "cache_creation_input_tokens", "obfuscation",
}  # fmt: skip
"""Fields of time, of names, and of what the cache held."""
_TOOL = {
    "type": "object",
    "properties": {"where": {"enum": ["in", "out"]}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["where", "days"],
    "additionalProperties": False,
}  # fmt: skip
_LIST = {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 30, "maxItems": 60}
_LONG = {"temperature": 1.0, "max_tokens": 300, "ignore_eos": True}
_QUESTION = "What is there?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_CHAT = {"messages": _MESSAGES, "temperature": 1.0, "max_tokens": 300}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "list", "schema": _LIST}}
_FUNCTION = {"type": "function", "function": {"name": "look", "parameters": _TOOL}}
_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**_LONG, "temperature": 0.0, "logit_bias": {"256": -100}}),
    "seeded": ("/v1/completions", _LONG),
    "long prompt": ("/v1/completions", {**_LONG, "prompt": "abcdefghij" * 150, "max_tokens": 60}),
    "candidates": ("/v1/completions", {**_LONG, "n": 3, "max_tokens": 150}),
    "prompts": ("/v1/completions", {**_LONG, "prompt": ["some", "words"], "echo": True}),
    "scored": ("/v1/completions", {**_LONG, "logprobs": 2}),
    "penalised": ("/v1/completions", {**_LONG, "frequency_penalty": 0.7, "presence_penalty": 0.4}),
    "stopped": ("/v1/completions", {**_LONG, "max_tokens": 900, "stop": ["ab", "~A", "!!"]}),
    "tools": ("/v1/chat/completions", {**_CHAT, "tools": [_FUNCTION], "tool_choice": "required"}),
    "format": ("/v1/chat/completions", {**_CHAT, "response_format": _SCHEMA}),
    "chat": ("/v1/chat/completions", {**_CHAT, "ignore_eos": True, "logprobs": True}),
    "messages": ("/v1/messages", {**_CHAT, "ignore_eos": True}),
    "responses": (
        "/v1/responses",
        {"input": _QUESTION, "temperature": 1.0, "max_output_tokens": 300, "ignore_eos": True},
    ),
}  # fmt: skip
KINDS = tuple(_BODIES)


@dataclass(frozen=True)
class Call:
    """One call: its kind, the seed of its tokens, and True for a stream."""

    kind: str
    seed: int
    streams: bool

    @property
    def path(self) -> str:
        """The route of the call."""
        return _BODIES[self.kind][0]

    @property
    def body(self) -> dict[str, Any]:
        """The fields of the call."""
        path, fields = _BODIES[self.kind]
        body = {"model": MODEL, "seed": self.seed, "stream": self.streams, **fields}
        if path == "/v1/completions":
            body.setdefault("prompt", f"Once {self.seed}")
        return body


@dataclass
class Answer:
    """The part of an answer that does not depend on the moment.

    Attributes:
        status: of HTTP.
        value: the texts, ids, probabilities and ends; an error instead if there was one.
        pause: the longest time between two pieces of a stream, in seconds.
    """

    status: int
    value: Any
    pause: float = 0.0


def ask(http: httpx.Client, call: Call, began: Callable[[], None] = lambda: None) -> Answer:
    """Make a call, and read its answer to the end. `began` is called after the first piece of a stream."""
    if not call.streams:
        response = http.post(call.path, json=call.body)
        return Answer(response.status_code, equal_part(response.json()))
    with http.stream("POST", call.path, json=call.body) as response:
        if response.status_code != 200:
            return Answer(response.status_code, json.loads(response.read()))
        return _read(_events(response), began)


def equal_part(value: Any) -> Any:
    """A value of JSON without the fields that differ between two equal answers."""
    match value:
        case dict():
            return {name: equal_part(each) for name, each in value.items() if name not in _UNEQUAL}
        case list():
            return [equal_part(each) for each in value]
    return value


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@dataclass
class _Joined:
    """The texts of a stream, joined by their places: pieces may be cut anywhere."""

    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def add(self, place: str, value: Any) -> None:
        """Join a string or a list to what stands at a place; another value replaces it."""
        match value:
            case dict():
                for name, each in value.items():
                    self.add(f"{place}.{name}", each)
            case str():
                self.texts[place] = self.texts.get(place, "") + value
            case list() if value and isinstance(value[0], dict) and "index" in value[0]:
                for each in value:
                    self.add(f"{place}[{each['index']}]", each)
            case list():
                self.lists[place] = self.lists.get(place, []) + value
            case None:
                pass
            case _:
                self.rest[place] = value


def _read(events: Iterator[dict[str, Any]], began: Callable[[], None]) -> Answer:
    joined = _Joined()
    last: Any = None
    pause = 0.0
    before: float | None = None
    for event in events:
        now = time.monotonic()
        if before is None:
            began()
        else:
            pause = max(pause, now - before)
        before = now
        last = event
        if "error" in event:
            return Answer(200, event, pause)
        _take(joined, equal_part(event))
    return Answer(200, [joined.texts, joined.lists, joined.rest, _end_of(last)], pause)


def _take(joined: _Joined, event: Mapping[str, Any]) -> None:
    """Add the pieces of one event. A whole value after its pieces, as of responses, is left to `_end_of`."""
    if "choices" in event:
        joined.add("choices", event["choices"])
    elif isinstance(event.get("delta"), str | dict):
        place = f"{event['type']} {event.get('index', event.get('output_index'))}"
        delta = event["delta"]
        if isinstance(delta, dict):
            delta = {name: each for name, each in delta.items() if name != "type"}
        joined.add(place, delta)


def _end_of(event: Any) -> Any:
    if isinstance(event, dict) and "response" in event:
        return equal_part(event["response"])
    return None
