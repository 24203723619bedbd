"""Writes the timeline of an engine (`--trace-file`): every arrival, iteration and end as a line of JSON.

A timeline holds counts, times and keyed hashes of pages, never token ids or text. `python -m orca_jax timeline` shows
it, and `python -m orca_jax bench replay` runs its arrivals again.

Lines are encoded and written in groups, right after a submission, while the device works. One at a time, each line
would find cold caches and take five times as long.
"""

import errno
import logging
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from orca_jax.sched.blocks import by_pool
from orca_jax.sched.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Held
from orca_jax.timeline.reads import ReadCalls
from orca_jax.values.config import CacheConfig, EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import FinishReason, RequestUpdate
from orca_jax.values.step import ExecutorStats, StepPlan, StepResult, spans_of

TIMELINE_VERSION = 4
FLUSH_LINES = 128  # lines written together, in half a millisecond
FLUSH_SECONDS = 1.0  # after this time fewer lines are written too

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimelineHeader:
    """Settings of the engine, on the first line of its timeline. All times are seconds on the clock of the engine."""

    version: int
    config: EngineConfig
    cache: CacheConfig
    max_model_len: int
    budget: int  # most tokens of one launch
    buckets: tuple[int, ...]  # empty: no padding
    unix_offset: float  # a time plus this is in seconds since 1970


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a request. `n` counts arrivals, and names the request in all other lines."""

    n: int
    request_id: str
    at: float
    prompt: int  # tokens
    max_tokens: int
    priority: int = 0
    tenant: int = 0  # keyed hash of the name; 0: no name
    deadline: float | None = None  # seconds after `at`
    predicted: float = 0.0  # predicted tokens to generate
    # (position, tokens) of the vector spans of the prompt
    spans: tuple[tuple[int, int], ...] = ()
    call: int | None = None  # of a read of decisions: the number of the first read of its call
    shared: int = 0  # tokens of the prompt that all reads of the call begin with


@dataclass(slots=True)
class IterationRecord:
    """One iteration, with its members by the kind of their work."""

    iteration: int
    selected: float  # time before the scheduler selects
    planned: float  # time when the plan is complete
    submitted: float  # time after the submission to the executor
    # (request, position): one generated token each; all of them sample
    increments: list[tuple[int, int]]
    # (request, position, tokens, samples): of prompts, or recomputed
    chunks: list[tuple[int, int, int, bool]]
    repeats: list[tuple[int, int, int]]  # (request, position, tokens): ended, and kept in the batch
    preempted: list[int]  # requests that lost their rows in this iteration
    tokens: int
    padding: int  # tokens that fill up buckets
    launches: int  # number of buckets
    running: int  # requests with a row
    waiting: int  # requests without one
    # the first waiting request lacks this: rows, budget, pages, batch; the others wait behind it
    held: str | None
    free_pages: int
    collected: float = 0.0  # time when the result has arrived
    # seconds to `collected` from `planned`, or from the previous `collected` if that is later
    device: float = 0.0
    # at most this many seconds without work for the device since the previous submission
    idle: float = 0.0
    update: float = 0.0  # seconds of the host to record and deliver the result
    # (request, number of sampled ids); None: one id per sampling member
    told: list[tuple[int, int]] | None = None
    # (request, ids proposed to follow its increment); None: no ids
    proposed: list[tuple[int, int]] | None = None
    # decisions of a policy from outside that were changed, since the previous iteration
    overruled: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The end of a request, when its last update is delivered."""

    n: int
    at: float
    reason: FinishReason
    generated: int  # tokens
    cached: int  # prompt tokens found in the prefix cache
    # With prefix caching, keyed hashes of the full pages of the prompt, and of the tokens after them: equal ones have
    # equal hashes.
    pages: list[int]


type TimelineLine = Mapping[str, Any]
"""A line: one of "head", "arrival", "iteration" and "end", with its record above."""

type Encode[Lines] = Callable[[Sequence[TimelineLine]], Lines]
type Sink[Lines] = Callable[[Lines], None]


def check_trace_file(path: str) -> None:
    """Refuse a file that `TimelineFile` could not append to, without a change of the file or its directory.

    Raises:
        ConfigError: the file is not a regular file, or its directory is missing, or either is not writable.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe could block the engine
        message = f"trace_file {path!r} is not a regular file; give the name of a file"
        raise ConfigError(message, param="trace_file")
    reason = None
    if not os.path.isdir(folder):
        reason = errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        reason = errno.EACCES
    if reason is not None:
        raise _unwritable(path, os.strerror(reason))


def _unwritable(path: str, reason: str | None) -> ConfigError:
    message = (
        f"trace_file {path!r} cannot be written: {reason}; give a file in a writable directory"
    )
    return ConfigError(message, param="trace_file")


class TimelineFile:
    """Appends to a file. The file is open only during a write, so it needs no `close`.

    Raises:
        ConfigError: the file cannot be written, or is not a regular file.
    """

    def __init__(self, path: str) -> None:
        check_trace_file(path)
        self._path = os.path.abspath(path)
        try:
            with open(self._path, "ab"):
                pass
        except OSError as error:
            raise _unwritable(path, error.strerror) from error

    def __call__(self, data: bytes) -> None:
        """Append data. If the disk is full, the data are lost, and the engine continues."""
        try:
            with open(self._path, "ab") as file:
                file.write(data)
        except OSError as error:
            logger.warning("%d bytes of the timeline are lost: %s", len(data), error.strerror)


class TimelineWriter[Lines](Observer):
    """Records a timeline.

    Args:
        head: the first line.
        encode: encodes lines as JSON, or copies them into a list.
        sink: receives encoded lines, several per call.
        clock: the clock of the engine.
        flush_seconds: time after which lines are passed to the sink at the next submission.
    """

    def __init__(
        self,
        head: TimelineHeader,
        encode: Encode[Lines],
        sink: Sink[Lines],
        clock: Callable[[], float] = time.monotonic,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self._head = head
        config = head.config
        self._has_runs = config.speculative_config is not None
        self._encode = encode
        self._sink = sink
        self._clock = clock
        self._flush_seconds = flush_seconds
        # not in the file, and not Python's hash seed, which a user may set
        self._secret = secrets.token_bytes(32)
        self._requests: dict[str, Request] = {}  # until the last update of each
        self._calls = ReadCalls()
        self._preempted: list[int] = []  # for the next iteration
        self._in_flight: deque[IterationRecord] = deque()
        self._current: IterationRecord | None = None  # collected in this step
        self._finished: list[TimelineLine] = [{"head": head}]  # lines to write
        # totals of the executor at the last submission
        self._tokens = self._padding = self._launches = 0
        self._idle = 0.0
        self._held: Held | None = None  # of the coming iteration
        self._overruled = 0  # likewise
        self._selected = self._planned = self._collected = self._flushed = clock()
        self._close = weakref.finalize(self, _write, self._finished, encode, sink)  # or at exit

    def arrived(self, request: Request) -> None:
        """Record the arrival of a request."""
        self._requests[request.request_id] = request
        self._finished.append({"arrival": self._arrival(request)})

    def _arrival(self, request: Request) -> object:
        urgency = request.urgency
        return Arrival(
            n=request.arrival_index,
            request_id=request.request_id,
            at=request.arrival,
            prompt=len(request.prompt_ids),
            max_tokens=request.params.max_tokens,
            priority=urgency.priority,
            tenant=self._keyed(urgency.tenant.encode()) if urgency.tenant else 0,
            deadline=urgency.deadline,
            predicted=request.predicted_output,
            spans=tuple([(span.place, span.length) for span in spans_of(request.prompt_ids)]),
            call=self._calls.first_of(request),
            shared=request.params.shared_tokens,
        )

    def selecting(self) -> None:
        """Record the time."""
        self._selected = self._clock()

    def preempted(self, request: Request) -> None:
        """Note the request for the line of the next iteration."""
        self._preempted.append(request.arrival_index)

    def overruled(self) -> None:
        """Count the decision for the line of the next iteration."""
        self._overruled += 1

    def planned(self, held: Held | None) -> None:
        """Record the time, and the reason why a request waits."""
        self._planned = self._clock()
        self._held = held

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        """Record the plan; from time to time, write the finished lines."""
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
            held=self._held if len(pool) > pool.kv.num_held_rows else None,
            free_pages=sum(by_pool(pool.kv.num_free_blocks)),
            idle=stats.idle_seconds - self._idle,
            overruled=self._overruled,
        )
        self._add_members(record, plan)
        self._tokens = stats.tokens
        self._padding = stats.padding_tokens
        self._launches = stats.launches
        self._idle = stats.idle_seconds
        self._preempted = []
        self._overruled = 0
        self._in_flight.append(record)
        if len(self._finished) >= FLUSH_LINES or now - self._flushed >= self._flush_seconds:
            self.flush()

    def collected(self, plan: StepPlan, result: StepResult) -> None:
        """Record the time, and for a plan with proposals the number of sampled ids."""
        now = self._clock()
        self._current = record = self._in_flight.popleft()
        record.collected = now
        if self._has_runs and any([len(each.run) > 1 for each in result.members]):
            told = zip(plan.members, result.members, strict=True)
            record.told = [
                (self._requests[m.request_id].arrival_index, len(each.run))
                for m, each in told
                if each.run
            ]
        record.device = now - max(record.planned, self._collected)
        self._collected = now

    def delivered(self, updates: Sequence[RequestUpdate]) -> None:
        """Finish the line of the iteration; write all lines if no request is left."""
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

    def _end(self, request: Request, now: float, reason: FinishReason) -> object:
        num_full = len(request.prompt_ids) // self._head.cache.page_size
        digests = request.page_digests[:num_full]
        if request.prompt_digest and len(request.prompt_ids) % self._head.cache.page_size:
            digests.append(request.prompt_digest)
        pages = [self._keyed(digest) for digest in digests]
        return End(
            request.arrival_index,
            now,
            reason,
            len(request.generated_ids),
            request.num_cached,
            pages,
        )

    def flush(self) -> None:
        """Pass all lines to the sink."""
        self._flushed = self._clock()
        _write(self._finished, self._encode, self._sink)

    def _keyed(self, content: bytes) -> int:
        """Hash with the secret of the run: a guess of a prompt or of an API key cannot be checked against the file."""
        return int.from_bytes(
            blake2b(content, digest_size=8, key=self._secret).digest(), signed=True
        )

    def _add_members(self, record: IterationRecord, plan: StepPlan) -> None:
        """Add the members by kind. This is the only part with a time that grows with the batch."""
        requests = self._requests
        increments = record.increments
        for member in plan.members:
            request = requests[member.request_id]
            start = member.start
            # a generated token: the usual case when iterations overlap
            if member.last_on_device and not member.ids:
                increments.append((request.arrival_index, start))
                continue
            n = request.arrival_index
            size = member.num_tokens
            if member.num_drafts:
                increments.append((n, start))
                record.proposed = [*(record.proposed or ()), (n, member.num_drafts)]
                continue
            if request.finish_reason is not None:
                record.repeats.append((n, start, size))
            elif size == 1 and member.is_sampling and start >= len(request.prompt_ids):
                increments.append((n, start))
            else:
                record.chunks.append((n, start, size, member.is_sampling))


def _write[Lines](finished: list[TimelineLine], encode: Encode[Lines], sink: Sink[Lines]) -> None:
    if finished:
        sink(encode(finished))
        finished.clear()
