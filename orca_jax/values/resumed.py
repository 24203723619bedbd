"""Values of a request that goes on in another engine than the one that began it."""

from dataclasses import dataclass

from orca_jax.values.request import RequestMetrics, TokenLogprobs

DELIVERED = TokenLogprobs(0.0, 1)
"""Stands for the log probabilities of an id that an earlier engine has delivered. They are not read again."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What an earlier engine has delivered of a request. Its parameters name the same seed again."""

    ids: tuple[int, ...]  # at least one
    metrics: RequestMetrics  # delivered with the first of them
