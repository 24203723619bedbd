"""The cost of an iteration by many features."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orca_jax.sim.cost import WorkCounts
from orca_jax.values.cache_spec import ceil_div


@dataclass(frozen=True)
class FeatureCost:
    """A cost by many features, fitted to a recorded timeline."""

    weights: Mapping[str, float]  # seconds for each unit of a feature of `features`
    host: float = 0.0
    buckets: tuple[int, ...] = ()

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """An equal part of the iteration's seconds on each stage."""
        found = features(work)
        seconds = sum([weight * found[name] for name, weight in self.weights.items()])
        return [seconds / num_stages] * num_stages


FIRST_SAMPLER = 8
"""Rows of the smallest sampler; each next one has twice as many."""
KNOTS = (4, 16, 64)
"""Tokens of a launch, padding included, at which the seconds for one more token may change.

Few tokens wait for the weights, more of them for the products, and many use the processor best.
"""


def features(work: WorkCounts) -> dict[str, float]:
    """The features of a fit to measured times, by name. All launches count as equally large."""
    draws = ceil_div(work.draws, work.steps)
    size = (work.num_tokens + work.padding) / work.launches
    found: dict[str, float] = {"steps": work.steps, "launches": work.launches}
    for low, high in pairwise((0, *KNOTS, math.inf)):
        name = f"tokens_from_{low}" if low else "tokens"
        found[name] = work.launches * min(max(size - low, 0.0), high - low)
    return found | {
        "chunk_tokens": work.chunk_tokens,
        "chunk_pairs": work.chunk_pairs,
        "chunk_context": work.chunk_context,
        "increments": work.increments,
        "context": work.context,
        "sampler_rows": work.steps * max(FIRST_SAMPLER, 1 << (draws - 1).bit_length())
        if draws
        else 0,
    }
