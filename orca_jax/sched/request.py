"""A live request: its prompt, its generated ids, its progress through Algorithm 1, and what a result changes in it."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256
from typing import Any

from orca_jax.sched.admission import after
from orca_jax.sched.prefixes.cache import with_spans
from orca_jax.sched.prefixes.spans import Owner, owner_of
from orca_jax.values.lora_request import Adapter
from orca_jax.values.request import (
    DEFAULT_URGENCY,
    Constraint,
    FinishReason,
    RequestMetrics,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
    Urgency,
    plain_update,
)
from orca_jax.values.resumed import DELIVERED, Resumed
from orca_jax.values.step import NOT_FINITE, Member, MemberResult, SpannedPrompt, spans_of


class State(Enum):
    """The states of a request in Algorithm 1, and its end."""

    INITIATION = "initiation"  # prompt tokens are still to be processed
    RUNNING = "running"  # member of an iteration in flight
    INCREMENT = "increment"  # one generated token per iteration
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One request of the pool. Only the pool and this module change the fields below `seed`.

    `num_computed` counts the tokens whose keys and values are in the cache. Preemption sets it back to 0, and
    the generated ids are then processed again like a prompt.
    """

    request_id: str
    prompt_ids: list[int] | SpannedPrompt
    params: SamplingParams
    arrival: float  # seconds, on the engine's clock
    arrival_index: int  # order of arrival, unique
    seed: int  # resolved: never None
    stop_ids: frozenset[int]  # end tokens of this request
    constraint: Constraint | None = None
    urgency: Urgency = DEFAULT_URGENCY
    predicted_output: float = 0.0  # generated tokens in all, as predicted at arrival
    state: State = State.INITIATION
    generated_ids: list[int] = field(default_factory=list)
    # of the generated ids, if requested
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # of the prompt's ids from the second on
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_computed: int = 0
    num_iterations: int = 0
    num_delivered: int = 0  # generated ids in earlier updates
    row: int | None = None  # held from the first iteration to the end, or to a preemption
    in_flight: int = 0  # iterations submitted and not yet collected
    num_pending: int = 0  # tokens sampled by these: they are on the device only
    drawn_in: int = -1  # the number of the last plan that samples a token of it
    adapter: Adapter | None = None
    slot: int = 0  # of the adapter, while the request has a row
    num_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_written: int = 0  # prompt tokens that it wrote into the prefix cache before its first token
    lost: tuple[float, str | None] | None = None  # see `RequestUpdate`
    page_digests: list[bytes] = field(default_factory=list)  # of its first full pages, a chain
    digest_before: bytes = b""  # the digest before the first page, once it is needed
    num_remembered: int = 0  # leading full pages already in the prefix cache
    remembers_at: int = 0  # computed tokens with which the next page enters it
    # digests of the first pages that its blocks were computed from
    roots: frozenset[bytes] = frozenset()
    prompt_digest: bytes = b""  # of all of its prompt, salt and adapter, once it is needed
    shared_digest: bytes = b""  # of the tokens that it shares, in the same way
    pooled: bytes | None = None  # the embedding, if requested and computed
    is_suspect: bool = False  # its pages may hold NaN, so none enters the prefix cache
    # its last update was delivered; it stays while an iteration is in flight
    has_ended: bool = False
    finish_reason: FinishReason | None = None
    # the reason for a missing next token; the request ends with reason "error"
    error: str | None = None
    aborted: bool = False
    # while it waits for its row: pages outside of the cache were sought; those being read (`prefixes/outer.py`)
    was_sought: bool = False
    last_near: bytes = b""  # the digest of the last page that needed no reading then
    sought: Any = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None  # its newest update

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def num_left(self) -> int:
        """Tokens to process now, those of iterations in flight included; 0 for a request about to end."""
        num_pending = self.num_pending
        num_generated = len(self.generated_ids)
        if num_pending and num_generated + num_pending >= self.params.max_tokens:
            return 0
        return len(self.prompt_ids) + num_generated + num_pending - self.num_computed

    @property
    def max_total(self) -> int:
        """The paper's `max_tokens`: the largest number of slots of the request."""
        return len(self.prompt_ids) + (self.params.max_tokens if self.params.pooling is None else 0)

    def ids_from(self, start: int, count: int) -> list[int] | SpannedPrompt:
        """`count` ids of prompt and generated text from position `start`, with the vector spans that touch them."""
        boundary = len(self.prompt_ids)
        if start >= boundary:
            return self.generated_ids[start - boundary : start - boundary + count]
        ids = self.prompt_ids[start : start + count]
        return ids + self.generated_ids[: count - len(ids)]

    @property
    def is_idle(self) -> bool:
        """True if the request could get a row now."""
        return self.row is None and not self.in_flight

    @property
    def may_read_prefixes(self) -> bool:
        """True if the request may begin with blocks of another one.

        Prompt log probabilities need every position computed. Penalties count ids in a history on the device; only
        computed tokens are in it. The mean of hidden vectors needs those of all positions.
        """
        params = self.params
        return (
            params.prompt_logprobs is None and not params.has_penalty and params.pooling != "mean"
        )

    @property
    def owner(self) -> Owner:
        """The facts about it for a retention."""
        return owner_of(self.urgency.tenant, self.urgency.program, self.params.cache_hints)

    def count_written(self, start: int, size: int) -> None:
        """Count the prompt tokens of a new page in the prefix cache; those that it had copied are not new."""
        if self.num_delivered:
            return
        num_prompt = len(self.prompt_ids)
        new = min(start + size, num_prompt) - max(start, self.num_cached)
        most = num_prompt - self.num_cached
        self.num_written = min(most, self.num_written + max(0, new))

    @property
    def num_shared(self) -> int:
        """Tokens at the begin of the prompt that other requests of its call have, too."""
        return min(self.params.shared_tokens, len(self.prompt_ids) - 1)

    def digests(self, page_size: int, num_pages: int) -> Sequence[bytes]:
        """Digests of the first `num_pages` full pages, in a chain; computed once.

        Equal digests mean equal tokens and vectors from the first one on. The chain starts from the request's salt and
        from the content of its adapter. So requests with different salts never find each other's pages, and response
        times reveal nothing about them. SHA-256, since a client may choose ids to make digests collide.
        """
        digests = self.page_digests
        while len(digests) < num_pages:
            parent = digests[-1] if digests else self.first_digest
            ids = self.ids_from(len(digests) * page_size, page_size)
            assert len(ids) == page_size, f"{self.request_id}: page {len(digests)} is not full"
            digests.append(page_digest(parent, id_bytes(ids)))
        return digests[:num_pages]

    @property
    def first_digest(self) -> bytes:
        """The digest before the first page: of salt and adapter; computed once."""
        if not self.digest_before:
            salt = sha256(self.params.cache_salt.encode()).digest()
            adapter = self.adapter
            self.digest_before = (
                salt if adapter is None else page_digest(salt, b"adapter" + adapter.key.encode())
            )
        return self.digest_before


def page_digest(parent: bytes, ids: bytes) -> bytes:
    """The digest of a page, given that of the page before it."""
    return sha256(parent + ids).digest()


def id_bytes(ids: Sequence[int]) -> bytes:
    """Ids as 4 bytes each, the lowest first; with vector spans in the form of `with_spans`."""
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    spans = spans_of(ids)
    if spans:
        return with_spans(words.tobytes(), spans)
    return words.tobytes()


def resume(request: Request, before: Resumed) -> None:
    """Let a new request go on after the ids of an earlier engine, which are computed again as after a preemption."""
    if request.params.prompt_logprobs is not None:  # delivered with the first ids
        request.params = replace(request.params, prompt_logprobs=None)
    request.generated_ids = list(before.ids)
    request.num_delivered = len(before.ids)
    request.arrival = before.metrics.arrival
    request.first_scheduled = before.metrics.first_scheduled
    request.first_token = before.metrics.first_token
    if request.params.logprobs is not None:
        request.logprobs = [DELIVERED] * len(before.ids)
    for token in before.ids:
        if request.constraint is not None:
            request.constraint = after(request.constraint, token)


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
    """Append drawn ids to a running request, up to the first one that ends it. An embedding ends it."""
    if result.pooled is not None:
        request.pooled = result.pooled
        request.error = None if result.is_finite else NOT_FINITE
        request.finish_reason = "stop" if result.is_finite else "error"
        return
    run = result.run
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
    start = request.num_delivered
    ids = request.generated_ids
    request.num_delivered = len(ids)
    new_ids = tuple(ids[start:])
    request.last_token = now
    if reason is None and start and not request.logprobs:  # nearly all updates
        return plain_update(request.request_id, new_ids)
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
        num_written=0 if start else request.num_written,
        lost=None if start else request.lost,
        pooled=request.pooled,
    )


def _score(request: Request, member: Member, scores: Sequence[TokenLogprobs]) -> None:
    """Keep the scores of the prompt's ids, except those returned by an earlier iteration."""
    assert len(scores) == len(member.targets), (
        f"{len(member.targets)} targets and {len(scores)} scores"
    )
    num_known = len(request.prompt_logprobs) - member.start
    assert num_known >= 0, (
        f"{request.request_id}: scores are missing before position {member.start}"
    )
    request.prompt_logprobs += scores[num_known:]


def _append(request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
    if request.error is not None:
        request.finish_reason = "error"
        return
    request.generated_ids.append(token)
    if request.params.logprobs is not None:
        assert logprobs is not None, (
            f"{request.request_id} requested logprobs, and the result has none"
        )
        request.logprobs.append(logprobs)
    if token in request.stop_ids:
        request.finish_reason = "stop"
    elif len(request.generated_ids) == request.params.max_tokens:
        request.finish_reason = "length"
    elif request.constraint is not None:
        request.constraint = after(request.constraint, token)


def _metrics(request: Request, now: float) -> RequestMetrics:
    assert request.first_scheduled is not None and request.first_token is not None, (
        "ended without a token"
    )
    return RequestMetrics(request.arrival, request.first_scheduled, request.first_token, now)
