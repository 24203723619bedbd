"""An executor without a device: time passes on a clock of its own, and requests end when they are told to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca_jax.sim.cost import LinearCost, padded
from orca_jax.step import ExecutorStats, Handle, Member, StepPlan, StepResult, TokenSet

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
        self._untold: dict[int, list[int]] = {}  # row -> ids that are in no result yet
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
        result = self._repeat(plan) if plan.repeats else self._run(plan)
        self._free_at = max(self._clock.now, self._free_at) + self._cost.seconds(plan, result.num_steps)
        return _Iteration(result, self._free_at)

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

    def _run(self, plan: StepPlan) -> StepResult:
        ids, rows = [], []
        for member in plan.members:
            if member.sampling is not None:
                self._num_prompt[member.row] = member.sampling.num_prompt
                self._untold[member.row] = []
            if member.samples:
                ids.append(self._next_id(member, 0))
                rows.append(member.row)
        runs = [[*self._untold[row], token] for row, token in zip(rows, ids, strict=True)]
        self._untold |= {row: [] for row in rows}
        return StepResult(
            plan.iteration, ids, [True] * len(ids), runs=runs if any([len(run) > 1 for run in runs]) else ()
        )

    def _repeat(self, plan: StepPlan) -> StepResult:
        """A plan that repeats: whoever has ended or reached its bound draws no more."""
        drawing, num_steps = list(plan.members), 0
        ended = set[int]()
        while drawing and num_steps < plan.num_steps and not (plan.yields and len(drawing) < len(plan.members)):
            for member in drawing:
                self._untold[member.row].append(self._next_id(member, num_steps))
            num_steps += 1
            ended |= {member.row for member in drawing if self._untold[member.row][-1] == END_ID}
            drawing = [m for m in drawing if m.row not in ended and num_steps < m.most_steps]
        told = [member.told or member.row in ended for member in plan.members]
        runs = [self._untold[m.row] if is_told else None for m, is_told in zip(plan.members, told, strict=True)]
        self._untold |= {m.row: [] for m, is_told in zip(plan.members, told, strict=True) if is_told}
        newest = [run[-1] if run else OTHER_ID for run in runs]
        return StepResult(plan.iteration, newest, [True] * len(runs), num_steps=num_steps, runs=runs)

    def _next_id(self, member: Member, num_before: int) -> int:
        """What a member draws after so many repetitions."""
        nth = member.start + member.num_tokens + num_before - self._num_prompt[member.row] + 1
        return END_ID if nth >= self._lengths[member.request_id] else OTHER_ID
