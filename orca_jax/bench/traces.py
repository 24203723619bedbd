"""Workloads: what arrives when, and how long it is."""

import random
from dataclasses import dataclass

from orca_jax.errors import ConfigError


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace. It generates exactly `num_output` tokens, since no end token counts."""

    arrival: float  # seconds after the start
    prompt_ids: tuple[int, ...]
    num_output: int


TRACES = ("orca",)


def make_trace(name: str, *, num_requests: int, vocab_size: int, seed: int, rate: float | None) -> list[TraceRequest]:
    """A trace by name.

    "orca" is the paper's (section 6.2): input uniform in 32..512 tokens, output uniform in 1..128, arrivals
    Poisson. Random ids stand for text.

    Args:
        name: one of `TRACES`.
        num_requests: how many.
        vocab_size: ids are below it.
        seed: same seed, same trace; the lengths do not depend on the rate.
        rate: requests per second; None: all at once.

    Raises:
        ConfigError: an unknown name, or a number that cannot be.
    """
    if name not in TRACES:
        raise ConfigError(f"unknown trace {name!r}; known: {', '.join(TRACES)}", param="trace")
    if num_requests < 1:
        raise ConfigError(f"num_requests must be at least 1, got {num_requests}", param="num_requests")
    if rate is not None and not rate > 0:
        raise ConfigError(f"rate must be above 0, got {rate}", param="rate")
    lengths, ids, gaps = (random.Random(f"{name}-{part}-{seed}") for part in ("lengths", "ids", "gaps"))
    trace, now = [], 0.0
    for _ in range(num_requests):
        num_input, num_output = lengths.randint(32, 512), lengths.randint(1, 128)
        prompt = tuple(ids.choices(range(vocab_size), k=num_input))
        trace.append(TraceRequest(now, prompt, num_output))
        now += gaps.expovariate(rate) if rate else 0.0
    return trace
