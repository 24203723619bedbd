"""A token budget for each iteration: increments first, prompts in chunks, blocks on demand.

Iteration-level scheduling as developed after the paper. Algorithm 1 admits a prompt of any length into an iteration,
and all other members wait for it. Here an iteration processes at most `token_budget` tokens. This bounds the wait of a
running request for its next token. Nothing is reserved: when blocks run out, the least urgent requests are preempted,
and compute their tokens again later.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Self

from orca_jax.sched.blocks import BlockCount, not_below_zero
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.cache import NO_HIT, Hit
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Choice, Held, SchedulerSettings, Selection
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import SCHEDULERS, Traits


@dataclass(eq=False)
class ChunkedScheduler:
    """Chooses by an ordering, from the most urgent request to the least.

    At least one request always makes progress. The most urgent request is never preempted: it may take the blocks of
    all others, and it fits alone, or the pool would have refused it. While a running request lacks blocks, no request
    is admitted; otherwise it could compete with newcomers for ever.

    In a pipeline of `num_stages` devices the token drawn by plan j leaves the last stage when the first stage is free
    for plan j + num_stages. So a request whose newest token is still on its way from plan j may be in plan k if
    k - j >= num_stages. Chunks of a prompt draw nothing: they may be in consecutive plans. No plan draws tokens for
    more than an equal share of the requests, so that every stage has work.

    Args:
        max_bs: the largest number of requests in an iteration.
        token_budget: tokens of an iteration, at least `max_bs`.
        ordering: the order of urgency.
        n_workers: iterations in flight. One more than stages overlaps the host's work on one with the devices' work on
            the others.
        watermark: blocks to keep free when a request is admitted beside others, for their next tokens.
        num_stages: devices in the pipeline.
        num_rows: the most requests that may run; 0: `max_bs` for each stage.
        awaits_chosen: True if a request waits for an equal prompt that is chosen in the same selection. Policies from
            outside choose both, since they see prompts that are being computed, and not those of their own decision.
    """

    traits: ClassVar[Traits] = SCHEDULERS["chunked"].traits

    max_bs: int
    token_budget: int
    ordering: Ordering
    _: KW_ONLY
    n_workers: int = 1
    watermark: BlockCount = 0
    num_stages: int = 1
    num_rows: int = 0
    awaits_chosen: bool = True

    def __post_init__(self) -> None:
        self.num_rows = self.num_rows or self.max_bs * self.num_stages
        self.order_by(self.ordering)

    def order_by(self, ordering: Ordering) -> None:
        """Select by another ordering from now on."""
        self.ordering = ordering
        self.queue = ordering.queue()

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Self:
        return cls(
            settings.max_bs,
            settings.token_budget,
            settings.ordering(),
            n_workers=settings.num_stages + settings.num_ahead,
            watermark=settings.watermark,
            num_stages=settings.num_stages,
        )

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Running requests first, increments before chunks of prompts; then newcomers, unless one lacks blocks."""
        draft = self.draft(pool, kv)
        running = live(self.queue.running(pool))
        increments = []
        chunks = []
        for request in self.able(running, pool):
            num_left = request.num_left
            if num_left == 1:
                increments.append(request)
            elif num_left:
                chunks.append(request)
        if not draft.resume_all(increments):
            for request in increments:
                draft.resume(request, 1, running)
        if chunks:
            draft.count_blocks()
        for request in chunks:
            draft.resume(request, request.num_left, running)
        num_rows = self.free_rows(pool, kv)
        admitted = 0 if draft.is_short else self._admit(pool, draft, num_rows, running)
        num_waiting = len(pool) - len(pool.running) - admitted + len(draft.preempted)
        held = draft.held(num_rows - admitted) if num_waiting else None
        return Selection(draft.choices, draft.preempted, held)

    def draft(self, pool: RequestPool, kv: KVManager) -> "SelectionDraft":
        """An empty selection, with the limits of an iteration."""
        return SelectionDraft(
            kv,
            self.ordering.charge,
            self.token_budget,
            kv.num_free_blocks,
            self.max_bs,
            self._share(pool),
            left=kv.no_blocks,
            taken=kv.no_blocks,
        )

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True

    def able(self, running: Sequence[Request], pool: RequestPool) -> Sequence[Request]:
        """The running requests without a token on its way through the stages."""
        if self.num_stages == 1:
            return running
        last = pool.num_plans - self.num_stages
        return [
            request for request in running if not request.num_pending or request.drawn_in <= last
        ]

    def _share(self, pool: RequestPool) -> int:
        """The requests that may run, divided by the stages."""
        return ceil_div(min(len(pool), self.num_rows), self.num_stages)

    def free_rows(self, pool: RequestPool, kv: KVManager) -> int:
        """The waiting requests that may get a row."""
        return min(self.num_rows - len(pool.running), kv.num_free_rows)

    def _admit(
        self,
        pool: RequestPool,
        draft: "SelectionDraft",
        num_rows: int,
        running: Sequence[Request],
    ) -> int:
        """Choose waiting requests as far as rows, budget and blocks beside `running` reach; returns their number."""
        if num_rows <= 0 or not draft.budget or len(pool) == len(pool.running):
            return 0
        draft.count_blocks()
        kv = draft.kv
        reuse = pool.reuse
        to_come = [
            kv.to_come(request.row, request.num_computed, request.num_tokens) for request in running
        ]
        spare = draft.free - draft.left - not_below_zero(sum(to_come, kv.no_blocks) - draft.taken)
        admitted = 0
        has_slot = pool.newcomers()
        prompts = set[bytes]()
        for request in self.queue.waiting(pool):
            if admitted == num_rows or not draft.budget:
                break
            if reuse is not None and reuse.awaits_prompt(request, prompts):
                draft.is_awaiting_prompt = True
                continue  # for a few iterations
            hit = NO_HIT if reuse is None else reuse.find(request)
            left = request.num_tokens - hit.num_tokens
            if not draft.may_take(left):
                break
            is_alone = not pool.running and not draft.choices
            hit, blocks = draft.fitting(request, hit, spare if is_alone else spare - self.watermark)
            if blocks is None:
                break  # and not `continue`, or a long request could wait for ever
            if not has_slot(request):
                draft.is_out_of_slots = True
                break  # for the same reason
            left = request.num_tokens - hit.num_tokens
            draft.choose(request, left, draft.chunk(request, left, hit.num_tokens), blocks, hit)
            if reuse is not None and self.awaits_chosen:
                prompts.update(reuse.awaited(request, hit.num_tokens))
            spare -= blocks
            admitted += 1
        return admitted


def live(requests: Iterable[Request]) -> list[Request]:
    """The requests that have not ended."""
    return [request for request in requests if not (request.finish_reason or request.aborted)]


@dataclass(slots=True)
class SelectionDraft:
    """A selection under construction.

    Attributes:
        kv: rows and blocks.
        charge: counts the tokens of every choice, if the order needs it.
        budget: tokens left.
        free: blocks left, those that the choices give back included.
        max_bs: the most choices.
        most_draws: the most requests with a token drawn.
        left: of `free`, blocks that the choices give back.
        taken: blocks that the choices will take.
        num_draws: choices with a token drawn.
        is_short: a request could not get the blocks for its tokens.
        is_awaiting_prompt: a waiting request has the prompt of one that is being computed.
        is_out_of_slots: the first waiting request could not get a slot for its adapter.
    """

    kv: KVManager
    charge: Callable[[Request, int], None] | None
    budget: int
    free: BlockCount
    max_bs: int
    most_draws: int
    left: BlockCount
    taken: BlockCount
    num_draws: int = 0
    choices: list[Choice] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    is_short: bool = False
    is_awaiting_prompt: bool = False
    is_out_of_slots: bool = False
    # choices whose blocks are still free here
    _uncounted: Sequence[Request] = ()

    def may_take(self, num_left: int) -> bool:
        """True if there is a place for a request with so many tokens left, or for a chunk of them."""
        if not self.budget or len(self.choices) == self.max_bs:
            return False
        return self.num_draws < self.most_draws or num_left > self.budget

    def chunk(self, request: Request, num_left: int, start: int) -> int:
        """The next tokens of a request: all that are left, within the budget and up to a border of states."""
        size = min(num_left, self.budget)
        states = self.kv.states
        if states is None:
            return size
        return states.chunk(request.row, start, size, len(request.prompt_ids))

    def choose(
        self,
        request: Request,
        num_left: int,
        num_tokens: int,
        blocks: BlockCount,
        hit: Hit = NO_HIT,
    ) -> None:
        """Add a request with so many of its tokens, which take these blocks."""
        # quick: no default values
        self.choices.append(tuple.__new__(Choice, (request, num_tokens, (), hit)))
        self.num_draws += num_tokens == num_left
        if self.charge is not None:
            self.charge(request, num_tokens)
        self.budget -= num_tokens
        self.free -= blocks
        self.taken += blocks

    def resume_all(self, increments: Sequence[Request]) -> bool:
        """Begin with these running requests, a token of each, if that is possible without a look at their blocks."""
        count = len(increments)
        most = min(self.max_bs, self.most_draws, self.budget)
        if count > most or self.kv.has_windows or count * self.kv.of_page > self.free:
            return False
        # quick: no default values
        self.choices = [tuple.__new__(Choice, (each, 1, (), NO_HIT)) for each in increments]
        self._uncounted = increments
        self.num_draws = count
        self.budget -= count
        if self.charge is not None:
            for request in increments:
                self.charge(request, 1)
        return True

    def count_blocks(self) -> None:
        """Take the blocks of `resume_all`, which few selections need to know."""
        kv = self.kv
        new = kv.no_blocks
        for request in self._uncounted:
            assert request.row is not None, f"{request.request_id} does not run"
            new += kv.lacking(request.row, request.num_computed + 1)
        self._uncounted = ()
        self.free -= new
        self.taken += new

    def fitting(
        self, request: Request, hit: Hit, spare: BlockCount
    ) -> tuple[Hit, BlockCount | None]:
        """The hit and the blocks for a waiting request; without the copy if its source has no room. None: no room."""
        blocks = self.kv.needed(hit, request.num_tokens)
        if hit.sources and blocks > spare:
            hit = hit.without_copy(self.kv.page_size)
            blocks = self.kv.needed(hit, request.num_tokens)
        if blocks > spare:
            return hit, None
        return hit, blocks

    def resume(self, request: Request, num_left: int, running: Sequence[Request]) -> None:
        """Choose a running request for as many tokens as budget and blocks allow; preempt less urgent ones."""
        if not self.may_take(num_left) or request in self.preempted:
            return
        kv = self.kv
        row = request.row
        start = request.num_computed
        assert row is not None, f"{request.request_id} does not run"
        size = 1 if num_left == 1 else self.chunk(request, num_left, start)
        free = self.free
        left = None
        if kv.has_windows:
            left = kv.behind(row, start)
            free += left
        while (blocks := kv.lacking(row, start + size)) > free:
            self.is_short = True
            room = kv.room(row, free) - start
            if room > 0:  # part of a chunk fits
                size = min(size, room)
                blocks = kv.lacking(row, start + size)
                break
            victim = self._least_urgent(running, request)
            if victim is None:
                return
            self._preempt(victim)
            if victim is request:
                return
            free = self.free
            if left is not None:
                free += left
        self.choose(request, num_left, size, blocks)
        if left is not None:
            self.free += left
            self.left += left

    def held(self, num_free_rows: int) -> Held:
        """The reason for not admitting the first waiting request."""
        if num_free_rows + len(self.preempted) <= 0:
            return "rows"
        if self.is_out_of_slots:
            return "adapters"
        if self.is_awaiting_prompt:
            return "prompt"
        if self.budget:
            return "pages"
        return "budget"

    def _least_urgent(self, running: Sequence[Request], request: Request) -> Request | None:
        """The request to preempt for `request`: the least urgent one not chosen yet, possibly `request` itself.

        The first running request is never preempted: it keeps its blocks and waits, since the requests chosen before
        it soon need blocks themselves.
        """
        chosen = {choice.request.request_id for choice in self.choices}
        for other in reversed(running):
            if other is request:
                if self.choices and request is not running[0]:
                    return request
                return None
            if other.request_id not in chosen and other not in self.preempted:
                return other
        return None

    def _preempt(self, victim: Request) -> None:
        self.preempted.append(victim)
        self.free += self.kv.releasable(victim.row)
