"""Values of a request in a second engine, which continues the work of the first."""

from dataclasses import dataclass

from orca_jax.values.request import RequestMetrics, TokenLogprobs

DELIVERED = TokenLogprobs(0.0, 1)
"""A place holder for the log probabilities of an id from an earlier engine. They are not read again."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The results of an earlier engine for a request. Its parameters name the same seed again."""

    ids: tuple[int, ...]  # at least one
    metrics: RequestMetrics  # delivered with the first of them
