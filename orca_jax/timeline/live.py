"""The timeline of a running engine, for pages that watch it: numbers only, from any moment on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from orca_jax.engine import Engine
from orca_jax.sched.request import Request
from orca_jax.timeline.writer import Encode, Sink, TimelineHeader, TimelineWriter
from orca_jax.values.request import FinishReason, RequestUpdate
from orca_jax.values.step import StepPlan, StepResult

LIVE_SECONDS = 0.1  # between two groups of lines
MAX_LISTED = 1000  # live requests in a `LiveStart`


@dataclass(frozen=True, slots=True)
class LiveArrival:
    """The arrival of a request. `n` counts arrivals, and is the only name of a request."""

    n: int
    at: float  # seconds, on the engine's clock
    prompt: int  # tokens
    max_tokens: int
    # of a read of decisions, as in `Arrival`
    call: int | None = None
    shared: int = 0


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that is live when the watch begins."""

    n: int
    prompt: int
    max_tokens: int
    computed: int  # tokens in the KV cache
    generated: int
    has_row: bool


@dataclass(frozen=True, slots=True)
class LiveStart:
    """The engine at the beginning of a watch. Requests that are not listed have ended, unless there are too many."""

    at: float
    scheduler: str
    budget: int  # most tokens of one launch
    num_rows: int
    num_pages: int
    page_size: int
    num_arrived: int  # requests so far; fewer than before: this is another engine
    requests: list[LiveRequest]


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """The end of a request."""

    n: int
    at: float
    reason: FinishReason
    generated: int  # tokens


class LiveTimeline(TimelineWriter[bytes]):
    """A timeline without a beginning. Its lines hold counts and times: no names, tenants or hashes of requests.

    Args:
        engine: the engine to observe; attach this between two steps.
        head: settings of the engine.
        encode: encodes lines as JSON.
        sink: receives encoded lines, every `LIVE_SECONDS` while the engine works.
        clock: the clock of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        head: TimelineHeader,
        encode: Encode[bytes],
        sink: Sink[bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(head, encode, sink, clock, LIVE_SECONDS)
        self._close.detach()  # the lines of an engine that ends have no reader
        self._pool = engine.pool
        self._requests = {each.request_id: each for each in engine.pool if not each.has_ended}
        stats = engine.executor.stats
        self._tokens = stats.tokens
        self._padding = stats.padding_tokens
        self._launches = stats.launches
        self._idle = stats.idle_seconds
        self._finished.clear()

    def start(self) -> None:
        """Pass a `LiveStart` on. Every further watcher needs one, and the others may read it too."""
        kv = self._pool.kv
        start = LiveStart(
            at=self._clock(),
            scheduler=self._head.config.scheduler,
            budget=self._head.budget,
            num_rows=kv.num_rows,
            num_pages=sum(kv.num_blocks),
            page_size=kv.page_size,
            num_arrived=self._pool.num_arrived,
            requests=[_listed(each) for each in islice(self._requests.values(), MAX_LISTED)],
        )
        self._finished.append({"start": start})
        self.flush()

    def collected(self, plan: StepPlan, result: StepResult) -> None:
        """Record the time, unless the plan was submitted before the watch."""
        if self._in_flight and self._in_flight[0].iteration == plan.iteration:
            super().collected(plan, result)

    def delivered(self, updates: Sequence[RequestUpdate]) -> None:
        """Finish the line of the iteration, without requests that ended before the watch."""
        super().delivered([each for each in updates if each.request_id in self._requests])

    def _arrival(self, request: Request) -> LiveArrival:
        return LiveArrival(
            request.arrival_index,
            request.arrival,
            len(request.prompt_ids),
            request.params.max_tokens,
            self._calls.first_of(request),
            request.params.shared_tokens,
        )

    def _end(self, request: Request, now: float, reason: FinishReason) -> LiveEnd:
        return LiveEnd(request.arrival_index, now, reason, len(request.generated_ids))


def _listed(request: Request) -> LiveRequest:
    num_generated = len(request.generated_ids)
    return LiveRequest(
        request.arrival_index,
        len(request.prompt_ids),
        request.params.max_tokens,
        request.num_computed,
        num_generated,
        request.row is not None,
    )
