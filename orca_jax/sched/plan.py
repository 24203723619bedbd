"""Plans made of selections: admission, pages and ids, once for all schedulers."""

from collections.abc import Sequence

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Selection
from orca_jax.step import Member, Pools, RowSampling, StepPlan


def make_plan(iteration: int, selection: Selection, pool: RequestPool, now: float) -> StepPlan:
    """Admit newcomers, allocate pages, and list the work of each member of one iteration.

    Args:
        iteration: number of the plan.
        selection: not empty, each request once.
        pool: owns the requests; newcomers are admitted, and all are marked as running.
        now: seconds on the engine's clock.
    """
    choices = selection.choices
    newcomers = [choice.request for choice in choices if choice.request.row is None]
    for request in newcomers:  # all before any allocation: it could take a cached page of the next newcomer
        pool.admit(request, now)
    new_ids = {request.request_id for request in newcomers}
    members = []
    for request, num_tokens, drafts in choices:
        member = _member(request, num_tokens, pool, iteration, drafts)
        if request.request_id in new_ids:
            member = _begun(member, request, pool)
        params = request.params
        if request.constraint is not None or params.prompt_logprobs is not None or params.pooling is not None:
            member = _with_extras(member, request)
        members.append(member)
    pool.num_plans = iteration + 1
    return StepPlan(iteration, tuple(members), pool.adapters.take_writes() if pool.adapters.writes else ())


def _member(request: Request, num_tokens: int, pool: RequestPool, iteration: int, drafts: Sequence[int]) -> Member:
    """The work of a request as nearly all members have it; the positions are those of the fields."""
    row, kv = request.row, pool.kv
    assert row is not None, f"{request.request_id} was not admitted"
    start = request.num_computed
    if request.finish_reason is not None:  # ended and kept in its place: the same tokens again
        start -= num_tokens
    end = start + num_tokens
    num_known = len(request.prompt_ids) + len(request.generated_ids)
    is_sampling = end == num_known + request.num_pending and request.params.pooling is None
    num_old_blocks = len(kv.pages_of(row))
    num_drafts = len(drafts)
    new_pages = kv.allocate(row, end + num_drafts)
    new_blocks = (new_pages,) if new_pages else ()
    pool.start(request, iteration, end + num_drafts, is_sampling)
    ids = () if start >= num_known else request.ids_from(start, num_tokens)
    if num_drafts:
        assert is_sampling and end == num_known, f"{request.request_id}: proposals for a token that is not known"
        verified = [*ids, *drafts]
        member = Member(request.request_id, row, start, verified, True, False, num_old_blocks, new_blocks)
        return member._replace(num_drafts=num_drafts)
    return Member(request.request_id, row, start, ids, is_sampling, end > num_known, num_old_blocks, new_blocks)


def _begun(member: Member, request: Request, pool: RequestPool) -> Member:
    """The member with the sampling of a newcomer, and its pages from the prefix cache among the new ones."""
    params = request.params
    sampling = RowSampling(params, request.seed, len(request.prompt_ids), request.slot)
    if member.num_old_blocks:
        member = member._replace(num_old_blocks=0, new_blocks=(tuple(pool.kv.pages_of(member.row)),))
    return member._replace(sampling=sampling)


def _with_extras(member: Member, request: Request) -> Member:
    """The member with its constraint, and the prompt's ids to score."""
    num_top = request.params.prompt_logprobs
    if request.params.pooling is not None:
        return member._replace(pools=_pools(request, member.start + member.num_tokens))
    return member._replace(
        is_constrained=member.is_sampling and request.constraint is not None and request.finish_reason is None,
        targets=() if num_top is None else _targets(request, member.start, member.start + member.num_tokens),
        num_top_targets=num_top or 0,
    )


def _pools(request: Request, end: int) -> Pools | None:
    """The use of the hidden vectors up to position `end`; None for an earlier chunk, or after the end."""
    if request.finish_reason is not None:
        return None
    is_last = end == len(request.prompt_ids)
    if request.params.pooling == "last":
        return "last" if is_last else None
    return "mean" if is_last else "sum"


def _targets(request: Request, start: int, end: int) -> Sequence[int]:
    """The prompt's ids to score: those after the positions from `start` to `end`, unless all scores are known."""
    last = min(end, len(request.prompt_ids) - 1)
    if last <= max(start, len(request.prompt_logprobs)):
        return ()
    return request.prompt_ids[start + 1 : last + 1]
