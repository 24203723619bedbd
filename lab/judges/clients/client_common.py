"""Requests of the Python clients: prompts, tools and schemas; and the wait for an idle server."""

import json
import time
import urllib.request
from typing import Any

from lab.judges.clients.checks import expect

__all__ = [
    *("CITY_SCHEMA", "FLAT_TOOLS", "JSON_SCHEMA_FORMAT", "QUIET", "TALK", "TOOLS", "WEATHER"),
    *("check_city", "check_weather", "wait_idle"),
]

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "How are you?"},
]

WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Ask for it.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {**WEATHER}}},
]
FLAT_TOOLS: list[dict[str, Any]] = [{"type": "function", **tool["function"]} for tool in TOOLS]
# a grammar allows any number of blanks
QUIET = {"logit_bias": {str(blank): -100 for blank in b" \t\n\r"}}

# Every value is bounded: the toy model computes its tokens and would not end one by itself.
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["Bern", "Oslo"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "size", "is_capital"],
    "additionalProperties": False,
}
JSON_SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "city", "strict": True, "schema": CITY_SCHEMA},
}


def check_city(text: str | None) -> None:
    """Check a text against `CITY_SCHEMA`."""
    city = json.loads(text or "")
    expect(set(city) == {"name", "size", "is_capital"}, f"keys of {city}")
    expect(city["name"] in ("Bern", "Oslo"), f"name of {city}")
    expect(isinstance(city["size"], int) and 0 <= city["size"] <= 9, f"size of {city}")
    expect(isinstance(city["is_capital"], bool), f"is_capital of {city}")


def check_weather(arguments: str | dict[str, Any]) -> None:
    """Check arguments against the parameters of the tools."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(set(given) == {"unit", "days"}, f"keys of {given}")
    expect(
        given["unit"] in ("celsius", "kelvin") and given["days"] in range(1, 10),
        f"values of {given}",
    )


def wait_idle(url: str, seconds: float = 10) -> None:
    """Wait until the server has no request left: requests of closed connections have ended."""
    deadline = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            load = json.load(answer)
        if load["running"] == load["waiting"] == 0:
            return
        expect(time.monotonic() < deadline, f"the server still has requests: {load}")
        time.sleep(0.05)
