"""An executor without a device: time passes on a clock of its own, and requests end when they are told to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca_jax.sim.cost import LinearCost, padded
from orca_jax.step import ExecutorStats, Handle, StepPlan, StepResult, TokenSet

END_ID = 0
"""What a request's last sampled token is; every other one is `OTHER_ID`."""
OTHER_ID = 1


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class _Iteration:
    """In flight."""

    result: StepResult
    ready_at: float


class SimExecutor:
    """`step.Executor` over a cost model. One device works through the iterations in the order of submission.

    Args:
        cost: of an iteration.
        clock: moved on by the host's time in `submit` and to the end of an iteration in `collect`.
        lengths: for each request, how many tokens it generates; the last one is `END_ID`.
    """

    def __init__(self, cost: LinearCost, clock: VirtualClock, lengths: Mapping[str, int]) -> None:
        self.stats = ExecutorStats()
        self._cost = cost
        self._clock = clock
        self._lengths = lengths
        self._num_prompt: dict[int, int] = {}  # row -> prompt tokens of its holder
        self._free_at = clock.now  # when the device is done with what it has
        self._is_wanted = False

    def submit(self, plan: StepPlan) -> Handle:
        """Start an iteration when the device is free."""
        num_padded = padded(plan.num_tokens, self._cost.buckets)
        self.stats.iterations += 1
        self.stats.launches += 1 if not self._cost.buckets else -(-plan.num_tokens // self._cost.buckets[-1])
        self.stats.tokens += plan.num_tokens
        self.stats.padding_tokens += num_padded - plan.num_tokens
        self._clock.now += self._cost.host
        if self._is_wanted:
            self.stats.idle_seconds += max(0.0, self._clock.now - self._free_at)
        self._is_wanted = True
        self._free_at = max(self._clock.now, self._free_at) + self._cost.seconds(plan)
        ids = self._sample(plan)
        return _Iteration(StepResult(plan.iteration, ids, [True] * len(ids)), self._free_at)

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Never called: replayed requests have no constraints."""
        raise NotImplementedError("a simulated request has no vocabulary to choose from")

    def collect(self, handle: Handle) -> StepResult:
        """Wait for it, which takes no time but on the clock."""
        assert isinstance(handle, _Iteration), "a handle of another executor"
        self.stats.wait_seconds += max(0.0, handle.ready_at - self._clock.now)
        self._clock.now = max(self._clock.now, handle.ready_at)
        return handle.result

    def rest(self) -> None:
        """Nobody wants the device until the next plan."""
        self._is_wanted = False

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, plan: StepPlan) -> list[int]:
        ids = []
        for member in plan.members:
            if member.sampling is not None:
                self._num_prompt[member.row] = member.sampling.num_prompt
            if member.samples:
                nth = member.start + member.num_tokens - self._num_prompt[member.row] + 1
                ids.append(END_ID if nth >= self._lengths[member.request_id] else OTHER_ID)
        return ids
