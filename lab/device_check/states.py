"""Checks and measures linear attention: the device's kernels against the oracle, then their speed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lab.device_check.correct import judged
from lab.device_check.part import Found, Setting, Write, attempt
from lab.device_check.rates import seconds_per_call
from orca_jax.kernels.linear_state import LinearTokens, linear_state
from orca_jax.kernels.state_rows import StateRows

SIZES = {"delta rule": (32, 128, 128), "lightning": (64, 128, 128), "Mamba-2": (128, 128, 64)}
"""Heads, keys and values; the first is that of Qwen3.5 9B."""
DRY_SIZES = {"delta rule": (2, 16, 32)}
RAGGED = (1, 1, 2, 64, 65, 700)  # tokens of each request
LOADS = {"64 single tokens": (1,) * 64, "a prompt": (2048,)}
DRY_LOADS = {"2 single tokens": (1, 1), "a prompt": (70,)}
ALLOWED = 1e-3  # difference, for results of order one; factors have 16 bits


def states(what: str, setting: Setting, write: Write) -> None:
    """Compare each kind with the oracle, and measure it; `what` is not used."""
    kinds = SIZES
    loads = LOADS
    ragged: tuple[int, ...] = RAGGED
    if setting.dry_run:
        kinds = DRY_SIZES
        loads = DRY_LOADS
        ragged = RAGGED[:4]
    for kind, sizes in kinds.items():
        attempt(write, partial(compare, kind, sizes, ragged), kind=kind)
    for kind, sizes in kinds.items():
        for load, lengths in loads.items():
            about = {"kind": kind, "load": load}
            attempt(write, partial(measure, kind, sizes, lengths, setting), **about)


def compare(kind: str, sizes: tuple[int, int, int], lengths: tuple[int, ...]) -> Found:
    """The largest difference from the oracle on the same device, in results and in states."""
    given = inputs(kind, sizes, lengths)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(partial(linear_state, implementation="reference"))(*given)
    found = jax.jit(linear_state)(*given)
    apart = [
        np.abs(np.asarray(ours) - np.asarray(theirs)).max()
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    return judged(np.asarray(apart), ALLOWED)


def measure(
    kind: str, sizes: tuple[int, int, int], lengths: tuple[int, ...], setting: Setting
) -> Found:
    """Seconds of a layer, and the bytes of states that are read and written in a second."""
    tokens, pool, rows = inputs(kind, sizes, lengths)

    def call(index: jax.Array, pool: jax.Array, tokens: LinearTokens, rows: StateRows) -> jax.Array:
        return linear_state(tokens, pool, rows)[1]

    repeats = 2 if setting.dry_run else 20
    seconds = seconds_per_call(call, pool, tokens, rows, repeats=repeats)
    return {"us": 1e6 * seconds, "bytes_per_s": 2 * pool.nbytes / seconds}


def inputs(
    kind: str, sizes: tuple[int, int, int], lengths: tuple[int, ...]
) -> tuple[LinearTokens, jax.Array, StateRows]:
    """Requests that go on, each with a state in place, and with keys of length one."""
    heads, keys, values = sizes
    shape = sum(lengths), heads
    draw = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*sizes: int) -> jax.Array:
        return jax.random.normal(next(draw), sizes)

    key = normal(*shape, keys)
    key /= jnp.linalg.norm(key, axis=-1, keepdims=True)
    query = normal(*shape, keys) * keys**-0.5
    beta = jax.nn.sigmoid(normal(*shape)) if kind == "delta rule" else None
    tokens = LinearTokens(query, key, normal(*shape, values), -jnp.exp(normal(*shape)), beta)
    index = jnp.arange(len(lengths), dtype=jnp.int32)
    start = jnp.asarray(np.cumsum((0, *lengths))[:-1], jnp.int32)
    rows = StateRows(start, jnp.asarray(lengths, jnp.int32), index, index, index < 0)
    return tokens, normal(len(lengths), heads, keys, values), rows
