"""The cost of an iteration, as a linear function of its work."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from orca_jax.step import StepPlan


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a device for an iteration, and of the host before it.

    Padding costs as much as tokens, so the number of tokens is that of the buckets.
    """

    per_iteration: float  # seconds
    per_token: float  # seconds for each token of the merged batch, padding included
    per_pair: float  # seconds for each pair of a token and an attended one
    host: float = 0.0  # seconds for each iteration, before it is submitted
    buckets: tuple[int, ...] = ()  # ascending; empty: nothing is padded

    def seconds(self, plan: StepPlan, num_steps: int = 1) -> float:
        """The device's time for `num_steps` steps of a plan, each one token further, with all members in each."""
        num_pairs = pairs((member.start, member.num_tokens) for member in plan.members)
        further = len(plan.members) * num_steps * (num_steps - 1) / 2
        once = self.of(padded(plan.num_tokens, self.buckets), num_pairs)
        return num_steps * once + self.per_pair * further

    def of(self, num_tokens: float, num_pairs: float) -> float:
        """The time of an iteration with this work."""
        return self.per_iteration + self.per_token * num_tokens + self.per_pair * num_pairs


def pairs(members: Iterable[tuple[int, int]]) -> int:
    """Pairs of a token and an attended one, itself included; a member is (its first position, its tokens)."""
    return sum([size * start + size * (size + 1) // 2 for start, size in members])


def padded(num_tokens: int, buckets: tuple[int, ...]) -> int:
    """Tokens of the launches that hold `num_tokens`, padding included."""
    if not buckets:
        return num_tokens
    full, rest = divmod(num_tokens, buckets[-1])
    return full * buckets[-1] + (buckets[bisect_left(buckets, rest)] if rest else 0)
