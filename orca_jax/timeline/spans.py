"""Divides the life of each request into spans of iterations, for all pictures of a timeline."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.writer import Arrival, IterationRecord

SpanKind = Literal["chunk", "increment", "repeat", "waiting", "preempted", "idle"]

KINDS: dict[SpanKind, str] = {
    "chunk": "prefill (initiation): a chunk of the prompt, or recomputed tokens",
    "increment": "increment: one generated token",
    "repeat": "ended, and still in the batch",
    "waiting": "waiting for admission",
    "preempted": "preempted, and waiting again",
    "idle": "admitted, and not in this iteration",
}


@dataclass(slots=True)
class Span:
    """Consecutive iterations, by their index in the timeline, in which a request did one thing."""

    first: int
    last: int
    kind: SpanKind
    start: int = 0  # position of the first token, if there are tokens
    tokens: int = 0
    held: str | None = None  # waiting: the resource that the first waiting request lacks


def request_spans(timeline: Timeline) -> dict[int, list[Span]]:
    """Return the spans of each request, from its arrival to its end.

    A member of an iteration with a later result than the end of the request is a repeat: its token is dropped.
    """
    spans: dict[int, list[Span]] = {n: [] for n in timeline.arrivals}
    coming = deque(sorted(timeline.arrivals.values(), key=lambda arrival: arrival.at))
    live: dict[int, SpanKind] = {}  # the state of a request outside of the iteration
    for index, iteration in enumerate(timeline.iterations):
        _update_live(timeline, iteration, coming, live)
        taking_part = _member_spans(iteration, index)
        for n in iteration.preempted:
            live[n] = "preempted"
        for n, span in taking_part.items():
            if n in live:
                live[n] = "idle"
                _extend(spans[n], span)
            elif n in timeline.ends and n in spans:
                _extend(spans[n], replace(span, kind="repeat"))
        for n, kind in live.items():
            if n not in taking_part:
                held = iteration.held if kind in ("waiting", "preempted") else None
                _extend(spans[n], Span(index, index, kind, held=held))
    return spans


def _update_live(
    timeline: Timeline,
    iteration: IterationRecord,
    coming: deque[Arrival],
    live: dict[int, SpanKind],
) -> None:
    """Add newly arrived requests, and remove those that end before the result of this iteration."""
    while coming and coming[0].at <= iteration.planned:
        live[coming.popleft().n] = "waiting"
    gone = [n for n in live if n in timeline.ends and timeline.ends[n].at <= iteration.collected]
    for n in gone:
        del live[n]


def _member_spans(iteration: IterationRecord, index: int) -> dict[int, Span]:
    """Return the span of each member in this iteration."""
    proposed = dict(iteration.proposed or ())
    spans = {
        n: Span(index, index, "increment", start, 1 + proposed.get(n, 0))
        for n, start in iteration.increments
    }
    spans |= {n: Span(index, index, "chunk", start, size) for n, start, size, _ in iteration.chunks}
    return spans | {
        n: Span(index, index, "repeat", start, size) for n, start, size in iteration.repeats
    }


def _extend(spans: list[Span], span: Span) -> None:
    """Append a span, joined to the span before it if both are of the same kind."""
    last = spans[-1] if spans else None
    same = (
        last is not None
        and last.last == span.first - 1
        and (last.kind, last.held) == (span.kind, span.held)
    )
    if (
        last is None
        or not same
        or span.kind == "chunk"
        or (span.kind == "increment" and not _follows(span, last))
    ):
        spans.append(span)
        return
    last.last = span.last
    last.tokens += span.tokens


def _follows(span: Span, last: Span) -> bool:
    """True if an increment is the token after those of a span, and none of them has proposals (speculation)."""
    length = span.first - last.first
    return span.tokens == 1 and last.tokens == length and span.start == last.start + length
