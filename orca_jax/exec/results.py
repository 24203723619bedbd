"""What is in flight on the device, and how it becomes a `StepResult`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import numpy as np
from jaxtyping import Array, Int

from orca_jax.exec.idle import Pending
from orca_jax.exec.multi_step import Repeated
from orca_jax.exec.pack import Kept
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.logprobs import LogprobReader
from orca_jax.exec.sampling.programs import Drawn
from orca_jax.step import StepPlan, StepResult, TokenLogprobs, TokenSet


@dataclass(slots=True)
class Launch:
    """Results of a launch, still on the device."""

    kept: Kept
    hidden: jax.Array
    logprobs: list[int | None]  # that the row of each kept token wants
    drawn: Drawn | None = None  # None: nothing is kept, or the sampler waits to be told what is allowed

    @property
    def newest(self) -> Pending:
        """Is there when the launch is done."""
        return cast(Pending, self.hidden if self.drawn is None else self.drawn.tokens)

    @classmethod
    def of_nothing(cls, hidden: jax.Array) -> "Launch":
        """No token is kept."""
        nobody = np.zeros(0, np.int32)
        return cls(Kept([], [], nobody, nobody), hidden, [])

    def is_constrained(self, plan: StepPlan) -> bool:
        """Whether a token is drawn here for a constrained member."""
        drawing = zip(self.kept.members, self.kept.targets, strict=True)
        return any(target is None and plan.members[index].is_constrained for index, target in drawing)

    def masks(self, sets: Mapping[int, TokenSet]) -> list[TokenSet | None]:
        """What each kept token's successor may be, from the sets of the plan's members."""
        drawing = zip(self.kept.members, self.kept.targets, strict=True)
        return [sets.get(index) if target is None else None for index, target in drawing]


def read_results(
    plan: StepPlan, launches: Sequence[Launch], vocab_size: int, untold: Sequence[Sequence[int]] = ()
) -> StepResult:
    """Wait for the device and put results in the plan's order.

    `untold` are tokens of the sampling members that earlier plans left on the device, where there are any.
    """
    drawn: dict[int, tuple[int, bool, TokenLogprobs | None]] = {}
    scores: dict[int, list[TokenLogprobs]] = {i: [] for i, member in enumerate(plan.members) if member.targets}
    for launch in launches:
        if launch.drawn is None:
            jax.block_until_ready(launch.hidden)  # so that nobody runs ahead of the device
            continue
        tokens, finite = np.asarray(launch.drawn.tokens).tolist(), np.asarray(launch.drawn.finite).tolist()
        reader = _reader(launch, vocab_size)
        for place, (index, target) in enumerate(zip(launch.kept.members, launch.kept.targets, strict=True)):
            if target is not None:
                assert reader is not None, "a scored token went through the full sampler"
                scores[index].append(reader.read(place, plan.members[index].num_top_targets))
                continue
            wanted = launch.logprobs[place]
            logprobs = None if wanted is None or reader is None else reader.read(place, wanted)
            drawn[index] = tokens[place], finite[place], logprobs
    in_order = [drawn[index] for index in sorted(drawn)]
    return StepResult(
        plan.iteration,
        [token for token, _, _ in in_order],
        [finite for _, finite, _ in in_order],
        [told for _, _, told in in_order] if any([told is not None for _, _, told in in_order]) else (),
        list(scores.values()),
        runs=[[*earlier, drawn[index][0]] for earlier, index in zip(untold, sorted(drawn), strict=True)]
        if untold
        else (),
    )


def read_repeated(
    plan: StepPlan, repeated: Repeated, untold: Int[Array, "R K"], rows: RowTable
) -> tuple[StepResult, int]:
    """Wait for a plan that repeats: what its members are told, and how many tokens they drew in all.

    `rows` learns how many tokens of each member stay on the device.
    """
    number = len(plan.members)
    ids, taken = np.asarray(untold), np.asarray(repeated.taken)[:number]
    ended, finite = np.asarray(repeated.ended)[:number].tolist(), np.asarray(repeated.finite)[:number].tolist()
    row = [member.row for member in plan.members]
    counts = rows.num_untold[row] + taken
    told = [member.told or has_ended for member, has_ended in zip(plan.members, ended, strict=True)]
    rows.num_untold[row] = np.where(told, 0, counts)
    runs = [ids[row[i], : counts[i]].tolist() if told[i] else None for i in range(number)]
    newest = [run[-1] if run else 0 for run in runs]
    result = StepResult(plan.iteration, newest, finite, num_steps=int(repeated.num_steps), runs=runs)
    return result, int(taken.sum())


def _reader(launch: Launch, vocab_size: int) -> LogprobReader | None:
    """Only where somebody asked: reading is a transfer."""
    if launch.drawn is None or launch.drawn.told is None:
        return None
    wanted = launch.kept.has_targets or any([count is not None for count in launch.logprobs])
    return LogprobReader(launch.drawn.told, vocab_size) if wanted else None
