"""The results of an iteration, member by member: what they change in a request, and the update that it makes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orca_jax.request import RequestMetrics, RequestUpdate, TokenLogprobs
from orca_jax.sched.constraint import after
from orca_jax.sched.request import Request
from orca_jax.step import NOT_FINITE, Limit, Member, StepPlan, StepResult

_ONE_STEP = Limit()


class MemberResult(NamedTuple):
    """The result of an iteration for one member."""

    member: Member
    run: Sequence[int] | None  # the reported ids, () if it does not sample; None: they stay on the device
    num_steps: int = 1  # steps in which it may have drawn a token
    is_finite: bool = True  # False: the last id is undefined
    logprobs: TokenLogprobs | None = None  # of the last id
    scores: Sequence[TokenLogprobs] = ()  # of its targets


def member_results(plan: StepPlan, result: StepResult) -> Iterator[MemberResult]:
    """One result for each member, in the plan's order.

    Raises:
        AssertionError: plan and result do not belong together.
    """
    num_sampling = sum([member.is_sampling for member in plan.members])
    assert len(result.token_ids) == len(result.finite) == num_sampling, (
        f"iteration {plan.iteration} samples {num_sampling} tokens, the result has {len(result.token_ids)}"
    )
    many = result.multi_step
    runs = [(token,) for token in result.token_ids] if many is None else many.runs
    limits = [_ONE_STEP] * len(plan.members) if plan.multi_step is None else plan.multi_step.limits
    sampled = zip(runs, result.finite, result.logprobs or (None,) * num_sampling, strict=True)
    scores = iter(result.scores)
    for member, limit in zip(plan.members, limits, strict=True):
        scored = next(scores) if member.targets else ()
        if member.is_sampling:
            run, is_finite, logprobs = next(sampled)
            num_steps = 1 if many is None else min(limit.most_steps, many.num_steps)
            yield MemberResult(member, run, num_steps, is_finite, logprobs, scored)
        else:
            yield MemberResult(member, (), scores=scored)


def advance(request: Request, result: MemberResult) -> None:
    """Count an iteration, the tokens drawn in it, and the scores of the prompt's ids."""
    member = result.member
    if member.targets:
        _score(request, member, result.scores)
    request.in_flight -= 1
    request.num_iterations += result.num_steps
    if not member.is_sampling:
        return
    if result.run is None:
        request.num_pending += result.num_steps - 1
        request.num_computed += result.num_steps - 1
    elif len(result.run) == 1:
        request.num_pending -= 1
    else:
        request.num_pending = 0
        request.num_computed = request.num_tokens + len(result.run) - 1  # the last id was drawn and not computed


def append(request: Request, result: MemberResult) -> None:
    """Append the reported ids of a running request, which may end with the last one."""
    *earlier, last = result.run or ()
    for token in earlier:
        _append(request, token, None)
    if not result.is_finite:
        request.error = NOT_FINITE
    _append(request, last, result.logprobs)


def update_of(request: Request, now: float) -> RequestUpdate:
    """The update with everything not delivered yet; it counts as delivered then.

    Args:
        request: has new ids, or has ended.
        now: seconds on the engine's clock.
    """
    reason = request.finish_reason
    if reason == "abort":
        return RequestUpdate(request.request_id, (), reason)
    start = request.num_delivered
    new_ids = tuple(request.generated_ids[start:])
    request.num_delivered += len(new_ids)
    if reason is None and start:  # nearly all updates
        return RequestUpdate(request.request_id, new_ids, logprobs=tuple(request.logprobs[start:]))
    if new_ids and request.first_token is None:
        request.first_token = now
    is_first = bool(new_ids) and not start
    has_scores = is_first and request.params.prompt_logprobs is not None
    return RequestUpdate(
        request_id=request.request_id,
        new_ids=new_ids,
        finish_reason=reason,
        error=request.error,
        metrics=_metrics(request, now) if is_first or reason in ("stop", "length") else None,
        logprobs=tuple(request.logprobs[start:]),
        prompt_logprobs=tuple(request.prompt_logprobs) if has_scores else None,
        num_cached=0 if start else request.num_cached,
    )


def _score(request: Request, member: Member, scores: Sequence[TokenLogprobs]) -> None:
    """Keep the scores of the prompt's ids, except those that an earlier iteration returned already."""
    assert len(scores) == len(member.targets), f"{len(member.targets)} targets and {len(scores)} scores"
    num_known = len(request.prompt_logprobs) - member.start
    assert num_known >= 0, f"{request.request_id}: scores are missing before position {member.start}"
    request.prompt_logprobs += scores[num_known:]


def _append(request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
    if request.error is not None:
        request.finish_reason = "error"
        return
    request.generated_ids.append(token)
    if request.params.logprobs is not None:
        assert logprobs is not None, f"{request.request_id} asked for logprobs, the result has none"
        request.logprobs.append(logprobs)
    if token in request.stop_ids:
        request.finish_reason = "stop"
    elif len(request.generated_ids) == request.params.max_tokens:
        request.finish_reason = "length"
    elif request.constraint is not None:
        request.constraint = after(request.constraint, token)


def _metrics(request: Request, now: float) -> RequestMetrics:
    assert request.first_scheduled is not None and request.first_token is not None, "ended without a token"
    return RequestMetrics(request.arrival, request.first_scheduled, request.first_token, now)
