"""A token budget for each iteration: increments first, prompts in chunks, pages on demand.

What iteration-level scheduling became after the paper. Algorithm 1 lets a prompt of any length into an iteration, and
everybody waits for it; here an iteration processes at most `max_tokens` tokens, which bounds how long a running
request waits for its next one. Nothing is reserved: where pages run out, the least urgent requests give theirs up and
compute their tokens again later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from orca_jax.request import Request
from orca_jax.sched.check_in import CheckIns
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.scheduler import Choice, Selection


class ChunkedScheduler:
    """Chooses by an ordering, from the most urgent request to the least.

    Somebody always makes progress, and the most urgent request is never preempted: it may take the pages of all
    others, and alone it fits, or the pool would have refused it. While a running request lacks pages nobody is
    admitted, so that it need not outbid newcomers for ever.

    Args:
        max_bs: requests that run at once.
        max_tokens: tokens of an iteration, at least `max_bs`.
        ordering: who comes first.
        depth: iterations in flight; 2 overlaps the host's work on one with the device's work on the other.
        watermark: pages that stay free when a request is admitted beside others, so that their next tokens find some.
        check_ins: repeats iterations in which everybody generates; needs a `depth` of 1.
    """

    name = "chunked"

    def __init__(
        self,
        max_bs: int,
        max_tokens: int,
        ordering: Ordering,
        *,
        depth: int = 1,
        watermark: int = 0,
        check_ins: CheckIns | None = None,
    ) -> None:
        self.max_bs = max_bs
        self.max_tokens = max_tokens
        self.ordering = ordering
        self.n_workers = depth
        self.watermark = watermark
        self.check_ins = check_ins

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Running requests first, increments before chunks of prompts; then newcomers, if nobody lacks pages."""
        turn = _Turn(kv, self.ordering, self.max_tokens, kv.num_free_pages)
        running = [request for request in self.ordering.running(pool) if not (request.finish_reason or request.aborted)]
        left = [(request, request.num_left) for request in running]
        chunks = [(request, count) for request, count in left if count > 1]
        for request, count in [each for each in left if each[1] == 1] + chunks:
            if turn.budget and request not in turn.preempted:
                turn.go_on(request, count, running)
        if not turn.is_short:
            self._admit(pool, turn)
        selection = Selection(turn.choices, turn.preempted)
        return selection if self.check_ins is None else self._stretch(selection, self.check_ins, pool)

    def may_return(self, request: Request) -> bool:
        """Always: a token leaves as soon as its iteration has returned."""
        return True

    def _stretch(self, selection: Selection, check_ins: CheckIns, pool: RequestPool) -> Selection:
        selection = check_ins.stretch(selection, pool.kv, len(pool) - len(pool.running))
        for choice in selection.choices:
            if choice.most_steps > 1:
                self.ordering.charge(choice.request, choice.most_steps - 1)
        return selection

    def _admit(self, pool: RequestPool, turn: "_Turn") -> None:
        rows = min(self.max_bs - len(pool.running), turn.kv.num_free_rows)
        if not rows or not turn.budget or len(pool) == len(pool.running):
            return
        promised = sum([turn.kv.lacking(request.row, request.num_tokens) for request in pool.running.values()])
        spare = turn.free - max(0, promised - turn.taken)
        for request in self.ordering.waiting(pool):
            if not rows or not turn.budget:
                break
            found = pool.cached_pages(request)
            price = turn.kv.num_kept(found) + turn.kv.lacking(None, request.num_tokens) - len(found)
            is_alone = not pool.running and not turn.choices
            if price + (0 if is_alone else self.watermark) > spare:
                break  # and not `continue`, or a long request could wait for ever
            size = min(request.num_tokens - len(found) * turn.kv.page_size, turn.budget)
            turn.choose(request, size, price)
            spare -= price
            rows -= 1


@dataclass(slots=True)
class _Turn:
    """One selection in the making."""

    kv: KVManager
    ordering: Ordering  # told of every choice
    budget: int  # tokens left
    free: int  # pages left
    taken: int = 0  # pages that the chosen ones will take
    choices: list[Choice] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    is_short: bool = False  # somebody could not have the pages that its tokens need

    def choose(self, request: Request, num_tokens: int, pages: int) -> None:
        self.choices.append(Choice(request, num_tokens))
        self.ordering.charge(request, num_tokens)
        self.budget -= num_tokens
        self.free -= pages
        self.taken += pages

    def go_on(self, request: Request, num_left: int, running: Sequence[Request]) -> None:
        """Choose a running request for as many tokens as budget and pages allow; less urgent ones give up theirs."""
        size = min(num_left, self.budget)
        while (pages := self.kv.lacking(request.row, request.num_computed + size)) > self.free:
            self.is_short = True
            room = (self._num_held(request) + self.free) * self.kv.page_size - request.num_computed
            if room > 0:  # part of a chunk fits
                size = min(size, room)
                pages = self.kv.lacking(request.row, request.num_computed + size)
                break
            victim = self._least_urgent(running, request)
            if victim is None:
                return
            self._preempt(victim)
            if victim is request:
                return
        self.choose(request, size, pages)

    def _least_urgent(self, running: Sequence[Request], request: Request) -> Request | None:
        """Who gives way to a request: the last one that is not chosen yet, perhaps itself; nobody before it does.

        The first of all keeps its pages and waits: those that were chosen before it soon need pages themselves.
        """
        chosen = {choice.request.request_id for choice in self.choices}
        for other in reversed(running):
            if other is request:
                return request if self.choices and request is not running[0] else None
            if other.request_id not in chosen and other not in self.preempted:
                return other
        return None

    def _preempt(self, victim: Request) -> None:
        self.preempted.append(victim)
        self.free += self.kv.releasable(victim.row)

    def _num_held(self, request: Request) -> int:
        assert request.row is not None, f"{request.request_id} does not run"
        return len(self.kv.pages_of(request.row))
