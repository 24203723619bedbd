"""Linear attention on a TPU: requests with one token by this kernel, the others by `tpu_chunks.py` or `xla.py`.

    HBM   states [N, H, K, V]    updated in place
    SMEM  of each request: the index of its old state and of its new one, and whether it is fresh
    VMEM  some heads of an old state, of a new one, and of the vectors of a token, moved by Pallas

The grid has one program for each request with one token and each block of heads. XLA would read each state several
times, and do so for all requests.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.linear_state import xla
from orca_jax.kernels.linear_state.parts import LinearTokens
from orca_jax.kernels.linear_state.tpu_chunks import chunks, takes
from orca_jax.kernels.linear_state.triangles import CHUNK
from orca_jax.kernels.state_rows import StateRows

_BLOCK_BYTES = 2 << 20  # of a state at once; four blocks are in VMEM
_VMEM_LIMIT = 32 << 20
_LANES = 128
_SUBLANES = 8

Ref = Any  # Pallas has no public type for references


class _Indices(NamedTuple):
    """What the kernel knows of each request; references within it."""

    old: Int[Array, " R"]  # index of the state before the token; `new` if there is none
    new: Int[Array, " R"]
    is_fresh: Int[Array, " R"]
    is_single: Int[Array, " R"]


class _Vectors(NamedTuple):
    """The inputs of one token of each request, by blocks of B heads; `remains` and `beta` repeat one number."""

    q: Float[Array, "R J K B"]
    k: Float[Array, "R J K B"]
    v: Float[Array, "R J B V"]
    remains: Float[Array, "R J B V"]
    beta: Float[Array, "R J B V"] | None


def attend(
    tokens: LinearTokens, states: Float[Array, "N H K V"], rows: StateRows
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """The arguments and the result of `api.linear_state`."""
    if states.shape[3] % _LANES:  # XLA keeps them in another layout, and would copy all of them
        return xla.attend(tokens, states, rows)
    if not takes(*states.shape[1:]):
        return xla.attend(tokens, states, rows, single_tokens=_single_tokens)
    return xla.attend(
        tokens,
        states,
        rows,
        single_tokens=_single_tokens,
        chunks=chunks,
        room=max(0, CHUNK - tokens.q.shape[0]),
    )


def _single_tokens(
    heads: LinearTokens, states: Float[Array, "N H K V"], rows: StateRows
) -> tuple[Float[Array, "H T V"], Float[Array, "N H K V"]]:
    """`xla.single_tokens` by the kernel."""
    num_tokens = heads.q.shape[1]
    rows, token = xla.first_tokens(heads, rows)
    is_single = rows.query_len == 1
    is_read = is_single & ~rows.is_fresh
    indices = _Indices(
        jnp.where(is_read, rows.source, rows.target),
        rows.target,
        rows.is_fresh.astype(jnp.int32),
        is_single.astype(jnp.int32),
    )
    size = _heads_at_once(*states.shape[1:])

    def by_blocks(x: Float[Array, "R H N"]) -> Float[Array, "R J B N"]:
        return x.reshape(len(x), -1, size, x.shape[2])

    def repeated(x: Float[Array, "R H"]) -> Float[Array, "R J B V"]:
        return by_blocks(jnp.broadcast_to(x[..., None], token.v.shape))

    vectors = _Vectors(
        by_blocks(token.q).swapaxes(2, 3),
        by_blocks(token.k).swapaxes(2, 3),
        by_blocks(token.v),
        repeated(jnp.exp(token.decay)),
        None if token.beta is None else repeated(token.beta),
    )
    found, states = lax.platform_dependent(
        indices,
        vectors,
        states,
        tpu=partial(_launch, interpret=False),
        default=partial(_launch, interpret=True),
    )
    place = jnp.where(is_single, rows.query_start, num_tokens)
    out = jnp.zeros(heads.v.shape, jnp.float32)
    result = found.reshape(token.v.shape).swapaxes(0, 1)
    return out.at[:, place].set(result, mode="drop"), states


def _heads_at_once(heads: int, keys: int, values: int) -> int:
    """B: as many heads as a block may have, in whole tiles or all."""
    one = 4 * pl.cdiv(keys, _SUBLANES) * _SUBLANES * pl.cdiv(values, _LANES) * _LANES
    fitting = [
        size for size in range(1, heads + 1) if heads % size == 0 and size * one <= _BLOCK_BYTES
    ]
    return max(fitting, default=1)


@partial(jax.jit, static_argnames="interpret")
def _launch(
    indices: _Indices, vectors: _Vectors, states: Float[Array, "N H K V"], interpret: Any
) -> tuple[Float[Array, "R J B V"], Float[Array, "N H K V"]]:
    """Run the kernel on the requests with one token. No other result is written."""
    _, blocks, size, values = vectors.v.shape
    keys = states.shape[2]

    def of_token(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda row, block, *_: (row, block, 0, 0))

    def of_state(name: str) -> pl.BlockSpec:
        def index(row: Array, block: Array, *indices: Ref) -> tuple[Any, ...]:
            return getattr(_Indices(*indices), name)[row], block, 0, 0

        return pl.BlockSpec((None, size, keys, values), index)

    column, line = of_token(keys, size), of_token(size, values)
    given = [each for each in vectors if each is not None]
    count = jnp.maximum(indices.is_single.sum(), 1)  # zero programs must not run
    run = pl.pallas_call(
        partial(_kernel, has_beta=vectors.beta is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(indices),
            grid=(count, blocks),
            in_specs=[column, column, *[line] * (len(given) - 2), of_state("old")],
            out_specs=[line, of_state("new")],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(vectors.v.shape, jnp.float32),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={len(indices) + len(given): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        name="state_increments",
        interpret=interpret,
    )
    out, states = run(*indices, *given, states)
    return out, states


def _kernel(*refs: Ref, has_beta: bool) -> None:
    """Update some heads of the state of one request."""
    indices = _Indices(*refs[:4])
    q, k, v, remains, *betas, old, out, new = refs[4:]
    row = pl.program_id(0)
    is_single = indices.is_single[row] > 0
    is_fresh = indices.is_fresh[row] > 0

    @pl.when(jnp.logical_not(is_single))
    def _is_other() -> None:
        new[...] = old[...]

    @pl.when(is_single)
    def _has_one_token() -> None:
        for head in range(v.shape[0]):
            state = old[head].astype(jnp.float32)
            state = jnp.where(is_fresh, 0.0, state) * remains[pl.ds(head, 1)]
            key = k[:, pl.ds(head, 1)]
            added = v[pl.ds(head, 1)]
            if has_beta:
                known = jnp.sum(key * state, axis=0, keepdims=True)
                added = betas[0][pl.ds(head, 1)] * (added - known)
            state += key * added
            new[head] = state.astype(new.dtype)
            out[pl.ds(head, 1)] = jnp.sum(q[:, pl.ds(head, 1)] * state, axis=0, keepdims=True)
