"""The executor: runs plans on a mesh of devices, each launch by a program that was compiled at start."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.config import ExecutorConfig, ModelConfig
from orca_jax.errors import CompileWhileServingError
from orca_jax.exec.buckets import bucket_for, launches
from orca_jax.exec.cache import allocate_cache
from orca_jax.exec.compile import CompileCounter, compile_cache
from orca_jax.exec.iteration import decoder_structure, make_iteration
from orca_jax.exec.pack import Layout, RowTable, pack
from orca_jax.model.transformer import Decoder
from orca_jax.step import ExecutorStats, Handle, StepPlan, StepResult

Progress = Callable[[int, int], None]

_COMPILE_THREADS = 4


class Launch(NamedTuple):
    """Results of one program, still on the device."""

    tokens: jax.Array  # [B]
    finite: jax.Array  # [B]
    members: list[int]  # for each place in use, the member of the plan


class JaxHandle(NamedTuple):
    """An iteration in flight."""

    plan: StepPlan
    launches: list[Launch]


class JaxExecutor:
    """Runs one model on one mesh.

    Args:
        decoder: parameters on the devices of `mesh`.
        model: of the decoder.
        config: shapes; `config.buckets` is the finite set of programs.
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
        self._replicated = NamedSharding(mesh, PartitionSpec())
        pages_per_row = -(-config.max_model_len // config.cache.page_size)
        self._rows = RowTable(config.num_rows, pages_per_row)
        self._layouts = {size: Layout(size, config.num_rows, pages_per_row) for size in config.buckets}
        self._structure, self._weights = decoder_structure(decoder)
        self._pages = allocate_cache(model, config.cache, mesh)
        self._last_token = jax.device_put(np.zeros(config.num_rows, np.int32), self._replicated)
        self._counter = CompileCounter()
        self.programs: dict[int, jax.stages.Compiled] = {}
        with compile_cache(config.compile_cache):
            lowered = {size: self._lower(size, model, mesh) for size in config.buckets}
            with ThreadPoolExecutor(_COMPILE_THREADS) as threads:  # XLA compiles outside Python's lock
                compiled = threads.map(lambda size: (size, lowered[size].compile()), config.buckets)
                for number, (size, program) in enumerate(compiled, start=1):
                    self.programs[size] = program
                    progress(number, len(config.buckets))
        self._warm_up()
        self.stats.compiles = self._counter.count

    def submit(self, plan: StepPlan) -> JaxHandle:
        """Pack and launch an iteration; returns before the device is done."""
        start = time.perf_counter()
        self._rows.update(plan.members)
        started = []
        for segments in launches(plan.members, self.config.buckets[-1]):
            num_tokens = sum([segment.size for segment in segments])
            bucket = bucket_for(self.config.buckets, num_tokens)
            layout = self._layouts[bucket]
            vector, members = pack(plan.members, segments, self._rows, layout)
            packed = time.perf_counter()
            started.append(Launch(*self._launch(bucket, vector), members))
            self.stats.pack_seconds += packed - start
            start = time.perf_counter()
            self.stats.dispatch_seconds += start - packed
            self.stats.launches += 1
            self.stats.tokens += num_tokens
            self.stats.padding_tokens += bucket - num_tokens
        self.stats.iterations += 1
        return JaxHandle(plan, started)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for an iteration.

        Raises:
            CompileWhileServingError: something was compiled since start, and `strict_compile` is set.
        """
        assert isinstance(handle, JaxHandle), "a handle of another executor"
        start = time.perf_counter()
        members = [index for launch in handle.launches for index in launch.members]
        tokens = np.concatenate([np.asarray(launch.tokens)[: len(launch.members)] for launch in handle.launches])
        finite = np.concatenate([np.asarray(launch.finite)[: len(launch.members)] for launch in handle.launches])
        self.stats.wait_seconds += time.perf_counter() - start
        self._count_compiles()
        order = np.argsort(members)
        return StepResult(handle.plan.iteration, tokens[order].tolist(), finite[order].tolist())

    def close(self) -> None:
        """Free the cache and stop counting compiles."""
        self._counter.close()
        for array in (*self._pages, self._last_token):
            array.delete()
        self.programs = {}

    def _launch(self, bucket: int, vector: np.ndarray) -> tuple[jax.Array, jax.Array]:
        device_vector = jax.device_put(vector, self._replicated)
        self._pages, self._last_token, tokens, finite = self.programs[bucket](
            self._weights, self._pages, self._last_token, device_vector
        )
        return tokens, finite

    def _lower(self, bucket: int, model: ModelConfig, mesh: Mesh) -> jax.stages.Lowered:
        layout = self._layouts[bucket]
        iteration = make_iteration(self._structure, model, self.config, layout, mesh)
        pages_sharding = jax.tree.map(lambda pool: pool.sharding, self._pages)
        program = jax.jit(
            iteration,
            donate_argnums=(1, 2),
            out_shardings=(pages_sharding, self._replicated, self._replicated, self._replicated),
        )
        vector = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=self._replicated)
        return program.lower(self._weights, self._pages, self._last_token, vector)

    def _warm_up(self) -> None:
        """Run an iteration without requests: what starts lazily starts now, and nothing is written."""
        bucket = self.config.buckets[0]
        vector = np.zeros(self._layouts[bucket].size, np.int32)
        view = self._layouts[bucket].views(vector)
        view["sample_row"][:] = self.config.num_rows
        jax.block_until_ready(self._launch(bucket, vector))

    def _count_compiles(self) -> None:
        late = self._counter.count - self.stats.compiles
        if late > self.stats.compiles_while_serving:
            self.stats.compiles_while_serving = late
            if self.config.strict_compile:
                raise CompileWhileServingError(
                    f"{late} programs were compiled after start; run with debug logging of jax to see which"
                )
