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
from dataclasses import dataclass
from itertools import pairwise

from orca_jax.config import ModelConfig
from orca_jax.request import Constraint, SamplingParams
from orca_jax.sim.toy_logits import best_of, first_allowed, has_adjustments, toy_adjusted, toy_logprobs, toy_noise
from orca_jax.sim.toy_memory import ToyMemory
from orca_jax.step import ExecutorStats, Handle, Member, StepPlan, StepResult, TokenLogprobs, TokenSet

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
    is_plain = constraint is None and not _is_limited(params) and not has_adjustments(params)
    for _ in range(params.max_tokens):
        noise = toy_noise(params.temperature, params.top_k, seed if params.seed is None else params.seed, len(ids))
        token = (total + noise) % vocab_size
        if not is_plain:
            generated = ids[len(prompt_ids) :]
            tokens = -1 if constraint is None else constraint.allowed()  # -1 has all bits
            allowed = [i for i in range(vocab_size) if tokens >> i & 1 and _may_follow(i, generated, params, stop_ids)]
            if not allowed:
                break
            logits = toy_adjusted(token, params, prompt_ids, Counter(generated), vocab_size)
            token = max(allowed, key=logits.__getitem__)
        ids.append(token)
        total += len(ids) * (token + 1)
        if token in stop_ids:
            break
        if constraint is not None:
            constraint.accept(token)
    return ids[len(prompt_ids) :]


def _is_limited(params: SamplingParams) -> bool:
    return bool(params.min_tokens or params.bad_token_ids) or params.allowed_token_ids is not None


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
        self._latency = latency
        self._override = override
        self._check_pages = check_pages
        self._memory = ToyMemory(vocab_size, num_pages, page_size, num_rows)
        self._in_flight: deque[_ToyHandle] = deque()
        self._awaiting: _ToyHandle | None = None  # submitted, and not told what it may draw
        self._ready_at = 0.0  # when the device is done with what it has
        self._is_wanted = False
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
            self._memory.write(member)
        self.stats.iterations += 1
        self.stats.launches += 1
        scores = tuple([self._score(member) for member in plan.members if member.targets])
        result = self._repeat(plan) if plan.repeats else None
        num_steps = 1 if result is None else result.num_steps
        self.stats.tokens += plan.num_tokens * num_steps
        now = time.perf_counter()
        if self._is_wanted:
            self.stats.idle_seconds += max(0.0, now - self._ready_at)
        self._is_wanted = True
        self._ready_at = max(now, self._ready_at) + self._latency * num_steps
        handle = _ToyHandle(plan, scores, self._ready_at, result)
        self._in_flight.append(handle)
        if result is not None:
            return handle
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
        oldest = self._in_flight.popleft()
        assert oldest is handle, "collected out of order"
        if self._latency:
            wait = max(0.0, oldest.ready_at - time.perf_counter())
            time.sleep(wait)
            self.stats.wait_seconds += wait
        assert oldest.result is not None, "collected before it was drawn"
        return oldest.result

    def rest(self) -> None:
        """Nobody wants the device until the next plan."""
        self._is_wanted = False

    def close(self) -> None:
        """Refuse further plans."""
        self._closed = True

    def _score(self, member: Member) -> list[TokenLogprobs]:
        sums = self._memory.row(member.row).sums[member.start :]
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
        token_ids = [token or 0 for token, _ in samples]
        rows = [self._memory.row(member.row) for member in plan.members if member.samples]
        runs = [row.told(token) for row, token in zip(rows, token_ids, strict=True)]
        handle.result = StepResult(
            iteration=plan.iteration,
            token_ids=token_ids,
            finite=[token is not None for token, _ in samples],
            logprobs=logprobs if any(logprobs) else (),
            scores=handle.scores,
            runs=runs if any([len(run) > 1 for run in runs]) else (),
        )

    def _repeat(self, plan: StepPlan) -> StepResult:
        """A plan that repeats, whose members have been written once: draw, write what was drawn, and so on."""
        assert not self._in_flight, "a plan that repeats with others in flight"
        drawing, ended, broken, num_steps = list(plan.members), set[int](), set[int](), 0
        while drawing and num_steps < plan.num_steps and not (plan.yields and len(drawing) < len(plan.members)):
            for member in drawing if num_steps else ():
                self._memory.write_drawn(member.row)
            num_steps += 1
            for member in drawing:
                token, _ = self._sample(member, None)
                row = self._memory.row(member.row)
                row.untold.append(token or 0)
                if token is None:
                    broken.add(member.row)
                if token is None or token in row.sampling.stop_ids:
                    ended.add(member.row)
            drawing = [m for m in drawing if m.row not in ended and num_steps < m.most_steps]
        runs = [
            tuple(self._memory.row(member.row).told()) if member.told or member.row in ended else None
            for member in plan.members
        ]
        return StepResult(
            iteration=plan.iteration,
            token_ids=[run[-1] if run else 0 for run in runs],
            finite=[member.row not in broken for member in plan.members],
            num_steps=num_steps,
            runs=runs,
        )

    def _sample(self, member: Member, allowed: TokenSet | None) -> tuple[int | None, TokenLogprobs | None]:
        """The next id after a member's whole context, None where the logits are not finite; and what it is worth."""
        row = self._memory.row(member.row)
        sampling, length, total = row.sampling, len(row.sums), row.sums[-1]
        if self._check_pages:
            self._memory.check(member.row)
        noise = toy_noise(sampling.temperature, sampling.top_k, sampling.seed, length)
        token: int | None = (total + noise) % self._vocab_size
        if self._override is not None and token is not None:
            token = self._override(member.request_id, length, token)
        row.last_token = token
        if token is None:
            return None, None
        favourite = (token - noise) % self._vocab_size
        row.last_token = token = self._choose(member.row, token, allowed)
        if sampling.logprobs is None:
            return token, None
        return token, toy_logprobs(favourite, token, sampling.logprobs, self._vocab_size)

    def _choose(self, row: int, favourite: int, allowed: TokenSet | None) -> int:
        """The id of the highest logit after biases, penalties and the mask."""
        sampling = self._memory.row(row).sampling
        if not has_adjustments(sampling):
            return favourite if allowed is None else first_allowed(favourite, allowed)
        ids = self._memory.ids_of(row)
        prompt, generated = ids[: sampling.num_prompt], ids[sampling.num_prompt :]
        logits = toy_adjusted(favourite, sampling, prompt, Counter(generated), self._vocab_size)
        return best_of(logits, (1 << self._vocab_size) - 1 if allowed is None else allowed)
