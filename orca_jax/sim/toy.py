"""The toy model: next tokens computable by hand, behind the real contract.

After ids `x_0 .. x_{n-1}` its favourite is `sum((i + 1) * (x_i + 1)) mod vocab_size`, and logits fall from there as
in `toy_logits.py`. Greedy sampling chooses the favourite; with a temperature, `seed + n + top_k` is added to the sum
first. So every id, its position, the row's seed and every page matter. Biases, penalties and masks then act on the
logits around this id, and the highest is drawn. Log probabilities are the model's own, without the temperature's
addition. With an adapter, its number is added to each `x_i`. `ToyExecutor` checks every plan: a mistake of a scheduler
raises an AssertionError.
"""

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca_jax.sim.toy_logits import (
    best_of,
    first_allowed,
    has_adjustments,
    toy_adjusted,
    toy_listed,
    toy_logprobs,
    toy_noise,
)
from orca_jax.sim.toy_memory import ToyMemory
from orca_jax.values.cache_spec import ONE_GROUP, LayerGroup
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LayerKind
from orca_jax.values.request import TokenLogprobs, TokenSet
from orca_jax.values.step import ExecutorStats, Handle, Member, MemberResult, StepPlan, StepResult

Override = Callable[[str, int, int], int | None]
"""(request id, context length, the model's choice) -> the id to return, or None for logits that are not finite."""


TOY_MODEL = ModelConfig(
    family="toy",
    vocab_size=257,  # bytes and an end token
    layers=(LayerKind(),),
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
    learned_positions=True,
    eos_token_ids=(256,),
)


def toy_pooled(sums: Sequence[int], pooling: str, vocab_size: int) -> bytes:
    """The toy's embedding of a context, from its sum after each position.

    The hidden vector of a token has two numbers: the sum modulo the vocabulary, and the number of tokens.
    """
    vectors = [(total % vocab_size, number) for number, total in enumerate(sums, start=1)]
    chosen = vectors[-1:] if pooling == "last" else vectors
    return array("f", [sum(column) / len(chosen) for column in zip(*chosen, strict=True)]).tobytes()


@dataclass(slots=True)
class _ToyHandle:
    """An iteration in flight: its plan, its result, and the time of its end."""

    plan: StepPlan
    scores: tuple[list[TokenLogprobs], ...]
    ready_at: float
    result: StepResult | None = None  # None while it waits for the allowed ids


class ToyExecutor:
    """`step.Executor` over simulated blocks; standard library only.

    Args:
        vocab_size: ids are below it.
        num_blocks: blocks of each pool of the simulated KV cache.
        page_size: slots in a page.
        num_rows: rows of plans are below it.
        latency: seconds of one iteration.
        num_stages: number of stages of a pipeline. Each has an equal part of the latency, and serves one iteration
            after the other.
        override: may replace every sampled id, or declare its logits not finite.
        check_pages: read each context back through its tables of blocks before sampling, in time proportional to its
            length, as far as windows reach. Otherwise a running sum is trusted.
        groups: the groups of layers. The model has all tokens in each of them, and reads back those within its window.
        num_states: blocks of states; 0: the model has none.

    Attributes:
        adapters: the number of each adapter by its key; the owner of the executor adds and removes them.
    """

    def __init__(
        self,
        vocab_size: int,
        num_blocks: Sequence[int],
        page_size: int,
        num_rows: int,
        *,
        latency: float = 0.0,
        num_stages: int = 1,
        override: Override | None = None,
        check_pages: bool = True,
        groups: Sequence[LayerGroup] = ONE_GROUP,
        num_states: int = 0,
    ) -> None:
        self.stats = ExecutorStats()
        self._vocab_size = vocab_size
        self._latency = latency
        self._num_stages = num_stages
        self._override = override
        self._check_pages = check_pages
        self.adapters: dict[str, int] = {}
        self._memory = ToyMemory(vocab_size, num_blocks, page_size, num_rows, groups, num_states)
        self._in_flight: deque[_ToyHandle] = deque()
        self._awaiting: _ToyHandle | None = None  # submitted, and waits for the allowed ids
        self._ready_at = 0.0  # the time at which the device has done all its work
        self._is_wanted = False
        self._closed = False

    @property
    def expected_seconds(self) -> float:
        """The latency of all iterations in flight."""
        return self._latency * len(self._in_flight)

    def submit(self, plan: StepPlan) -> Handle:
        """Run a plan at once; its result is ready after the latency, and a stage's part of it after the last one."""
        assert not self._closed, "submit after close"
        assert self._awaiting is None, "submit while an iteration waits for allowed ids"
        assert plan.members, f"iteration {plan.iteration} is empty"
        assert plan.iteration == self.stats.iterations, (
            f"iteration {plan.iteration} instead of {self.stats.iterations}"
        )
        rows = [member.row for member in plan.members]
        assert len(set(rows)) == len(rows), f"iteration {plan.iteration} names a row twice: {rows}"
        for write in plan.writes:
            assert write.slot > 0, "slot 0 has no adapter"
            self._memory.slots[write.slot] = self.adapters[write.adapter]
        # First all writes, then all reads, as on a device: a page in two rows shows in both.
        self._memory.copy(plan.copies)
        self._memory.check_moves(plan.members)
        for member in plan.members:
            self._memory.write(member)
        if self._check_pages:
            for member in plan.members:
                self._memory.check(member.row)
        self.stats.iterations += 1
        self.stats.launches += 1
        scores = tuple([self._score(member) for member in plan.members if member.targets])
        self.stats.tokens += plan.num_tokens
        now = time.perf_counter()
        if self._is_wanted:
            self.stats.idle_seconds += max(0.0, now - self._ready_at)
        self._is_wanted = True
        self._ready_at = max(now + self._latency, self._ready_at + self._latency / self._num_stages)
        handle = _ToyHandle(plan, scores, self._ready_at)
        self._in_flight.append(handle)
        if plan.is_constrained:
            self._awaiting = handle
        else:
            self._draw(handle, ())
        return handle

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Sample for the constrained members."""
        assert self._awaiting is not None, "no iteration waits for allowed ids"
        assert self._awaiting is handle, "another iteration waits for allowed ids"
        num_constrained = sum(member.is_constrained for member in self._awaiting.plan.members)
        assert len(allowed) == num_constrained, (
            f"{len(allowed)} sets for {num_constrained} constrained members"
        )
        assert all(0 < tokens < 1 << self._vocab_size for tokens in allowed), (
            "a set is empty or outside the vocabulary"
        )
        self._draw(self._awaiting, allowed)
        self._awaiting = None

    def is_ready(self, handle: Handle) -> bool:
        """True if the latency of an iteration has passed."""
        assert isinstance(handle, _ToyHandle), "a handle of another executor"
        return handle.result is not None and time.perf_counter() >= handle.ready_at

    def wait(self, handle: Handle) -> None:
        """Sleep until the latency of an iteration has passed."""
        assert isinstance(handle, _ToyHandle), "a handle of another executor"
        time.sleep(max(0.0, handle.ready_at - time.perf_counter()))

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
        """Stop counting idle time until the next plan."""
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

    def _pool(self, member: Member) -> bytes | None:
        if member.pools is None or member.pools == "sum":
            return None
        return toy_pooled(self._memory.row(member.row).sums, member.pools, self._vocab_size)

    def _draw(self, handle: _ToyHandle, allowed: Sequence[TokenSet]) -> None:
        """Sample for a plan after all its members were written; `allowed` is for the constrained ones."""
        plan = handle.plan
        sets = iter(allowed)
        scores = iter(handle.scores)
        results = []
        for member in plan.members:
            scored = next(scores) if member.targets else ()
            if not member.is_sampling:
                results.append(MemberResult(scores=scored, pooled=self._pool(member)))
                continue
            if member.num_drafts:
                results.append(self._verify(member))
                continue
            token, logprobs = self._sample(member, next(sets) if member.is_constrained else None)
            results.append(MemberResult((token or 0,), token is not None, logprobs, scored))
        handle.result = StepResult(plan.iteration, results)
        # `sim/clock.py` counts the latency from the draw, so a token must not be seen before that.
        handle.ready_at = max(handle.ready_at, time.perf_counter() + self._latency)
        self._ready_at = max(self._ready_at, handle.ready_at)

    def _verify(self, member: Member) -> MemberResult:
        """Sample after a member's newest token and after each proposal, up to the first other id."""
        drafts = [*member.ids[-member.num_drafts :], None]
        run = []
        for before, draft in zip(range(member.num_drafts, -1, -1), drafts, strict=True):
            token, _ = self._sample(member, None, before)
            run.append(token or 0)
            if token != draft:
                break
        self._memory.row(member.row).last_token = None  # the host decides about it
        return MemberResult(run, token is not None)

    def _sample(
        self, member: Member, allowed: TokenSet | None, before: int = 0
    ) -> tuple[int | None, TokenLogprobs | None]:
        """The id after a member's context without its last `before` tokens (None if logits are not finite).

        The second value is the log probability of the id.
        """
        row = self._memory.row(member.row)
        length = len(row.sums) - before
        sampling = row.sampling
        total = row.sums[length - 1]
        params = sampling.params
        noise = toy_noise(params.temperature, params.top_k, sampling.seed, length)
        token: int | None = (total + noise) % self._vocab_size
        if self._override is not None and token is not None:
            token = self._override(member.request_id, length, token)
        if token is None:
            # an id without a meaning, as on a device; an iteration in flight may read it
            row.last_token = 0
            return None, None
        favourite = (token - noise) % self._vocab_size
        row.last_token = token = self._choose(member.row, token, allowed)
        if params.logprobs is None:
            return token, None
        if params.logprob_token_ids:
            ids = params.logprob_token_ids
            return token, toy_listed(favourite, token, ids, self._vocab_size)
        return token, toy_logprobs(favourite, token, params.logprobs, self._vocab_size)

    def _choose(self, row: int, favourite: int, allowed: TokenSet | None) -> int:
        """The id of the highest logit after biases, penalties and the mask."""
        sampling = self._memory.row(row).sampling
        if not has_adjustments(sampling.params):
            if allowed is None:
                return favourite
            return first_allowed(favourite, allowed)
        ids = self._memory.row(row).ids
        prompt = ids[: sampling.num_prompt]
        generated = ids[sampling.num_prompt :]
        logits = toy_adjusted(
            favourite, sampling.params, prompt, Counter(generated), self._vocab_size
        )
        return best_of(logits, (1 << self._vocab_size) - 1 if allowed is None else allowed)
