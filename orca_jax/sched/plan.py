"""From choices to a plan: admission, pages and ids, once for all schedulers."""

from collections.abc import Sequence

from orca_jax.request import Request
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.scheduler import Choice, Selection
from orca_jax.step import Member, RowSampling, StepPlan


def make_plan(iteration: int, selection: Selection, pool: RequestPool, now: float) -> StepPlan:
    """Give the chosen requests what they need for one iteration, and write down what each does in it.

    Args:
        iteration: number of the plan.
        selection: not empty, each request once.
        pool: where the requests live; newcomers are admitted, and all are marked as running.
        now: seconds on the engine's clock.
    """
    choices = selection.choices
    newcomers = [choice.request for choice in choices if choice.request.row is None]
    for request in newcomers:  # all of them before any page is allocated, which might be one that a newcomer shares
        pool.admit(request, now)
    new_ids = {request.request_id for request in newcomers}
    return StepPlan(
        iteration,
        tuple([_member(choice, pool, choice.request.request_id in new_ids) for choice in choices]),
        selection.num_steps,
        selection.yields,
    )


def _member(choice: Choice, pool: RequestPool, is_new: bool) -> Member:
    request, num_tokens = choice.request, choice.num_tokens
    row = request.row
    assert row is not None, f"{request.request_id} was not admitted"
    start = request.num_computed
    if request.finish_reason is not None:  # ended and kept in its place: the same tokens again
        start -= num_tokens
    end = start + num_tokens
    num_known = request.num_tokens
    samples = end == num_known + request.num_pending
    num_top = request.params.prompt_logprobs
    targets = () if num_top is None else _targets(request, start, end)
    old_pages = len(pool.kv.pages_of(row))
    new_pages = pool.kv.allocate(row, end + choice.most_steps - 1)
    if is_new and old_pages:  # found by their content
        old_pages, new_pages = 0, tuple(pool.kv.pages_of(row))
    pool.launch(request, end, samples)
    return Member(
        request_id=request.request_id,
        row=row,
        start=start,
        ids=() if start >= num_known else request.ids_from(start, num_tokens),
        samples=samples,
        last_on_device=end > num_known,
        num_old_pages=old_pages,
        new_pages=new_pages,
        sampling=_row_sampling(request) if is_new else None,
        is_constrained=samples and request.constraint is not None and request.finish_reason is None,
        targets=targets,
        num_top_targets=num_top or 0,
        most_steps=choice.most_steps,
        told=choice.told,
    )


def _targets(request: Request, start: int, end: int) -> Sequence[int]:
    """The prompt's ids to score: those that follow the positions from `start` to `end`, unless all are known."""
    last = min(end, len(request.prompt_ids) - 1)
    if last <= max(start, len(request.prompt_logprobs)):
        return ()
    return request.prompt_ids[start + 1 : last + 1]


def _row_sampling(request: Request) -> RowSampling:
    params = request.params
    return RowSampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),  # -1 and 0 both mean all tokens to users; executors know only 0
        top_p=params.top_p,
        seed=request.seed,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        num_prompt=len(request.prompt_ids),
        logprobs=params.logprobs,
        stop_ids=tuple(sorted(request.stop_ids)),
    )
