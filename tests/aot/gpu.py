"""Compiles for GPUs that are not there: JAX's CUDA plugin holds the compiler, and a text describes the card."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.config import CacheConfig, ExecutorConfig, ModelConfig
from orca_jax.exec.cache import cache_shape, cache_spec
from orca_jax.exec.iteration import make_forward
from orca_jax.exec.pack import Layout
from orca_jax.kernels.kv_pages import PackedPages, pages_shape
from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.kernels.ragged_attention.gpu import ragged_attention_gpu
from orca_jax.model.load import decoder_builder, tensor_mesh
from orca_jax.model.sharding import param_shardings, tensor_parallel_size
from orca_jax.model.transformer import Decoder
from tests.source import ROOT

H200 = ROOT / "tests" / "aot" / "h200.txtpb"  # a GpuTargetConfigProto


def mesh_of_h200(chips: int = 1) -> Mesh:
    """A mesh of devices that can be compiled for and nothing else."""
    config = H200.read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{chips}", target_config=config)
    return tensor_mesh(list(topology.devices))


@dataclass(frozen=True)
class Compiled:
    """What a compiled program tells of its memory, in bytes on one device."""

    alias: int  # results that are arguments
    temp: int
    kernels: int  # calls of Mosaic GPU kernels
    copies_of_pages: list[str]  # instructions


def read(program: jax.stages.Compiled, pages: PackedPages) -> Compiled:
    """Memory of a program whose pages have, on one device, the shape of `pages`."""
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert text is not None
    shape = f"[{','.join(map(str, pages.kv.shape))}]"
    copies = [line for line in text.splitlines() if shape in line and re.search(r" copy(-start)?\(", line)]
    kernels = len(re.findall(r"custom_call_target=\"mosaic_gpu", text))
    return Compiled(memory.alias_size_in_bytes, memory.temp_size_in_bytes, kernels, copies)


def compile_attention(case: Case, *, rows: int, tokens: int, pages_per_row: int) -> Compiled:
    """One call of the kernels with the heads and pages of a case, over a cache of 256 MiB."""
    mesh = mesh_of_h200()
    num_pages = (256 << 20) // (case.num_kv_heads * 2 * case.head_dim * 2 * case.page_size)
    page = case.num_kv_heads, case.head_dim, case.page_size
    pages = pages_shape("packed", num_pages, *page, jnp.dtype(jnp.bfloat16))
    assert isinstance(pages, PackedPages)
    q = jax.ShapeDtypeStruct((tokens, case.num_heads, case.head_dim), jnp.bfloat16)
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, pages_per_row), (rows,), (rows,), (rows,))]
    with jax.set_mesh(mesh):
        attend = jax.jit(lambda *args: ragged_attention_gpu(*args, **case.options))
        return read(attend.lower(q, pages, *ids).compile(), pages)


def unstacked_decoder(model: ModelConfig, mesh: Mesh) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Abstract parameters, each layer's by themselves, as an engine on a GPU has them."""

    def build() -> Decoder:
        decoder = decoder_builder(model, "bfloat16", tensor_parallel_size(mesh))()
        decoder.unstack()
        return decoder

    graph, state = nnx.split(nnx.eval_shape(build))
    shardings = param_shardings(state, mesh)
    shapes = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, shardings)
    return graph, shapes


def compile_step(
    model: ModelConfig, *, tokens: int, rows: int, max_model_len: int, num_pages: int, chips: int = 1
) -> tuple[Compiled, int]:
    """The program of all layers, as the executor compiles it; and the bytes of K and V on one device."""
    mesh, page_size = mesh_of_h200(chips), 64
    cache = CacheConfig(num_pages, page_size, "bfloat16", "packed")
    config = ExecutorConfig("bfloat16", chips, (tokens,), rows, max_model_len, cache)
    layout = Layout(tokens, rows, -(-max_model_len // page_size))
    here = NamedSharding(mesh, PartitionSpec())
    graph, state = unstacked_decoder(model, mesh)
    weights, tree = jax.tree.flatten(state)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), cache_spec(cache))
    pages = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        cache_shape(model, cache),
        shardings,
    )

    def structure(weights: list[jax.Array]) -> object:
        return nnx.merge(graph, jax.tree.unflatten(tree, weights))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=here)

    program = jax.jit(
        make_forward(structure, model, config, layout, mesh),  # type: ignore[arg-type]
        donate_argnums=(1, 2),
        out_shardings=(shardings, here, here),
    )
    lowered = program.lower(weights, pages, array(rows, max_model_len), array(rows), array(layout.size))
    kv_bytes = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(pages)) // chips
    shard = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), pages)
    return read(lowered.compile(), shard), kv_bytes
