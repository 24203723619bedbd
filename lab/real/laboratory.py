"""One engine in this process that runs under each system of an evaluation in turn."""

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from lab.paper.runs import Lengths, RunResult, serve
from lab.paper.systems import System
from lab.real.quiet import Quiet
from orca_jax.assembly.support import adapted
from orca_jax.engine import Engine
from orca_jax.timeline.writer import TimelineHeader
from orca_jax.tools.bench.feed import Drive, sleep_until
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import EngineConfig, ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.step import Executor, Handle

SCHEDULERS = {"orca": "orca", "ft": "request_level", "chunked": "chunked"}
"""The scheduler of each kind of system."""


def settings_of(system: System, config: EngineConfig) -> EngineConfig:
    """The settings of a system. Microbatches are iterations in flight.

    Raises:
        ConfigError: only a simulation has this system, or a setting of `config` is wrong with it.
    """
    if system.kind not in SCHEDULERS:
        message = f"{system.name} exists in simulations alone; give one of {', '.join(SCHEDULERS)}"
        raise ConfigError(message, param="systems")
    changes: dict[str, Any] = {"scheduler": SCHEDULERS[system.kind], "max_num_seqs": system.max_bs}
    if system.kind == "ft":
        changes["n_workers"] = ceil_div(system.max_bs, system.mbs)
    return adapted(replace(config, **changes), changes)


class RealWaits:
    """Waits of a real executor, each until its end or a time of `time.monotonic`, as the server's loop does."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="result")
        self._awaited: Handle | None = None
        self._result: Future[None] | None = None

    def __call__(self, handle: Handle, when: float) -> bool:
        """Wait for an iteration or a time; True if the iteration has ended."""
        if self._executor.is_ready(handle):
            return True
        if self._awaited is not handle or self._result is None:
            self._awaited, self._result = handle, self._thread.submit(self._executor.wait, handle)
        wait([self._result], None if when == math.inf else max(0.0, when - time.monotonic()))
        if not self._result.done():
            return False
        self._result.result()  # raises the executor's error
        return True

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


@dataclass(frozen=True)
class Laboratory:
    """An engine with the settings that all systems share.

    Args:
        engine: used by one run at a time.
        config: the shared settings.
        model: the shape of its model.
        max_model_len: of one request.
        scale: of the paper's lengths.
        reschedule: gives the engine the scheduler of other settings, and an empty pool.
        header: of timelines; None: no timelines.
        dtype: of the model's weights and products.
        quiet: watches the machine.
    """

    engine: Engine
    config: EngineConfig
    model: ModelConfig
    max_model_len: int
    scale: float
    reschedule: Callable[[EngineConfig], None]
    header: TimelineHeader | None = None
    dtype: str = "none"
    quiet: Quiet = field(default_factory=Quiet)

    @property
    def vocab_size(self) -> int:
        """Ids of prompts are below it."""
        return self.model.vocab_size

    def serve_requests(
        self,
        system: System,
        requests: Sequence[Lengths],
        arrivals: Sequence[float],
        *,
        seed: int = 0,
        has_gaps: bool = True,
    ) -> RunResult:
        """Serve requests with random prompts; times of the result count from the beginning of the arrivals."""
        self.reschedule(settings_of(system, self.config))
        prompts = prompts_of(requests, self.vocab_size, seed)
        gc.collect()
        waits = RealWaits(self.engine.executor)
        start = time.monotonic()
        drive = Drive(
            self.engine,
            lambda: time.monotonic() - start,
            lambda when: sleep_until(start + when),
            lambda handle, when: waits(handle, start + when),
        )
        try:
            return serve(drive, requests, prompts, arrivals, has_gaps=has_gaps)
        finally:
            waits.close()

    def warm_up(self, systems: Sequence[System]) -> None:
        """Run a few requests under each system, so that first-use costs are paid."""
        for system in systems:
            requests = [Lengths(16 + 8 * n, 2, 2) for n in range(min(system.max_bs, 4))]
            self.serve_requests(system, requests, [0.0] * len(requests))
        gc.collect()
        gc.freeze()


def prompts_of(requests: Sequence[Lengths], vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids of the prompts."""
    dice = random.Random(f"prompts-{seed}")
    vocabulary = range(vocab_size)
    return [dice.choices(vocabulary, k=request.num_prompt) for request in requests]
