"""An executor without a device: time passes on a virtual clock, and requests end after given lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from orca_jax.sim.cost import ALL_TOKENS, IterationCost, WorkCounts, windows_of, work_of
from orca_jax.values.cache_spec import ONE_GROUP, LayerGroup
from orca_jax.values.request import TokenSet
from orca_jax.values.step import ExecutorStats, Handle, Member, MemberResult, StepPlan, StepResult

END_ID = 0
"""The last sampled token of a request; every other one is `OTHER_ID`."""
OTHER_ID = 1
UNLIKE_ID = 2
"""A sampled token in place of a proposal that is not accepted."""


class VirtualClock:
    """A clock with the time in seconds in `now`, and changed only there."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(frozen=True, slots=True)
class _SimHandle:
    """An iteration in flight."""

    result: StepResult
    ready_at: float


class _SimRow:
    """The lengths of a row's holder."""

    __slots__ = ("end", "num_prompt")

    def __init__(self, num_prompt: int, num_generated: int) -> None:
        self.num_prompt = num_prompt
        self.end = num_prompt + num_generated - 1  # the context that the last id is drawn after

    def next_id(self, context: int) -> int:
        """The id drawn after `context` tokens."""
        if context >= self.end:
            return END_ID
        return OTHER_ID


_NOTHING = MemberResult()
_OTHER = MemberResult((OTHER_ID,))
_END = MemberResult((END_ID,))


class SimExecutor:
    """`step.Executor` over a cost model. Each device works through the iterations in the order of submission.

    With several pipeline stages, an iteration is on each of them, one after another. Iterations in flight are on
    different stages. A stage is idle while the one before it takes longer.

    Args:
        cost: the cost of an iteration on each stage.
        clock: advanced by the host's time in `submit`, and to the end of an iteration in `collect`.
        lengths: the number of generated tokens of each request; the last one is `END_ID`.
        num_stages: devices in the pipeline.
        acceptance: chance of a proposed token to be drawn, if those before it were; which ones are depends on the
            request and the position alone.
        groups: the groups of the model's layers; a window bounds the context of its layers.
    """

    def __init__(
        self,
        cost: IterationCost,
        clock: VirtualClock,
        lengths: Mapping[str, int],
        *,
        num_stages: int = 1,
        acceptance: float = 1.0,
        groups: Sequence[LayerGroup] = ONE_GROUP,
    ) -> None:
        self._windows = windows_of(groups)
        self._sees_all = self._windows == ALL_TOKENS
        self.stats = ExecutorStats()
        self._cost = cost
        self._clock = clock
        self._lengths = lengths
        self._acceptance = acceptance
        self._rows: dict[int, _SimRow] = {}
        self._free_at = [clock.now] * num_stages
        self._is_wanted = False

    @property
    def expected_seconds(self) -> float:
        """Seconds of the virtual clock until the last stage has done all its work."""
        return max(0.0, self._free_at[-1] - self._clock.now)

    @property
    def free_at(self) -> tuple[float, ...]:
        """The time on the clock at which each stage has done all its work."""
        return tuple(self._free_at)

    def submit(self, plan: StepPlan) -> Handle:
        """Start an iteration when the first stage is free; `idle_seconds` are those of this stage."""
        result, work = self._run(plan)
        self.stats.iterations += 1
        self.stats.launches += work.launches
        self.stats.tokens += work.num_tokens
        self.stats.padding_tokens += work.padding
        self._clock.now += self._cost.host
        if self._is_wanted:
            self.stats.idle_seconds += max(0.0, self._clock.now - self._free_at[0])
        self._is_wanted = True
        end = self._clock.now
        for stage, seconds in enumerate(self._cost.stages(work, len(self._free_at))):
            self._free_at[stage] = end = max(end, self._free_at[stage]) + seconds
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

    def _run(self, plan: StepPlan) -> tuple[StepResult, WorkCounts]:
        results, parts = [], []
        increments = context = draws = 0
        for member in plan.members:
            if member.sampling is not None:
                self._rows[member.row] = _SimRow(
                    member.sampling.num_prompt, self._lengths[member.request_id]
                )
            row = self._rows[member.row]
            start = member.start
            size = len(member.ids) + member.last_on_device
            is_increment = size == 1 and start >= row.num_prompt
            if is_increment and self._sees_all:  # nearly always
                increments += 1
                context += start + 1
            else:
                parts.append((start, size, is_increment))
            draws += member.is_sampling + member.num_drafts
            if not member.is_sampling:
                results.append(_NOTHING)
            elif member.num_drafts:
                results.append(self._verify(member, row))
            else:  # nearly always
                results.append(_END if start + size >= row.end else _OTHER)
        work = work_of(parts, draws, self._windows)
        work = work._replace(
            increments=work.increments + increments,
            context=work.context + context,
            members=len(plan.members),
        )
        return StepResult(plan.iteration, results), work.padded(self._cost.buckets)

    def _verify(self, member: Member, row: _SimRow) -> MemberResult:
        """Draw after a member's newest token and after each proposal, up to the first other id."""
        run = []
        first = member.start + member.num_tokens - member.num_drafts
        for context, draft in enumerate(member.ids[-member.num_drafts :], first):
            is_drawn = (
                crc32(b"%d %s" % (context, member.request_id.encode())) < self._acceptance * 2**32
            )
            token = row.next_id(context)
            run.append(token if is_drawn or token == END_ID else UNLIKE_ID)
            if run[-1] != draft:
                return MemberResult(run)
        return MemberResult([*run, row.next_id(member.start + member.num_tokens)])
