"""The data of the page of a timeline: numbers by iteration, and the spans of each request."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orca_jax.timeline.read import Timeline
from orca_jax.timeline.spans import Span, request_spans

KINDS = ("chunk", "increment", "repeat", "waiting", "preempted")
"""Kinds of drawn spans, by the number that stands for each in the data; `page/recording.js` has the same list."""


def page_json(timeline: Timeline, times: Mapping[int, Sequence[float]]) -> str:
    """The data as JSON that may stand within a script element: no tag and no comment can begin in it."""
    text = json.dumps(page_data(timeline, times), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(timeline: Timeline, times: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The data of the page. Times are whole microseconds since the first arrival.

    Args:
        timeline: a timeline with at least one arrival.
        times: those of `token_times`.
    """
    spans = {n: drawn_spans(each) for n, each in request_spans(timeline).items()}
    return {"iterations": _iterations(timeline, spans), "requests": _requests(timeline, spans, times)}


def drawn_spans(spans: Iterable[Span]) -> list[Span]:
    """Spans that are drawn: waits for different reasons joined, and none for an iteration without the request."""
    drawn: list[Span] = []
    for span in spans:
        last = drawn[-1] if drawn else None
        if last is not None and last.kind == span.kind and last.last == span.first - 1 and not span.tokens:
            last.last = span.last
        elif span.kind in KINDS:
            drawn.append(span)
    return drawn


def _iterations(timeline: Timeline, spans: Mapping[int, list[Span]]) -> dict[str, list[Any]]:
    begin, every = timeline.origin, timeline.iterations
    return {
        "number": [each.iteration for each in every],
        "begin": [_micros(each.collected - each.device - begin) for each in every],
        "end": [_micros(each.collected - begin) for each in every],
        "tokens": [each.tokens for each in every],
        "chunk": _tokens_of("chunk", len(every), spans),
        "repeat": _tokens_of("repeat", len(every), spans),
        "padding": [each.padding for each in every],
        "launches": [each.launches for each in every],
        "running": [each.running for each in every],
        "waiting": [each.waiting for each in every],
        "held": [each.held for each in every],
        "free": [each.free_pages for each in every],
        "device": [_micros(each.device) for each in every],
        "host": [_micros(each.planned - each.selected + each.update) for each in every],
    }


def _tokens_of(kind: str, count: int, spans: Mapping[int, list[Span]]) -> list[int]:
    """Tokens of a kind of work in each iteration."""
    tokens = [0] * count
    for span in (span for each in spans.values() for span in each if span.kind == kind):
        length = span.last - span.first + 1
        for index in range(span.first, span.last + 1):
            tokens[index] += span.tokens // length
    return tokens


def _requests(
    timeline: Timeline, spans: Mapping[int, list[Span]], times: Mapping[int, Sequence[float]]
) -> list[dict[str, Any]]:
    begin, requests = timeline.origin, []
    for n, arrival in timeline.arrivals.items():
        end = timeline.ends.get(n)
        first = times[n][0] if times.get(n) else None
        numbers = [[KINDS.index(each.kind), each.first, each.last, each.start, each.tokens] for each in spans[n]]
        requests.append(
            {
                "n": n,
                "id": arrival.request_id,
                "prompt": arrival.prompt,
                "limit": arrival.max_tokens,
                "arrival": _micros(arrival.at - begin),
                "first": None if first is None else _micros(first - begin),
                "answer": None if end is None else _micros(end.at - begin),
                "reason": None if end is None else end.reason,
                "generated": None if end is None else end.generated,
                "cached": 0 if end is None else end.cached,
                "spans": [number for each in numbers for number in each],
            }
        )
    return requests


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)
