"""The contract of a scheduler: it selects the requests of the next iteration, and does nothing else."""

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

from orca_jax.sched.blocks import BlockCount
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.cache import NO_HIT, Hit
from orca_jax.sched.request import Request
from orca_jax.values.config import Traits

Held = Literal["rows", "budget", "pages", "batch", "adapters", "prompt"]
"""The reason why the first waiting request was not admitted: all rows or places of the batch are taken, the token
budget is spent, its blocks or slots are not free, a whole batch has to end first, its adapter has no slot, or another
request computes the same prompt."""


class Choice(NamedTuple):
    """A request of the next iteration, and the number of its tokens to process.

    An ended request may keep its place; it then repeats its last processed tokens. Only a choice of one token, which is
    the newest of its request and known to the host, has drafts. A waiting request may begin with a hit, which was found
    for this selection.
    """

    request: Request
    num_tokens: int
    # ids proposed to follow (`drafts/scheduler.py`); the schedulers themselves leave it
    drafts: Sequence[int] = ()
    hit: Hit = NO_HIT


class Selection(NamedTuple):
    """The requests of the next iteration, and those to preempt for it; no choices if no request can run."""

    choices: Sequence[Choice]
    preempted: Sequence[Request] = ()
    held: Held | None = None  # None if no request waits, or if the selection is empty
    is_overruled: bool = False  # a policy from outside decided something else
    is_slow: bool = False  # it took long
    # seconds until the next selection, if nothing happens before and this one is empty
    wake_after: float | None = None


type MeasuredSeconds = Callable[[Sequence[tuple[int, int, bool]]], float]
"""Expected seconds of an iteration, given (first position, tokens, is an increment) of each member."""


def unknown_seconds(work: Sequence[tuple[int, int, bool]]) -> float:
    """Return 0.0: nothing is measured."""
    return 0.0


class SchedulerSettings(NamedTuple):
    """Settings for every kind of scheduler; each kind reads some of them."""

    max_bs: int
    n_workers: int
    token_budget: int
    ordering: Callable[[], Ordering]
    num_ahead: int  # iterations submitted before the results that they follow are read
    watermark: BlockCount
    num_stages: int = 1  # of the pipeline; each has its own iteration
    num_rows: int = 0  # requests with a row; 0: those of the iterations
    seconds: MeasuredSeconds = unknown_seconds  # expected, of an iteration
    clock: Callable[[], float] = time.perf_counter  # measures decisions; they take no virtual time


class Scheduler(Protocol):
    """Selects requests. Admission, accounting and finishing exist once, in `plan`, `pool` and `request`."""

    n_workers: int  # iterations that may be in flight

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Select the requests of the next iteration. Changes neither `pool` nor `kv`."""
        ...

    def may_return(self, request: Request) -> bool:
        """True if the new tokens of a request may be delivered now."""
        ...


class KnownScheduler(Scheduler, Protocol):
    """A scheduler that settings can name. Other parts read its traits instead of comparing names."""

    traits: ClassVar[Traits]


class SchedulerKind(Protocol):
    """Makes schedulers of one kind: a class of this package, or a policy from outside."""

    @property
    def traits(self) -> Traits: ...

    def from_settings(self, settings: SchedulerSettings) -> KnownScheduler:
        """Make a scheduler. Raises ConfigError for a setting beyond its abilities."""
        ...
