"""The engine's diary (`--trace-file`): every arrival, iteration and end as a line of JSON.

It holds counts, times and keyed numbers of pages, never token ids or text. `python -m orca_jax.timeline` shows and
replays it.

Lines are made and written in bundles, right after a submission, while a device works: one at a time, each would find
cold caches and take five times as long.
"""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca_jax.config import CacheConfig, EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.observer import Observer
from orca_jax.request import FinishReason, Request, RequestUpdate
from orca_jax.sched.pool import RequestPool
from orca_jax.step import ExecutorStats, StepPlan, StepResult

TIMELINE_VERSION = 1
FLUSH_LINES = 128  # lines that are made and written together, in half a millisecond
FLUSH_SECONDS = 1.0  # after which fewer are, too

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimelineHeader:
    """The engine whose lines follow. All times are seconds on its clock."""

    version: int
    config: EngineConfig
    cache: CacheConfig
    max_model_len: int
    budget: int  # tokens of one launch at most
    buckets: tuple[int, ...]  # empty: nothing is padded
    unix_offset: float  # added to a time, seconds since 1970


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request came. `n` counts arrivals, and is its name in all other lines."""

    n: int
    request_id: str
    at: float
    prompt: int  # tokens
    max_tokens: int
    priority: int = 0
    tenant: int = 0  # a number instead of a name
    deadline: float | None = None  # seconds after `at`
    predicted: float = 0.0  # tokens that it was thought to generate


@dataclass(slots=True)
class IterationRecord:
    """One iteration; its members by what they did."""

    iteration: int
    selected: float  # when the scheduler was asked
    planned: float  # when it was decided
    submitted: float  # when the executor had it
    increments: list[tuple[int, int]]  # (request, position): one generated token each, all sample
    chunks: list[tuple[int, int, int, bool]]  # (request, position, tokens, samples): of prompts, or computed anew
    repeats: list[tuple[int, int, int]]  # (request, position, tokens): ended, and kept in a batch
    preempted: list[int]  # requests that lost their rows for it
    tokens: int
    padding: int  # tokens that only fill buckets
    launches: int  # buckets
    running: int  # requests with a row
    waiting: int  # requests without one
    held: str | None  # why the first of those was not admitted: rows, budget, pages, batch; the others wait behind it
    free_pages: int
    collected: float = 0.0  # when its result was there
    device: float = 0.0  # seconds from `planned`, or from the previous one's `collected`, to `collected`
    idle: float = 0.0  # seconds in which the device had nothing to do since the previous one was submitted, at most
    update: float = 0.0  # seconds of the host, to record and hand out the result
    steps: int = 1  # how often it was run in one dispatch; tokens, padding and positions are of the first time
    told: list[tuple[int, int]] | None = None  # (request, ids) that came with it; None: one of each that samples


@dataclass(frozen=True, slots=True)
class End:
    """A request's last update was handed out."""

    n: int
    at: float
    reason: FinishReason
    generated: int  # tokens
    cached: int  # tokens of the prompt that were not computed again
    pages: list[int]  # numbers of the prompt's full pages where prefixes are reused: equal for equal content


Encode = Callable[[Sequence[object]], bytes]
Sink = Callable[[bytes], None]


class TimelineFile:
    """Appends to a file. It is open only while it is written to: nobody has to close it.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        try:
            with open(self._path, "ab"):
                pass
        except OSError as error:
            message = f"trace_file {path!r} cannot be written: {error.strerror}; name a file in a directory that can be"
            raise ConfigError(message, param="trace_file") from error

    def __call__(self, data: bytes) -> None:
        """Append. A full disk costs the lines, not the requests."""
        try:
            with open(self._path, "ab") as file:
                file.write(data)
        except OSError as error:
            logger.warning("%d bytes of the trace are lost: %s", len(data), error.strerror)


class TimelineWriter(Observer):
    """Writes down what an engine does.

    Args:
        head: what the engine is.
        encode: values as lines of JSON.
        sink: takes lines, several at a time.
        clock: the engine's.
    """

    def __init__(
        self, head: TimelineHeader, encode: Encode, sink: Sink, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._head = head
        self._encode, self._sink = encode, sink
        self._clock = clock
        self._requests: dict[str, Request] = {}  # until their last update
        self._preempted: list[int] = []  # for the coming iteration
        self._in_flight: deque[IterationRecord] = deque()
        self._current: IterationRecord | None = None  # collected in this turn
        self._finished: list[object] = [{"head": head}]  # not written yet
        self._tokens = self._padding = self._launches = 0  # the executor's totals
        self._idle = 0.0
        self._selected = self._planned = self._collected = self._flushed = clock()
        self._close = weakref.finalize(self, _write, self._finished, encode, sink)  # at the end of the program at last

    def arrived(self, request: Request) -> None:
        """Remember it, for the names in iterations."""
        self._requests[request.request_id] = request
        urgency = request.urgency
        arrival = Arrival(
            n=request.arrival_index,
            request_id=request.request_id,
            at=request.arrival,
            prompt=len(request.prompt_ids),
            max_tokens=request.params.max_tokens,
            priority=urgency.priority,
            tenant=hash(urgency.tenant),  # salted for each process, so that nobody reads a key out of it
            deadline=urgency.deadline,
            predicted=request.predicted_output,
        )
        self._finished.append({"arrival": arrival})

    def selecting(self) -> None:
        """Take the time."""
        self._selected = self._clock()

    def preempted(self, request: Request) -> None:
        """Part of the coming iteration's line."""
        self._preempted.append(request.arrival_index)

    def planned(self) -> None:
        """Take the time."""
        self._planned = self._clock()

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        """Write down the plan, and now and then what has finished."""
        now = self._clock()
        record = IterationRecord(
            iteration=plan.iteration,
            selected=self._selected,
            planned=self._planned,
            submitted=now,
            increments=[],
            chunks=[],
            repeats=[],
            preempted=self._preempted,
            tokens=stats.tokens - self._tokens,
            padding=stats.padding_tokens - self._padding,
            launches=stats.launches - self._launches,
            running=pool.kv.num_held_rows,
            waiting=len(pool) - pool.kv.num_held_rows,
            held=None,
            free_pages=pool.kv.num_free_pages,
            idle=stats.idle_seconds - self._idle,
        )
        self._add_members(record, plan)
        record.held = self._why_held(record, len(plan.members), pool) if record.waiting else None
        self._tokens, self._padding, self._launches = stats.tokens, stats.padding_tokens, stats.launches
        self._idle = stats.idle_seconds
        self._preempted = []
        self._in_flight.append(record)
        if len(self._finished) >= FLUSH_LINES or now - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def collected(self, plan: StepPlan, result: StepResult) -> None:
        """Take the time, and what cannot be known before of a plan that repeats."""
        now = self._clock()
        self._current = record = self._in_flight.popleft()
        record.collected = now
        if result.runs:
            record.steps = result.num_steps
            sampling = [self._requests[member.request_id] for member in plan.members if member.samples]
            told = zip(sampling, result.runs, strict=True)
            record.told = [(request.arrival_index, len(run)) for request, run in told if run]
        record.device = now - max(record.planned, self._collected)
        self._collected = now

    def delivered(self, updates: Sequence[RequestUpdate]) -> None:
        """The iteration is done with; write everything where nobody is left."""
        now = self._clock()
        if self._current is not None:
            self._current.update = now - self._current.collected
            self._finished.append({"iteration": self._current})
            self._current = None
        for update in updates:
            if update.finish_reason is not None:
                request = self._requests.pop(update.request_id)
                self._finished.append({"end": self._end(request, now, update.finish_reason)})
        if not self._requests:
            self.flush()

    def _end(self, request: Request, now: float, reason: FinishReason) -> End:
        num_full = len(request.prompt_ids) // self._head.cache.page_size
        # The hash of bytes is keyed with a secret of the process, so that pages can be compared and not be guessed.
        pages = [hash(digest) for digest in request.page_digests[:num_full]]
        return End(request.arrival_index, now, reason, len(request.generated_ids), request.num_cached, pages)

    def flush(self) -> None:
        """Hand all lines to the sink."""
        self._flushed = self._clock()
        _write(self._finished, self._encode, self._sink)

    def _add_members(self, record: IterationRecord, plan: StepPlan) -> None:
        """The one part whose time grows with the batch."""
        requests, increments = self._requests, record.increments
        for member in plan.members:
            request, start = requests[member.request_id], member.start
            if member.last_on_device and not member.ids:  # most of them where iterations overlap: a generated token
                increments.append((request.arrival_index, start))
                continue
            n, size = request.arrival_index, member.num_tokens
            if request.finish_reason is not None:
                record.repeats.append((n, start, size))
            elif size == 1 and member.samples and start >= len(request.prompt_ids):
                increments.append((n, start))
            else:
                record.chunks.append((n, start, size, member.samples))

    def _why_held(self, record: IterationRecord, num_members: int, pool: RequestPool) -> str:
        """Why nobody else was admitted; a full batch is told before a spent budget, and that before pages."""
        config = self._head.config
        if not pool.kv.num_free_rows or num_members >= config.max_num_seqs:
            return "rows"
        if config.scheduler == "request_level":
            return "batch"
        if config.scheduler == "chunked" and record.tokens >= self._head.budget:
            return "budget"
        return "pages"


def _write(finished: list[object], encode: Encode, sink: Sink) -> None:
    if finished:
        sink(encode(finished))
        finished.clear()
