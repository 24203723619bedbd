"""The data of the page of a timeline: numbers by iteration, and the spans of each request."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.rows import joined, row_members
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
    members = row_members(timeline.arrivals)
    rows = {n: joined([spans[each] for each in reads]) for n, reads in members.items()}
    return {
        "iterations": _iterations(timeline, spans),
        "requests": [_row(timeline, reads, rows[n], times) for n, reads in members.items()],
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


def _row(
    timeline: Timeline,
    members: Sequence[int],
    spans: Sequence[Span],
    times: Mapping[int, Sequence[float]],
) -> dict[str, Any]:
    """A request, or the reads of a call together: the state once, and all questions."""
    begin = timeline.origin
    arrivals = [timeline.arrivals[n] for n in members]
    arrival = arrivals[0]
    numbers: list[int] = []
    for each in spans:
        numbers += [KINDS.index(each.kind), each.first, each.last, each.start, each.tokens]
    row: dict[str, Any] = {
        "n": arrival.n,
        "id": arrival.request_id,
        "reads": len(members),
        "prompt": sum([each.prompt for each in arrivals]) - arrival.shared * (len(members) - 1),
        "limit": sum([each.max_tokens for each in arrivals]),
        "arrival": _micros(arrival.at - begin),
        "first": None,
        "answer": None,
        "reason": None,
        "generated": None,
        "cached": 0,
        "spans": numbers,
    }
    if all([times.get(n) for n in members]):
        row["first"] = _micros(max([times[n][0] for n in members]) - begin)
    ends = [timeline.ends[n] for n in members if n in timeline.ends]
    if len(ends) == len(members):
        last = max(ends, key=lambda end: end.at)
        row["answer"] = _micros(last.at - begin)
        generated = sum([end.generated for end in ends])
        row |= {"reason": last.reason, "generated": generated, "cached": ends[0].cached}
    return row


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)
