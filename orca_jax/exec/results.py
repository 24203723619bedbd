"""Results in flight on the device, and their conversion to a `StepResult`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import jax
import numpy as np
from jaxtyping import Array, Int

from orca_jax.exec.idle import Pending
from orca_jax.exec.multi_step import ManyDrawn
from orca_jax.exec.pack import Kept
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.logprobs import LogprobReader
from orca_jax.exec.sampling.programs import Drawn
from orca_jax.request import TokenLogprobs, TokenSet
from orca_jax.step import MemberResult, MultiStep, StepPlan, StepResult


@dataclass(slots=True)
class Launch:
    """Results of a launch, still on the device."""

    kept: Kept
    hidden: jax.Array
    num_top: list[int | None]  # log probabilities to report for the row of each kept token; None: not requested
    drawn: Drawn | None = None  # None: no token is kept, or the sampler waits for the allowed ids

    @property
    def newest(self) -> Pending:
        """The array computed last. When it is ready, the launch is done."""
        return cast(Pending, self.hidden if self.drawn is None else self.drawn.tokens)

    @classmethod
    def of_nothing(cls, hidden: jax.Array) -> "Launch":
        """A launch without kept tokens."""
        empty = np.zeros(0, np.int32)
        return cls(Kept([], [], empty, empty), hidden, [])

    def is_constrained(self, plan: StepPlan) -> bool:
        """True if a token is drawn here for a constrained member."""
        drawing = zip(self.kept.members, self.kept.targets, strict=True)
        return any(target is None and plan.members[index].is_constrained for index, target in drawing)

    def masks(self, sets: Mapping[int, TokenSet]) -> list[TokenSet | None]:
        """The allowed ids after each kept token, from the sets of the plan's members."""
        drawing = zip(self.kept.members, self.kept.targets, strict=True)
        return [sets.get(index) if target is None else None for index, target in drawing]


def read_results(
    plan: StepPlan,
    launches: Sequence[Launch],
    vocab_size: int,
    unreported: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> StepResult:
    """Wait for the device and put results in the plan's order.

    `unreported` has the tokens of rows left on the device by earlier plans; it is empty if there are none.
    """
    drawn: dict[int, tuple[int, bool, TokenLogprobs | None]] = {}
    scores: dict[int, list[TokenLogprobs]] = {i: [] for i, member in enumerate(plan.members) if member.targets}
    for launch in launches:
        if launch.drawn is None:
            jax.block_until_ready(launch.hidden)  # keep the host from running ahead of the device
            continue
        tokens, finite = np.asarray(launch.drawn.tokens).tolist(), np.asarray(launch.drawn.finite).tolist()
        reader = _reader(launch, vocab_size)
        for place, (index, target) in enumerate(zip(launch.kept.members, launch.kept.targets, strict=True)):
            if target is not None:
                assert reader is not None, "a scored token went through the full sampler"
                scores[index].append(reader.read(place, plan.members[index].num_top_targets))
                continue
            num_top = launch.num_top[place]
            logprobs = None if num_top is None or reader is None else reader.read(place, num_top)
            drawn[index] = tokens[place], finite[place], logprobs
    results = []
    for index, member in enumerate(plan.members):
        scored = scores.get(index, ())
        if not member.is_sampling:
            results.append(MemberResult(scores=scored))
            continue
        token, is_finite, logprobs = drawn[index]
        results.append(MemberResult((*unreported.get(member.row, ()), token), is_finite, logprobs, scored))
    return StepResult(plan.iteration, results)


def read_many(
    plan: StepPlan, multi_step: MultiStep, drawn: ManyDrawn, unreported: Int[Array, "R K"], rows: RowTable
) -> tuple[StepResult, int]:
    """Wait for a plan of many steps, and return its result and the number of all drawn tokens.

    `rows` is updated with the number of tokens of each member still on the device.
    """
    number = len(plan.members)
    ids, num_drawn = np.asarray(unreported), np.asarray(drawn.num_drawn)[:number]
    ended, finite = np.asarray(drawn.ended)[:number].tolist(), np.asarray(drawn.finite)[:number].tolist()
    row = [member.row for member in plan.members]
    counts = rows.num_unreported[row] + num_drawn
    reported = [limit.reports or has_ended for limit, has_ended in zip(multi_step.limits, ended, strict=True)]
    rows.num_unreported[row] = np.where(reported, 0, counts)
    results = [
        MemberResult(ids[row[i], : counts[i]].tolist() if reported[i] else None, finite[i]) for i in range(number)
    ]
    return StepResult(plan.iteration, results, int(drawn.num_steps)), int(num_drawn.sum())


def _reader(launch: Launch, vocab_size: int) -> LogprobReader | None:
    """The log probabilities of a launch; None if none is requested, because reading is a transfer."""
    if launch.drawn is None or launch.drawn.top is None:
        return None
    is_requested = launch.kept.has_targets or any([count is not None for count in launch.num_top])
    return LogprobReader(launch.drawn.top, vocab_size) if is_requested else None
