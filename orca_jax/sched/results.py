"""A result, sorted by the members of its plan."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orca_jax.step import Member, StepPlan, StepResult, TokenLogprobs


class Outcome(NamedTuple):
    """What an iteration brought to one member."""

    member: Member
    run: Sequence[int] | None  # the ids that are told, () where it does not sample; None: they stay on the device
    finite: bool = True  # whether the last of them means something
    logprobs: TokenLogprobs | None = None  # of the last of them
    scores: Sequence[TokenLogprobs] = ()  # of its targets


def outcomes(plan: StepPlan, result: StepResult) -> Iterator[Outcome]:
    """One for each member, in the plan's order.

    Raises:
        AssertionError: plan and result do not belong together.
    """
    num_samples = sum([member.samples for member in plan.members])
    assert len(result.token_ids) == len(result.finite) == num_samples, (
        f"iteration {plan.iteration} samples {num_samples} tokens, the result has {len(result.token_ids)}"
    )
    runs = result.runs or [(token,) for token in result.token_ids]
    samples = zip(runs, result.finite, result.logprobs or (None,) * num_samples, strict=True)
    scores = iter(result.scores)
    for member in plan.members:
        told = next(scores) if member.targets else ()
        if member.samples:
            run, finite, logprobs = next(samples)
            yield Outcome(member, run, finite, logprobs, told)
        else:
            yield Outcome(member, (), scores=told)
