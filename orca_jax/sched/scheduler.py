"""The contract of a scheduler: it decides which requests run next, and nothing else."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.step import MultiStep

Held = Literal["rows", "budget", "pages", "batch"]
"""The reason why the first waiting request was not admitted: all rows or places of the batch are taken, the token
budget is spent, its pages or slots are not free, or a whole batch has to end first."""


class Choice(NamedTuple):
    """A request of the next iteration, and the number of its tokens to process.

    A request that has ended but keeps its place repeats its last processed tokens.
    """

    request: Request
    num_tokens: int


class Selection(NamedTuple):
    """The requests of the next iteration, and those to preempt for it; no choices if no request can run."""

    choices: Sequence[Choice]
    preempted: Sequence[Request] = ()
    held: Held | None = None  # None if no request waits, or if the selection is empty
    multi_step: MultiStep | None = None  # None in nearly all selections


class SchedulerSettings(NamedTuple):
    """Settings for every kind of scheduler; each reads those that it has a use for."""

    max_bs: int
    n_workers: int
    token_budget: int
    ordering: Callable[[], Ordering]
    overlap: bool
    watermark: int
    check_in_intervals: tuple[int, ...] | None


class Scheduler(Protocol):
    """Decides. Admission, accounting and finishing exist once, in `plan`, `pool` and `results`.

    The class variables are its traits; other parts read them instead of comparing names.
    """

    has_reservations: ClassVar[bool]  # a request reserves all its slots when it is admitted; else pages on demand
    shares_prefixes: ClassVar[bool]  # requests may begin with pages of the prefix cache
    has_orderings: ClassVar[bool]  # `--scheduling-policy` decides the order
    has_token_budget: ClassVar[bool]  # an iteration has at most `--max-num-batched-tokens` tokens
    has_many_steps: ClassVar[bool]  # `--check-in-intervals` makes plans of many steps

    n_workers: int  # iterations that may be in flight

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> "Scheduler":
        """Make one; raises ConfigError for a setting that this kind cannot have."""
        ...

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Decide. Changes neither `pool` nor `kv`."""
        ...

    def may_return(self, request: Request) -> bool:
        """True if the tokens that a request has generated may be delivered now."""
        ...
