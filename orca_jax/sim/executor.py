"""An executor without a device: time passes on a virtual clock, and requests end after given lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca_jax.request import TokenSet
from orca_jax.sim.cost import LinearCost, padded
from orca_jax.step import ExecutorStats, Handle, Member, MemberResult, MultiStep, StepPlan, StepResult

END_ID = 0
"""The last sampled token of a request; every other one is `OTHER_ID`."""
OTHER_ID = 1


class VirtualClock:
    """A clock with the time in seconds in `now`, and changed only there."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class _SimHandle:
    """An iteration in flight."""

    result: StepResult
    ready_at: float


class SimExecutor:
    """`step.Executor` over a cost model. Each device works through the iterations in the order of submission.

    With several pipeline stages, an iteration takes an equal part of its time on each of them, one after another.
    Iterations in flight are on different stages. A stage is idle while the one before it takes longer.

    Args:
        cost: of an iteration, on all stages together.
        clock: advanced by the host's time in `submit`, and to the end of an iteration in `collect`.
        lengths: the number of generated tokens of each request; the last one is `END_ID`.
        num_stages: devices in the pipeline.
    """

    def __init__(
        self, cost: LinearCost, clock: VirtualClock, lengths: Mapping[str, int], *, num_stages: int = 1
    ) -> None:
        self.stats = ExecutorStats()
        self._cost = cost
        self._clock = clock
        self._lengths = lengths
        self._num_prompt: dict[int, int] = {}  # row -> prompt tokens of its holder
        self._unreported: dict[int, list[int]] = {}  # row -> ids in no result yet
        self._free_at = [clock.now] * num_stages  # the time at which each stage has done all its work
        self._is_wanted = False

    @property
    def expected_seconds(self) -> float:
        """Seconds of the virtual clock until the last stage has done all its work."""
        return max(0.0, self._free_at[-1] - self._clock.now)

    def submit(self, plan: StepPlan) -> Handle:
        """Start an iteration when the first stage is free; `idle_seconds` are those of this stage."""
        num_padded = padded(plan.num_tokens, self._cost.buckets)
        self.stats.iterations += 1
        self.stats.launches += 1 if not self._cost.buckets else -(-plan.num_tokens // self._cost.buckets[-1])
        self.stats.tokens += plan.num_tokens
        self.stats.padding_tokens += num_padded - plan.num_tokens
        self._clock.now += self._cost.host
        if self._is_wanted:
            self.stats.idle_seconds += max(0.0, self._clock.now - self._free_at[0])
        self._is_wanted = True
        result = self._run(plan) if plan.multi_step is None else self._run_many(plan, plan.multi_step)
        seconds = self._cost.seconds(plan, result.num_steps) / len(self._free_at)
        end = self._clock.now
        for stage, free_at in enumerate(self._free_at):
            self._free_at[stage] = end = max(end, free_at) + seconds
        return _SimHandle(result, end)

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Never called: replayed requests have no constraints."""
        raise NotImplementedError("a simulated request has no vocabulary to choose from")

    def is_ready(self, handle: Handle) -> bool:
        """True if the clock has reached the end of an iteration."""
        assert isinstance(handle, _SimHandle), "a handle of another executor"
        return handle.ready_at <= self._clock.now

    def wait(self, handle: Handle) -> None:
        """Move the clock to the end of an iteration."""
        self.wait_until(handle, math.inf)

    def wait_until(self, handle: Handle, when: float) -> bool:
        """Move the clock to the end of an iteration, or to a time before it; True if the iteration has ended.

        With the time of the next arrival it is the `engine.Wait` of a driver in virtual time.
        """
        assert isinstance(handle, _SimHandle), "a handle of another executor"
        self._clock.now = max(self._clock.now, min(handle.ready_at, when))
        return self.is_ready(handle)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for an iteration; the wait passes on the clock only."""
        assert isinstance(handle, _SimHandle), "a handle of another executor"
        self.stats.wait_seconds += max(0.0, handle.ready_at - self._clock.now)
        self._clock.now = max(self._clock.now, handle.ready_at)
        return handle.result

    def rest(self) -> None:
        """Stop counting idle time until the next plan."""
        self._is_wanted = False

    def close(self) -> None:
        """Do nothing: no memory is held."""

    def _run(self, plan: StepPlan) -> StepResult:
        results = []
        for member in plan.members:
            if member.sampling is not None:
                self._num_prompt[member.row] = member.sampling.num_prompt
                self._unreported[member.row] = []
            if not member.is_sampling:
                results.append(MemberResult())
                continue
            results.append(MemberResult((*self._unreported[member.row], self._next_id(member, 0))))
            self._unreported[member.row] = []
        return StepResult(plan.iteration, results)

    def _run_many(self, plan: StepPlan, many: MultiStep) -> StepResult:
        """Run a plan of many steps; a member draws no more after its end or at its limit."""
        assert len(self._free_at) == 1, "a plan of many steps on several stages"
        limits = dict(zip([member.row for member in plan.members], many.limits, strict=True))
        drawing, num_steps = list(plan.members), 0
        ended = set[int]()
        while drawing and num_steps < many.num_steps and not (many.stops_early and len(drawing) < len(plan.members)):
            for member in drawing:
                self._unreported[member.row].append(self._next_id(member, num_steps))
            num_steps += 1
            ended |= {member.row for member in drawing if self._unreported[member.row][-1] == END_ID}
            drawing = [m for m in drawing if m.row not in ended and num_steps < limits[m.row].most_steps]
        reported = {row for row, limit in limits.items() if limit.reports or row in ended}
        results = [MemberResult(self._unreported[row] if row in reported else None) for row in limits]
        self._unreported |= {row: [] for row in reported}
        return StepResult(plan.iteration, results, num_steps)

    def _next_id(self, member: Member, num_before: int) -> int:
        """The id of a member's draw after `num_before` steps of a plan."""
        nth = member.start + member.num_tokens + num_before - self._num_prompt[member.row] + 1
        return END_ID if nth >= self._lengths[member.request_id] else OTHER_ID
