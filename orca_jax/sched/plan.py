"""Plans made of selections: admission, blocks and ids, once for all schedulers."""

from collections.abc import Sequence

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.cache import Hit
from orca_jax.sched.prefixes.reuse import PrefixReuse
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Selection
from orca_jax.sched.states import States
from orca_jax.values.step import BlockCopy, Member, Pools, RowSampling, StepPlan, plain_member


def make_plan(iteration: int, selection: Selection, pool: RequestPool, now: float) -> StepPlan:
    """Admit newcomers, give back and allocate blocks, and list the work of each member of one iteration.

    Args:
        iteration: number of the plan.
        selection: not empty, each request once.
        pool: owns the requests; newcomers are admitted, and all are marked as running.
        now: seconds on the engine's clock.
    """
    choices = selection.choices
    newcomers = [choice for choice in choices if choice.request.row is None]
    # all before any allocation: it could take a cached block of the next newcomer
    for request, _, _, hit in newcomers:
        pool.admit(request, now, hit)
    if pool.kv.has_windows:
        _leave_windows(selection, pool)
    new_ids = {choice.request.request_id for choice in newcomers}
    members = []
    copies: list[BlockCopy] = []
    for request, num_tokens, drafts, hit in choices:
        member = _member(request, num_tokens, pool, iteration, drafts)
        if request.request_id in new_ids:
            if hit.sources:
                copies += _copies(member, hit)
            member = _begun(member, request, pool)
        if _has_extras(request):
            member = _with_extras(member, request)
        members.append(member)
    if copies:
        for _, _, _, hit in newcomers:  # after all allocations: none of them may take a source
            pool.kv.drop(hit.sources)
    if pool.kv.states is not None:
        members = _with_states(
            members, [choice.request for choice in choices], pool.kv.states, pool.reuse
        )
    pool.num_plans = iteration + 1
    writes = pool.adapters.take_writes() if pool.adapters.writes else ()
    return StepPlan(iteration, tuple(members), writes, tuple(copies))


def _has_extras(request: Request) -> bool:
    params = request.params
    return (
        request.constraint is not None
        or params.prompt_logprobs is not None
        or params.pooling is not None
    )


def _leave_windows(selection: Selection, pool: RequestPool) -> None:
    """Give back the blocks that no window reaches any more."""
    for request, num_tokens, _, _ in selection.choices:
        repeated = 0 if request.finish_reason is None else num_tokens
        start = request.num_computed - repeated
        if pool.kv.leaves(request.row, start):
            _leave(request, start, pool)


def _leave(request: Request, start: int, pool: RequestPool) -> None:
    """Give back the blocks that no token of a request from position `start` on reads."""
    assert request.row is not None, f"{request.request_id} was not admitted"
    if pool.reuse is not None and not request.is_suspect:
        pool.reuse.remember(request, request.row)  # before blocks of a page leave
    pool.kv.leave(request.row, start)


def _with_states(
    members: Sequence[Member],
    requests: Sequence[Request],
    states: States,
    reuse: PrefixReuse | None,
) -> list[Member]:
    """The members with their moves of states; those at borders leave snapshots behind."""
    moved = []
    for member, request in zip(members, requests, strict=True):
        if reuse is not None:
            reuse.snapshot(request, member.row, member.start)
        moved.append(member._replace(state=states.move(member.row)))
    return moved


def _copies(member: Member, hit: Hit) -> list[BlockCopy]:
    """The copies for a newcomer, into the first block of each group that it does not share."""
    return [
        BlockCopy(group, source, blocks[0])
        for group, (source, blocks) in enumerate(zip(hit.sources, member.new_blocks, strict=True))
    ]


def _member(
    request: Request, num_tokens: int, pool: RequestPool, iteration: int, drafts: Sequence[int]
) -> Member:
    """The work of a request as nearly all members have it."""
    row = request.row
    kv = pool.kv
    assert row is not None, f"{request.request_id} was not admitted"
    start = request.num_computed
    if request.finish_reason is not None:  # ended and kept in its place: the same tokens again
        start -= num_tokens
    end = start + num_tokens
    num_known = len(request.prompt_ids) + len(request.generated_ids)
    is_sampling = end == num_known + request.num_pending and request.params.pooling is None
    num_old_blocks = kv.num_pages_of(row)
    num_drafts = len(drafts)
    if kv.prefixes.lost is not None:
        kv.prefixes.lost.cause = request.request_id
    new_blocks = kv.allocate(row, end + num_drafts)
    pool.start(request, iteration, end + num_drafts, is_sampling)
    ids = () if start >= num_known else request.ids_from(start, num_tokens)
    if num_drafts:
        assert is_sampling and end == num_known, (
            f"{request.request_id}: proposals for a token that is not known"
        )
        verified = [*ids, *drafts]
        member = Member(
            request.request_id, row, start, verified, True, False, num_old_blocks, new_blocks
        )
        return member._replace(num_drafts=num_drafts)
    is_on_device = end > num_known
    return plain_member(
        request.request_id, row, start, ids, is_sampling, is_on_device, num_old_blocks, new_blocks
    )


def _begun(member: Member, request: Request, pool: RequestPool) -> Member:
    """The member of a request's first iteration.

    It carries the sampling parameters, and `new_blocks` also lists the blocks found in the prefix cache.
    """
    params = request.params
    sampling = RowSampling(params, request.seed, len(request.prompt_ids), request.slot)
    if member.num_old_blocks:
        member = member._replace(
            num_old_blocks=0, new_blocks=tuple(map(tuple, pool.kv.blocks_of(member.row)))
        )
    return member._replace(sampling=sampling)


def _with_extras(member: Member, request: Request) -> Member:
    """The member with its constraint, and the prompt's ids to score."""
    num_top = request.params.prompt_logprobs
    if request.params.pooling is not None:
        return member._replace(pools=_pools(request, member.start + member.num_tokens))
    return member._replace(
        is_constrained=member.is_sampling
        and request.constraint is not None
        and request.finish_reason is None,
        targets=()
        if num_top is None
        else _targets(request, member.start, member.start + member.num_tokens),
        num_top_targets=num_top or 0,
    )


def _pools(request: Request, end: int) -> Pools | None:
    """The use of the hidden vectors up to position `end`; None for an earlier chunk, or after the end."""
    if request.finish_reason is not None:
        return None
    is_last = end == len(request.prompt_ids)
    if request.params.pooling == "last":
        if is_last:
            return "last"
        return None
    if is_last:
        return "mean"
    return "sum"


def _targets(request: Request, start: int, end: int) -> Sequence[int]:
    """The prompt's ids to score: those after the positions from `start` to `end`, unless all scores are known."""
    last = min(end, len(request.prompt_ids) - 1)
    if last <= max(start, len(request.prompt_logprobs)):
        return ()
    return request.prompt_ids[start + 1 : last + 1]
