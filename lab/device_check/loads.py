"""Batches of attention, and the implementations by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.device_check.part import Setting, Write
from orca_jax.kernels.kv_pages import TokenMajorPages
from orca_jax.kernels.ragged_attention import RowArrays, Scores, ragged_attention
from orca_jax.kernels.ragged_attention.api import BACKENDS

Requests = list[tuple[int, int]]
"""For each request, the tokens of this iteration and the context after them."""
Given = tuple[jax.Array, TokenMajorPages, RowArrays]
"""Queries, pages and requests."""


@dataclass(frozen=True)
class Heads:
    """The shape of attention in one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer, in bf16."""
        return 2 * self.num_kv_heads * self.head_dim * 2


PAGE_SIZE = 128  # of the engine on accelerators
TINY = Heads(2, 1, 64, 16)


def llama(page_size: int = PAGE_SIZE) -> Heads:
    """The attention of Llama-3-8B."""
    return Heads(32, 8, 128, page_size)


def make_batch(requests: Requests, heads: Heads, seed: int = 0) -> Given:
    """A batch in bf16 on the device, with scattered pages."""
    length, context = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    per_row = -(-int(context.max()) // heads.page_size)
    num_pages = len(requests) * per_row
    table = (
        np.random.default_rng(seed)
        .permutation(num_pages)
        .astype(np.int32)
        .reshape(len(requests), per_row)
    )
    width = heads.num_kv_heads * 2 * heads.head_dim
    kv = jax.random.normal(
        jax.random.key(2 * seed), (num_pages, heads.page_size, width), jnp.bfloat16
    )
    q = jax.random.normal(
        jax.random.key(2 * seed + 1),
        (int(length.sum()), heads.num_heads, heads.head_dim),
        jnp.bfloat16,
    )
    first = (np.cumsum(length) - length).astype(np.int32)
    return (
        q,
        TokenMajorPages(kv),
        RowArrays(*(jnp.asarray(x) for x in (table, first, length, context))),
    )


def is_fit(name: str, setting: Setting, write: Write) -> bool:
    """True if an implementation can run here; else the reason is written."""
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    if name == "gpu" and not setting.dry_run and not capability.startswith("9."):
        write(
            skipped=f"these kernels are for Hopper, and this card has compute capability {capability}"
        )
        return False
    if name == "gpu" and setting.dry_run and jax.__version_info__ < (0, 12):
        write(skipped="needs jax 0.12 or newer: in older simulators all threads wait for a barrier")
        return False
    return True


def attention_of(name: str, setting: Setting, scores: Scores) -> Callable[..., jax.Array]:
    """An implementation as a function of the arrays of `make_batch`; in a dry run kernels are interpreted."""
    if name == "dense":
        return partial(dense_attention, scores=scores)
    if setting.dry_run and name in ("gpu", "triton", "tpu", "tpu_latents", "triton_latents"):
        return interpreted(name, scores)
    return partial(ragged_attention, scores=scores, implementation=name)


def planned_attention_of(
    name: str, setting: Setting, scores: Scores
) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """A plan of the requests, as made once for all layers, and attention by it in the layer from a given page on.

    Without a plan of its own, an implementation makes one in each call; on a GPU only its kernels are counted.
    """
    if name == "tpu":
        from orca_jax.kernels.ragged_attention.tpu.attention import attend_prepared, prepare

        interpret = setting.dry_run
        return prepare, lambda q, pages, plan, first: attend_prepared(
            q, pages, plan.of_layer(first), scores, interpret=interpret
        )
    attend = attention_of(name, setting, scores)
    return lambda q, pages, requests: requests, lambda q, pages, plan, first: attend(
        q, pages, plan.of_layer(first)
    )


def interpreted(name: str, scores: Scores) -> Callable[..., jax.Array]:
    """Kernels for accelerators, interpreted on a CPU."""
    if name == "tpu":
        from orca_jax.kernels.ragged_attention.tpu.attention import attend as ragged_attention_tpu

        return partial(ragged_attention_tpu, interpret=True, scores=scores)
    if name == "triton":
        from orca_jax.kernels.ragged_attention.triton import attend as ragged_attention_triton

        return partial(ragged_attention_triton, multiprocessors=1, interpret=True, scores=scores)
    if name in ("tpu_latents", "triton_latents"):
        module = next(backend for backend in BACKENDS if backend.name == name).load()
        return partial(module.attend, interpret=True, scores=scores)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from orca_jax.kernels.ragged_attention.hopper.attention import attend as ragged_attention_gpu

    return partial(
        ragged_attention_gpu, multiprocessors=1, interpret=plgpu.InterpretGPUParams(), scores=scores
    )


def dense_attention(
    q: jax.Array, pages: TokenMajorPages, requests: RowArrays, scores: Scores
) -> jax.Array:
    """The obvious program: gather every row's pages, attend densely. All rows have the same number of queries."""
    table, _, length, context = requests
    rows = table.shape[0]
    tokens = q.shape[0] // table.shape[0]
    head_dim = q.shape[2]
    kv = pages.kv[table].reshape(rows, -1, pages.kv.shape[2] // (2 * head_dim), 2, head_dim)
    grouped = q.reshape(rows, tokens, kv.shape[2], -1, head_dim)
    products = jnp.einsum(
        "rtkgd,rckd->rkgtc", grouped, kv[:, :, :, 0], preferred_element_type=jnp.float32
    )
    position = (context - length)[:, None] + jnp.arange(tokens)
    visible = jnp.arange(kv.shape[1]) <= position[..., None]  # [R, t, C]
    weights = jax.nn.softmax(
        jnp.where(visible[:, None, None], products * scores.scale, -1e30), axis=-1
    ).astype(q.dtype)
    return jnp.einsum("rkgtc,rckd->rtkgd", weights, kv[:, :, :, 1]).reshape(q.shape)
