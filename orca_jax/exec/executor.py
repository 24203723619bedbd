"""The executor: runs plans on a mesh of devices, each launch by programs that were compiled at start.

A launch is two programs: the layers, one program for each bucket, and a sampler, of which there are a few. Which one
draws is decided on the host, from how many tokens are kept, whether a row among them wants more than the plain one
can do, and, where that spares the device a question to the host, of which kind they are. Everything that lives on
the device between iterations is donated from program to program.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.config import ExecutorConfig, ModelConfig
from orca_jax.errors import CompileWhileServingError
from orca_jax.exec.buckets import bucket_for, launches, sampler_places
from orca_jax.exec.cache import allocate_cache, allocate_history
from orca_jax.exec.compile import CompileCounter, compile_all, compile_cache, compiler_options
from orca_jax.exec.idle import IdleWatch, Pending
from orca_jax.exec.layers import flatten_module, make_forward
from orca_jax.exec.multi_step import Repeated, limits_layout, make_repeat, pack_limits
from orca_jax.exec.pack import Layout, pack
from orca_jax.exec.results import Launch, read_repeated, read_results
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.adjust import WORD
from orca_jax.exec.sampling.draw import Kind
from orca_jax.exec.sampling.pack import draws_layout, extras_layout, kind_of_draws, pack_draws, pack_extras, pack_masks
from orca_jax.exec.sampling.programs import Drawn, make_full_sampler, make_plain_sampler, plain_kinds
from orca_jax.kernels.kv_pages import KVPages
from orca_jax.model.transformer import Decoder
from orca_jax.progress import Progress
from orca_jax.step import ExecutorStats, Handle, StepPlan, StepResult, TokenSet

ProgramName = tuple[str, int]
"""("layers", bucket), ("repeat", bucket), ("full", places) or (a kind of plain ones, places)."""


@dataclass(slots=True)
class JaxHandle:
    """An iteration in flight."""

    plan: StepPlan
    launches: list[Launch]
    is_complete: bool  # False: `constrain` has yet to start the samplers that wait for it
    repeated: Repeated | None = None  # of a plan that repeats, which has no launches
    untold: jax.Array | None = None  # with it, or where members have tokens there from earlier plans

    @property
    def newest(self) -> Pending:
        """Is there when the iteration is done."""
        return self.launches[-1].newest if self.repeated is None else cast(Pending, self.repeated.num_steps)


class JaxExecutor:
    """Runs one model on one mesh.

    Args:
        decoder: parameters on the devices of `mesh`.
        model: of the decoder.
        config: shapes; they decide the finite set of programs.
        mesh: with a tensor axis.
        progress: told after each compiled program how many of how many are done.
    """

    def __init__(
        self,
        decoder: Decoder,
        model: ModelConfig,
        config: ExecutorConfig,
        mesh: Mesh,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.config = config
        self.stats = ExecutorStats()
        self._model = model
        self._replicated = NamedSharding(mesh, PartitionSpec())
        pages_per_row = -(-config.max_model_len // config.cache.page_size)
        self._rows = RowTable(config.num_rows, pages_per_row)
        self._layouts = {size: Layout(size, config.num_rows, pages_per_row) for size in config.buckets}
        self._places = sampler_places(config.num_rows)
        self._kinds = plain_kinds(mesh.devices.flat[0].platform)
        self._full_places = self._places[0], self._places[-1]
        self._draws_layouts = {places: draws_layout(places) for places in self._places}
        self._extras_layouts = {places: extras_layout(places) for places in self._full_places}
        self._structure, self._weights = flatten_module(decoder)
        self._unembed, self._unembedding = flatten_module(decoder.unembedding)
        self._columns = self._unembedding[0].shape[0]
        self._pages = allocate_cache(model, config.cache, mesh)
        self._history = allocate_history(config.num_rows, config.max_model_len, mesh)
        self._last_token = self._put(np.zeros(config.num_rows, np.int32))
        self._untold = self._put(np.zeros((config.num_rows, config.max_steps), np.int32))
        self._no_masks = {n: self._put(pack_masks((), n, self._columns)) for n in self._full_places}
        self._idle = IdleWatch()
        self._num_in_flight = 0
        self._counter = CompileCounter()
        with compile_cache(config.compile_cache):
            self.programs: dict[ProgramName, jax.stages.Compiled] = compile_all(
                self._lower_all(mesh), compiler_options(mesh.devices.flat[0].device_kind), progress
            )
        self._warm_up()
        self._idle.rest()
        self.stats.compiles = self._counter.count

    def submit(self, plan: StepPlan) -> JaxHandle:
        """Pack and launch an iteration; returns before the device is done."""
        self._idle.look()
        self._rows.update(plan.members)
        self.stats.iterations += 1
        self._num_in_flight += 1
        if plan.repeats:
            return self._repeat(plan)
        handle = JaxHandle(plan, [], is_complete=not plan.is_constrained)
        if self.config.max_steps > 1 and self._rows.num_untold.any():
            handle.untold = self._untold
        for segments in launches(plan.members, self.config.buckets[-1], self._places[-1]):
            start = time.perf_counter()
            num_tokens = sum([segment.size for segment in segments])
            bucket = bucket_for(self.config.buckets, num_tokens)
            vector, kept = pack(plan.members, segments, self._rows, self._layouts[bucket])
            packed = time.perf_counter()
            launch = Launch(
                kept, self._run_layers(bucket, vector), [self._rows.logprobs[row] for row in kept.row.tolist()]
            )
            self.stats.pack_seconds += packed - start
            self.stats.dispatch_seconds += time.perf_counter() - packed
            self.stats.launches += 1
            self.stats.tokens += num_tokens
            self.stats.padding_tokens += bucket - num_tokens
            handle.launches.append(launch)
            if handle.is_complete or not launch.is_constrained(plan):
                self._draw(launch, ())
        return handle

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Start the samplers that waited for what the constrained members may draw."""
        assert isinstance(handle, JaxHandle), "a handle of another executor"
        assert not handle.is_complete, "a plan that is not constrained, or was already"
        members = handle.plan.members
        constrained = [index for index, member in enumerate(members) if member.is_constrained]
        sets = dict(zip(constrained, allowed, strict=True))
        assert all(sets.values()), "a set of allowed ids is empty"
        for launch in handle.launches:
            if launch.is_constrained(handle.plan):
                self._draw(launch, launch.masks(sets))
        handle.is_complete = True

    def collect(self, handle: Handle) -> StepResult:
        """Wait for an iteration.

        Raises:
            CompileWhileServingError: something was compiled since start, and `strict_compile` is set.
        """
        assert isinstance(handle, JaxHandle), "a handle of another executor"
        assert handle.is_complete, "a constrained plan, and nobody said what its members may draw"
        start = time.perf_counter()
        self._idle.wait(handle.newest)
        result = self._read(handle)
        self._num_in_flight -= 1
        self.stats.wait_seconds += time.perf_counter() - start
        self._count_compiles()
        return result

    def rest(self) -> None:
        """Nobody wants the device until the next plan."""
        self._idle.rest()

    def close(self) -> None:
        """Free the cache and stop counting compiles."""
        self._counter.close()
        kept = (self._history, self._last_token, self._untold, *self._no_masks.values())
        for array in (*jax.tree.leaves(self._pages), *kept):
            array.delete()
        self.programs = {}

    def _repeat(self, plan: StepPlan) -> JaxHandle:
        """Start a plan that repeats: one launch, since its members are no more than rows."""
        assert self._num_in_flight == 1, "a plan that repeats with others in flight"
        start = time.perf_counter()
        bucket = bucket_for(self.config.buckets, len(plan.members))
        (segments,) = launches(plan.members, self.config.buckets[-1], self._places[-1])
        vector, kept = pack(plan.members, segments, self._rows, self._layouts[bucket])
        draws = pack_draws(kept, self._rows, draws_layout(bucket))
        limits = pack_limits(plan, kept, self._rows, limits_layout(bucket))
        packed = time.perf_counter()
        self._idle.begin()
        self._pages, self._history, self._last_token, self._untold, repeated = self.programs["repeat", bucket](
            self._weights, self._unembedding, *self._carried, self._untold, vector, draws, limits
        )
        self._idle.handed_over(repeated.num_steps)
        self.stats.idle_seconds = self._idle.seconds
        self.stats.pack_seconds += packed - start
        self.stats.dispatch_seconds += time.perf_counter() - packed
        self.stats.launches += 1
        return JaxHandle(plan, [], is_complete=True, repeated=repeated, untold=self._untold)

    def _read(self, handle: JaxHandle) -> StepResult:
        """Wait for results, those that earlier plans left on the device included."""
        plan, rows = handle.plan, self._rows
        if handle.repeated is not None and handle.untold is not None:
            result, num_drawn = read_repeated(plan, handle.repeated, handle.untold, rows)
            bucket = bucket_for(self.config.buckets, len(plan.members))
            self.stats.tokens += num_drawn
            self.stats.padding_tokens += bucket * result.num_steps - num_drawn
            return result
        if handle.untold is None:
            return read_results(plan, handle.launches, self._model.vocab_size)
        ids = np.asarray(handle.untold)
        sampling = [member.row for member in plan.members if member.samples]
        untold = [ids[row, : rows.num_untold[row]].tolist() for row in sampling]
        rows.num_untold[sampling] = 0
        return read_results(plan, handle.launches, self._model.vocab_size, untold)

    def _run_layers(self, bucket: int, vector: np.ndarray) -> jax.Array:
        self._idle.begin()
        # A program takes an array of the host in a tenth of the time that `jax.device_put` takes before it.
        self._pages, self._history, hidden = self.programs["layers", bucket](
            self._weights, self._pages, self._history, self._last_token, vector
        )
        self._idle.handed_over(hidden)
        self.stats.idle_seconds = self._idle.seconds
        return hidden

    def _draw(self, launch: Launch, masks: Sequence[TokenSet | None]) -> None:
        """Start the smallest and simplest sampler that serves a launch; none where no token is kept."""
        if not launch.kept.members:
            return
        start = time.perf_counter()
        number, rows = len(launch.kept.members), self._rows
        is_full = (
            bool(masks) or launch.kept.has_targets or any([rows.has_extras[row] for row in launch.kept.row.tolist()])
        )
        places = bucket_for(self._full_places if is_full else self._places, number)
        draws = pack_draws(launch.kept, rows, self._draws_layouts[places])
        extras = pack_extras(launch.kept, rows, self._extras_layouts[places]) if is_full else None
        mask = pack_masks(masks, places, self._columns) if masks else None
        packed = time.perf_counter()
        launch.drawn = self._run_sampler(places, launch.hidden, draws, extras, mask)
        self.stats.pack_seconds += packed - start
        self.stats.dispatch_seconds += time.perf_counter() - packed

    def _run_sampler(
        self, places: int, hidden: jax.Array, draws: np.ndarray, extras: np.ndarray | None, mask: np.ndarray | None
    ) -> Drawn:
        plain = self._unembedding, self._last_token, hidden, draws
        self._idle.begin()
        if extras is None:
            kind = kind_of_draws(draws, self._draws_layouts[places]) if len(self._kinds) > 1 else "plain"
            self._last_token, drawn = self.programs[kind, places](*plain)
        else:
            masks = self._no_masks[places] if mask is None else mask
            self._last_token, drawn = self.programs["full", places](*plain, self._history, extras, masks)
        result: Drawn = drawn
        self._idle.handed_over(drawn.tokens)
        self.stats.idle_seconds = self._idle.seconds
        return result

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._replicated)

    def _lower_all(self, mesh: Mesh) -> dict[ProgramName, jax.stages.Lowered]:
        """Every program, traced for the shapes it will see."""
        lowered = {("layers", bucket): self._lower_layers(bucket, mesh) for bucket in self.config.buckets}
        for places in self._places:
            lowered |= {(kind, places): self._lower_sampler(kind, places, mesh) for kind in self._kinds}
        for places in self._full_places:
            lowered["full", places] = self._lower_sampler("full", places, mesh)
        if self.config.max_steps > 1:
            most = bucket_for(self.config.buckets, min(self.config.num_rows, self.config.buckets[-1]))
            lowered |= {
                ("repeat", size): self._lower_repeat(size, mesh) for size in self.config.buckets if size <= most
            }
        return lowered

    def _lower_repeat(self, bucket: int, mesh: Mesh) -> jax.stages.Lowered:
        layout = self._layouts[bucket]
        program = jax.jit(
            make_repeat(self._structure, self._unembed, self._model, self.config, layout, mesh),
            donate_argnums=(2, 3, 4),
            out_shardings=(jax.tree.map(lambda pool: pool.sharding, self._pages), *(self._replicated,) * 4),
        )
        sizes = layout.size, draws_layout(bucket).size, limits_layout(bucket).size
        vectors = [self._abstract((size,)) for size in sizes]
        return program.lower(self._weights, self._unembedding, *self._carried, self._untold, *vectors)

    @property
    def _carried(self) -> tuple[KVPages, jax.Array, jax.Array]:
        """What lives on the device between iterations."""
        return self._pages, self._history, self._last_token

    def _lower_layers(self, bucket: int, mesh: Mesh) -> jax.stages.Lowered:
        layout = self._layouts[bucket]
        pages_sharding = jax.tree.map(lambda pool: pool.sharding, self._pages)
        program = jax.jit(
            make_forward(self._structure, self._model, self.config, layout, mesh),
            donate_argnums=(1, 2),
            out_shardings=(pages_sharding, self._replicated, self._replicated),
        )
        vector = self._abstract((layout.size,))
        return program.lower(self._weights, self._pages, self._history, self._last_token, vector)

    def _lower_sampler(self, name: Kind | Literal["full"], places: int, mesh: Mesh) -> jax.stages.Lowered:
        make = make_full_sampler if name == "full" else partial(make_plain_sampler, kind=name)
        sampler = make(self._unembed, places, self._model.vocab_size, mesh)
        program = jax.jit(sampler, donate_argnums=1, out_shardings=self._replicated)
        shape = self._places[-1], self._model.embed_dim
        hidden = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._replicated)
        draws = self._abstract((self._draws_layouts[places].size,))
        plain = self._unembedding, self._last_token, hidden, draws
        if name != "full":
            return program.lower(*plain)
        extras, mask = self._extras_layouts[places].size, (places, self._columns // WORD)
        return program.lower(*plain, self._history, self._abstract((extras,)), self._abstract(mask))

    def _abstract(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)

    def _warm_up(self) -> None:
        """Run an iteration without requests: what starts lazily starts now, and nothing is written."""
        bucket = self.config.buckets[0]
        vector = np.zeros(self._layouts[bucket].size, np.int32)
        self._layouts[bucket].views(vector)["token_row"][:] = self.config.num_rows
        launch = Launch.of_nothing(self._run_layers(bucket, vector))
        for places in self._places:
            draws = pack_draws(launch.kept, self._rows, self._draws_layouts[places])
            view = self._draws_layouts[places].views(draws)
            for kind in self._kinds:
                view["temperature"][:], view["top_p"][:] = kind != "greedy", kind == "unfiltered"
                jax.block_until_ready(self._run_sampler(places, launch.hidden, draws, None, None))
        for places in self._full_places:
            draws = pack_draws(launch.kept, self._rows, self._draws_layouts[places])
            extras = pack_extras(launch.kept, self._rows, self._extras_layouts[places])
            jax.block_until_ready(self._run_sampler(places, launch.hidden, draws, extras, None))

    def _count_compiles(self) -> None:
        late = self._counter.count - self.stats.compiles
        if late > self.stats.compiles_while_serving:
            self.stats.compiles_while_serving = late
            if self.config.strict_compile:
                raise CompileWhileServingError(
                    f"{late} programs were compiled after start; run with debug logging of jax to see which"
                )
