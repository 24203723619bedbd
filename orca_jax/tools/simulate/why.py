"""The reason why a request was not chosen in an iteration, found by a second run of the simulation."""

from orca_jax.sched.blocks import by_pool
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.cache import NO_HIT
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Scheduler, Selection
from orca_jax.tools.simulate.run import SimulatedRun
from orca_jax.values.errors import ConfigError

_SHOWN = 8  # chosen requests in the answer


def why(run: SimulatedRun, request: int, iteration: int) -> str:
    """Return the reason why a request is in an iteration or not, in one line.

    Args:
        run: a simulation.
        request: its index in the load.
        iteration: its number in the timeline.

    Raises:
        ConfigError: there is no such request or iteration.
    """
    head = run.timeline.head
    last = len(run.timeline.iterations) - 1
    if not (0 <= request < len(run.load) and 0 <= iteration <= last):
        message = f"why must be from 0@0 to {len(run.load) - 1}@{last}, got {request}@{iteration}"
        raise ConfigError(message, param="why")
    asked = _Explainer(str(request), iteration, head.config.max_num_seqs, head.budget)
    run.again(run.device._replace(wrap=asked.around))
    return f"request {request} in iteration {iteration}: {asked.answer}"


class _Explainer:
    """A scheduler that explains one selection of another one."""

    def __init__(self, request_id: str, iteration: int, max_bs: int, budget: int) -> None:
        self.answer, self.n_workers = "", 1
        self._request_id = request_id
        self._iteration = iteration
        self._max_bs = max_bs
        self._budget = budget
        self._inner: Scheduler

    def around(self, inner: Scheduler) -> Scheduler:
        """Take the place of a scheduler."""
        self._inner = inner
        self.n_workers = inner.n_workers
        return self

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Return the other's selection."""
        selection = self._inner.select(pool, kv)
        if selection.choices and pool.num_plans == self._iteration:
            self.answer = self._explained(selection, pool, kv)
        return selection

    def may_return(self, request: Request) -> bool:
        """Return the other's answer."""
        return self._inner.may_return(request)

    def _explained(self, selection: Selection, pool: RequestPool, kv: KVManager) -> str:
        request = next(
            (request for request in pool if request.request_id == self._request_id), None
        )
        if request is None:
            return "it has not arrived, or has ended"
        for choice in selection.choices:
            if choice.request is request:
                return f"it is chosen, with {choice.num_tokens} tokens"
        if request in selection.preempted:
            return "it is preempted, so that others get its pages"
        if (
            request.row is not None
            and request.num_computed >= request.num_tokens + request.num_pending
        ):
            return "it cannot run: its newest token is being computed"
        lacking = self._lacking(request, selection, kv)
        chosen = ", ".join([choice.request.request_id for choice in selection.choices[:_SHOWN]])
        chosen += ", ..." if len(selection.choices) > _SHOWN else ""
        state = "waits" if request.row is None else "is paused"
        return f"it {state}; {lacking or 'it would fit, and the scheduler prefers others'}; chosen: {chosen}"

    def _lacking(self, request: Request, selection: Selection, kv: KVManager) -> str:
        """The limits that the iteration reaches, as far as they keep out the request."""
        taken = wanted = kv.no_blocks
        for other, size, _, hit in (*selection.choices, (request, 1, (), NO_HIT)):
            start = hit.num_tokens if other.row is None else other.num_computed
            wanted = (
                kv.needed(hit, start + size)
                if other.row is None
                else kv.lacking(other.row, start + size)
            )
            taken += wanted
        free = sum([kv.releasable(other.row) for other in selection.preempted], kv.num_free_blocks)
        rows = kv.num_free_rows + len(selection.preempted)
        rows -= sum([choice.request.row is None for choice in selection.choices])
        num_tokens = sum([choice.num_tokens for choice in selection.choices])
        reached = {
            f"all {self._max_bs} places are taken": len(selection.choices) >= self._max_bs,
            f"the budget of {self._budget} tokens is spent": num_tokens >= self._budget,
            "no row is free": request.row is None and rows < 1,
            f"it needs {sum(by_pool(wanted))} pages and {sum(by_pool(free - taken + wanted))} are free": taken
            > free,
        }
        return " and ".join([text for text, holds in reached.items() if holds])
