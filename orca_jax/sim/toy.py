"""A model whose next token can be computed by hand, behind the real contract.

After ids `x_0 .. x_{n-1}` its favourite is `sum((i + 1) * (x_i + 1)) mod vocab_size`, and logits fall from there by
`toy_logits.py`. The next id is the favourite where sampling is greedy; with a temperature `seed + n + top_k` is added
to the sum first. So every id, its position, the row's seed and every page matter. Biases, penalties and masks then act
on the logits around that id, and the highest is drawn. Log probabilities are the model's own, without the temperature's
addition. `ToyExecutor` trusts no plan: what a scheduler gets wrong ends in an AssertionError.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from orca_jax.config import ModelConfig
from orca_jax.request import Constraint, SamplingParams
from orca_jax.sim.toy_logits import best_of, first_allowed, has_adjustments, toy_adjusted, toy_logprobs, toy_noise
from orca_jax.step import (
    ExecutorStats,
    Handle,
    Member,
    RowSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenSet,
)

Override = Callable[[str, int, int], int | None]
"""(request id, context length, the model's choice) -> the id to return, or None for logits that are not finite."""


TOY_MODEL = ModelConfig(
    family="toy",
    vocab_size=257,  # bytes and an end token
    num_layers=1,
    embed_dim=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    mlp_dim=1,
    max_positions=16384,
    norm="layernorm",
    norm_eps=1e-5,
    activation="gelu",
    gated_mlp=False,
    attention_bias=False,
    mlp_bias=False,
    tied_embeddings=True,
    eos_token_ids=(256,),
)


def toy_generate(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    seed: int = 0,
    eos_token_ids: Collection[int] = (),
    constraint: Constraint | None = None,
) -> list[int]:
    """What the toy model generates for one request alone, with neither pages nor batches: the oracle of tests.

    `seed` is the resolved one, for a request without a seed of its own. `constraint` is a new one, for a request that
    has one beside its parameters. A final stop token is included; where nothing may follow, the ids end.
    """
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    ids = list(prompt_ids)
    total = sum((i + 1) * (token + 1) for i, token in enumerate(ids))
    for _ in range(params.max_tokens):
        generated = ids[len(prompt_ids) :]
        allowed = [i for i in range(vocab_size) if _may_follow(i, generated, params, stop_ids)]
        if constraint is not None:
            tokens = constraint.allowed()
            allowed = [i for i in allowed if tokens >> i & 1]
        if not allowed:
            break
        noise = toy_noise(params.temperature, params.top_k, seed if params.seed is None else params.seed, len(ids))
        logits = toy_adjusted((total + noise) % vocab_size, params, prompt_ids, Counter(generated), vocab_size)
        token = max(allowed, key=logits.__getitem__)
        ids.append(token)
        total += len(ids) * (token + 1)
        if token in stop_ids:
            break
        if constraint is not None:
            constraint.accept(token)
    return ids[len(prompt_ids) :]


def _may_follow(token: int, generated: list[int], params: SamplingParams, stop_ids: Collection[int]) -> bool:
    """Whether a request's own parameters let an id come next."""
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    if len(generated) < params.min_tokens and token in stop_ids:
        return False
    after = (*generated, token)
    return not any(after[-len(bad) :] == bad for bad in params.bad_token_ids)


def toy_score(ids: Sequence[int], num_top: int, *, vocab_size: int) -> list[TokenLogprobs]:
    """What each id from the second on is worth after those before it: the oracle of all log probabilities."""
    scores, total = [], 0
    for i, (token, following) in enumerate(pairwise(ids)):
        total += (i + 1) * (token + 1)
        scores.append(toy_logprobs(total % vocab_size, following, num_top, vocab_size))
    return scores


@dataclass(slots=True)
class _Row:
    """What the device knows about one row."""

    request_id: str
    sampling: RowSampling
    pages: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)  # the model's sum after each position
    last_token: int | None = None


@dataclass(slots=True)
class _ToyHandle:
    """An iteration in flight: what it computes, its result, and the time when it may be seen."""

    plan: StepPlan
    scores: tuple[list[TokenLogprobs], ...]
    ready_at: float
    result: StepResult | None = None  # None while the allowed ids are awaited


class ToyExecutor:
    """`step.Executor` over simulated pages; standard library only.

    Args:
        vocab_size: ids are below it.
        num_pages: pages of simulated K/V memory.
        page_size: slots in a page.
        num_rows: rows that plans may name.
        latency: seconds that one iteration takes; iterations in flight run one after another.
        override: may replace every sampled id, or declare its logits not finite.
        check_pages: read each context back through its page table before sampling, which costs time in proportion to
            its length; without it, a running sum is trusted.
    """

    def __init__(
        self,
        vocab_size: int,
        num_pages: int,
        page_size: int,
        num_rows: int,
        *,
        latency: float = 0.0,
        override: Override | None = None,
        check_pages: bool = True,
    ) -> None:
        self.stats = ExecutorStats()
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._num_rows = num_rows
        self._latency = latency
        self._override = override
        self._check_pages = check_pages
        self._pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self._owner_of_page: list[int | None] = [None] * num_pages
        self._rows: dict[int, _Row] = {}
        self._in_flight: deque[_ToyHandle] = deque()
        self._awaiting: _ToyHandle | None = None  # submitted, and not told what it may draw
        self._ready_at = 0.0
        self._closed = False

    def submit(self, plan: StepPlan) -> Handle:
        """Run a plan at once, and let its result be seen `latency` seconds after the one before it."""
        assert not self._closed, "submit after close"
        assert self._awaiting is None, "submit where allowed ids are awaited"
        assert plan.members, f"iteration {plan.iteration} is empty"
        assert plan.iteration == self.stats.iterations, (
            f"iteration {plan.iteration} where {self.stats.iterations} is due"
        )
        rows = [member.row for member in plan.members]
        assert len(set(rows)) == len(rows), f"iteration {plan.iteration} names a row twice: {rows}"
        # First all writes, then all reads, as on a device: a page in two rows shows in both.
        for member in plan.members:
            self._write(member)
        self.stats.iterations += 1
        self.stats.launches += 1
        self.stats.tokens += plan.num_tokens
        self._ready_at = max(time.perf_counter(), self._ready_at) + self._latency
        scores = tuple([self._score(member) for member in plan.members if member.targets])
        handle = _ToyHandle(plan, scores, self._ready_at)
        self._in_flight.append(handle)
        if plan.is_constrained:
            self._awaiting = handle
        else:
            self._draw(handle, ())
        return handle

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Draw what waited for it."""
        assert self._awaiting is not None, "nothing awaits allowed ids"
        assert self._awaiting is handle, "another iteration awaits allowed ids"
        num_constrained = sum(member.is_constrained for member in self._awaiting.plan.members)
        assert len(allowed) == num_constrained, f"{len(allowed)} sets for {num_constrained} constrained members"
        assert all(0 < tokens < 1 << self._vocab_size for tokens in allowed), "a set is empty or outside the vocabulary"
        self._draw(self._awaiting, allowed)
        self._awaiting = None

    def collect(self, handle: Handle) -> StepResult:
        """Wait until the oldest iteration in flight is done."""
        assert self._in_flight, "nothing is in flight"
        assert self._awaiting is None, "collect where allowed ids are awaited"
        oldest = self._in_flight.popleft()
        assert oldest is handle, "collected out of order"
        if self._latency:
            wait = max(0.0, oldest.ready_at - time.perf_counter())
            time.sleep(wait)
            self.stats.wait_seconds += wait
        assert oldest.result is not None, "collected before it was drawn"
        return oldest.result

    def close(self) -> None:
        """Refuse further plans."""
        self._closed = True

    def _write(self, member: Member) -> None:
        """Put a member's ids into its pages, and check all that its plan claims."""
        assert 0 <= member.row < self._num_rows, f"row {member.row} of {self._num_rows}"
        row = self._holder(member)
        ids = list(member.ids)
        if member.last_on_device:
            assert row.last_token is not None, f"row {member.row} has no token on the device"
            ids.append(row.last_token)
        assert ids, f"{member.request_id} processes nothing"
        self._check_claims(member, ids)
        assert all(0 <= token < self._vocab_size for token in ids), f"{member.request_id}: ids outside the vocabulary"
        assert member.start <= len(row.sums), (
            f"{member.request_id} starts at {member.start} after {len(row.sums)} tokens"
        )
        end = member.start + len(ids)
        assert end <= len(row.pages) * self._page_size, f"{member.request_id}: {end} tokens in {len(row.pages)} pages"
        total = row.sums[member.start - 1] if member.start else 0
        del row.sums[member.start :]
        for position, token in enumerate(ids, start=member.start):
            page, slot = divmod(position, self._page_size)
            self._pages[row.pages[page]][slot] = token
            total += (position + 1) * (token + 1)
            row.sums.append(total)

    def _holder(self, member: Member) -> _Row:
        """The state of a member's row, which starts afresh for a new holder, with the new pages appended."""
        if member.sampling is not None:
            self._rows[member.row] = _Row(member.request_id, member.sampling)
            assert member.num_old_pages == 0, f"{member.request_id} is new in row {member.row} and has old pages"
        row = self._rows[member.row]
        assert row.request_id == member.request_id, f"row {member.row} is {row.request_id}'s, not {member.request_id}'s"
        assert member.num_old_pages == len(row.pages), (
            f"{member.request_id} has {len(row.pages)} pages, the plan says {member.num_old_pages}"
        )
        for page in member.new_pages:
            self._owner_of_page[page] = member.row
            self._pages[page] = [None] * self._page_size
        row.pages += member.new_pages
        return row

    def _check_claims(self, member: Member, ids: list[int]) -> None:
        assert member.samples or not member.is_constrained, f"{member.request_id} is constrained and does not sample"
        targets = list(member.targets)
        if targets:
            expected = len(ids) - member.samples
            assert len(targets) == expected, f"{member.request_id}: {len(targets)} targets for {len(ids)} tokens"
            assert all(0 <= token < self._vocab_size for token in targets), f"{member.request_id}: targets outside"
            assert targets[: len(ids) - 1] == ids[1:], f"{member.request_id}: targets are not what follows"

    def _score(self, member: Member) -> list[TokenLogprobs]:
        sums = self._rows[member.row].sums[member.start :]
        pairs = zip(sums, member.targets, strict=False)
        return [
            toy_logprobs(total % self._vocab_size, target, member.num_top_targets, self._vocab_size)
            for total, target in pairs
        ]

    def _draw(self, handle: _ToyHandle, allowed: Sequence[TokenSet]) -> None:
        """Sample for a plan whose members have all been written; `allowed` is for its constrained ones."""
        plan, sets = handle.plan, iter(allowed)
        samples = [self._sample(m, next(sets) if m.is_constrained else None) for m in plan.members if m.samples]
        logprobs = [logprob for _, logprob in samples]
        handle.result = StepResult(
            iteration=plan.iteration,
            token_ids=[token or 0 for token, _ in samples],
            finite=[token is not None for token, _ in samples],
            logprobs=logprobs if any(logprobs) else (),
            scores=handle.scores,
        )

    def _sample(self, member: Member, allowed: TokenSet | None) -> tuple[int | None, TokenLogprobs | None]:
        """The next id after a member's whole context, None where the logits are not finite; and what it is worth."""
        row = self._rows[member.row]
        sampling, length, total = row.sampling, len(row.sums), row.sums[-1]
        if self._check_pages:
            read_back = self._sum_of_pages(row, member)
            assert read_back == total, f"{member.request_id}: another request wrote into its pages"
        noise = toy_noise(sampling.temperature, sampling.top_k, sampling.seed, length)
        token: int | None = (total + noise) % self._vocab_size
        if self._override is not None and token is not None:
            token = self._override(member.request_id, length, token)
        row.last_token = token
        if token is None:
            return None, None
        favourite = (token - noise) % self._vocab_size
        row.last_token = token = self._choose(row, token, allowed)
        if sampling.logprobs is None:
            return token, None
        return token, toy_logprobs(favourite, token, sampling.logprobs, self._vocab_size)

    def _choose(self, row: _Row, favourite: int, allowed: TokenSet | None) -> int:
        """The id of the highest logit after biases, penalties and the mask."""
        if not has_adjustments(row.sampling):
            return favourite if allowed is None else first_allowed(favourite, allowed)
        ids = [self._token_at(row, position) for position in range(len(row.sums))]
        prompt, generated = ids[: row.sampling.num_prompt], ids[row.sampling.num_prompt :]
        logits = toy_adjusted(favourite, row.sampling, prompt, Counter(generated), self._vocab_size)
        return best_of(logits, (1 << self._vocab_size) - 1 if allowed is None else allowed)

    def _token_at(self, row: _Row, position: int) -> int:
        page, slot = divmod(position, self._page_size)
        token = self._pages[row.pages[page]][slot]
        assert token is not None, f"{row.request_id} reads position {position}, which nobody wrote"
        return token

    def _sum_of_pages(self, row: _Row, member: Member) -> int:
        total = 0
        for position in range(len(row.sums)):
            index = row.pages[position // self._page_size]
            assert self._owner_of_page[index] == member.row, (
                f"page {index} of {member.request_id} was given to row {self._owner_of_page[index]} too"
            )
            total += (position + 1) * (self._token_at(row, position) + 1)
        return total
