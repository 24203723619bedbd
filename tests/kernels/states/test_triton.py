"""The kernels of linear attention for CUDA cards, interpreted, against the oracle: memory of nobody holds NaN."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.linear_state import LinearTokens, linear_state
from orca_jax.kernels.linear_state.triton import CHUNK, MOST_KEYS
from orca_jax.kernels.state_rows import StateRows
from tests.covering import slow

pytestmark = pytest.mark.usefixtures("quick_compiles")
ALLOWED = 3e-4  # difference from the oracle; factors of products have 16 bits
RAGGED = (1, 1, 1, 2, CHUNK, CHUNK + 1, 3 * CHUNK - 5)
PADDING = 3  # tokens, and a row


@dataclass(frozen=True)
class Load:
    """Requests and the sizes of their states.

    Attributes:
        lengths: tokens of each request, single ones first.
        heads, keys, values: of a state.
        pairs: queries and keys, if heads share them.
        is_listed: an array has the query and key of each head.
        has_beta: True for the delta rule.
        likeness: of all keys of a head; 1 if they are equal.
        gate: what remains of a state at each token; None for random gates.
    """

    lengths: tuple[int, ...] = RAGGED
    heads: int = 2
    keys: int = 16
    values: int = 32
    pairs: int | None = None
    is_listed: bool = False
    has_beta: bool = True
    likeness: float = 0.0
    gate: float | None = None
    dtype: str = "float32"


def make(load: Load) -> tuple[LinearTokens, jax.Array, StateRows]:
    """Tokens, states and rows. Every third request is fresh, every second one keeps its state."""
    draw = np.random.default_rng(1)
    used = sum(load.lengths)
    shape = used + PADDING, load.heads
    pairs = load.pairs or load.heads
    shared = draw.normal(size=(1, pairs, load.keys))
    own = draw.normal(size=(shape[0], pairs, load.keys))
    keys = load.likeness * shared + (1 - load.likeness) * own
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    decay = -np.exp(draw.normal(size=shape))
    if load.gate is not None:
        decay[:] = np.log(load.gate)
    arrays = [
        draw.normal(size=keys.shape) / load.keys**0.5,
        keys,
        draw.normal(size=(*shape, load.values)),
        decay,
    ]
    if load.has_beta:
        arrays.append(1 / (1 + np.exp(-draw.normal(size=shape) - 5 * load.likeness)))
    for each in arrays:
        each[used:] = np.nan
    rows = len(load.lengths) + 1
    index = np.arange(rows)
    is_fresh = index % 3 == 0
    target = np.where(index % 2, index, rows + index)
    states = np.full((2 * rows, load.heads, load.keys, load.values), np.nan, np.float32)
    read = index[:-1][~is_fresh[:-1]]
    states[read] = draw.normal(size=(len(read), *states.shape[1:]))
    start = np.cumsum((0, *load.lengths))
    start[-1] = 0
    columns = start, (*load.lengths, 0), index, target
    given = StateRows(*(jnp.asarray(each, jnp.int32) for each in columns), jnp.asarray(is_fresh))
    tokens = LinearTokens(*(jnp.asarray(each, load.dtype) for each in arrays))
    if load.is_listed:
        tokens = tokens._replace(group=jnp.asarray(draw.integers(0, pairs, load.heads), jnp.int32))
    return tokens, states, given


@cache
def compiled(implementation: str) -> Callable[..., Any]:
    return jax.jit(partial(linear_state, implementation=implementation))


def difference(load: Load) -> float:
    """The largest difference from the oracle; NaN must be at the same places."""
    given = make(load)
    ours, oracle = (compiled(name)(*given) for name in ("triton", "reference"))
    apart = []
    for found, wanted in zip(ours, oracle, strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        apart.append(np.nanmax(np.abs(np.asarray(found) - np.asarray(wanted))))
    return max(apart)


ONE = (1, 150)  # the same shapes: compiled once
LOADS = {
    "ragged rows": Load(),
    "keys and values in no power of two": Load((1, 70), keys=20, values=72, has_beta=False),
    "shared keys": Load(ONE, heads=4, pairs=2),
    "keys of a list": Load(ONE, heads=4, pairs=3, is_listed=True),
    "gates near 0": Load(ONE, gate=1e-30),
    "gates near 1": Load(ONE, gate=1 - 1e-6),
    "similar keys": Load(ONE, likeness=0.99, gate=1 - 1e-6),
    "equal keys": Load(ONE, likeness=1.0, gate=1.0),
}
SLOW = {
    "bfloat16": Load(ONE, dtype="bfloat16"),
    "added values": Load(has_beta=False),
    "single tokens": Load((1, 1, 1)),
    "no single token": Load((2, 90)),
    "one token in all": Load((1,)),
    "sizes of Qwen3.5": Load((1, 1, 2000, 3, 40), keys=128, values=128),
    "sizes of Falcon-H1": Load((1, 100), keys=256, values=64, has_beta=False),
}


@pytest.mark.parametrize("name", [*LOADS, *(slow(name) for name in SLOW)])
def test_against_the_oracle(name: str) -> None:
    assert difference((LOADS | SLOW)[name]) < ALLOWED


def test_the_inverse_by_powers_would_fail_for_similar_keys() -> None:
    """The powers of the triangle of equal keys exceed the range of their sum by far."""
    triangle = np.tril(np.ones((CHUNK, CHUNK), np.float32), -1)
    power = np.linalg.matrix_power(triangle, CHUNK // 2)
    assert np.abs(power).max() > 1e15 > np.abs(np.linalg.inv(np.eye(CHUNK) + triangle)).max()


def test_states_with_too_many_keys_are_those_of_xla() -> None:
    load = Load((1, 3), heads=1, keys=MOST_KEYS + 1, values=2)
    texts: list[Any] = [
        jax.jit(partial(linear_state, implementation=name)).lower(*make(load)).as_text()
        for name in ("triton", "xla")
    ]
    assert texts[0].count("dot_general") == texts[1].count("dot_general") > 0
