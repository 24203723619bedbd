"""Rows of a picture of a timeline: one for all reads of a call, and one for each other request."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from orca_jax.timeline.spans import Span, SpanKind
from orca_jax.timeline.writer import Arrival

_WORK: Sequence[SpanKind] = ("chunk", "increment", "repeat")


def row_members(arrivals: Mapping[int, Arrival]) -> dict[int, list[int]]:
    """The requests of each row, by the number of the first one: all reads of a call, or one other request."""
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for n, arrival in arrivals.items():
        first = n if arrival.call is None else arrival.call
        rows[first if first in arrivals else n].append(n)
    return dict(rows)


def joined(parts: Sequence[Sequence[Span]]) -> list[Span]:
    """The spans of a row: in an iteration the tokens of all working reads, or the state of the first one."""
    if len(parts) == 1:
        return [*parts[0]]
    columns: dict[int, Span] = {}
    for span in [span for spans in parts for span in spans]:
        tokens = span.tokens // (span.last - span.first + 1)
        for index in range(span.first, span.last + 1):
            _add(columns, Span(index, index, span.kind, span.start, tokens, span.held))
    row: list[Span] = []
    for index in sorted(columns):
        span = columns[index]
        goes_on = row and (row[-1].kind, row[-1].held) == (span.kind, span.held)
        if goes_on and span.kind not in _WORK and row[-1].last == index - 1:
            row[-1].last = index
        else:
            row.append(span)
    return row


def _add(columns: dict[int, Span], span: Span) -> None:
    """Add a span of one iteration to those of other reads."""
    known = columns.get(span.first)
    if known is None or (known.kind not in _WORK and span.kind in _WORK):
        columns[span.first] = span
    elif known.kind in _WORK and span.kind in _WORK:
        known.kind = min(known.kind, span.kind, key=_WORK.index)
        known.start = min(known.start, span.start)
        known.tokens += span.tokens
