"""Measures whole iterations of a model: milliseconds, the share of bandwidth, and the device's wait for its host."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lab.device_check.loads import PAGE_SIZE
from lab.device_check.part import UTILIZATION, Found, Setting, Skip, Write, attempt, gib
from lab.device_check.profile import profile
from lab.device_check.rates import bytes_of_device, copy_rate
from orca_jax.exec.cache import free_memory, largest_stack, page_bytes, workspace_bytes
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.stage import StageModel
from orca_jax.helpers.bundled import is_preset, model_directory
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import abstract_decoder, load_decoder, random_decoder, tensor_mesh
from orca_jax.model.sharding import most_shards, on_shards
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, DType, ExecutorConfig, ModelConfig
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import Member, RowSampling, StepPlan

ROWS = (64, 256, 8, 1)
DRY_ROWS = (4, 1)
CONTEXT = 1024  # at most half of the model's
STEPS = 30  # measured iterations
WARM = 4  # before them
PROFILED = 5
SHARE_OF_ROOM = 0.9  # of the memory that is left, for pages
GREEDY = RowSampling(SamplingParams(temperature=0.0), seed=0)


@dataclass(frozen=True)
class Model:
    """A model and its devices: one GPU, or the largest number of chips of a TPU VM that divides the model."""

    setting: Setting
    name: str  # "preset:<name>", a directory or "demo"

    @property
    def source(self) -> str:
        """The directory, or the name of a preset."""
        return model_directory(self.name) or self.name

    @cached_property
    def config(self) -> ModelConfig:
        """The model's configuration; of a preset in a dry run, the same kind of model with two small layers."""
        config = read_model_config(self.source)
        if not self.setting.dry_run or not is_preset(self.name):
            return config
        small = replace(
            config,
            layers=config.layers[:2],
            embed_dim=64,
            mlp_dim=128,
            num_heads=2,
            num_kv_heads=2,
            head_dim=32,
        )
        return replace(
            small, vocab_size=512, max_positions=1024, eos_token_ids=(), bos_token_id=None
        )

    @cached_property
    def mesh(self) -> Mesh:
        """A tensor-parallel mesh of the devices."""
        devices = jax.local_devices()
        return tensor_mesh(
            devices[: most_shards(self.config, len(devices)) if self.setting.kind == "tpu" else 1]
        )

    @property
    def held(self) -> ModelConfig:
        """The configuration as the mesh holds it."""
        return on_shards(self.config, self.mesh.size)

    @property
    def dtype(self) -> DType:
        """The type of weights and KV cache."""
        return "float32" if self.setting.dry_run else "bfloat16"

    @property
    def page_size(self) -> int:
        """The tokens of a page."""
        return PAGE_SIZE

    def load(self) -> Decoder:
        """Load the weights; those of a preset are random.

        Raises:
            Skip: they do not fit into memory.
        """
        size = local_bytes(nnx.state(self.shapes)) + self.holes
        room = int(bytes_of_device() * UTILIZATION)
        if size > room:
            number = f"each of {self.mesh.size} devices" if self.mesh.size > 1 else "the device"
            raise Skip(f"loading takes {gib(size)} of {number}, and {gib(room)} are available")
        if is_preset(self.name):
            decoder = random_decoder(self.config, dtype=self.dtype, mesh=self.mesh)
        else:
            decoder = load_decoder(self.source, dtype=self.dtype, mesh=self.mesh)
        self.arrange(decoder)
        return decoder

    def arrange(self, decoder: Decoder) -> None:
        """Change the layers to the form of the engine (`arrange` in `assembly/executor.py`)."""
        if self.setting.kind == "gpu":
            decoder.unstack()

    @cached_property
    def shapes(self) -> Decoder:
        """The decoder with shapes, in the form of the engine."""
        decoder: Decoder = nnx.merge(*abstract_decoder(self.config, self.dtype, self.mesh))
        self.arrange(decoder)
        return decoder

    @cached_property
    def holes(self) -> int:
        """The most bytes on each device in holes that loading leaves."""
        return largest_stack(self.shapes)

    def pages_that_fit(self, num_tokens: int, rows: int, max_model_len: int) -> int:
        """The number of pages that fit beside loaded weights and the programs for `num_tokens`, as one array.

        They take nine tenths of the room, because the sizes of programs are estimates.
        """
        needed = self.holes + workspace_bytes(
            self.held, num_tokens, rows, max_model_len, self.mesh.size
        )
        memory = free_memory(list(self.mesh.devices.flat), UTILIZATION, needed)
        return max(0, int(SHARE_OF_ROOM * memory)) // page_bytes(
            self.held, self.page_size, self.dtype
        )

    def executor(
        self,
        decoder: Decoder,
        buckets: tuple[int, ...],
        rows: int,
        max_model_len: int,
        num_pages: int,
        on_phase: Callable[[str], None],
        attention: str | None = None,
    ) -> JaxExecutor:
        """An executor with the programs for these shapes and for greedy requests.

        Args:
            decoder: the loaded weights.
            buckets: as for `ExecutorConfig`, like the next three.
            rows: number of rows.
            max_model_len: tokens of a row.
            num_pages: pages of the KV cache.
            on_phase: called with the name of each phase of the start, at its end.
            attention: implementation; None for that of the setting.
        """
        cache = CacheConfig(
            one_group(self.held.layer_caches),
            (num_pages,),
            self.page_size,
            self.dtype,
            "token_major",
        )
        name = attention or self.setting.attention
        shapes = ExecutorConfig(
            self.dtype, self.mesh.size, buckets, rows, max_model_len, cache, name
        )

        def progress(done: int, total: int) -> None:
            if done == total:
                on_phase("compiled")

        executor = JaxExecutor(
            [StageModel(decoder, self.mesh)], self.held, shapes, progress, greedy_only=True
        )
        on_phase("warmed")
        return executor


def local_bytes(tree: object) -> int:
    """Bytes of a tree's arrays, or of their shapes, on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)


def bytes_read(decoder: Decoder) -> int:
    """Bytes of weights read by one device in an iteration: all except tables, of which it reads a few rows."""
    looked_up = [decoder.positions] + [decoder.embedding] * (decoder.head is not None)
    tables = [nnx.state(table) for table in looked_up if table is not None]
    return local_bytes(nnx.state(decoder)) - local_bytes(tables)


def step(what: str, setting: Setting, write: Write) -> None:
    """Measure iterations of the preset `what`: every row generates one token; two are in flight, as in the engine.

    One number of rows at a time: what is measured before the time is over stays.
    """
    model = Model(setting, f"preset:{what}")
    bandwidth = copy_rate(setting)
    start = time.perf_counter()
    try:
        decoder = model.load()
    except Skip as reason:
        write(model=what, skipped=str(reason))
        return
    size = bytes_read(decoder)
    about = {"devices": model.mesh.size, "weight_bytes": size, "copy_bytes_per_s": bandwidth}
    write(model=what, **about, load_s=time.perf_counter() - start, attention=setting.attention)
    for count in DRY_ROWS if setting.dry_run else ROWS:
        measure = partial(measure_rows, model, decoder, count, (size, bandwidth), write)
        attempt(write, measure, rows=count)


def measure_rows(
    model: Model,
    decoder: Decoder,
    rows: int,
    sizes: tuple[int, float],
    write: Write,
    attention: str | None = None,
    *,
    profiled: bool = True,
) -> Found:
    """Compile for a number of rows, and measure. Writes a row after each phase, and a profile.

    Args:
        model: the model.
        decoder: its loaded weights.
        rows: number of rows.
        sizes: bytes of weights read in an iteration, and bytes/s of a copy.
        write: for the rows of phases and of the profile.
        attention: implementation; None for that of the setting.
        profiled: also run some iterations under the profiler. The measurement is then written, not returned.

    Raises:
        Skip: not even one page of each row fits.
    """
    wanted = 64 if model.setting.dry_run else min(CONTEXT, model.config.max_positions // 2)
    max_model_len = wanted + 2 * STEPS
    # The engine takes all the memory that it can use, and a large cache may change its programs.
    num_pages = min(
        model.pages_that_fit(rows, rows, max_model_len), 64 if model.setting.dry_run else 1 << 20
    )
    context = min(wanted, num_pages // rows * model.page_size - 2 * STEPS)
    if context <= 0:
        needed = rows * page_bytes(model.held, model.page_size, model.dtype)
        raise Skip(f"a page of each row takes {gib(needed)}; there are {num_pages} pages")
    start = time.perf_counter()

    def on_phase(phase: str) -> None:
        write(rows=rows, phase=phase, at_s=time.perf_counter() - start)

    executor = model.executor(decoder, (rows,), rows, max_model_len, num_pages, on_phase, attention)
    try:
        run = Run(model, rows, context, *sizes)
        found = {"context": context, "pages": num_pages, **run.measure(executor)}
        if not profiled:
            return found
        write(rows=rows, **found)  # a profile may fail, or take too long
        profile(
            partial(run.measure, executor, steps=PROFILED),
            PROFILED + WARM,
            partial(write, rows=rows),
        )
        return {"phase": "profiled", "at_s": time.perf_counter() - start}
    finally:
        executor.close()


@dataclass(frozen=True)
class Run:
    """A number of rows at one context, a shorter one if memory is short.

    Rows begin with a context that was never computed: reading their pages takes as long as reading any.
    """

    model: Model
    rows: int
    context: int
    weight_bytes: int  # on one device, as all bytes here
    bandwidth: float

    @property
    def pages(self) -> int:
        """The pages of each row."""
        return -(-(self.context + 2 * STEPS) // self.model.page_size)

    @property
    def bytes_read(self) -> float:
        """Bytes read by one device in the middle iteration: weights, and the KV cache of its heads."""
        token = page_bytes(self.model.held, 1, self.model.dtype) / self.model.mesh.size
        return self.weight_bytes + self.rows * (self.context + STEPS // 2) * token

    def measure(self, executor: JaxExecutor, steps: int = STEPS) -> Found:
        """Measure the milliseconds of one iteration, its share of the bandwidth, and the device's wait for its host."""
        waiting = [executor.submit(StepPlan(0, self._first()))]

        def advance(index: int) -> None:
            waiting.append(executor.submit(StepPlan(index, self._next(index))))
            executor.collect(waiting.pop(0))

        for index in range(1, WARM):
            advance(index)
        idle = executor.stats.idle_seconds
        start = time.perf_counter()
        for index in range(WARM, WARM + steps):
            advance(index)
        seconds = (time.perf_counter() - start) / steps
        gap = (executor.stats.idle_seconds - idle) / steps
        executor.collect(waiting.pop())
        executor.rest()
        mbu = self.bytes_read / seconds / self.bandwidth
        return {
            "ms": seconds * 1e3, "tokens_per_s": self.rows / seconds, "mbu": mbu, "host_gap_ms_at_most": gap * 1e3
        }  # fmt: skip

    def _first(self) -> tuple[Member, ...]:
        each = self.pages
        return tuple(
            Member(
                f"r{r}", r, self.context, (1,), True, new_blocks=(range(r * each, (r + 1) * each),), sampling=GREEDY
            )
            for r in range(self.rows)
        )  # fmt: skip

    def _next(self, index: int) -> tuple[Member, ...]:
        return tuple(
            Member(
                f"r{r}",
                r,
                self.context + index,
                (),
                True,
                last_on_device=True,
                num_old_blocks=self.pages,
            )
            for r in range(self.rows)
        )
