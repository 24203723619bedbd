"""Compile for absent GPUs: JAX's CUDA plugin contains the compiler, and a text file describes the card."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from orca_jax.exec.compile import Options, compiler_options
from orca_jax.exec.layers import Weights
from orca_jax.exec.programs import Programs
from orca_jax.exec.sampling.draw import Kind
from orca_jax.exec.sampling.programs import draws_layout, make_plain_sampler
from orca_jax.kernels.expert_mlp import ExpertKernels, KernelForm, expert_mlp
from orca_jax.kernels.kv_pages import KVPages, RowArrays, pages_shape
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.linear_state import linear_state
from orca_jax.kernels.matmul import PER_BYTE, MatrixKind, Quantised, quantised_matmul
from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.model.layers import Table
from orca_jax.model.load import abstract_decoder, tensor_mesh
from orca_jax.model.maker import Maker
from orca_jax.model.matrices.quantise import expand
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import form_groups
from orca_jax.values.config import CacheConfig, ExecutorConfig, ModelConfig
from orca_jax.values.platforms import platform_named
from tests.aot.compilers import use_cuda
from tests.aot.models import StateSizes
from tests.aot.ptx import TENSOR_ALIGNMENT, tensor_addresses
from tests.aot.ptxas import take
from tests.aot.tpu import bytes_of, on_one_device
from tests.project.source import ROOT

CARDS = {"H200": "h200.txtpb", "A100": "a100.txtpb"}  # each a GpuTargetConfigProto
PAGES_PER_ROW = 64
KERNELS = re.compile(r"custom_call_target=\"(mosaic_gpu|__gpu\$xla\.gpu\.triton)")
_OUTSIDE = re.compile(r"^\d+: k(?!CommandBuffer)")
_SHARED = re.compile(r"shared_memory: (\d+) bytes")
_LAUNCH = re.compile(r"^\s*\d+: k\w+")
_COPY = re.compile(r" copy(-start)?\(")
_OURS = re.compile(r"increments|combine|chunks|experts|state_")


def mesh_of(card: str, chips: int = 1) -> Mesh:
    """A mesh of described devices, for compilation only."""
    use_cuda()
    config = (ROOT / "tests" / "aot" / CARDS[card]).read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{chips}", target_config=config
    )
    return tensor_mesh(list(topology.devices))


@dataclass(frozen=True)
class Compiled:
    """Facts about a compiled program; sizes are bytes on one device."""

    alias: int  # results stored in the memory of arguments
    temp: int  # temporary memory
    kernels: int  # calls of Pallas kernels
    launches: int  # launches of kernels of any kind, and copies
    outside_graphs: list[str]  # launches outside all CUDA graphs
    copies: list[str]  # instructions that copy arrays of the given shapes
    registers: int  # the most of a Pallas kernel; 0 if all kernels came from a cache
    spilled: int  # bytes of spilled registers, likewise
    # tensor copies of a Pallas kernel whose address in shared memory may be misaligned
    misaligned: list[str]
    # shared memory of a Triton kernel's thread block; not known for Mosaic kernels
    shared: int | None

    @property
    def cells(self) -> list[str]:
        """The cells of this program in the table."""
        shared = "-" if not self.shared else f"{self.shared / 1024:.0f}"
        ours = [str(self.registers), str(self.spilled)] if self.registers else ["-", "-"]
        return [f"{self.temp / 2**20:.1f}", str(self.launches), *ours, shared]


def compile_and_read(
    lowered: jax.stages.Lowered,
    shapes: Sequence[tuple[int, ...]],
    ptxas: Path,
    options: Options | None = None,
) -> Compiled:
    """Compile a program, and look for copies of arrays of these shapes.

    Args:
        lowered: the program.
        shapes: those of which no copy is expected.
        ptxas: the folder of the wrapper.
        options: of the compiler; None for those of the engine.
    """
    options = compiler_options(platform_named("gpu"), "") if options is None else options
    with TemporaryDirectory() as folder:
        take(ptxas)
        dumps = {"xla_dump_to": folder, "xla_gpu_cuda_data_dir": str(ptxas)}
        program = lowered.compile(compiler_options={**options, **dumps})
        assembled = take(ptxas)
        (thunks,) = Path(folder).glob("*thunk_sequence.txt")
        lines = thunks.read_text(encoding="utf-8").splitlines()
        # XLA writes the second file only if there are launches to gather into a graph.
        graphs = next(Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"), thunks)
        outside = [
            line for line in graphs.read_text(encoding="utf-8").splitlines() if _OUTSIDE.match(line)
        ]
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert text is not None
    kept = [f"[{','.join(map(str, shape))}]" for shape in shapes]
    ours = [kernel for kernel in assembled if _OURS.search(kernel.name)]
    shared = [
        int(found[1]) for line in lines if _OURS.search(line) and (found := _SHARED.search(line))
    ]
    return Compiled(
        alias=memory.alias_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        kernels=len(KERNELS.findall(text)),
        launches=sum(bool(_LAUNCH.search(line)) for line in lines),
        outside_graphs=outside,
        copies=[
            line
            for line in text.splitlines()
            if _COPY.search(line) and any(shape in line for shape in kept)
        ],
        registers=max((kernel.registers for kernel in ours), default=0),
        spilled=max((kernel.spilled for kernel in ours), default=0),
        misaligned=[
            copy
            for kernel in ours
            for copy, alignment in tensor_addresses(kernel.ptx)
            if alignment % TENSOR_ALIGNMENT
        ],
        shared=max(shared, default=None),
    )


def compile_attention(
    ptxas: Path, card: str, name: str, case: Case, *, rows: int, tokens: int
) -> Compiled:
    """Compile one call of a backend with the heads and pages of a case, over a cache of 256 MiB."""
    pages, q, requests = _shapes(case, rows, tokens)
    shapes = [x.shape for x in jax.tree.leaves(pages)]
    with jax.set_mesh(mesh_of(card)):
        attend = jax.jit(
            lambda *arrays: ragged_attention(*arrays, case.scores, implementation=name)
        )
        return compile_and_read(attend.lower(q, pages, requests), shapes[:1], ptxas)


def compile_write(
    ptxas: Path, card: str, case: Case, *, rows: int, tokens: int
) -> tuple[Compiled, int]:
    """Compile `write_kv` alone. Returns the program and the bytes of the cache."""
    pages, _, requests = _shapes(case, rows, tokens)
    new = jax.ShapeDtypeStruct((tokens, case.num_kv_heads, case.head_dim), jnp.bfloat16)
    with jax.set_mesh(mesh_of(card)):
        lowered = jax.jit(write_kv, donate_argnums=0).lower(pages, new, new, requests)
        shapes = [x.shape for x in jax.tree.leaves(pages)]
        return compile_and_read(lowered, shapes[:1], ptxas), bytes_of(pages)


def _shapes(case: Case, rows: int, tokens: int) -> tuple[KVPages, jax.ShapeDtypeStruct, RowArrays]:
    """Shapes of 256 MiB of pages, of queries and of the other arguments."""
    dtype = jnp.dtype(case.page_dtype)
    token = case.num_kv_heads * (1 + case.has_values) * case.head_dim * dtype.itemsize
    num_pages = (256 << 20) // (token * case.page_size)
    page = case.num_kv_heads, case.head_dim, case.page_size, dtype
    pages = pages_shape("token_major", num_pages, *page, has_values=case.has_values)
    q = jax.ShapeDtypeStruct((tokens, case.num_heads, case.head_dim), case.dtype)
    shapes = (rows, PAGES_PER_ROW), (rows,), (rows,), (rows,)
    return pages, q, RowArrays(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))  # type: ignore[arg-type]


def compile_experts(
    ptxas: Path, card: str, kind: MatrixKind | None, *, tokens: int, per_token: int = 4
) -> Compiled:
    """Compile the MLPs of the 32 experts of gpt-oss-20b, in bfloat16 or stored."""
    count, width = 32, 2880
    dtype = jnp.dtype(jnp.bfloat16)
    form = KernelForm()
    matrix: Any = jax.ShapeDtypeStruct((count, width, width), jnp.bfloat16)
    if kind is not None:
        product = partial(quantised_matmul, kind=kind, dtype=dtype)
        form = KernelForm(product, partial(expand, kind=kind, dtype=dtype), kind=kind, dtype=dtype)
        rows = width // PER_BYTE[kind]
        values = jnp.float8_e4m3fn if kind == "fp8" else jnp.int8
        scale: tuple[int, ...] = (count, width)
        if PER_BYTE[kind] == 2:
            scale = (count, width // 32, width)
        matrix = Quantised(
            jax.ShapeDtypeStruct((count, rows, width), values),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct(scale, jnp.float32),  # type: ignore[arg-type]
        )

    def mix(x: jax.Array, chosen: jax.Array, weights: jax.Array, kernels: Any) -> jax.Array:
        return expert_mlp(
            x, chosen, weights, kernels, activation=lambda gate, up: gate * up, form=form
        )

    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    chosen = jax.ShapeDtypeStruct((tokens, per_token), jnp.int32)
    weights = jax.ShapeDtypeStruct((tokens, per_token), jnp.float32)
    with jax.set_mesh(mesh_of(card)):
        lowered = jax.jit(mix).lower(x, chosen, weights, ExpertKernels(matrix, matrix, matrix))
        return compile_and_read(lowered, [(count, width, width)], ptxas)


def compile_states(
    ptxas: Path, card: str, sizes: StateSizes, *, rows: int, tokens: int
) -> tuple[Compiled, int]:
    """Compile linear attention over twice as many states as rows. Returns the program and the bytes of all states."""
    given = sizes.arguments(rows, tokens)
    with jax.set_mesh(mesh_of(card)):
        lowered = jax.jit(linear_state, donate_argnums=1).lower(*given)
        return compile_and_read(lowered, [given[1].shape], ptxas), bytes_of(given[1])


def compile_sampler(
    ptxas: Path, card: str, model: ModelConfig, kind: Kind, *, width: int
) -> Compiled:
    """A plain sampler, as the executor compiles it; the table must not be copied."""
    mesh, columns = mesh_of(card), -(-model.vocab_size // 128) * 128
    graph, state = nnx.split(nnx.eval_shape(lambda: _table(columns, model.embed_dim)))
    weights, tree = jax.tree.flatten(state)

    def unembed(weights: Weights) -> Table:
        merged: Table = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        return merged

    sampler = make_plain_sampler(unembed, width, model.vocab_size, mesh, kind=kind)
    last, draws = (
        jax.ShapeDtypeStruct((size,), jnp.int32) for size in (width, draws_layout(width).size)
    )
    hidden = jax.ShapeDtypeStruct((width, model.embed_dim), jnp.float32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(sampler, donate_argnums=1).lower(weights, last, hidden, draws)
        return compile_and_read(lowered, [(columns, model.embed_dim)], ptxas)


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
    num_states: int = 0,
    chips: int = 1,
    options: Options | None = None,
) -> tuple[Compiled, int]:
    """Compile the program of all layers as the executor does.

    Returns also the bytes of pages and states on one device.
    """
    mesh = mesh_of(card, chips)
    groups = form_groups(model.layer_caches, max_model_len)
    cache = CacheConfig(groups, (num_pages,), 64, "bfloat16", "token_major", num_states)
    config = ExecutorConfig("bfloat16", chips, (tokens,), rows, max_model_len, cache)
    decoder: Decoder = nnx.merge(*abstract_decoder(model, "bfloat16", mesh))
    decoder.unstack()
    programs = Programs(decoder, config, mesh)
    state = programs._state()
    with jax.set_mesh(mesh):
        lowered = programs._lower_layers(tokens, state)
    caches = jax.tree.leaves(on_one_device(state.caches))
    return compile_and_read(lowered, [x.shape for x in caches], ptxas, options), bytes_of(caches)
