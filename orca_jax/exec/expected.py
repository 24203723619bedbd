"""The time that launches should take, measured at start: for the limit for a hung engine, and for the token budget."""

import json
import time
from collections.abc import Callable, Sequence

import jax

from orca_jax.values.config import ModelConfig

_BUSY = 1.25  # a launch that took so many times as long was measured while other programs ran


class LaunchTimes:
    """Measures each program, with a batch as on a busy server."""

    def __init__(self) -> None:
        self._of_bucket: dict[int, float] = {}
        self._of_plain = self._of_slowest = 0.0  # samplers

    @classmethod
    def from_bytes(cls, content: bytes | None) -> "LaunchTimes | None":
        """The times that an earlier start measured; None if there are none."""
        if content is None:
            return None
        times = cls()
        found = json.loads(content)
        times._of_bucket = {int(bucket): seconds for bucket, seconds in found["layers"].items()}
        times._of_plain, times._of_slowest = found["samplers"]
        return times

    def to_bytes(self) -> bytes:
        """The times, for `from_bytes`."""
        return json.dumps(
            {"layers": self._of_bucket, "samplers": [self._of_plain, self._of_slowest]}
        ).encode()

    def as_now(self, now: "LaunchTimes") -> "LaunchTimes":
        """These times, shortened if a launch of `now` takes clearly less: other programs ran while they were measured.

        `now` has one of the measured sizes.
        """
        size = min(now._of_bucket)
        ratio = now._of_bucket[size] / self._of_bucket[size]
        if ratio * _BUSY >= 1:
            return self
        times = LaunchTimes()
        times._of_bucket = {each: ratio * seconds for each, seconds in self._of_bucket.items()}
        times._of_plain = ratio * self._of_plain
        times._of_slowest = ratio * self._of_slowest
        return times

    @property
    def largest(self) -> int:
        """The largest measured bucket."""
        return max(self._of_bucket)

    def of_layers(self, bucket: int) -> float:
        """The measured seconds of the layers of a bucket."""
        return self._of_bucket[bucket]

    def measure_layers[T](self, bucket: int, run: Callable[[], T], repeats: int) -> T:
        """Run the layers of a bucket and wait for the result. The shortest time counts.

        The first run may include work that no later run has.
        """
        for _ in range(repeats):
            start = time.perf_counter()
            result = jax.block_until_ready(run())
            taken = time.perf_counter() - start
            self._of_bucket[bucket] = min(taken, self._of_bucket.get(bucket, taken))
        return result

    def measure_sampler(self, run: Callable[[], object], *, is_plain: bool) -> None:
        """Run a sampler and wait for the result."""
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken = time.perf_counter() - start
        self._of_slowest = max(self._of_slowest, taken)
        if is_plain:
            self._of_plain = max(self._of_plain, taken)

    def usual(self) -> dict[int, float]:
        """The expected seconds of a launch of each measured bucket with a plain sampler."""
        return {bucket: seconds + self._of_plain for bucket, seconds in self._of_bucket.items()}

    def longest(self, buckets: Sequence[int], context: float) -> dict[int, float]:
        """The expected seconds of a launch of each bucket with the slowest sampler.

        `context` multiplies the times of the layers, since attention over long contexts takes longer. A bucket beyond
        the measured ones takes as long for each of its tokens as the largest of these.
        """
        each = self._of_bucket[self.largest] / self.largest
        layers = {bucket: self._of_bucket.get(bucket, bucket * each) for bucket in buckets}
        return {bucket: seconds * context + self._of_slowest for bucket, seconds in layers.items()}


def context_factor(model: ModelConfig, max_model_len: int) -> float:
    """The arithmetic of a token with the longest context, relative to a token without context."""
    heads = model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim
    embed = model.embed_dim
    parameters = (
        2 * embed * (heads + kv_heads) + (2 + model.gated_mlp) * embed * model.active_mlp_dim
    )
    scores = model.num_heads * model.page_shape.head_dim
    # two operations for each parameter, four for each head dim
    return 1 + 2 * scores * max_model_len / parameters
