"""The executor: runs plans on a mesh of devices, each launch by programs compiled at start.

The host picks the sampler of each launch by the number of kept tokens and by the features used by their rows. If
branches make the devices wait for the host (on GPUs), the kind of draws decides too. All arrays staying on the device
between iterations are donated from program to program.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from orca_jax.exec.ahead import CompiledAhead
from orca_jax.exec.buckets import Segment, bucket_for, launches, measured_sizes
from orca_jax.exec.compile import CompileCounter, compile_cache
from orca_jax.exec.expected import LaunchTimes, context_factor
from orca_jax.exec.host import trim_heap
from orca_jax.exec.host_memory import give_back
from orca_jax.exec.pack import Packer
from orca_jax.exec.probe import probe
from orca_jax.exec.programs import ProgramName, Programs, compile_stages
from orca_jax.exec.results import IdleWatch, Launch, Pending, read_results
from orca_jax.exec.rows import RowTable, VectorSums
from orca_jax.exec.sampling.programs import (
    Drawn,
    DrawsPacker,
    kind_of_draws,
    pack_draws,
    pack_extras,
    pack_masks,
)
from orca_jax.exec.stage import Stage, StageModel, make_path
from orca_jax.helpers.console import Progress
from orca_jax.model.lora.stacks import zero_values
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import ExecutorConfig, ModelConfig
from orca_jax.values.errors import CompileWhileServingError
from orca_jax.values.request import TokenSet
from orca_jax.values.startup import StartTimes
from orca_jax.values.step import BlockCopy, ExecutorStats, Handle, StepPlan, StepResult


@dataclass(slots=True)
class JaxHandle:
    """An iteration in flight."""

    plan: StepPlan
    launches: list[Launch]
    is_complete: bool  # False until `constrain` has started the samplers waiting for it
    expected: float = 0.0  # seconds, from measurements at start
    ready_at: float | None = None  # the end of `JaxExecutor.wait`, if it was called

    @property
    def newest(self) -> Pending:
        """The array computed last. When it is ready, the iteration is done."""
        return self.launches[-1].newest


class JaxExecutor:
    """Runs one model on one mesh, or on a mesh for each stage of a pipeline.

    Stages run the launches in the order of submission, each its own launch at a time (the paper's Figure 8a). If they
    belong to several processes, every process submits the same plans, and only those of the last stage have results.

    Args:
        stages: the stages of the model, in their order, those of other processes included.
        model: all stages of it.
        config: shapes, for the finite set of programs.
        progress: called before each program is traced and after each compilation, with the number compiled so far and
            the total.
        greedy_only: compile the greedy sampler of the largest width alone. For measurements: a start takes less time.
        ahead: the programs for the same model, configuration and mesh, if their compilation began before.
        times: takes the phases of the start and the number of programs.
        before_run: called before the first program is run, when all are compiled.
        is_enough: true if no bucket larger than this one, whose layers take these seconds, has to be measured.

    Attributes:
        launch_seconds: measured time of a launch of each measured size and its sampler. Larger ones may be missing.
        stages: those of this process.
        has_results: True if this process has devices of the last stage.
        adapters: the weights of adapters by key, as plans name them; the owner of the executor adds and removes them.
    """

    def __init__(
        self,
        stages: Sequence[StageModel],
        model: ModelConfig,
        config: ExecutorConfig,
        progress: Progress = lambda done, total: None,
        *,
        greedy_only: bool = False,
        ahead: CompiledAhead | None = None,
        times: StartTimes | None = None,
        before_run: Callable[[], None] = lambda: None,
        is_enough: Callable[[int, float], bool] = lambda size, seconds: False,
    ) -> None:
        times = times or StartTimes()
        self.config = config
        self.stats = ExecutorStats()
        self._model = model
        own = [(decoder, mesh) for decoder, mesh in stages if decoder is not None]
        if ahead is None:
            shapes = [
                Programs(decoder, config, mesh, greedy_only=greedy_only) for decoder, mesh in own
            ]
        else:
            shapes = list(ahead.stages)
        self._shapes = shapes[-1]
        self.adapters: dict[str, Mapping[str, NDArray[Any]]] = {}
        pages_per_row = ceil_div(config.max_model_len, config.cache.page_size)
        self._rows = RowTable(config.num_rows, pages_per_row, len(config.cache.groups))
        self._packer = Packer(self._rows)
        self._draws_packer = DrawsPacker(
            self._rows, for_scored=config.logprobs_mode.startswith("processed")
        )
        self._sums = VectorSums()
        self._idle = IdleWatch()
        self._seconds_in_flight = 0.0  # expected for everything submitted and not collected
        self._num_in_flight = 0
        self._counter = CompileCounter()
        programs = _compiled(shapes, config, ahead, progress, times)
        decoders = (decoder for decoder, _ in own)
        self.stages = [Stage(*each) for each in zip(decoders, shapes, programs, strict=True)]
        self._last = self.stages[-1]
        self.has_results = stages[-1].decoder is not None
        self._path = make_path(stages, self.stages, model.stream_dim, config.buckets)
        before_run()
        with times.phase("warm_up"):
            measured = self._warm_up(is_enough, times)
        self.launch_seconds = measured.usual()
        self._buckets = tuple(bucket for bucket in config.buckets if self._last.has_layers(bucket))
        self._longest_seconds = measured.longest(
            self._buckets, context_factor(model, config.max_model_len)
        )
        self._idle.rest()
        if self._shapes.platform.is_host:
            give_back(jax.tree.leaves([stage.state.caches for stage in self.stages]))
        self.stats.compiles = sum(len(each) for each in programs)
        self._num_before = self._counter.count  # before the first plan

    @property
    def expected_seconds(self) -> float:
        """Time that everything submitted and not collected should take, from measurements at start."""
        return self._seconds_in_flight

    def submit(self, plan: StepPlan) -> JaxHandle:
        """Pack and launch an iteration, without waiting for the device."""
        before = self._seconds_in_flight
        handle = self._submit(plan)
        handle.expected = self._seconds_in_flight - before
        return handle

    def _submit(self, plan: StepPlan) -> JaxHandle:
        self._idle.look()
        for write in plan.writes:
            self._write_adapter(write.slot, self.adapters[write.adapter])
        if plan.copies:
            for stage in self.stages:
                stage.copy_blocks(plan.copies)
        self._rows.update(plan.members)
        self.stats.iterations += 1
        self._num_in_flight += 1
        handle = JaxHandle(plan, [], is_complete=not plan.is_constrained)
        for segments in launches(plan.members, self._buckets[-1], self._shapes.most_scored):
            launch = self._launch(plan, segments)
            handle.launches.append(launch)
            if handle.is_complete or not launch.is_constrained(plan):
                self._draw(launch, ())
        return handle

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Start the samplers waiting for the allowed ids of the constrained members."""
        assert isinstance(handle, JaxHandle), "a handle of another executor"
        assert not handle.is_complete, (
            "the plan is not constrained, or has been constrained already"
        )
        members = handle.plan.members
        constrained = [index for index, member in enumerate(members) if member.is_constrained]
        sets = dict(zip(constrained, allowed, strict=True))
        assert all(sets.values()), "a set of allowed ids is empty"
        for launch in handle.launches:
            if launch.is_constrained(handle.plan):
                self._draw(launch, launch.masks(sets))
        handle.is_complete = True

    def is_ready(self, handle: Handle) -> bool:
        """True if the device has computed an iteration."""
        assert isinstance(handle, JaxHandle), "a handle of another executor"
        return handle.newest.is_ready()

    def wait(self, handle: Handle) -> None:
        """Wait for the device, in any thread, without reading the result."""
        assert isinstance(handle, JaxHandle), "a handle of another executor"
        handle.newest.block_until_ready()
        handle.ready_at = time.perf_counter()

    def collect(self, handle: Handle) -> StepResult:
        """Wait for an iteration. Without `has_results`, the result has no members.

        Raises:
            CompileWhileServingError: a program was compiled since start, and `strict_compile` is set.
        """
        assert isinstance(handle, JaxHandle), "a handle of another executor"
        assert handle.is_complete, "a constrained plan without a call of `constrain`"
        start = time.perf_counter()
        self._idle.wait(handle.newest, handle.ready_at)
        result = self._read(handle)
        self._num_in_flight -= 1
        self._seconds_in_flight -= handle.expected
        if not self._num_in_flight:
            self._seconds_in_flight = 0.0
        self.stats.wait_seconds += time.perf_counter() - start
        self._count_compiles()
        return result

    def rest(self) -> None:
        """Stop counting idle time until the next plan."""
        self._idle.rest()

    def free_devices(self, *, keeps_weights: bool) -> None:
        """Free weights and pages on the devices. No plan may be in flight or submitted until both are back.

        Args:
            keeps_weights: copy them to the memory of the host for `restore_weights`.
        """
        assert not self._num_in_flight, "plans are in flight"
        for stage in self.stages:
            stage.free_pages()
            stage.free_weights(keeps=keeps_weights)
        trim_heap()

    def restore_weights(self) -> None:
        """Put the weights of the host back. No other ones may be in their place."""
        for stage in self.stages:
            stage.restore_weights()

    def allocate_pages(self) -> None:
        """Allocate empty pages, as at start. Their programs do not count as compiled while serving."""
        before = self._counter.count
        for stage in self.stages:
            stage.allocate_pages()
        jax.block_until_ready([stage.state for stage in self.stages])
        self._num_before += self._counter.count - before

    def close(self) -> None:
        """Free the cache and stop counting compiles."""
        self._counter.close()
        for stage in self.stages:
            stage.close()

    def _launch(self, plan: StepPlan, segments: Sequence[Segment]) -> Launch:
        """Start the layers of one launch."""
        start = time.perf_counter()
        num_tokens = sum([segment.size for segment in segments])
        bucket = bucket_for(self._buckets, num_tokens)
        is_adapted = self.config.lora is not None and self._rows.has_adapters(
            [plan.members[segment.member].row for segment in segments]
        )
        layouts = self._shapes.adapted_layouts if is_adapted else self._shapes.layouts
        vector, kept = self._packer.pack(plan.members, segments, layouts[bucket])
        packed = time.perf_counter()
        # before the dispatch, which may wait for the device
        self._seconds_in_flight += self._longest_seconds[bucket]
        hidden = self._run_layers(bucket, vector, is_adapted)
        self.stats.pack_seconds += packed - start
        self.stats.dispatch_seconds += time.perf_counter() - packed
        self.stats.launches += 1
        self.stats.tokens += num_tokens
        self.stats.padding_tokens += bucket - num_tokens
        return Launch.of_plan(plan, kept, hidden, self._rows)

    def _read(self, handle: JaxHandle) -> StepResult:
        """Wait for results."""
        plan = handle.plan
        if not self.has_results:
            return StepResult(plan.iteration, ())
        return read_results(plan, handle.launches, self._model.vocab_size, self._sums)

    def _write_adapter(self, slot: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Start to copy an adapter to the devices, after the launches submitted so far."""
        for stage in self.stages:
            stage.write_adapter(slot, values)

    def _run_layers(
        self, bucket: int, vector: NDArray[np.int32], is_adapted: bool = False
    ) -> jax.Array:
        self._idle.begin()
        hidden: jax.Array | None = None
        for hop, stage in self._path:
            if hop is not None:
                hidden = hop(bucket, hidden)
            if stage is not None:
                newest = hidden = stage.run_layers(bucket, vector, hidden, is_adapted=is_adapted)
        self._idle.handed_over(cast(Pending, newest))
        self.stats.idle_seconds = self._idle.seconds
        return newest

    def _draw(self, launch: Launch, masks: Sequence[TokenSet | None]) -> None:
        """Start the smallest and simplest sampler sufficient for a launch, or none if no token is kept."""
        if not launch.kept.members or not self.has_results:
            return
        start = time.perf_counter()
        number = len(launch.kept.members)
        rows = self._rows
        shapes = self._shapes
        is_full = (
            bool(masks)
            or launch.kept.has_targets
            or any([rows.has_extras[row] for row in launch.kept.row.tolist()])
        )
        width = bucket_for(shapes.full_widths if is_full else shapes.widths, number)
        draws = self._draws_packer.pack(launch.kept, shapes.draws_layouts[width])
        extras = mask = None
        if is_full:
            extras = pack_extras(launch.kept, launch.num_top, rows, shapes.extras_layouts[width])
        if masks:
            mask = pack_masks(masks, width, shapes.num_columns)
        packed = time.perf_counter()
        launch.drawn = self._run_sampler(width, launch.hidden, draws, extras, mask)
        self.stats.pack_seconds += packed - start
        self.stats.dispatch_seconds += time.perf_counter() - packed

    def _run_sampler(
        self,
        width: int,
        hidden: jax.Array,
        draws: NDArray[np.int32],
        extras: NDArray[np.int32] | None,
        mask: NDArray[np.int32] | None,
    ) -> Drawn:
        shapes = self._shapes
        self._idle.begin()
        if extras is None:
            kind = shapes.kinds[0]
            if len(shapes.kinds) > 1:
                kind = kind_of_draws(draws, shapes.draws_layouts[width])
            drawn = self._last.draw(kind, width, hidden, draws)
        else:
            drawn = self._last.draw_full(width, hidden, draws, extras, mask)
        self._idle.handed_over(cast(Pending, drawn.tokens))
        self.stats.idle_seconds = self._idle.seconds
        return drawn

    def _warm_up(self, is_enough: Callable[[int, float], bool], start: StartTimes) -> LaunchTimes:
        """Run programs without requests, to get lazy start-up work done and to measure them.

        On a CPU, times of an earlier start replace the runs of all sizes but the smallest, and the programs of the
        largest sizes are compiled only if a smaller one is not enough.
        """
        shapes = self._shapes
        times = LaunchTimes()
        sizes = measured_sizes(self.config.buckets, skips_padding=shapes.skips_padding)
        launch = self._measure_layers(times, sizes[0], start)
        known = self._known_now(times, is_enough, sizes[-1])
        ran = [sizes[0]]
        if known is None:
            for size in sizes[1:]:
                if shapes.may_skip_runs and is_enough(ran[-1], times.of_layers(ran[-1])):
                    break
                launch = self._measure_layers(times, size, start)
                ran.append(size)
        self._run_others(ran)
        if self.has_results:
            self._measure_samplers(times, launch, is_known=known is not None)
        if known is not None:
            return known
        shapes.keep_times(times)
        return times

    def _measure_layers(self, times: LaunchTimes, size: int, start: StartTimes) -> Launch:
        """Measure the layers on `size` tokens, and compile them if they are not."""
        config = self.config
        bucket = bucket_for(config.buckets, size)
        if not self._last.has_layers(bucket):
            for stage in self.stages:
                stage.compile_later(start)
        vector = probe(self._shapes.layouts[bucket], config, size)
        run = partial(self._run_layers, bucket, vector)
        # The first run of more rows takes memory for their pages.
        repeats = 2 if size <= config.num_rows else 1
        return Launch.of_nothing(times.measure_layers(size, run, repeats))

    def _known_now(
        self, times: LaunchTimes, is_enough: Callable[[int, float], bool], largest: int
    ) -> LaunchTimes | None:
        """The times of an earlier start, as they are now by those of the smallest size.

        None if a size that it did not measure may be quick: its target was shorter, or it was beside other programs.
        """
        earlier = self._shapes.known_times
        if earlier is None:
            return None
        known = earlier.as_now(times)
        most = earlier.largest
        if most == largest or is_enough(most, known.of_layers(most)):
            return known
        return None

    def _run_others(self, sizes: Sequence[int]) -> None:
        """Run the programs of adapters, those with layers in the buckets of some sizes, and those of blocks."""
        config = self.config
        layouts = self._shapes.adapted_layouts
        for bucket in sorted({bucket_for(config.buckets, size) for size in sizes} & {*layouts}):
            self._run_layers(bucket, probe(layouts[bucket], config), True)
        if config.copies_blocks:
            copies = [BlockCopy(group, 0, 0) for group in range(len(config.cache.groups))]
            for stage in self.stages:
                stage.copy_blocks(copies)
        if config.moves_blocks:
            for stage in self.stages:
                for pool in range(stage.shapes.num_pools):
                    stage.write_block(pool, 0, stage.read_block(pool, 0))
        if config.lora is not None:
            self._write_adapter(0, zero_values(self._model, config.lora, config.dtype))

    def _measure_samplers(self, times: LaunchTimes, launch: Launch, *, is_known: bool) -> None:
        """Run the samplers of all widths, with all places in use. If the times are known, run the smallest with one."""
        shapes = self._shapes
        most = 1 if is_known else None  # widths, and places in use
        for width in shapes.widths[:most]:
            draws = pack_draws(launch.kept, self._rows, shapes.draws_layouts[width])
            view = shapes.draws_layouts[width].views(draws)
            view["position"][:most] = 1
            for kind in shapes.kinds:
                view["temperature"][:] = kind != "greedy"
                view["top_p"][:] = kind == "unfiltered"
                run_plain = partial(self._run_sampler, width, launch.hidden, draws, None, None)
                times.measure_sampler(run_plain, is_plain=True)
        for width in shapes.full_widths[:most]:
            draws = pack_draws(launch.kept, self._rows, shapes.draws_layouts[width])
            shapes.draws_layouts[width].views(draws)["position"][:most] = 1
            layout = shapes.extras_layouts[width]
            extras = pack_extras(launch.kept, launch.num_top, self._rows, layout)
            run_full = partial(self._run_sampler, width, launch.hidden, draws, extras, None)
            times.measure_sampler(run_full, is_plain=False)

    def _count_compiles(self) -> None:
        late = self._counter.count - self._num_before
        if late > self.stats.compiles_while_serving:
            self.stats.compiles_while_serving = late
            if self.config.strict_compile:
                raise CompileWhileServingError(
                    f"{late} programs were compiled after start; run with debug logging of jax to see which"
                )


def _compiled(
    shapes: Sequence[Programs],
    config: ExecutorConfig,
    ahead: CompiledAhead | None,
    progress: Progress,
    times: StartTimes,
) -> list[dict[ProgramName, jax.stages.Compiled]]:
    """The programs of each stage, also after a compilation that began before."""
    if ahead is not None:
        return ahead.result(progress)
    with compile_cache(config.compile_cache):
        return compile_stages(shapes, progress, times)
