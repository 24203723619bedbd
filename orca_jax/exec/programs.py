"""The programs of an executor: the finite set of shapes, and their lowering and compilation at start.

A launch runs two programs: the layers, compiled once for each bucket, and one of a few samplers. In a pipeline, each
stage has a program of its layers, and the last one has the samplers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from orca_jax.exec.buckets import sampler_width, sampler_widths
from orca_jax.exec.cache import allocate_caches, allocate_zeros, caches_shape, caches_spec
from orca_jax.exec.compile import Options, compile_all, compiler_options
from orca_jax.exec.expected import LaunchTimes
from orca_jax.exec.host import num_processors
from orca_jax.exec.layers import flatten_module, make_forward
from orca_jax.exec.pack import Layout
from orca_jax.exec.program_store import ProgramStore, name_suffix
from orca_jax.exec.sampling.adjust import WORD
from orca_jax.exec.sampling.draw import Kind
from orca_jax.exec.sampling.programs import (
    draws_layout,
    extras_layout,
    make_full_sampler,
    make_plain_sampler,
    plain_kinds,
)
from orca_jax.exec.states import Caches, PoolArrays
from orca_jax.helpers.console import Progress
from orca_jax.kernels.kv_pages import KVPages, copy_blocks, read_blocks, write_blocks
from orca_jax.model.lora.stacks import Stacks, stack_specs, value_specs, write_slot
from orca_jax.model.stages import of_span
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import LayerGroup, ceil_div, of_stage
from orca_jax.values.config import ExecutorConfig
from orca_jax.values.platforms import Platform, platform_of
from orca_jax.values.startup import StartTimes

ProgramName = tuple[str, int]
"""("layers", bucket), ("adapted", bucket), ("full", width),
(a kind of plain samplers, width), ("write_slot", 0), or ("copy_blocks", pool), ("read_blocks", pool) and
("write_blocks", pool). "adapted" are the layers for launches with adapters."""


class DeviceState(NamedTuple):
    """Arrays staying on the device between iterations, donated from program to program."""

    caches: Caches  # of the layers of a stage
    # [R, L] ids of each row's context by position, for penalties; only of the last stage
    history: jax.Array | None
    last_token: jax.Array | None  # [R]; only of the last stage


class Programs:
    """Shapes and programs of one decoder, or one stage of it, on one mesh.

    The decoder may hold shapes in place of parameters, so that programs can be compiled before weights are loaded.

    Args:
        decoder: parameters or shapes.
        config: shapes.
        mesh: the mesh of the stage.
        greedy_only: see `JaxExecutor`.
        largest: the largest bucket whose programs a start on a CPU compiles; None for all buckets. Those of larger
            ones wait in `later`, unless an earlier start measured them.

    Attributes:
        span: the layers of the stage.
        is_first, is_last: place of the stage in the pipeline.
        weights, unembedding: shapes of the flat parameters, the first arguments of the programs.
        skips_padding: padding of launches is not multiplied.
        layouts: the layout of each bucket.
        adapted_layouts: the layout of each bucket for launches with adapters; empty without adapters.
        widths: rows of the samplers, ascending.
        full_widths: rows of the full samplers.
        kinds: the kinds of plain samplers.
        num_columns: V, the padded vocabulary.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: ExecutorConfig,
        mesh: Mesh,
        *,
        greedy_only: bool = False,
        largest: int | None = None,
    ) -> None:
        self._largest = largest or config.buckets[-1]
        self.span = span = decoder.span
        self.is_first = span.is_first
        self.is_last = span.is_last
        self._is_switched = decoder.is_switched
        self.skips_padding = decoder.is_packed
        self._suffix = name_suffix()
        self._model = of_span(decoder.config, span)
        groups = of_stage(config.cache.groups, span.start, span.stop)
        self._config = config = replace(config, cache=replace(config.cache, groups=groups))
        self._mesh = mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._structure, weights = flatten_module(decoder)
        self.weights = _shapes(weights)
        self.unembedding = list[jax.ShapeDtypeStruct]()
        layout = Layout(
            num_tokens=config.buckets[-1],
            num_rows=config.num_rows,
            num_pages=ceil_div(config.max_model_len, config.cache.page_size),
            num_drafts=config.num_drafts,
            windows=tuple(group.window for group in groups),
            page_size=config.cache.page_size,
            has_states=config.cache.num_states > 0,
        )
        self.layouts = {size: replace(layout, num_tokens=size) for size in config.buckets}
        self.adapted_layouts: dict[int, Layout] = {}
        self._stacks: dict[str, jax.ShapeDtypeStruct] = {}
        if config.lora is not None:
            self.adapted_layouts = {
                size: replace(each, has_slots=True) for size, each in self.layouts.items()
            }
            self._stacks = stack_specs(self._model, config.lora, config.dtype, mesh)
        can_skip = self.is_last and decoder.unembedding.can_skip
        self.widths = sampler_widths(config.num_rows + config.num_drafts, can_skip=can_skip)
        # The full sampler draws no proposals, or as few as fit.
        most = sampler_width(config.num_rows)
        self.full_widths: tuple[int, ...] = (most,) if can_skip else (self.widths[0], most)
        self.kinds = plain_kinds(platform_of(mesh.devices.flat[0]))
        if greedy_only:
            self.widths = self.widths[-1:]
            self.full_widths = ()
            self.kinds = ("greedy",)
        self.draws_layouts = {
            width: draws_layout(width) for width in {*self.widths, *self.full_widths}
        }
        self.extras_layouts = {width: extras_layout(width) for width in self.full_widths}
        self.num_columns = 0
        if self.is_last:
            self._unembed, unembedding = flatten_module(decoder.unembedding)
            self.unembedding = _shapes(unembedding)
            self.num_columns = decoder.unembedding.num_rows

    @property
    def most_scored(self) -> int:
        """Tokens of the largest launch in which all are scored."""
        return (self.full_widths or self.widths)[-1]

    @property
    def groups(self) -> Sequence[LayerGroup]:
        """The groups of layers, as the stage has them."""
        return self._config.cache.groups

    def num_copies(self, pool: int) -> int:
        """Blocks copied by a run of the program of a pool: a row has a copy in each group of layers at most."""
        return sum(group.pool == pool for group in self.groups)

    @property
    def num_programs(self) -> int:
        """The number of programs to compile."""
        return len(self.lowerings())

    @property
    def is_local(self) -> bool:
        """True if this process has the whole model."""
        own = self._mesh.devices.flat[0].client.process_index()
        return self._config.pipeline_parallel_size == 1 and all(
            device.process_index == own for device in self._mesh.devices.flat
        )

    @property
    def platform(self) -> Platform:
        """The platform of the devices."""
        return platform_of(self._mesh.devices.flat[0])

    def compile(
        self, progress: Progress, times: StartTimes, *, later: bool = False
    ) -> dict[ProgramName, jax.stages.Compiled]:
        """Load every program from disk, or compile it: those of `later`, or all others."""
        return compile_all(self.lowerings(later=later), self._options, self.store, progress, times)

    @cached_property
    def known_times(self) -> LaunchTimes | None:
        """The times that an earlier start measured; None if there are none, or if they must be measured.

        A GPU or TPU has start-up work in the first runs. Processes that share a model have to run the same.
        """
        if not self.may_skip_runs:
            return None
        return LaunchTimes.from_bytes(self.store.read(_times_name()))

    @property
    def may_skip_runs(self) -> bool:
        """True if no program has to run before the first request."""
        return self.platform.is_host and self.is_local

    def keep_times(self, measured: LaunchTimes) -> None:
        """Keep times for `known_times` of later starts."""
        self.store.write(_times_name(), measured.to_bytes())

    @cached_property
    def later(self) -> tuple[int, ...]:
        """Buckets whose programs are needed only if launches of the smaller ones are quick."""
        if not self.may_skip_runs:
            return ()
        largest = self._largest
        if self.known_times is not None:
            largest = max(largest, self.known_times.largest)
        return tuple(bucket for bucket in self._config.buckets if bucket > largest)

    @property
    def _options(self) -> Options:
        device = self._mesh.devices.flat[0]
        return compiler_options(
            self.platform, device.device_kind, has_library=self._config.has_library
        )

    @cached_property
    def store(self) -> ProgramStore:
        """The programs on disk, with their measured times."""
        config = self._config
        options = self._options
        # None of these changes a program, and those that move blocks have names of their own.
        shapes = replace(config, compile_cache=None, strict_compile=False, moves_blocks=False)
        weights = [(each.shape, each.dtype) for each in self.weights]
        facts = (
            self._model,
            self.span,
            shapes,
            self._is_switched,
            weights,
            self.widths,
            sorted(options.items()),
        )
        # A user's code may depend on anything, so only JAX's cache has its programs: it goes by the lowered code.
        directory = config.compile_cache if self._model.decoder is None else None
        return ProgramStore(directory, self._mesh, facts)

    def lowerings(
        self, *, later: bool = False
    ) -> Mapping[ProgramName, Callable[[], jax.stages.Lowered]]:
        """The functions to trace and lower each program, those that take longest to compile first.

        They are those of `later`, or all others.
        """
        config = self._config
        state = self._state()
        layers: dict[ProgramName, Callable[[], jax.stages.Lowered]] = {}
        buckets = [bucket for bucket in config.buckets if (bucket in self.later) == later]
        for bucket in buckets:
            layers["layers", bucket] = partial(self._lower_layers, bucket, state)
        if self.adapted_layouts:
            for bucket in buckets:
                layers["adapted", bucket] = partial(self._lower_adapted, bucket, state)
        if later:
            return layers
        lower: dict[ProgramName, Callable[[], jax.stages.Lowered]] = {}
        sample = partial(partial, self._lower_sampler)
        if self.is_last:
            lower |= {("full", width): sample("full", width, state) for width in self.full_widths}
        lower |= layers
        if self.is_last:
            for width, kind in product(self.widths, self.kinds):
                lower[kind, width] = sample(kind, width, state)
        if self._stacks:
            lower["write_slot", 0] = self._lower_write
        return {**lower, **self._of_blocks(state)}

    def _of_blocks(
        self, state: DeviceState
    ) -> Mapping[ProgramName, Callable[[], jax.stages.Lowered]]:
        """The programs that copy, read and write blocks."""
        lower: dict[ProgramName, Callable[[], jax.stages.Lowered]] = {}
        if self._config.copies_blocks:
            for pool in range(len(state.caches.pages)):
                lower["copy_blocks", pool] = partial(self._lower_copy, pool, state)
        if self._config.moves_blocks:
            for pool, arrays in enumerate(state.caches.pools):
                lower["read_blocks", pool] = partial(self._lower_read, pool, arrays)
                lower["write_blocks", pool] = partial(self._lower_put, pool, arrays)
        return lower

    def _state(self) -> DeviceState:
        """The shapes of the state."""
        config = self._config
        shape = caches_shape(config, self._model)
        spec = caches_spec(config, self._model)
        caches: Caches = jax.tree.map(
            lambda x, spec: _sharded(x, NamedSharding(self._mesh, spec)), shape, spec
        )
        if not self.is_last:
            return DeviceState(caches, None, None)
        sizes = (config.num_rows, config.max_model_len), (config.num_rows,)
        history, last_token = (cast(jax.Array, self._abstract(size)) for size in sizes)
        return DeviceState(caches, history, last_token)

    def allocate_state(self) -> DeviceState:
        """The state before the first launch, without waiting for the devices."""
        caches = allocate_caches(self._config, self._model, self._mesh)
        others = self._state()[1:]
        if self.is_last:
            others = allocate_zeros(others, self._mesh)
        return DeviceState(caches, *others)

    @property
    def stack_names(self) -> Sequence[str]:
        """The names of the adapters' arrays, in the order in which programs take them."""
        return tuple(self._stacks)

    def allocate_stacks(self) -> Stacks:
        """The adapters of all slots, before the first one is written."""
        shardings = {name: each.sharding for name, each in self._stacks.items()}
        create = jax.jit(
            lambda: {
                name: jnp.zeros(each.shape, each.dtype) for name, each in self._stacks.items()
            },
            out_shardings=shardings,
        )
        stacks: Stacks = create()
        return stacks

    def replicate(self, array: NDArray[np.int32]) -> jax.Array:
        """A copy on each device. In several processes, `jax.device_put` would compare it between all of them."""
        return jax.make_array_from_callback(array.shape, self._replicated, lambda _: array)

    def _lower_layers(self, bucket: int, state: DeviceState) -> jax.stages.Lowered:
        return self._lower_forward(self.layouts[bucket], self.weights, state)

    def _lower_adapted(self, bucket: int, state: DeviceState) -> jax.stages.Lowered:
        return self._lower_forward(self.adapted_layouts[bucket], self._with_stacks(), state)

    def _with_stacks(self) -> list[jax.ShapeDtypeStruct]:
        return [*self.weights, *self._stacks.values()]

    def _lower_write(self) -> jax.stages.Lowered:
        config = self._config
        assert config.lora is not None, "there are adapters"

        def write(stacks: Stacks, slot: jax.Array, values: Stacks) -> Stacks:
            return write_slot(stacks, slot, values)

        program = jax.jit(
            self._named(write),
            donate_argnums=0,
            out_shardings={name: each.sharding for name, each in self._stacks.items()},
        )
        values = value_specs(self._model, config.lora, config.dtype, self._mesh)
        return program.lower(self._stacks, self._abstract((1,)), values)

    def _lower_copy(self, pool: int, state: DeviceState) -> jax.stages.Lowered:
        num_blocks = self._config.cache.num_blocks[pool]
        pages = state.caches.pages[pool]

        def copied(pages: KVPages, blocks: jax.Array) -> KVPages:
            return copy_blocks(pages, blocks, num_blocks)

        program = jax.jit(
            self._named(copied), donate_argnums=0, out_shardings=self._sharding_of(pages)
        )
        return program.lower(pages, self._abstract((self.num_copies(pool), 2)))

    def _lower_read(self, pool: int, arrays: PoolArrays) -> jax.stages.Lowered:
        num_blocks = self._blocks_of(pool)

        def saved(arrays: PoolArrays, blocks: jax.Array) -> PoolArrays:
            return read_blocks(arrays, blocks, num_blocks)

        program = jax.jit(self._named(saved), out_shardings=self._sharding_of(arrays))
        return program.lower(arrays, self._abstract((1,)))

    def _lower_put(self, pool: int, arrays: PoolArrays) -> jax.stages.Lowered:
        num_blocks = self._blocks_of(pool)

        def restored(arrays: PoolArrays, blocks: jax.Array, values: PoolArrays) -> PoolArrays:
            return write_blocks(arrays, blocks, values, num_blocks)

        program = jax.jit(
            self._named(restored), donate_argnums=0, out_shardings=self._sharding_of(arrays)
        )
        return program.lower(arrays, self._abstract((1,)), self.block_shape(pool))

    def block_shape(self, pool: int) -> PoolArrays:
        """The shape of one block of a pool, as `read_blocks` returns it."""
        return self._block_shapes[pool]

    @cached_property
    def _block_shapes(self) -> tuple[PoolArrays, ...]:
        """The shapes of one block of each pool. They are asked for at every block that is moved."""

        def part(num_blocks: int, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (array.shape[0] // num_blocks, *array.shape[1:])
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=array.sharding)

        return tuple(
            jax.tree.map(partial(part, self._blocks_of(pool)), arrays)
            for pool, arrays in enumerate(self._state().caches.pools)
        )

    @property
    def only_counts_tokens(self) -> bool:
        """True if no layer reads the numbers of pages."""
        return self._model.only_counts_tokens

    @property
    def num_pools(self) -> int:
        """Pools of pages, and of states by mixer."""
        return len(self._block_shapes)

    def _blocks_of(self, pool: int) -> int:
        cache = self._config.cache
        return cache.num_blocks[pool] if pool < len(cache.num_blocks) else cache.num_states

    def _lower_forward(
        self, layout: Layout, weights: Sequence[jax.ShapeDtypeStruct], state: DeviceState
    ) -> jax.stages.Lowered:
        donated = [1, 2]
        if not self.is_first and not self.is_last:  # its result has the shape of its input
            donated.append(3)
        program = jax.jit(
            self._named(
                make_forward(self._structure, self._model, self._config, layout, self._mesh)
            ),
            donate_argnums=tuple(donated),
            out_shardings=(self._sharding_of(state.caches), self._replicated, self._replicated),
        )
        inputs: Any = state.last_token
        if not self.is_first:
            shape = layout.num_tokens, self._model.stream_dim
            inputs = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._replicated)
        return program.lower(
            weights, state.caches, state.history, inputs, self._abstract((layout.size,))
        )

    def _lower_sampler(
        self, name: Kind | Literal["full"], width: int, state: DeviceState
    ) -> jax.stages.Lowered:
        make: Callable[..., Callable[..., Any]] = partial(
            make_full_sampler, logprobs_mode=self._config.logprobs_mode
        )
        if name != "full":
            make = partial(make_plain_sampler, kind=name)
        sampler = make(self._unembed, width, self._model.vocab_size, self._mesh)
        program = jax.jit(self._named(sampler), donate_argnums=1, out_shardings=self._replicated)
        shape = self.widths[-1], self._model.embed_dim
        hidden = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._replicated)
        draws = self._abstract((self.draws_layouts[width].size,))
        plain = self.unembedding, state.last_token, hidden, draws
        if name != "full":
            return program.lower(*plain)
        extras = self.extras_layouts[width].size
        mask = (width, self.num_columns // WORD)
        return program.lower(*plain, state.history, self._abstract((extras,)), self._abstract(mask))

    def _named[F: Callable[..., Any]](self, function: F) -> F:
        """The function with a name for the code of this package, for JAX's cache (see `program_store`)."""
        function.__name__ += self._suffix
        return function

    def _sharding_of[T](self, pools: T) -> T:
        shardings: T = jax.tree.map(lambda pool: pool.sharding, pools)
        return shardings

    def _abstract(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)


def _times_name() -> str:
    return f"times-{num_processors()}"


def compile_stages(
    stages: Sequence[Programs], progress: Progress, times: StartTimes
) -> list[dict[ProgramName, jax.stages.Compiled]]:
    """Compile the programs of all stages. `progress` gets the numbers of all of them together."""
    total = sum(stage.num_programs for stage in stages)
    compiled: list[dict[ProgramName, jax.stages.Compiled]] = []
    for stage in stages:
        before = sum(map(len, compiled))

        def report(done: int, _: int, before: int = before) -> None:
            progress(before + done, total)

        compiled.append(stage.compile(report, times))
    return compiled


def _shapes(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """The shapes, with the order of axes in memory where it may be another one than usual (`keep_order`)."""
    is_chosen = bool(arrays) and platform_of(next(iter(arrays[0].sharding.device_set))).has_tiles
    return [_sharded(each, getattr(each, "format" if is_chosen else "sharding")) for each in arrays]


def _sharded(shape: jax.Array | jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
