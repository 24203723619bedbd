"""Results in flight on the device: idle time between them, and their conversion to a `StepResult`."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import jax
import numpy as np
from numpy.typing import NDArray

from orca_jax.exec.pack import Kept
from orca_jax.exec.rows import RowTable, VectorSums
from orca_jax.exec.sampling.logprobs import LogprobReader
from orca_jax.exec.sampling.programs import Drawn
from orca_jax.values.request import TokenLogprobs, TokenSet
from orca_jax.values.step import Member, MemberResult, StepPlan, StepResult


@runtime_checkable
class Pending(Protocol):
    """A result still being computed. Every `jax.Array` is one, but its declaration lacks `is_ready`."""

    def is_ready(self) -> bool:
        """True if the result is there."""
        ...

    def block_until_ready(self) -> object:
        """Wait until the result is there."""
        ...


@dataclass(slots=True)
class Launch:
    """Results of a launch, still on the device."""

    kept: Kept
    hidden: jax.Array
    # most probable tokens to report for each kept token; None: nothing is requested
    num_top: list[int | None]
    scored: list[Sequence[int]]  # ids to score in place of these
    drawn: Drawn | None = None  # None: no token is kept, or the sampler waits for the allowed ids

    @property
    def newest(self) -> Pending:
        """The array computed last. When it is ready, the launch is done."""
        if self.drawn is None:
            return cast(Pending, self.hidden)
        return cast(Pending, self.drawn.tokens)

    @classmethod
    def of_nothing(cls, hidden: jax.Array) -> "Launch":
        """A launch without kept tokens."""
        empty = np.zeros(0, np.int32)
        return cls(Kept([], [], empty, empty, empty, empty), hidden, [], [])

    @classmethod
    def of_plan(cls, plan: StepPlan, kept: Kept, hidden: jax.Array, rows: RowTable) -> "Launch":
        """A launch with kept tokens of a plan."""
        num_top: list[int | None] = []
        scored: list[Sequence[int]] = []
        for index, target, row in zip(kept.members, kept.targets, kept.row.tolist(), strict=True):
            count = rows.logprobs[row]
            if target is not None:
                count = plan.members[index].num_top_targets
            num_top.append(count)
            scored.append(rows.scored[row])  # none in the row of targets
        return cls(kept, hidden, num_top, scored)

    def is_constrained(self, plan: StepPlan) -> bool:
        """True if a token is drawn here for a constrained member."""
        drawing = zip(self.kept.members, self.kept.targets, strict=True)
        return any(
            target is None and plan.members[index].is_constrained for index, target in drawing
        )

    def masks(self, sets: Mapping[int, TokenSet]) -> list[TokenSet | None]:
        """The allowed ids after each kept token, from the sets of the plan's members."""
        drawing = zip(self.kept.members, self.kept.targets, strict=True)
        return [sets.get(index) if target is None else None for index, target in drawing]


type _Draw = tuple[int, bool, TokenLogprobs | None]
"""A drawn id, True if its logits were finite, and its log probabilities if they were requested."""


def read_results(
    plan: StepPlan, launches: Sequence[Launch], vocab_size: int, sums: VectorSums | None = None
) -> StepResult:
    """Wait for the device and put results in the plan's order.

    `sums` takes the hidden vectors of members that pool them.
    """
    pooled: dict[int, tuple[bytes, bool]] = {}
    drawn: defaultdict[int, list[_Draw]] = defaultdict(list)
    scores: dict[int, list[TokenLogprobs]] = {
        i: [] for i, member in enumerate(plan.members) if member.targets
    }
    for launch in launches:
        if launch.kept.pooled:
            assert sums is not None, "embeddings need sums"
            pooled |= _pool(plan, launch, sums)
        if launch.drawn is None:
            jax.block_until_ready(launch.hidden)  # keep the host from running ahead of the device
            continue
        reader = _reader(launch, vocab_size)
        if reader is not None:
            _read_scores(launch, reader, scores)
        for index, draw in _draws(launch, launch.drawn, reader):
            drawn[index].append(draw)
    results = []
    for index, member in enumerate(plan.members):
        scored = scores.get(index, ())
        if not member.is_sampling:
            vector, is_finite = pooled.get(index, (None, True))
            results.append(MemberResult(is_finite=is_finite, scores=scored, pooled=vector))
        elif member.num_drafts:
            results.append(_verified(member, drawn[index]))
        else:
            [(token, is_finite, logprobs)] = drawn[index]
            results.append(MemberResult((token,), is_finite, logprobs, scored))
    return StepResult(plan.iteration, results)


def _read_scores(
    launch: Launch, reader: LogprobReader, scores: Mapping[int, list[TokenLogprobs]]
) -> None:
    """Add the log probabilities of the targets of a launch to the scores of their members."""
    places = zip(launch.kept.members, launch.kept.targets, strict=True)
    for place, (index, target) in enumerate(places):
        if target is not None:
            scores[index].append(reader.read(place, launch.num_top[place] or 0))


def _draws(
    launch: Launch, drawn: Drawn, reader: LogprobReader | None
) -> Iterator[tuple[int, _Draw]]:
    """The drawn tokens of a launch, each after the index of its member."""
    tokens = np.asarray(drawn.tokens).tolist()
    finite = np.asarray(drawn.finite).tolist()
    if reader is None:
        # Places after the kept tokens are unused.
        for index, token, is_finite in zip(launch.kept.members, tokens, finite, strict=False):
            yield index, (token, is_finite, None)
        return
    for place, index in enumerate(launch.kept.members):
        if launch.kept.targets[place] is not None:
            continue
        logprobs = None
        num_top = launch.num_top[place]
        if launch.scored[place]:
            logprobs = reader.read_listed(place, launch.scored[place])
        elif num_top is not None:
            logprobs = reader.read(place, num_top)
        yield index, (tokens[place], finite[place], logprobs)


def _pool(plan: StepPlan, launch: Launch, sums: VectorSums) -> dict[int, tuple[bytes, bool]]:
    """The embeddings complete after a launch, by member: the bytes of float32, and True if all of them are finite."""
    hidden = np.asarray(launch.hidden)
    done = {}
    for tokens in launch.kept.pooled:
        member = plan.members[tokens.member]
        vector: NDArray[np.floating] = hidden[tokens.first_place]
        if member.pools != "last":
            vectors = hidden[tokens.first_place : tokens.first_place + tokens.size]
            vector = sums.add_vectors(member.row, tokens.position, vectors) / (
                tokens.position + tokens.size
            )
        if not tokens.is_last or member.pools == "sum":
            continue
        if member.pools == "mean":
            sums.forget_row(member.row)
        done[tokens.member] = vector.astype(np.float32).tobytes(), bool(np.isfinite(vector).all())
    return done


def _verified(member: Member, drawn: Sequence[_Draw]) -> MemberResult:
    """The drawn ids up to the first one unlike its proposal. All later ones follow a context that does not exist."""
    drafts = member.ids[-member.num_drafts :]
    run = []
    for (token, is_finite, _), draft in zip(drawn, [*drafts, None], strict=True):
        run.append(token)
        if token != draft or not is_finite:
            break
    return MemberResult(run, is_finite)


def _reader(launch: Launch, vocab_size: int) -> LogprobReader | None:
    """The log probabilities of a launch; None if none is requested, because reading is a transfer."""
    if launch.drawn is None or launch.drawn.scores is None:
        return None
    if all([count is None for count in launch.num_top]):
        return None
    return LogprobReader(launch.drawn.scores, vocab_size, has_listed=any(launch.scored))


class IdleWatch:
    """Adds up the time in which the device had no program to run although the engine had work.

    The host can check if a device is done, but not since when. So an idle gap counts from the last time at which the
    device was known to be busy: from the last call of `look`, or from the end of a wait for its newest result. The sum
    is exact if the host waits for the device before each program. Otherwise it is an upper bound, kept close by
    frequent calls of `look`. The time of a dispatch counts as work.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._newest: Pending | None = None  # the result of the last program
        self._busy_at: float | None = (
            None  # the time at which the device was last known to be busy; None: there is no work
        )

    def look(self) -> None:
        """Note the time if the device is busy. This takes half a microsecond."""
        if self._newest is not None and not self._newest.is_ready():
            self._busy_at = self._clock()

    def begin(self) -> None:
        """Count the gap before a program; called just before its dispatch."""
        if self._busy_at is not None and self._newest is not None and self._newest.is_ready():
            self.seconds += self._clock() - self._busy_at

    def handed_over(self, result: Pending) -> None:
        """Note the dispatch of a program. When `result` is ready, the program is done."""
        self._newest, self._busy_at = result, self._clock()

    def wait(self, result: Pending, ready_at: float | None = None) -> None:
        """Block until `result` of any program is ready. If it was not ready before, the device was busy until now.

        `ready_at` is the time of its readiness, as another thread saw it.
        """
        if not result.is_ready():
            result.block_until_ready()
            self._busy_at = self._clock()
        elif ready_at is not None and self._busy_at is not None:
            self._busy_at = max(self._busy_at, ready_at)
        self.look()

    def rest(self) -> None:
        """Count no time until the next program, since there is no work."""
        self._busy_at = None
