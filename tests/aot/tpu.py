"""Compilation for absent TPUs: libtpu contains the compilers of all generations, and they need no chip."""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.assembly.executor import arrange
from orca_jax.assembly.resolve import can_view
from orca_jax.exec.buckets import sampler_width
from orca_jax.exec.compile import compile_one, compiler_options
from orca_jax.exec.programs import Programs
from orca_jax.exec.sampling.adjust import WORD
from orca_jax.exec.sampling.programs import (
    draws_layout,
    extras_layout,
    make_full_sampler,
    make_plain_sampler,
)
from orca_jax.kernels.kv_pages import KVPages, RowArrays, TokenMajorPages, needs_scales, pages_shape
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.linear_state import linear_state
from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.kernels.ragged_attention.tpu import attention, latents
from orca_jax.model.block import Block
from orca_jax.model.load import abstract_decoder, tensor_mesh
from orca_jax.model.sharding import on_shards
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import form_groups
from orca_jax.values.config import CacheConfig, ExecutorConfig, ModelConfig, PageDType
from orca_jax.values.platforms import platform_named
from tests.aot.compilers import use_compilers
from tests.aot.models import StateSizes

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# Without these, libtpu looks for a TPU VM, and locks the TPU against a second process.
LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def mesh_of(generation: str, chips: int) -> Mesh:
    """A mesh of devices for compilation only."""
    return tensor_mesh(devices_of(TOPOLOGIES[generation])[:chips])


def devices_of(topology: str) -> list[jax.Device]:
    """All chips of a topology."""
    use_compilers()
    os.environ.update(LIBTPU)
    return list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)


# Instructions that write an array again: a copy, a transposition, or either by the sparse cores.
# Gathered rows are activations, which may have the size of a weight.
_RELAID = re.compile(
    r"= bf16\[([\d,]+)\]\S* (?:copy|transpose|call-start|custom-call-done)\((?!%gather)"
)

_COPY = re.compile(r" copy(-start)?\(")


@dataclass(frozen=True)
class Compiled:
    """The memory of a compiled program, in bytes on one device."""

    alias: int  # of results in the memory of arguments
    temp: int
    vmem: int  # of the kernel with the most
    copies: list[str]  # instructions that copy all pages or all states of a kind
    copies_of_weights: list[str]  # of all layers or of one
    text: str = field(repr=False)  # the optimised program


def read(
    program: jax.stages.Compiled,
    pages: KVPages | Sequence[KVPages],
    weights: Iterable[jax.ShapeDtypeStruct] = (),
    states: Iterable[jax.ShapeDtypeStruct] = (),
) -> Compiled:
    """Read the memory of a program. `pages` and `states` have shapes of one device; `weights` are its weights."""
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert text is not None
    # without scales, which are small
    tokens = [each for each in jax.tree.leaves(pages) if each.ndim != 3]
    kept = [f"[{','.join(map(str, each.shape))}]" for each in (*tokens, *states)]
    copies = [
        line
        for line in text.splitlines()
        if _COPY.search(line) and any(shape in line for shape in kept)
    ]
    shapes = [weight.sharding.shard_shape(weight.shape) for weight in weights]
    sizes = {math.prod(shape[axis:]) for shape in shapes for axis in range(min(2, len(shape) - 1))}
    relaid = [
        line
        for line in text.splitlines()
        if (found := _RELAID.search(line)) and _elements(found[1]) in sizes
    ]
    return Compiled(
        memory.alias_size_in_bytes, memory.temp_size_in_bytes, _vmem(text), copies, relaid, text
    )


def _elements(dimensions: str) -> int:
    return math.prod(map(int, dimensions.split(",")))


def _vmem(text: str) -> int:
    """Scoped memory of the largest kernel: from the offset of its beginning to the end of the used part."""
    kernels = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    used = [0]
    for line in kernels:
        begin = re.search(r'"scoped_memory_configs":\[{"memory_space":"1","offset":"(\d+)"', line)
        end = re.search(
            r'"used_scoped_memory_configs":\[{"memory_space":"1","offset":"0","size":"(\d+)"', line
        )
        if begin and end:
            used.append(int(end[1]) - int(begin[1]))
    return max(used)


def compile_attention(
    generation: str, case: Case, dtype: str, *, rows: int, tokens: int, pages_per_row: int
) -> Compiled:
    """Compile one call of the kernels with the heads and pages of a case, on a cache of 256 MiB."""
    mesh = mesh_of(generation, 1)
    pages = _pages_of(case, dtype, mesh)
    q = _array(
        mesh,
        (tokens, case.num_heads, case.head_dim),
        "bfloat16" if needs_scales(jnp.dtype(dtype)) else dtype,
    )
    requests = _requests(mesh, rows, pages_per_row)
    # sinks are made on the device
    attend = jax.jit(lambda *arrays: attention.attend(*arrays, case.scores))
    with jax.set_mesh(mesh):  # Pallas takes the generation from the mesh
        return read(attend.lower(q, pages, requests).compile(), pages)


def compile_layer(
    generation: str, case: Case, dtype: str, *, rows: int, tokens: int, pages_per_row: int
) -> Compiled:
    """Compile the work of a layer on a cache of 256 MiB: new tokens are written too."""
    mesh = mesh_of(generation, 1)
    pages = _pages_of(case, dtype, mesh)
    q = _array(mesh, (tokens, case.num_heads, case.head_dim), "bfloat16")
    k = _array(mesh, (tokens, case.num_kv_heads, case.head_dim), "bfloat16")
    v = k if case.has_values else None
    kernels: Any = attention if case.has_values else latents

    def layer(q: Any, k: Any, v: Any, pages: KVPages, requests: RowArrays) -> Any:
        prepared = kernels.prepare(q, pages, requests)
        first = jnp.int32(0)
        return kernels.write_and_attend(q, k, v, pages, prepared, first, case.scores)

    with jax.set_mesh(mesh):
        program = jax.jit(layer, donate_argnums=3)
        return read(
            program.lower(q, k, v, pages, _requests(mesh, rows, pages_per_row)).compile(), pages
        )


def compile_write(
    generation: str, case: Case, dtype: str, *, rows: int, tokens: int, pages_per_row: int
) -> Compiled:
    """Compile one call of `write_kv` on a cache of 256 MiB."""
    mesh = mesh_of(generation, 1)
    pages = _pages_of(case, dtype, mesh)
    new = _array(
        mesh,
        (tokens, case.num_kv_heads, case.head_dim),
        "bfloat16" if needs_scales(jnp.dtype(dtype)) else dtype,
    )
    requests = _requests(mesh, rows, pages_per_row)
    write = jax.jit(lambda *args: write_kv(*args, implementation="tpu"), donate_argnums=0)
    with jax.set_mesh(mesh):
        return read(write.lower(pages, new, new, requests).compile(), pages)


def compile_states(
    generation: str, sizes: StateSizes, *, rows: int, tokens: int
) -> tuple[Compiled, int]:
    """Compile linear attention over twice as many states as rows. Returns the program and the bytes of all states."""
    mesh = mesh_of(generation, 1)
    given = jax.tree.map(
        lambda x: _array(mesh, x.shape, x.dtype), sizes.arguments(rows=rows, tokens=tokens)
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(linear_state, donate_argnums=1).lower(*given).compile()
    no_pages: list[KVPages] = []
    return read(compiled, no_pages, states=[given[1]]), bytes_of(given[1])


def _requests(mesh: Mesh, rows: int, pages_per_row: int) -> RowArrays:
    return RowArrays(
        *(_array(mesh, shape) for shape in ((rows, pages_per_row), (rows,), (rows,), (rows,)))
    )  # type: ignore[arg-type]


def _pages_of(case: Case, dtype: str, mesh: Mesh) -> KVPages:
    slot = case.num_kv_heads * (1 + case.has_values) * case.head_dim * jnp.dtype(dtype).itemsize
    page = case.num_kv_heads, case.head_dim, case.page_size
    number = (256 << 20) // (slot * case.page_size)
    shapes = pages_shape("token_major", number, *page, jnp.dtype(dtype), has_values=case.has_values)
    return jax.tree.map(lambda x: _array(mesh, x.shape, x.dtype), shapes)


def _array(mesh: Mesh, shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec())
    )


def compile_step(
    generation: str,
    chips: int,
    model: ModelConfig,
    *,
    tokens: int,
    rows: int,
    max_model_len: int,
    num_pages: int,
    num_states: int = 0,
    cache_dtype: PageDType = "bfloat16",
) -> tuple[Compiled, int]:
    """Compile the program of all layers, as the executor does.

    Returns also the bytes of pages and states on one device.
    """
    mesh = mesh_of(generation, chips)
    groups = form_groups(
        on_shards(model, chips).layer_caches,
        max_model_len,
        views=can_view(cache_dtype, has_tiles=True),
    )
    pools = 1 + max(group.pool for group in groups)
    cache = CacheConfig(groups, (num_pages,) * pools, 128, cache_dtype, "token_major", num_states)
    config = ExecutorConfig("bfloat16", chips, (tokens,), rows, max_model_len, cache)
    decoder: Decoder = nnx.merge(*abstract_decoder(model, "bfloat16", mesh))
    arrange(platform_named("tpu"), decoder)
    programs = Programs(decoder, config, mesh)
    state = programs._state()
    compiled = compile_one(
        programs._lower_layers(tokens, state),
        compiler_options(platform_named("tpu"), mesh.devices.flat[0].device_kind),
    )
    # Matrices alone: vectors, small matrices and the table of positions have sizes of activations.
    most, is_stacked = tokens * model.embed_dim, isinstance(decoder.blocks, Block)
    shapes = [
        (each, each.shape[1:] if is_stacked or len(each.shape) > 2 else each.shape)
        for each in programs.weights
    ]
    matrices = [each for each, shape in shapes if len(shape) > 1 and math.prod(shape) > most]
    pages, states = on_one_device(state.caches)
    return read(compiled, pages, matrices, jax.tree.leaves(states)), bytes_of((pages, states))


def on_one_device[T](shapes: T) -> T:
    """The shapes of a tree of sharded arrays on each device."""
    found: T = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), shapes
    )
    return found


def bytes_of(shapes: object) -> int:
    """Bytes of a tree of arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def compile_sampler(
    generation: str, model: ModelConfig, *, rows: int, max_model_len: int, is_full: bool
) -> Compiled:
    """Compile a sampler as wide as all rows, as the executor does for one chip."""
    mesh = mesh_of(generation, 1)
    graph, state = abstract_decoder(model, "bfloat16", mesh)
    decoder: Decoder = nnx.merge(graph, state)
    table, parameters = nnx.split(decoder.unembedding)
    weights, tree = jax.tree.flatten(parameters)
    make = make_full_sampler if is_full else make_plain_sampler
    sample = make(
        lambda weights: nnx.merge(table, jax.tree.unflatten(tree, weights)),
        rows,
        model.vocab_size,
        mesh,
    )
    hidden = _array(mesh, (sampler_width(rows), model.embed_dim), "float32")
    arguments = [weights, _array(mesh, (rows,)), hidden, _array(mesh, (draws_layout(rows).size,))]
    if is_full:
        mask = rows, weights[0].shape[0] // WORD
        arguments += [
            _array(mesh, shape)
            for shape in ((rows, max_model_len), (extras_layout(rows).size,), mask)
        ]
    program = jax.jit(sample, donate_argnums=1, out_shardings=NamedSharding(mesh, PartitionSpec()))
    compiled = compile_one(
        program.lower(*arguments),
        compiler_options(platform_named("tpu"), mesh.devices.flat[0].device_kind),
    )
    return read(compiled, TokenMajorPages(jax.ShapeDtypeStruct((0,), jnp.bfloat16)), weights)
