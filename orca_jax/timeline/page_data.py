"""The data of the page of a timeline: numbers by iteration, and the spans of each request."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
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
    return {
        "iterations": _iterations(timeline, spans),
        "requests": _requests(timeline, spans, times),
    }


def drawn_spans(spans: Iterable[Span]) -> list[Span]:
    """Spans that are drawn: waits for different reasons joined, and none for an iteration without the request."""
    drawn: list[Span] = []
    for span in spans:
        goes_on = drawn and (drawn[-1].kind, drawn[-1].last + 1) == (span.kind, span.first)
        if goes_on and not span.tokens:
            drawn[-1].last = span.last
        elif span.kind in KINDS:
            drawn.append(span)
    return drawn


def _iterations(timeline: Timeline, spans: Mapping[int, list[Span]]) -> dict[str, list[Any]]:
    begin = timeline.origin
    every = timeline.iterations
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
    for span in chain.from_iterable(spans.values()):
        if span.kind != kind:
            continue
        length = span.last - span.first + 1
        for index in range(span.first, span.last + 1):
            tokens[index] += span.tokens // length
    return tokens


def _requests(
    timeline: Timeline, spans: Mapping[int, list[Span]], times: Mapping[int, Sequence[float]]
) -> list[dict[str, Any]]:
    begin = timeline.origin
    requests = []
    for n, arrival in timeline.arrivals.items():
        numbers: list[int] = []
        for each in spans[n]:
            numbers += [KINDS.index(each.kind), each.first, each.last, each.start, each.tokens]
        request: dict[str, Any] = {
            "n": n,
            "id": arrival.request_id,
            "prompt": arrival.prompt,
            "limit": arrival.max_tokens,
            "arrival": _micros(arrival.at - begin),
            "first": None,
            "answer": None,
            "reason": None,
            "generated": None,
            "cached": 0,
            "spans": numbers,
        }
        if times.get(n):
            request["first"] = _micros(times[n][0] - begin)
        if (end := timeline.ends.get(n)) is not None:
            request["answer"] = _micros(end.at - begin)
            request |= {"reason": end.reason, "generated": end.generated, "cached": end.cached}
        requests.append(request)
    return requests


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)
