"""How a TPU attention kernel is called: which arrays stand where, and what memory it gets.

    SMEM  the scalars of `Rows`: blocks and rows of the plan, and where the layer's pages begin
    HBM   page lists, pages, their scales; where new tokens are written the pages are also the second result
    VMEM  a block of queries, of outputs, and of new tokens, which Pallas moves; buffers and sums, which stay

The grid is the plan's blocks of queries, so as long as there are any.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from orca_jax.kernels.kv_pages import PackedPages
from orca_jax.kernels.ragged_attention.tpu.plan import Plan, Span
from orca_jax.kernels.ragged_attention.tpu.shape import LANES, Shape
from orca_jax.kernels.ragged_attention.tpu.softmax import Softmax
from orca_jax.kernels.ragged_attention.tpu.walk import Pages, Ref, Refs, Rows

_VMEM_LIMIT = 32 << 20  # bytes of one kernel; chips have 64 MiB or more, and half is left to what XLA keeps there


def launch(
    kernel: Callable[[Refs], None],
    name: str,
    shape: Shape,
    blocks: Span,
    q: jax.Array,
    pages: PackedPages,
    plan: Plan,
    *,
    axis: int,
    out_dtype: jnp.dtype,
    interpret: Any,
    new: jax.Array | None = None,
) -> tuple[jax.Array, PackedPages]:
    """Run a kernel over some query blocks; blocks of `q` and of the output are cut along `axis`.

    Args:
        kernel: the work of one query block.
        name: of the kernel, for profiles.
        shape: what it is compiled for.
        blocks: the plan's for this kind of rows.
        q: queries, as the kernel wants them.
        pages: K and V.
        plan: the requests.
        axis: of tokens in `q`.
        out_dtype: of the outputs, which have the shape of `q`.
        interpret: as `pallas_call` takes it.
        new: K and V of each row's new token `[R, W]` in float32, where the kernel writes them to their pages.

    Returns:
        Outputs, and the pages, which are the same ones where nothing is written.
    """
    assert (new is not None) == shape.is_writing
    span, scalars = blocks.ends, (*blocks, plan.start, plan.length, plan.context, plan.pieces.first_page)
    block = list(q.shape)
    block[axis] = shape.query_block if axis == 0 else shape.query_block * shape.groups
    index = [0] * q.ndim

    def place(step: jax.Array, span: Any, *_: Any) -> tuple[Any, ...]:
        return (*index[:axis], step + span[0], *index[axis + 1 :])

    spec, anywhere = pl.BlockSpec(tuple(block), place), pl.BlockSpec(memory_space=pl.ANY)
    inputs = {"q": (q, spec), "lists": (plan.lists, anywhere), "kv": (pages.kv, anywhere)}
    outputs = [(jax.ShapeDtypeStruct(q.shape, out_dtype), spec)]
    aliases = {}
    if pages.scale is not None:
        inputs["scale"] = pages.scale, anywhere
    if new is not None:
        inputs["new"] = new, pl.BlockSpec((shape.query_block, new.shape[1]), lambda step, span, *_: (step + span[0], 0))
        outputs.append((jax.ShapeDtypeStruct(pages.kv.shape, pages.dtype), anywhere))
        aliases = {len(scalars) + list(inputs).index("kv"): 1}
    scratch = _scratch(shape, pages, tuple(block[1:]) if axis == 0 else tuple(block))

    def run(*refs: Ref) -> None:
        kernel(_by_role(shape, refs, [*inputs], [*scratch]))

    arrays = [array for array, _ in inputs.values()]
    results = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(span[1] - span[0],),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[*scratch.values()],
        ),
        out_shape=[shape for shape, _ in outputs],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT),
        name=name,
        interpret=interpret,
    )(*scalars, *arrays)
    return results[0], pages if new is None else PackedPages(results[1])


def _scratch(shape: Shape, pages: PackedPages, sums: tuple[int, ...]) -> dict[str, Any]:
    """Memory of a kernel by its role."""
    two, statistics = pltpu.SemaphoreType.DMA((2,)), pltpu.VMEM((*sums[:2], LANES), jnp.float32)
    scratch = {
        "parity": pltpu.SMEM((1,), jnp.int32),
        "list_buf": pltpu.SMEM((2, 1, LANES), jnp.int32),
        "kv_buf": pltpu.VMEM((2, shape.fetch_tokens, pages.kv.shape[2]), pages.dtype),
        "list_sem": two,
        "kv_sem": two,
        "top": statistics,
        "total": statistics,
        "values": pltpu.VMEM(sums, jnp.float32),
    }
    if pages.scale is not None:
        scratch["scale_buf"] = pltpu.SMEM((2, shape.fetch_pages, 1, pages.scale.shape[2]), jnp.float32)
        scratch["scale_sem"] = two
    if shape.is_writing:
        scratch |= {"writing": pltpu.SMEM((2,), jnp.int32), "write_sem": two}
    return scratch


def _by_role(shape: Shape, refs: tuple[Ref, ...], inputs: list[str], scratch: list[str]) -> Refs:
    """Scalars, inputs, outputs and scratch, as they come."""
    outputs = ["out", *(["written"] if shape.is_writing else [])]
    scalars, others = refs[:7], refs[7:]
    role: dict[str, Ref] = dict(zip([*inputs, *outputs, *scratch], others, strict=True))
    rows = Rows(shape, *scalars)
    # Where pages are written they are read through the same reference.
    kv = role.get("written", role["kv"])
    buffers = (role.get(name) for name in ("list_buf", "kv_buf", "scale_buf", "list_sem", "kv_sem", "scale_sem"))
    pages = Pages(shape, rows, role["lists"], kv, role.get("scale"), *buffers)
    softmax = Softmax(shape, role["top"], role["total"], role["values"])
    new, writing, write_sem = (role.get(name) for name in ("new", "writing", "write_sem"))
    return Refs(rows, pages, role["q"], new, role["out"], softmax, role["parity"], writing, write_sem)
