"""The protocols between the engine and classes from outside. A change that breaks these classes raises `API`."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from orca_jax.sched.blocks import BlockCount
from orca_jax.sched.predict import Predictor
from orca_jax.sched.prefixes.spans import Keeping, KeptSpan

API = 1
"""The version of these protocols; each class names its version."""


class RequestView(Protocol):
    """A request, as a policy sees it. All values are of this moment; read them again in the next decision.

    A policy may keep views, in sets and as keys too. Times are seconds on the clock of `PolicyView.now`. Tokens of
    iterations in flight count too, unless it is said.

    Attributes:
        index: order of arrival, unique.
        arrival: seconds.
        num_prompt: tokens of the prompt.
        max_tokens: most tokens to generate.
        num_generated: generated tokens that the host has read.
        num_pending: generated tokens that are only on the device yet.
        num_computed: tokens in the KV cache.
        num_left: tokens that may be processed now; 0: it cannot run in this iteration.
        num_cached: tokens of a waiting job that the prefix cache has; 0 for a resident.
        is_resident: it has a row and pages.
        num_evictions: times that it lost them.
        predicted: predicted number of generated tokens.
        priority: number of the caller; lower values are more urgent.
        tenant: name of the caller; "" without one.
        deadline: seconds after `arrival`, as the caller wishes.
        program: name of the agent or conversation that the request is part of; "" without one.
        weight: share of the engine that the caller wishes, relative to others.
        ttft: seconds to the first token, as the caller wishes.
        tpot: seconds between two tokens, as the caller wishes.
        first_token: time of the first token's delivery; None: there is none yet.
        last_token: time of the newest token's delivery.
    """

    @property
    def index(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_generated(self) -> int: ...
    @property
    def num_pending(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def num_left(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def is_resident(self) -> bool: ...
    @property
    def num_evictions(self) -> int: ...
    @property
    def predicted(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def program(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def ttft(self) -> float | None: ...
    @property
    def tpot(self) -> float | None: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def last_token(self) -> float | None: ...


class PolicyView(Protocol):
    """The state of the engine for one decision; do not keep it.

    Pages are counted by values that can be added, subtracted and compared: `a > b` is true if `b` does not hold `a`.
    They are ints for a model with one pool of pages.

    Attributes:
        now: seconds.
        max_batch: most jobs of an iteration.
        max_draws: most jobs of an iteration that draw a token: a share of the jobs in a pipeline, else `max_batch`.
        token_budget: most tokens of an iteration.
        free_rows: waiting jobs that can become residents; each eviction gives one more.
        free_pages: pages that are not in use, and pages of the prefix cache.
        num_pages: all pages.
        residents: jobs with a row, in the order of admission; jobs about to leave are left out.
        waiting: the other jobs that could get a row, in the order of arrival; read it lazily, it may be long.
    """

    now: float
    max_batch: int
    max_draws: int
    token_budget: int
    free_rows: int
    free_pages: BlockCount
    num_pages: BlockCount
    residents: Sequence[RequestView]

    @property
    def waiting(self) -> Iterable[RequestView]: ...

    def pages(self, job: RequestView, num_tokens: int) -> BlockCount:
        """Pages that a job takes, beside its own, until `num_tokens` tokens more are computed."""
        ...

    def most_pages(self, num_tokens: int, num_jobs: int) -> BlockCount:
        """Pages that so many residents take at most, until so many tokens more of them are computed; found quickly."""
        ...

    def use_whole_pages(self, job: RequestView) -> None:
        """Reuse only whole cached pages for a waiting job: `num_cached` falls, and it may take a page less.

        Otherwise the beginning of a page is copied too, and the source of the copy must not be given to others.
        """
        ...

    def releases(self, job: RequestView) -> BlockCount:
        """Pages that the eviction of a resident gives back."""
        ...

    def seconds(self, work: Sequence[tuple[RequestView, int]]) -> float:
        """Expected seconds of an iteration with this work; 0.0 while nothing is measured."""
        ...

    def in_order(self, order: "Order", watermark: BlockCount = 0) -> "Decision":
        """The decision of the scheduler `chunked` with an order, such as one that the policy itself gives.

        Increments come first, then chunks of residents, then newcomers, unless a resident lacks pages. While one does,
        the last residents lose theirs. If the order preempts, residents and waiting jobs are chosen together: those
        behind are paused, and the last ones lose rows and pages that others lack. The resident admitted longest ago
        keeps its own.

        Args:
            order: the same object in each decision.
            watermark: pages to keep free when a job is admitted beside others.
        """
        ...


class Decision(NamedTuple):
    """The next iteration.

    A resident that is not in `run` is paused: it keeps its row and pages. An evicted job waits again; its tokens are
    computed again later.

    Attributes:
        run: jobs and the number of tokens of each, from 1 to `num_left`. The engine may cut the number at a border of
            recurrent states, and lets a waiting job wait whose cached pages are those of a job in `evict`.
        evict: residents that lose row and pages before the iteration.
        wake_after: seconds, from 0 to 5, after which the policy is asked again if nothing happens before; only if
            `run` is empty.
    """

    run: Sequence[tuple[RequestView, int]]
    evict: Sequence[RequestView] = ()
    wake_after: float | None = None


class Policy(Protocol):
    """A scheduler from outside: `--scheduler FILE.py:CLASS`.

    The class is called with the keys of `--scheduler-options` as keyword arguments. A decision is applied as a whole,
    or ends the engine with an error that names the policy.

    Attributes:
        api: the value of `API` for which it is written.
        reads: names of the fields of `RequestView` that it needs from callers or predictors, among `predicted`,
            `priority`, `tenant`, `deadline`, `program`, `weight`, `ttft` and `tpot`. Calls that give others
            are refused.
        may_starve: True if a job may wait for ever while others arrive.
    """

    api: ClassVar[int]
    reads: ClassVar[frozenset[str]]
    may_starve: ClassVar[bool]

    def __init__(self, **options: Any) -> None: ...

    def decide(self, view: PolicyView) -> Decision:
        """Return the next iteration. It must not change jobs or view."""
        ...

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Take note of a job in an iteration, once for each entry of `run`."""
        ...

    def ended(self, job: RequestView) -> None:
        """Take note of a job that has left the engine, for any reason."""
        ...


class Order(Protocol):
    """An order of jobs for the scheduler `chunked`: `--scheduling-policy FILE.py:CLASS`.

    It may have two members more. `reads` is that of a `Policy`; without it calls may give all fields.
    `charge(job, num_tokens)` is called for each job of an iteration, so that a key can count service.

    Attributes:
        api: the value of `API` for which it is written.
        preempts: True if a waiting job may take row and pages of a resident that is behind it.
        is_static: True if the key of a job never changes; then waiting jobs are sorted once.
    """

    api: ClassVar[int]
    preempts: ClassVar[bool]
    is_static: ClassVar[bool]

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """The place of a job: the lowest key first, the first to arrive among equals."""
        ...


class LengthPredictor(Predictor[RequestView], Protocol):
    """Predicts output lengths: `--length-predictor FILE.py:CLASS`.

    Attributes:
        api: the value of `API` for which it is written.
        refresh: generated tokens between two predictions for a job; None: one prediction, at its arrival.
    """

    api: ClassVar[int]


class Retention(Protocol):
    """Names the pages of the prefix cache to give up: `--retention FILE.py:CLASS`.

    It may have three members more. `reads` is that of a `Policy`. `used(span, now)` is called when a request begins
    with pages of a kept span, and `lost(span, now)` when the first page of one is given up.

    Attributes:
        api: the value of `API` for which it is written.
    """

    api: ClassVar[int]

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """Return the worth of a span, and the seconds for which it holds.

        It is called when a request leaves the span, and again after these seconds.
        """
        ...
