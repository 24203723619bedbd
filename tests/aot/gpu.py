"""Compile for absent GPUs: JAX's CUDA plugin contains the compiler, and a text file describes the card."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.cache_spec import one_group
from orca_jax.config import CacheConfig, ExecutorConfig, ModelConfig
from orca_jax.exec.cache import caches_shape, caches_spec
from orca_jax.exec.compile import Options, compiler_options
from orca_jax.exec.layers import Weights, make_forward
from orca_jax.exec.pack import Layout
from orca_jax.exec.sampling.draw import Kind
from orca_jax.exec.sampling.pack import draws_layout
from orca_jax.exec.sampling.programs import make_plain_sampler
from orca_jax.kernels.kv_pages import PackedPages, RowArrays, pages_shape
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.model.layers import Maker, Table
from orca_jax.model.load import decoder_builder, tensor_mesh
from orca_jax.model.sharding import param_shardings
from orca_jax.model.transformer import Decoder
from tests.aot.compilers import use_cuda
from tests.aot.ptx import TENSOR_ALIGNMENT, tensor_addresses
from tests.aot.ptxas import take
from tests.project.source import ROOT

CARDS = {"H200": "h200.txtpb", "A100": "a100.txtpb"}  # each a GpuTargetConfigProto
PAGES_PER_ROW = 64
KERNELS = re.compile(r"custom_call_target=\"(mosaic_gpu|__gpu\$xla\.gpu\.triton)")
_OUTSIDE = re.compile(r"^\d+: k(?!CommandBuffer)")
_SHARED = re.compile(r"shared_memory: (\d+) bytes")
_LAUNCH = re.compile(r"^\s*\d+: k\w+")
_OURS = re.compile(r"increments|combine|chunks")


def mesh_of(card: str, chips: int = 1) -> Mesh:
    """A mesh of described devices, for compilation only."""
    use_cuda()
    config = (ROOT / "tests" / "aot" / CARDS[card]).read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{chips}", target_config=config)
    return tensor_mesh(list(topology.devices))


@dataclass(frozen=True)
class Compiled:
    """Facts about a compiled program; sizes are bytes on one device."""

    alias: int  # results stored in the memory of arguments
    temp: int  # temporary memory
    kernels: int  # calls of Pallas kernels
    launches: int  # launches of kernels of any kind, and copies
    outside_graphs: list[str]  # launches outside all CUDA graphs
    copies: list[str]  # instructions that copy arrays of the given shape
    registers: int  # the most of a Pallas kernel; 0 if all kernels came from a cache
    spilled: int  # bytes of spilled registers, likewise
    misaligned: list[str]  # tensor copies of a Pallas kernel whose address in shared memory may be misaligned
    shared: int | None  # shared memory of a Triton kernel's thread block; not known for Mosaic kernels

    @property
    def cells(self) -> list[str]:
        """The cells of this program in the table."""
        shared = "-" if not self.shared else f"{self.shared / 1024:.0f}"
        ours = [str(self.registers), str(self.spilled)] if self.registers else ["-", "-"]
        return [f"{self.temp / 2**20:.1f}", str(self.launches), *ours, shared]


def compile_and_read(
    lowered: jax.stages.Lowered, sizes: tuple[int, ...], ptxas: Path, options: Options | None = None
) -> Compiled:
    """Compile a program, and look for copies of arrays of shape `sizes`.

    Args:
        lowered: the program.
        sizes: a shape of which no copy is expected.
        ptxas: the folder of the wrapper.
        options: of the compiler; None for those of the engine.
    """
    options = compiler_options("gpu", "") if options is None else options
    with TemporaryDirectory() as folder:
        take(ptxas)
        dumps = {"xla_dump_to": folder, "xla_gpu_cuda_data_dir": str(ptxas)}
        program = lowered.compile(compiler_options={**options, **dumps})
        assembled = take(ptxas)
        (thunks,) = Path(folder).glob("*thunk_sequence.txt")
        lines = thunks.read_text(encoding="utf-8").splitlines()
        # XLA writes the second file only if there are launches to gather into a graph.
        graphs = next(Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"), thunks)
        outside = [line for line in graphs.read_text(encoding="utf-8").splitlines() if _OUTSIDE.match(line)]
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert text is not None
    shape = f"[{','.join(map(str, sizes))}]"
    ours = [kernel for kernel in assembled if _OURS.search(kernel.name)]
    shared = [int(found[1]) for line in lines if _OURS.search(line) and (found := _SHARED.search(line))]
    return Compiled(
        alias=memory.alias_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        kernels=len(KERNELS.findall(text)),
        launches=sum(bool(_LAUNCH.search(line)) for line in lines),
        outside_graphs=outside,
        copies=[line for line in text.splitlines() if shape in line and re.search(r" copy(-start)?\(", line)],
        registers=max((kernel.registers for kernel in ours), default=0),
        spilled=max((kernel.spilled for kernel in ours), default=0),
        misaligned=[
            copy for kernel in ours for copy, alignment in tensor_addresses(kernel.ptx) if alignment % TENSOR_ALIGNMENT
        ],
        shared=max(shared, default=None),
    )


def compile_attention(ptxas: Path, card: str, name: str, case: Case, *, rows: int, tokens: int) -> Compiled:
    """Compile one call of a backend with the heads and pages of a case, over a cache of 256 MiB."""
    pages, q, requests = _shapes(case, rows, tokens)
    with jax.set_mesh(mesh_of(card)):
        attend = jax.jit(partial(ragged_attention, implementation=name))
        return compile_and_read(attend.lower(q, pages, requests, case.scores), pages.kv.shape, ptxas)


def compile_write(ptxas: Path, card: str, case: Case, *, rows: int, tokens: int) -> tuple[Compiled, int]:
    """Compile `write_kv` alone. Returns the program and the bytes of the cache."""
    pages, _, requests = _shapes(case, rows, tokens)
    new = jax.ShapeDtypeStruct((tokens, case.num_kv_heads, case.head_dim), jnp.bfloat16)
    with jax.set_mesh(mesh_of(card)):
        lowered = jax.jit(write_kv, donate_argnums=0).lower(pages, new, new, requests)
        return compile_and_read(lowered, pages.kv.shape, ptxas), _bytes(pages)


def _shapes(case: Case, rows: int, tokens: int) -> tuple[PackedPages, jax.ShapeDtypeStruct, RowArrays]:
    """Shapes of 256 MiB of pages, of queries and of the other arguments."""
    dtype = jnp.dtype(case.page_dtype)
    num_pages = (256 << 20) // (case.num_kv_heads * 2 * case.head_dim * dtype.itemsize * case.page_size)
    pages = pages_shape("packed", num_pages, case.num_kv_heads, case.head_dim, case.page_size, dtype)
    assert isinstance(pages, PackedPages)
    q = jax.ShapeDtypeStruct((tokens, case.num_heads, case.head_dim), case.dtype)
    shapes = (rows, PAGES_PER_ROW), (rows,), (rows,), (rows,)
    return pages, q, RowArrays(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))  # type: ignore[arg-type]


def _bytes(pages: PackedPages) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(pages))


def unstacked_decoder(model: ModelConfig, mesh: Mesh) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Abstract parameters with separate arrays for each layer, as in an engine on a GPU."""

    def build() -> Decoder:
        decoder = decoder_builder(model, "bfloat16", mesh)()
        decoder.unstack()
        return decoder

    graph, state = nnx.split(nnx.eval_shape(build))
    shardings = param_shardings(state, mesh)
    shapes = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, shardings)
    return graph, shapes


def compile_sampler(ptxas: Path, card: str, model: ModelConfig, kind: Kind, *, width: int) -> Compiled:
    """A plain sampler, as the executor compiles it; the table must not be copied."""
    mesh, columns = mesh_of(card), -(-model.vocab_size // 128) * 128
    graph, state = nnx.split(nnx.eval_shape(lambda: _table(columns, model.embed_dim)))
    weights, tree = jax.tree.flatten(state)

    def unembed(weights: Weights) -> Table:
        merged: Table = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        return merged

    sampler = make_plain_sampler(unembed, width, model.vocab_size, mesh, kind=kind)
    last, draws = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (width, draws_layout(width).size))
    hidden = jax.ShapeDtypeStruct((width, model.embed_dim), jnp.float32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(sampler, donate_argnums=1).lower(weights, last, hidden, draws)
        return compile_and_read(lowered, (columns, model.embed_dim), ptxas)


def _table(rows: int, width: int) -> Table:
    return Table(Maker(jnp.dtype("bfloat16"), nnx.Rngs(0)), rows, width, "vocab")


def compile_step(
    ptxas: Path,
    card: str,
    model: ModelConfig,
    *,
    tokens: int,
    rows: int,
    max_model_len: int,
    num_pages: int,
    chips: int = 1,
    options: Options | None = None,
) -> tuple[Compiled, int]:
    """Compile the program of all layers as the executor does. Returns it and the bytes of one device's KV cache."""
    mesh, page_size = mesh_of(card, chips), 64
    cache = CacheConfig(one_group(model.layer_caches), (num_pages,), page_size, "bfloat16", "packed")
    config = ExecutorConfig("bfloat16", chips, (tokens,), rows, max_model_len, cache)
    layout = Layout(tokens, rows, -(-max_model_len // page_size))
    here = NamedSharding(mesh, PartitionSpec())
    graph, state = unstacked_decoder(model, mesh)
    weights, tree = jax.tree.flatten(state)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), caches_spec(config, model))
    caches = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        caches_shape(config, model),
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
    with jax.set_mesh(mesh):
        lowered = program.lower(weights, caches, array(rows, max_model_len), array(rows), array(layout.size))
    (shard,) = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), caches.pages)
    return compile_and_read(lowered, shard.kv.shape, ptxas, options), _bytes(shard)
