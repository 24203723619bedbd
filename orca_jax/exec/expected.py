"""The time that launches in flight should take, measured at start: the basis of the limit for a hung engine."""

import time
from collections.abc import Callable

import jax

from orca_jax.config import ModelConfig


class ExpectedTime:
    """Adds up the expected times of the launches in flight.

    Each program runs once at start, with padding alone. `context` multiplies these times, since attention over long
    contexts takes longer than attention over none.
    """

    def __init__(self, context: float) -> None:
        self.seconds = 0.0  # of everything submitted and not collected
        self._context = context
        self._of_bucket: dict[int, float] = {}
        self._of_sampler = 0.0  # of the slowest one

    def measure_layers[T](self, bucket: int, run: Callable[[], T]) -> T:
        """Run the layers of a bucket and wait for the result."""
        start = time.perf_counter()
        result = jax.block_until_ready(run())
        self._of_bucket[bucket] = time.perf_counter() - start
        return result

    def measure_sampler(self, run: Callable[[], object]) -> None:
        """Run a sampler and wait for the result."""
        start = time.perf_counter()
        jax.block_until_ready(run())
        self._of_sampler = max(self._of_sampler, time.perf_counter() - start)

    def begin(self, bucket: int, num_steps: int = 1) -> None:
        """Count a launch; call it before the launch, since a dispatch may wait for the device."""
        self.seconds += num_steps * (self._of_bucket[bucket] * self._context + self._of_sampler)

    def end(self, seconds: float, *, is_last: bool) -> None:
        """Count the launches of a collected iteration as done: `seconds` were added for them by `begin`."""
        self.seconds = 0.0 if is_last else self.seconds - seconds


def context_factor(model: ModelConfig, max_model_len: int) -> float:
    """The arithmetic of a token with the longest context, relative to a token without context."""
    heads, kv_heads, embed = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.embed_dim
    parameters = 2 * embed * (heads + kv_heads) + (2 + model.gated_mlp) * embed * model.mlp_dim
    return 1 + 2 * heads * max_model_len / parameters  # two operations for each parameter, four for each head dim
