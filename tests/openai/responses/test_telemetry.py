"""Times and progress in streamed responses, as llama.cpp has them."""

import json
from typing import Any

import pytest

from orca_jax.serve.openai.responses.telemetry import Telemetry
from orca_jax.serve.openai.schema.answers import PromptDetails, Usage
from tests.openai.responses.played import respond
from tests.serve.played import saying


def events(**fields: Any) -> list[dict[str, Any]]:
    answer, _ = respond(saying("hel", "lo"), stream=True, **fields)
    found = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert "x-orca-ignored-fields" not in answer.headers
    return found


@pytest.mark.conforms("responses.timings_per_token", "responses.return_progress")
def test_a_stream_has_what_was_asked_for() -> None:
    found = events(timings_per_token=True, return_progress=True)
    (place,) = [index for index, event in enumerate(found) if "prompt_progress" in event]
    progress = found[place]["prompt_progress"]
    assert place == 2 and found[place]["type"] == "response.in_progress"
    assert (
        progress["processed"] == progress["total"] == found[-1]["response"]["usage"]["input_tokens"]
    )
    timed = [event for event in found if "timings" in event]
    assert {event["type"] for event in timed} == {
        "response.output_text.delta",
        "response.completed",
    }
    assert (
        timed[-1]["timings"]["predicted_n"] == found[-1]["response"]["usage"]["output_tokens"] == 6
    )
    assert not any("timings" in event for event in events(return_progress=True))
    assert not any("prompt_progress" in event for event in events(timings_per_token=True))


@pytest.mark.conforms("responses.timings_per_token", "responses.return_progress")
def test_a_whole_response_has_none_and_says_so() -> None:
    answer, _ = respond("x", timings_per_token=True, return_progress=True)
    assert answer.headers["x-orca-ignored-fields"] == "timings_per_token, return_progress"


def test_rates_are_of_computed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 2.5])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    usage = Usage(110, 5, 115, PromptDetails(10))
    telemetry = Telemetry(lambda: usage, has_timings=True, has_progress=True)
    assert telemetry.timings() == {}, "before the first piece"
    assert telemetry.progress()["prompt_progress"] == {
        "total": 110,
        "cache": 10,
        "processed": 110,
        "time_ms": 2000,
    }
    assert telemetry.timings()["timings"] == {
        "cache_n": 10,
        "prompt_n": 100, "prompt_ms": 2000, "prompt_per_token_ms": 20, "prompt_per_second": 50,
        "predicted_n": 5, "predicted_ms": 500, "predicted_per_token_ms": 100, "predicted_per_second": 10,
    }  # fmt: skip


@pytest.mark.parametrize("count", [0, 1])
def test_rates_of_few_tokens(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    clock = iter([0.0, 2.0, 2.5])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    usage = Usage(10 + count, count, 10 + 2 * count, PromptDetails(10))
    telemetry = Telemetry(lambda: usage, has_timings=True, has_progress=True)
    telemetry.progress()
    timings = telemetry.timings()["timings"]
    assert (timings["prompt_per_token_ms"], timings["predicted_per_token_ms"]) == (2000, 500)
