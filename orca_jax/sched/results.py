"""The results of an iteration, member by member: the changes of each request, and its update."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from orca_jax.request import RequestMetrics, RequestUpdate, TokenLogprobs
from orca_jax.sched.admission import after
from orca_jax.sched.request import Request
from orca_jax.step import NOT_FINITE, Member, MemberResult


@dataclass(slots=True)
class DraftCounts:
    """Totals of speculation since start."""

    num_drafts: int = 0  # proposals, each of one or several tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)  # by the place in the proposal

    def add_proposal(self, num_proposed: int, num_accepted: int) -> None:
        """Count a verified proposal."""
        self.num_drafts += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        self.accepted_per_pos += [0] * (num_proposed - len(self.accepted_per_pos))
        for place in range(num_accepted):
            self.accepted_per_pos[place] += 1


def advance(request: Request, member: Member, result: MemberResult) -> None:
    """Count an iteration, the tokens drawn in it, and the scores of the prompt's ids.

    Raises:
        AssertionError: the result does not belong to the member.
    """
    run = result.run
    assert len(run) <= 1 + member.num_drafts and member.is_sampling == (len(run) > 0), (
        f"{request.request_id}: is_sampling is {member.is_sampling}, {member.num_drafts} drafts; the result has {run}"
    )
    if member.targets:
        _score(request, member, result.scores)
    request.in_flight -= 1
    request.num_iterations += 1
    if not member.is_sampling:
        return
    request.num_pending -= 1
    if member.num_drafts and request.row is not None:  # else preempted
        request.num_computed -= 1 + member.num_drafts - len(run)  # keys and values of wrong ids


def append(request: Request, result: MemberResult) -> None:
    """Append drawn ids to a running request, up to the first one that ends it.

    An embedding ends a request.
    """
    if result.pooled is not None:
        request.pooled = result.pooled
        request.error = None if result.is_finite else NOT_FINITE
        request.finish_reason = "stop" if result.is_finite else "error"
        return
    run = result.run
    if len(run) > 1:
        for token in run[:-1]:
            _append(request, token, None)
            if request.finish_reason is not None:  # accepted proposals after the end
                request.num_computed = min(request.num_computed, request.num_tokens - 1)
                return
    if not result.is_finite:
        request.error = NOT_FINITE
    _append(request, run[-1], result.logprobs)


def update_of(request: Request, now: float) -> RequestUpdate:
    """The update with everything not delivered yet; from then on it counts as delivered.

    Args:
        request: has new ids, or has ended.
        now: seconds on the engine's clock.
    """
    reason = request.finish_reason
    if reason == "abort":
        return RequestUpdate(request.request_id, (), reason)
    start, ids = request.num_delivered, request.generated_ids
    request.num_delivered = len(ids)
    new_ids = tuple(ids[start:])
    request.last_token = now
    if reason is None and start and not request.logprobs:  # nearly all updates
        return tuple.__new__(RequestUpdate, (request.request_id, new_ids, None, None, None, (), None, 0, None))  # quick
    if (new_ids or request.pooled is not None) and request.first_token is None:
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
        pooled=request.pooled,
    )


def _score(request: Request, member: Member, scores: Sequence[TokenLogprobs]) -> None:
    """Keep the scores of the prompt's ids, except those returned by an earlier iteration."""
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
        assert logprobs is not None, f"{request.request_id} requested logprobs, and the result has none"
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
