"""An engine on the toy model with a record of every batch, for tests of schedulers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from orca_jax.assembly.choices import scheduler_kind
from orca_jax.engine import Engine, Wait
from orca_jax.sched.adapters import AdapterSlots
from orca_jax.sched.blocks import by_pool, count_of
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Choice, Scheduler, SchedulerSettings, Selection
from orca_jax.sim.toy import Override, ToyExecutor
from orca_jax.values.cache_spec import ONE_GROUP, LayerGroup, PageShape
from orca_jax.values.request import (
    DEFAULT_URGENCY,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
    Urgency,
)
from orca_jax.values.step import Handle, StepPlan
from tests.sim.oracle import toy_generate

VOCAB = 61


class Shape(NamedTuple):
    """The settings of `chunked` beside `max_bs`."""

    budget: int = 16
    depth: int = 2
    watermark: int = 0
    num_pages: int | None = None  # None: enough for all rows
    reuses_prefixes: bool = True
    ordering: Callable[[], Ordering] = FirstComeFirstServed
    check_in_interval: int = 1
    stages: int = 1


def fewest_blocks(groups: Sequence[LayerGroup], num_slots: int, page_size: int) -> tuple[int, ...]:
    """Blocks of each pool for so many slots of each of its groups."""
    pools = range(1 + max(group.pool for group in groups))
    return tuple(
        -(-sum(group.pool == pool for group in groups) * num_slots // page_size) for pool in pools
    )


def groups_of(*windows: int | None, pools: Sequence[int] = ()) -> tuple[LayerGroup, ...]:
    """A group of one layer for each window."""
    shape = PageShape(1, 1)
    return tuple(
        LayerGroup((layer,), 1, shape, window, pools[layer] if pools else 0)
        for layer, window in enumerate(windows)
    )


class RecordingScheduler:
    """Delegates to another scheduler, and records its decisions."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.n_workers = inner.n_workers
        self.seen: list[Sequence[Choice]] = []

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        before = [(request.request_id, request.state, request.row) for request in pool]
        selection = self.inner.select(pool, kv)
        after = [(request.request_id, request.state, request.row) for request in pool]
        assert before == after, "select changed a request"
        self.seen.append(selection.choices)
        return selection

    def may_return(self, request: Request) -> bool:
        return self.inner.may_return(request)


class RecordingExecutor(ToyExecutor):
    """A toy executor with a record of every plan."""

    def __init__(self, num_rows: int, kv: KVManager, override: Override | None) -> None:
        num_states = 0 if kv.states is None else kv.states.num_states
        super().__init__(
            VOCAB,
            kv.num_blocks,
            kv.page_size,
            num_rows,
            override=override,
            groups=kv.groups,
            num_states=num_states,
        )
        self.plans: list[StepPlan] = []
        self.shown: list[str] = []

    def submit(self, plan: StepPlan) -> Handle:
        self.plans.append(plan)
        self.shown.append(" ".join(_shown(plan)))
        return super().submit(plan)


class Lab:
    """Engine, scheduler and pool, with as few pages as `n_slots` allows, and a clock that counts its readings."""

    def __init__(
        self,
        name: str = "orca",
        max_bs: int = 2,
        n_workers: int = 1,
        n_slots: int = 100,
        page_size: int = 4,
        max_model_len: int = 64,
        eos: Sequence[int] = (),
        seed: int = 0,
        override: Override | None = None,
        shape: Shape | None = None,
        num_loras: int = 0,
        groups: Sequence[LayerGroup] = ONE_GROUP,
        num_drafts: int = 0,
        spare_states: int | None = None,
    ) -> None:
        self.max_bs = max_bs
        self.n_slots = n_slots
        rows = max_bs * (n_workers if shape is None else shape.stages)
        num_states = 0 if spare_states is None else rows + spare_states
        if shape is None:
            num_blocks = fewest_blocks(groups, n_slots + rows * (page_size - 1), page_size)
            self.kv = KVManager(
                num_blocks,
                page_size,
                rows,
                n_slots,
                groups=groups,
                num_drafts=num_drafts,
                num_states=num_states,
            )
            settings = SchedulerSettings(
                max_bs, n_workers, max_model_len, FirstComeFirstServed, 0, count_of([0])
            )
            scheduler: Scheduler = scheduler_kind(name).from_settings(settings)
        else:
            per_group = shape.num_pages or rows * -(-max_model_len // page_size)
            num_blocks = fewest_blocks(groups, per_group * page_size, page_size)
            longest = shape.budget + num_drafts
            self.kv = KVManager(
                num_blocks, page_size, rows, groups=groups, longest=longest, num_states=num_states
            )
            scheduler = ChunkedScheduler(
                max_bs,
                shape.budget,
                shape.ordering(),
                n_workers=shape.depth,
                watermark=shape.watermark,
                num_stages=shape.stages,
            )
        self.pool = RequestPool(
            self.kv,
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=eos,
            reuses_prefixes=shape is not None and shape.reuses_prefixes,
            adapters=AdapterSlots(num_loras, 100),
        )
        self.scheduler = RecordingScheduler(scheduler)
        self.executor = RecordingExecutor(rows, self.kv, override)
        self.now = 0.0
        self.engine = Engine(
            self.executor,
            self.scheduler,
            self.pool,
            seed=seed,
            clock=self._tick,
            weights=self.executor.adapters,
            check_in_interval=1 if shape is None else shape.check_in_interval,
        )
        self.eos = eos
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[tuple[TokenLogprobs, ...]]] = {}
        self.ends: dict[str, RequestUpdate] = {}
        self.returned: list[str] = []  # for each step, the requests that ended in it
        self.wait: Wait | None = None

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def add(
        self, request_id: str, num_prompt: int, max_tokens: int, urgency: Urgency = DEFAULT_URGENCY
    ) -> None:
        """Add a greedy request with the prompt 1, 2, 3, ..."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        self.engine.add_request(request_id, list(range(1, num_prompt + 1)), params, urgency=urgency)

    def step(self) -> list[RequestUpdate]:
        """Run one step with all checks; an update after a request's last one fails."""
        updates = self.engine.step(self.wait)
        self.pool.check_integrity()
        for update in updates:
            assert update.request_id not in self.ends, "an update after the last one"
            self.tokens.setdefault(update.request_id, []).extend(update.new_ids)
            self.logprobs.setdefault(update.request_id, []).extend(update.logprobs)
            if update.prompt_logprobs is not None:
                self.prompt_logprobs.setdefault(update.request_id, []).append(
                    update.prompt_logprobs
                )
            if update.finish_reason is not None:
                self.ends[update.request_id] = update
        self.returned.append(
            "".join(update.request_id for update in updates if update.finish_reason)
        )
        return updates

    def run(self, limit: int = 1000) -> None:
        """Step until no request is left, and check that all pages, rows and slots are free."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "requests starve"
        assert by_pool(self.kv.num_free_blocks) == self.kv.num_blocks
        assert self.kv.num_held_rows == 0
        assert self.kv.states is None or not self.kv.states.by_use()[0]
        assert self.kv.reserved_slots == self.kv.no_blocks

    @property
    def batches(self) -> list[str]:
        """Each plan as `A5 B1`: the members and their numbers of tokens; `-` marks a member that does not sample.

        `+2` marks two proposals.
        """
        return self.executor.shown

    def expected(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The tokens of a request that runs alone; its seed is in `params` or has no effect."""
        return toy_generate(prompt, params, vocab_size=VOCAB, eos_token_ids=self.eos)


def _shown(plan: StepPlan) -> Iterable[str]:
    for member in plan.members:
        size = member.num_tokens - member.num_drafts
        drafts = f"+{member.num_drafts}" if member.num_drafts else ""
        yield f"{member.request_id}{size}{drafts}{'' if member.is_sampling else '-'}"


def run_lab(requests: Iterable[tuple[str, int, int]], **sizes: Any) -> Lab:
    """A lab with `sizes` after it has run these requests: (id, prompt tokens, `max_tokens`) of each."""
    lab = Lab(**sizes)
    for request_id, num_prompt, max_tokens in requests:
        lab.add(request_id, num_prompt, max_tokens)
    lab.run()
    return lab
