"""Converts a timeline to trace-event JSON for https://ui.perfetto.dev and chrome://tracing."""

from collections.abc import Iterator, Mapping

from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.spans import request_spans
from orca_jax.timeline.writer import IterationRecord

Event = dict[str, object]

_ENGINE, _REQUESTS = 1, 2  # "processes"
_HOST, _DEVICE = 1, 2  # the engine's "threads"


def perfetto(timeline: Timeline) -> dict[str, object]:
    """Return the content of the file: host, device and counters of the engine, and a track per request.

    Times are in microseconds.
    """
    origin = min(
        [arrival.at for arrival in timeline.arrivals.values()]
        + [each.selected for each in timeline.iterations[:1]]
    )
    writer = _Events(origin)
    events = [*_names(timeline)]
    for iteration in timeline.iterations:
        events += writer.engine(iteration)
    for n, spans in request_spans(timeline).items():
        for span in spans:
            first = timeline.iterations[span.first]
            last = timeline.iterations[span.last]
            begin = _begin(first)
            if span is spans[0] and span.kind == "waiting":
                begin = timeline.arrivals[n].at
            end = _begin(last) + last.device
            if span.kind in ("chunk", "increment", "repeat"):
                end = last.collected
            details: dict[str, object] = {"iterations": f"{first.iteration}..{last.iteration}"}
            if span.tokens:
                details |= {"position": span.start, "tokens": span.tokens}
            if span.held:
                details["first in line lacks"] = span.held
            events.append(writer.slice(_REQUESTS, n + 1, span.kind, begin, end, details))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Events:
    """Makes events with times relative to an origin."""

    def __init__(self, origin: float) -> None:
        self._origin = origin

    def slice(
        self,
        process: int,
        thread: int,
        name: str,
        begin: float,
        end: float,
        details: Mapping[str, object],
    ) -> Event:
        """Return an event with a duration."""
        start = 1e6 * (begin - self._origin)
        length = 1e6 * max(0.0, end - begin)
        return {
            "ph": "X",
            "pid": process,
            "tid": thread,
            "name": name,
            "ts": start,
            "dur": length,
            "args": details,
        }

    def engine(self, iteration: IterationRecord) -> Iterator[Event]:
        """Yield the events of both threads and of all counters for one iteration."""
        name = f"iteration {iteration.iteration}"
        details = {
            "members": len(iteration.increments) + len(iteration.chunks) + len(iteration.repeats),
            "tokens": iteration.tokens,
            "padding": iteration.padding,
            "launches": iteration.launches,
            "held": iteration.held,
        }
        yield self.slice(
            _ENGINE, _HOST, "select and plan", iteration.selected, iteration.planned, {"for": name}
        )
        yield self.slice(
            _ENGINE, _HOST, "submit", iteration.planned, iteration.submitted, {"of": name}
        )
        updated = iteration.collected + iteration.update
        yield self.slice(_ENGINE, _HOST, "update", iteration.collected, updated, {"of": name})
        yield self.slice(_ENGINE, _DEVICE, name, _begin(iteration), iteration.collected, details)
        for counter in ("tokens", "running", "waiting", "free_pages"):
            at = 1e6 * (iteration.planned - self._origin)
            value = {"value": getattr(iteration, counter)}
            yield {
                "ph": "C",
                "pid": _ENGINE,
                "name": counter.replace("_", " "),
                "ts": at,
                "args": value,
            }


def _names(timeline: Timeline) -> Iterator[Event]:
    for process, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for thread, name in ((_HOST, "host"), (_DEVICE, "device")):
        yield {
            "ph": "M",
            "pid": _ENGINE,
            "tid": thread,
            "name": "thread_name",
            "args": {"name": name},
        }
    for arrival in timeline.arrivals.values():
        track = {"ph": "M", "pid": _REQUESTS, "tid": arrival.n + 1}
        yield {
            **track,
            "name": "thread_name",
            "args": {"name": f"{arrival.n}: {arrival.request_id}"},
        }
        yield {**track, "name": "thread_sort_index", "args": {"sort_index": arrival.n}}


def _begin(iteration: IterationRecord) -> float:
    """Return the time at which the device began."""
    return iteration.collected - iteration.device
