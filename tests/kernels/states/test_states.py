"""Operations on states, over random mixes of requests: all implementations against single tokens in float64."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.kernels import linear_state as linear
from orca_jax.kernels import short_conv as conv
from orca_jax.kernels.linear_state import xla as chunks
from orca_jax.kernels.state_rows import StateRows

pytestmark = pytest.mark.usefixtures("quick_compiles")

TOKENS, ROWS, POOL = 40, 6, 14
CHANNELS, TAPS, HEADS, KEYS, DIM = 3, 4, 2, 3, 4
FEW = settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
UNIT = 2e-5  # largest difference from float64, for results of order ten
HALVES = 3e-4  # likewise, for factors of 16 bits


class Mix(NamedTuple):
    """Requests of an iteration: tokens of each, the indices of their states, and those that are at position 0."""

    lengths: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    is_fresh: tuple[bool, ...]

    @property
    def rows(self) -> StateRows:
        """The arrays, with absent rows, whose indices are those of others."""
        absent = ROWS - len(self.lengths)
        start = np.cumsum((0, *self.lengths))[: len(self.lengths)]
        columns = (
            (*start, *(0,) * absent),
            (*self.lengths, *(0,) * absent),
            (*self.source, *(3,) * absent),
            (*self.target, *(self.target[:1] or (0,)) * absent),
        )
        is_fresh = jnp.array((*self.is_fresh, *(False,) * absent))
        return StateRows(*(jnp.array(column, jnp.int32) for column in columns), is_fresh)


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    """Single tokens first, then longer requests. A target is in place, or an index of nobody."""
    count = draw(st.integers(1, ROWS))
    lengths = sorted(draw(st.lists(st.integers(1, 12), min_size=count, max_size=count)))
    while sum(lengths) > TOKENS:
        lengths.pop()
    count = len(lengths)
    indices = draw(st.permutations(range(POOL)))
    in_place = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    source = tuple(indices[:count])
    target = tuple(indices[i] if stays else indices[count + i] for i, stays in enumerate(in_place))
    return Mix(
        tuple(lengths),
        source,
        target,
        tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
    )


def pool(mix: Mix, *shape: int) -> np.ndarray:
    """Random states. Those that must not be read are NaN."""
    states = np.random.default_rng(len(mix.lengths)).normal(size=(POOL, *shape)).astype(np.float32)
    read = {
        source for source, is_fresh in zip(mix.source, mix.is_fresh, strict=True) if not is_fresh
    }
    states[[index for index in range(POOL) if index not in read]] = np.nan
    return states


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected_conv(
    mix: Mix, x: np.ndarray, kernel: np.ndarray, states: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    out, after, token = np.zeros(x.shape), states.copy(), 0
    for length, source, target, is_fresh in zip(*mix, strict=True):
        seen = [
            *(
                np.zeros((TAPS - 1, CHANNELS))
                if is_fresh
                else states[source].astype(np.float64).reshape(-1, CHANNELS)
            )
        ]
        for _ in range(length):
            seen.append(x[token].astype(np.float64))
            out[token] = sum(tap * value for tap, value in zip(kernel, seen[-TAPS:], strict=True))
            token += 1
        after[target] = np.concatenate(seen[1 - TAPS :])
    return out, after


def linear_tokens(*, has_beta: bool) -> linear.LinearTokens:
    """Random inputs, with keys of about length one."""
    keys, shares = values(4, TOKENS, HEADS, KEYS) / KEYS**0.5, values(7, TOKENS, HEADS)
    decay = -np.exp(values(6, TOKENS, HEADS))
    beta = 1 / (1 + np.exp(-shares)) if has_beta else None
    return linear.LinearTokens(
        values(3, TOKENS, HEADS, KEYS), keys, values(5, TOKENS, HEADS, DIM), decay, beta
    )


def expected_linear(
    mix: Mix, tokens: linear.LinearTokens, states: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    out, after, token = np.zeros((TOKENS, HEADS, DIM)), states.copy(), 0
    for length, source, target, is_fresh in zip(*mix, strict=True):
        state = np.zeros((HEADS, KEYS, DIM)) if is_fresh else states[source].astype(np.float64)
        for _ in range(length):
            q, k, v, decay = (np.asarray(each)[token].astype(np.float64) for each in tokens[:4])
            state = np.exp(decay)[:, None, None] * state
            if tokens.beta is not None:
                v = np.asarray(tokens.beta)[token][:, None] * (
                    v - np.einsum("hk,hkv->hv", k, state)
                )
            state = state + k[:, :, None] * v[:, None]
            out[token] = np.einsum("hd,hde->he", q, state)
            token += 1
        after[target] = state
    return out, after


@cache
def compiled(run: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    return jax.jit(partial(run, implementation=implementation))


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Any:
    """Chunks of a few tokens, so that requests have several."""
    size, chunks.CHUNK = chunks.CHUNK, 5
    yield
    chunks.CHUNK = size


def check(
    found: tuple[jax.Array, jax.Array],
    wanted: tuple[np.ndarray, np.ndarray],
    allowed: float = UNIT,
) -> None:
    # NaN equals NaN: what is not a target is not touched
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("implementation", [backend.name for backend in conv.BACKENDS])
@FEW
@given(mix=mixes())
def test_short_conv(implementation: str, mix: Mix) -> None:
    x, kernel, states = (
        values(1, TOKENS, CHANNELS),
        values(2, TAPS, CHANNELS),
        pool(mix, (TAPS - 1) * CHANNELS),
    )
    found = compiled(conv.short_conv, implementation)(x, kernel, states, mix.rows)
    check(found, expected_conv(mix, x, kernel, states))


@pytest.mark.parametrize("has_beta", [False, True], ids=["added", "delta rule"])
@pytest.mark.parametrize("implementation", [backend.name for backend in linear.BACKENDS])
@FEW
@given(mix=mixes())
def test_linear_state(implementation: str, has_beta: bool, mix: Mix) -> None:
    tokens, states = linear_tokens(has_beta=has_beta), pool(mix, HEADS, KEYS, DIM)
    found = compiled(linear.linear_state, implementation)(tokens, states, mix.rows)
    allowed = HALVES if implementation == "triton" else UNIT
    check(found, expected_linear(mix, tokens, states), allowed)


@pytest.mark.parametrize("cuts", [(5, 7), (1,) * 12, (4, 1, 1, 6)])
def test_chunks_of_a_prompt_change_no_result_of_a_convolution(cuts: tuple[int, ...]) -> None:
    """Inputs are rounded to the type of the states, whether they come from a state or not."""
    x, kernel = values(6, TOKENS, CHANNELS), values(7, TAPS, CHANNELS)
    run = compiled(conv.short_conv, "xla")

    def convolved(cuts: tuple[int, ...]) -> np.ndarray:
        states, parts, done = jnp.full((POOL, (TAPS - 1) * CHANNELS), jnp.nan, jnp.bfloat16), [], 0
        for size in cuts:
            out, states = run(
                np.roll(x, -done, axis=0),
                kernel,
                states,
                Mix((size,), (0,), (0,), (done == 0,)).rows,
            )
            parts.append(np.asarray(out)[:size])
            done += size
        return np.concatenate(parts)

    np.testing.assert_allclose(convolved(cuts), convolved((12,)), rtol=1e-6, atol=1e-6)


def test_a_long_request_and_fast_decay_give_finite_results() -> None:
    """All factors are at most 1, however long a chunk is and however fast a head forgets."""
    tokens, mix = linear_tokens(has_beta=False), Mix((TOKENS,), (0,), (1,), (True,))
    tokens = tokens._replace(decay=np.tile(np.array([-200.0, 0.0], np.float32), (TOKENS, 1)))
    out, states = compiled(linear.linear_state, "xla")(
        tokens, pool(mix, HEADS, KEYS, DIM), mix.rows
    )
    assert np.isfinite(np.asarray(out)).all() and np.isfinite(np.asarray(states)[1]).all()
    np.testing.assert_allclose(
        np.asarray(states)[1, 0], np.outer(tokens.k[-1, 0], tokens.v[-1, 0]), rtol=1e-5
    )


def test_unknown_implementation() -> None:
    mix, zeros = Mix((1,), (0,), (1,), (True,)), jnp.zeros((1, 1, 1))
    with pytest.raises(NotImplementedError, match="use one of tpu, xla, reference"):
        conv.short_conv(zeros[0], zeros[0], zeros[0], mix.rows, implementation="none")
    with pytest.raises(NotImplementedError, match="use one of triton, tpu, xla, reference"):
        tokens = linear.LinearTokens(zeros, zeros, zeros, zeros[0])
        linear.linear_state(tokens, zeros[None], mix.rows, implementation="none")
