"""Plans made of selections: admission, pages and ids, once for all schedulers."""

from collections.abc import Sequence

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Choice, Selection
from orca_jax.step import Member, RowSampling, StepPlan


def make_plan(iteration: int, selection: Selection, pool: RequestPool, now: float) -> StepPlan:
    """Admit newcomers, allocate pages, and list the work of each member of one iteration.

    Args:
        iteration: number of the plan.
        selection: not empty, each request once.
        pool: owns the requests; newcomers are admitted, and all are marked as running.
        now: seconds on the engine's clock.
    """
    choices, multi_step = selection.choices, selection.multi_step
    newcomers = [choice.request for choice in choices if choice.request.row is None]
    for request in newcomers:  # all before any allocation: it could take a cached page of the next newcomer
        pool.admit(request, now)
    new_ids = {request.request_id for request in newcomers}
    steps = [1] * len(choices) if multi_step is None else [limit.most_steps for limit in multi_step.limits]
    members = [
        _member(choice, pool, iteration, num_steps, choice.request.request_id in new_ids)
        for choice, num_steps in zip(choices, steps, strict=True)
    ]
    pool.num_plans = iteration + 1
    return StepPlan(iteration, tuple(members), multi_step)


def _member(choice: Choice, pool: RequestPool, iteration: int, num_steps: int, is_new: bool) -> Member:
    request, num_tokens = choice.request, choice.num_tokens
    row = request.row
    assert row is not None, f"{request.request_id} was not admitted"
    start = request.num_computed
    if request.finish_reason is not None:  # ended and kept in its place: the same tokens again
        start -= num_tokens
    end = start + num_tokens
    num_known = request.num_tokens
    is_sampling = end == num_known + request.num_pending
    num_top = request.params.prompt_logprobs
    targets = () if num_top is None else _targets(request, start, end)
    old_pages = len(pool.kv.pages_of(row))
    new_pages = pool.kv.allocate(row, end + num_steps - 1)
    if is_new and old_pages:  # from the prefix cache
        old_pages, new_pages = 0, tuple(pool.kv.pages_of(row))
    pool.start(request, iteration, end, is_sampling)
    return Member(
        request_id=request.request_id,
        row=row,
        start=start,
        ids=() if start >= num_known else request.ids_from(start, num_tokens),
        is_sampling=is_sampling,
        last_on_device=end > num_known,
        num_old_pages=old_pages,
        new_pages=new_pages,
        sampling=_row_sampling(request) if is_new else None,
        is_constrained=is_sampling and request.constraint is not None and request.finish_reason is None,
        targets=targets,
        num_top_targets=num_top or 0,
    )


def _targets(request: Request, start: int, end: int) -> Sequence[int]:
    """The prompt's ids to score: those after the positions from `start` to `end`, unless all scores are known."""
    last = min(end, len(request.prompt_ids) - 1)
    if last <= max(start, len(request.prompt_logprobs)):
        return ()
    return request.prompt_ids[start + 1 : last + 1]


def _row_sampling(request: Request) -> RowSampling:
    return RowSampling(request.params, request.seed, len(request.prompt_ids), tuple(sorted(request.stop_ids)))
