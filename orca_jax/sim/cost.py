"""The cost of an iteration: its work, counted in features, and linear functions of it."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orca_jax.values.cache_spec import LayerGroup, attended_pairs, ceil_div

type WindowShares = Mapping[int | None, float]
"""The share of the layers with each window of tokens; None: the layers that see all earlier tokens."""
ALL_TOKENS: WindowShares = {None: 1}


def windows_of(groups: Sequence[LayerGroup]) -> WindowShares:
    """The windows of a model's layers."""
    layers = Counter[int | None]()
    for group in groups:
        layers[group.window] += len(group.layers)
    if len(layers) == 1:
        return dict.fromkeys(layers, 1)  # work is then counted in integers
    return {window: number / layers.total() for window, number in layers.items()}


class WorkCounts(NamedTuple):
    """The work of one iteration.

    An increment processes one generated token. All other tokens are in chunks: of prompts, or computed again after a
    preemption. A context is counted in tokens with keys and values to read. Pairs and contexts are means over the
    layers: a window bounds those of its layers.
    """

    steps: int = 1  # runs of all layers
    launches: int = 1  # device programs
    padding: int = 0  # tokens that fill up buckets
    chunk_tokens: int = 0  # the paper's initiation phase
    chunk_pairs: float = 0  # of a chunk's token and an attended one, itself included
    chunk_context: float = 0  # tokens before the chunks
    increments: int = 0
    context: float = 0  # of the increments, their own tokens included
    draws: int = 0  # members with a token drawn
    members: int = 0  # requests

    @property
    def num_tokens(self) -> int:
        """Tokens of the merged batch, without padding."""
        return self.chunk_tokens + self.increments

    @property
    def num_read(self) -> float:
        """Tokens whose keys and values a layer reads, those of the batch included."""
        return self.chunk_context + self.chunk_tokens + self.context

    @property
    def pairs(self) -> float:
        """Pairs of a token and an attended one, of chunks and increments."""
        return self.chunk_pairs + self.context

    def padded(self, buckets: tuple[int, ...]) -> "WorkCounts":
        """The same work in launches of these sizes."""
        if not buckets:
            return self
        num_tokens = self.num_tokens
        return self._replace(
            launches=ceil_div(num_tokens, buckets[-1]),
            padding=padded(num_tokens, buckets) - num_tokens,
        )


def work_of(
    members: Sequence[tuple[int, int, bool]], num_draws: int = 0, windows: WindowShares = ALL_TOKENS
) -> WorkCounts:
    """The work of members given as (first position, number of tokens, whether it is an increment), without padding."""
    chunks = [(start, size) for start, size, is_increment in members if not is_increment]
    increments = [start for start, _, is_increment in members if is_increment]
    pairs = before = context = 0.0 if len(windows) > 1 else 0
    for window, share in windows.items():
        most = math.inf if window is None else window - 1  # earlier tokens that a token sees
        pairs += share * sum([attended_pairs(start, size, window) for start, size in chunks])
        before += share * sum([min(start, most) for start, _ in chunks])
        context += share * sum([min(start, most) + 1 for start in increments])
    return WorkCounts(
        1,
        1,
        0,
        sum([size for _, size in chunks]),
        pairs,
        before,
        len(increments),
        context,
        num_draws,
    )


def padded(num_tokens: int, buckets: tuple[int, ...]) -> int:
    """Tokens of the launches for `num_tokens`, padding included."""
    if not buckets:
        return num_tokens
    full, rest = divmod(num_tokens, buckets[-1])
    return full * buckets[-1] + (buckets[bisect_left(buckets, rest)] if rest else 0)


class IterationCost(Protocol):
    """Seconds of the devices for an iteration, and of the host before it."""

    @property
    def host(self) -> float:
        """Seconds of the host for each iteration, before it is submitted."""
        ...

    @property
    def buckets(self) -> tuple[int, ...]:
        """Padded numbers of tokens of a launch, ascending; empty: nothing is padded."""
        ...

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """Seconds on each stage of a pipeline."""
        ...


def seconds_by(cost: IterationCost) -> Callable[[Sequence[tuple[int, int, bool]]], float]:
    """Seconds of an iteration on one device, host included, by its members as `work_of` takes them."""
    return lambda members: (
        cost.host + sum(cost.stages(work_of(members, len(members)).padded(cost.buckets), 1))
    )


@dataclass(frozen=True)
class LinearCost:
    """A cost by three features: steps, tokens with padding, and pairs of tokens in attention.

    Stages have equal parts of it.
    """

    per_iteration: float  # seconds
    per_token: float  # seconds for each token of the merged batch, padding included
    per_pair: float  # seconds for each pair of a token and an attended one
    host: float = 0.0  # seconds for each iteration, before it is submitted
    buckets: tuple[int, ...] = ()  # ascending; empty: nothing is padded

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """An equal part of the iteration's seconds on each stage."""
        seconds = self.per_iteration * work.steps + self.per_token * (
            work.num_tokens + work.padding
        )
        return [(seconds + self.per_pair * work.pairs) / num_stages] * num_stages
