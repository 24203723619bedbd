"""The call of a TPU attention kernel: the places of its arrays, and its memory.

    SMEM  the scalars of `RowScalars`: query blocks, rows, the layer's first page, and its window; the page table
    HBM   pages, their scales, page lists instead of a large table; written pages are also the second result
    VMEM  a block of queries, of outputs and of new tokens, moved by Pallas; buffers and sums, which stay

The grid has one program for each query block with tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from orca_jax.kernels.kv_pages import KVPages, TokenMajorPages
from orca_jax.kernels.ragged_attention.tpu.fetches import Pages, Ref, RowScalars
from orca_jax.kernels.ragged_attention.tpu.plan import BlockRange, Prepared
from orca_jax.kernels.ragged_attention.tpu.shape import LANES, TpuShape
from orca_jax.kernels.ragged_attention.tpu.softmax import TpuSoftmax
from orca_jax.kernels.ragged_attention.tpu.walk import Refs, Ring

# bytes of one kernel; chips have 64 MiB or more, and XLA keeps half for its own arrays
_VMEM_LIMIT = 32 << 20


def launch[P: KVPages](
    kernel: Callable[[Refs], None],
    name: str,
    shape: TpuShape,
    blocks: BlockRange,
    q: jax.Array,
    pages: P,
    prepared: Prepared,
    *,
    axis: int,
    window: Int[Array, "1"],
    out_dtype: jnp.dtype,
    interpret: Any,
    new: tuple[jax.Array, pl.BlockSpec] | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, P]:
    """Run a kernel over a range of query blocks; `q` and the output are cut into blocks along `axis`.

    Args:
        kernel: the work of one query block.
        name: name of the kernel in profiles.
        shape: the constants of the kernel.
        blocks: the query blocks of this kind of rows.
        q: queries, in the layout of the kernel.
        pages: the KV cache.
        prepared: the requests.
        axis: the axis of tokens in `q`.
        window: number of tokens that a query sees, if the shape has a window.
        out_dtype: type of the outputs; their shape is that of `q`.
        interpret: the argument of `pallas_call`.
        sinks: see `TpuSoftmax`; None if the shape has none.
        new: the new token of each row in float32, and the part of them for a query block; None if the kernel does not
            write them.

    Returns:
        The outputs, and the pages; these are unchanged if `new` is None.
    """
    scalars: tuple[jax.Array, ...] = (
        blocks.ends,
        blocks.first_row,
        blocks.end_row,
        prepared.start,
        prepared.length,
        prepared.context,
        prepared.pieces.first_page,
        window,
    )
    block = list(q.shape)
    block[axis] = shape.query_block if axis == 0 else shape.query_block * shape.groups
    index = [0] * q.ndim

    def index_map(program: jax.Array, ends: Any, *_: Any) -> tuple[Any, ...]:
        return (*index[:axis], program + ends[0], *index[axis + 1 :])

    spec = pl.BlockSpec(tuple(block), index_map)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    kv, scale = _arrays(pages)
    inputs = {"q": (q, spec), "kv": (kv, anywhere)}
    if prepared.lists.ndim == 1:
        scalars = *scalars, prepared.lists
    else:
        inputs["lists"] = prepared.lists, anywhere
    if sinks is not None:
        inputs["sinks"] = sinks, pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0))
    outputs = [(jax.ShapeDtypeStruct(q.shape, out_dtype), spec)]
    aliases = dict[int, int]()
    if scale is not None:
        inputs["scale"] = scale, anywhere
    if new is not None:
        inputs["new"] = new
        outputs.append((jax.ShapeDtypeStruct(kv.shape, kv.dtype), anywhere))
        aliases = {len(scalars) + list(inputs).index("kv"): 1}
    scratch = _scratch(shape, kv, scale, tuple(block), has_lists="lists" in inputs)

    def run(*refs: Ref) -> None:
        kernel(_by_role(shape, refs, len(scalars), [*inputs], [*scratch]))

    arrays = [array for array, _ in inputs.values()]
    results = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks.num_blocks,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[*scratch.values()],
        ),
        out_shape=[shape for shape, _ in outputs],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        name=name,
        interpret=interpret,
    )(*scalars, *arrays)
    if new is None:
        return results[0], pages
    written: Any = pages._replace(**{pages._fields[0]: results[1]})
    return results[0], written


def _arrays(pages: KVPages) -> tuple[jax.Array, jax.Array | None]:
    """The stored values, and their scales."""
    if isinstance(pages, TokenMajorPages):
        return pages.kv, pages.scale
    return pages.k, pages.k_scale


def _scratch(
    shape: TpuShape,
    kv: jax.Array,
    scale: jax.Array | None,
    sums: tuple[int, ...],
    *,
    has_lists: bool,
) -> dict[str, Any]:
    """The scratch memory of a kernel, by role."""
    count = shape.buffers
    each = pltpu.SemaphoreType.DMA((count,))
    statistics = pltpu.VMEM((*sums[:-1], LANES), jnp.float32)
    buffer = (count, shape.fetch_pages, *kv.shape[2:])
    if shape.has_values:
        buffer = count, shape.fetch_tokens, kv.shape[2]
    scratch = {
        "current": pltpu.SMEM((1,), jnp.int32),
        "ahead": pltpu.SMEM((3,), jnp.int32),
        "kv_buf": pltpu.VMEM(buffer, kv.dtype),
        "kv_sem": each,
        "top": statistics,
        "total": statistics,
        "values": pltpu.VMEM(sums, jnp.float32),
    }
    if has_lists:
        scratch["listed"] = pltpu.SMEM((3,), jnp.int32)
        scratch["list_buf"] = pltpu.SMEM((count, 1, LANES), jnp.int32)
        scratch["list_sem"] = each
    if scale is not None:
        # Scales of heads are scalars; those of tokens are in lanes, like the tokens.
        memory = pltpu.SMEM if shape.has_values else pltpu.VMEM
        scratch["scale_buf"] = memory((count, shape.fetch_pages, 1, scale.shape[2]), jnp.float32)
        scratch["scale_sem"] = each
    if shape.is_writing:
        scratch |= {"writing": pltpu.SMEM((count,), jnp.int32), "write_sem": each}
    return scratch


def _by_role(
    shape: TpuShape, refs: tuple[Ref, ...], num_scalars: int, inputs: list[str], scratch: list[str]
) -> Refs:
    """Sort the references by role; they come as scalars, inputs, outputs and scratch."""
    outputs = ["out", *(["written"] if shape.is_writing else [])]
    scalars = refs[:num_scalars]
    others = refs[num_scalars:]
    role: dict[str, Ref] = dict(zip([*inputs, *outputs, *scratch], others, strict=True))
    rows = RowScalars(shape, *scalars[:8])
    # A kernel that writes pages reads them through the same reference.
    kv = role.get("written", role["kv"])
    buffers = (
        role.get(name)
        for name in ("list_buf", "kv_buf", "scale_buf", "list_sem", "kv_sem", "scale_sem")
    )
    lists = role.get("lists", scalars[-1])
    pages = Pages(shape, rows, lists, kv, role.get("scale"), *buffers)
    ring = Ring(pages, role["current"], role["ahead"], role.get("listed"))
    softmax = TpuSoftmax(shape, role["top"], role["total"], role["values"], role.get("sinks"))
    new, writing, write_sem = (role.get(name) for name in ("new", "writing", "write_sem"))
    return Refs(rows, pages, role["q"], new, role["out"], softmax, ring, writing, write_sem)
