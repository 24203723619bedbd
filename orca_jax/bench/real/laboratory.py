"""One engine in this process that runs under each system of an evaluation in turn."""

import dataclasses
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from orca_jax.bench.feed import RealWaits, sleep_until
from orca_jax.bench.measure import reschedule
from orca_jax.bench.paper.runs import Drive, Lengths, RunResult, serve
from orca_jax.bench.paper.systems import System
from orca_jax.build.engine import build_engine
from orca_jax.build.scheduler import num_rows
from orca_jax.build.settings import adapted
from orca_jax.config import EngineConfig, ModelConfig
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.reporting import hardware
from orca_jax.sim.gpt import LONGEST
from orca_jax.timeline.read import Timeline, parse_timeline
from orca_jax.timeline.writer import TimelineHeader, TimelineWriter

SCHEDULERS = {"orca": "orca", "ft": "request_level", "chunked": "chunked"}
"""The scheduler of each kind of system."""
_TREE = Path(__file__).parents[3]


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
        changes["n_workers"] = -(-system.max_bs // system.mbs)
    return adapted(replace(config, **changes), changes)


@dataclass(frozen=True)
class Laboratory:
    """An engine with the settings that all systems share.

    Args:
        engine: used by one run at a time.
        config: the shared settings.
        model: the shape of its model.
        max_model_len: of one request; the paper's lengths are scaled by it.
        reschedule: gives the engine the scheduler of other settings, and an empty pool.
        header: of timelines; None: no timelines.
        dtype: of the model's weights and products.
    """

    engine: Engine
    config: EngineConfig
    model: ModelConfig
    max_model_len: int
    reschedule: Callable[[EngineConfig], None]
    header: TimelineHeader | None = None
    dtype: str = "none"

    @property
    def vocab_size(self) -> int:
        """Ids of prompts are below it."""
        return self.model.vocab_size

    @property
    def scale(self) -> float:
        """The context of the model as a multiple of that of the paper's models."""
        return self.max_model_len / LONGEST

    def run(
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

    @contextmanager
    def recording(self, timelines: list[Timeline]) -> Iterator[None]:
        """Add the timeline of the runs in the block, all of one system, to a list."""
        assert self.header is not None, "a laboratory without timelines"
        parts: list[bytes] = []
        writer = TimelineWriter(self.header, msgspec.json.Encoder().encode_lines, parts.append)
        before, self.engine.observer = self.engine.observer, writer
        try:
            yield
        finally:
            self.engine.observer = before
        writer.flush()
        timelines.append(parse_timeline(b"".join(parts)))

    def warm_up(self, systems: Sequence[System]) -> None:
        """Run a few requests under each system, so that first-use costs are paid."""
        for system in systems:
            requests = [Lengths(16 + 8 * n, 2, 2) for n in range(min(system.max_bs, 4))]
            self.run(system, requests, [0.0] * len(requests))
        gc.collect()
        gc.freeze()


@contextmanager
def open_laboratory(config: EngineConfig, systems: Sequence[System]) -> Iterator[Laboratory]:
    """Build an engine with rows for the largest system. A context manager, which closes the engine at its end.

    Raises:
        ConfigError: a setting is wrong.
    """
    each = [settings_of(system, config) for system in systems]
    rows = max(num_rows(one) for one in each)
    shared = adapted(replace(config, scheduler="orca", max_num_seqs=rows, n_workers=None))
    with build_engine(shared) as built:
        laboratory = Laboratory(
            built.engine,
            config,
            built.model_config,
            built.max_model_len,
            lambda settings: reschedule(built, settings),
            built.timeline_header,
            built.executor_config.dtype if built.executor_config else "none",
        )
        laboratory.warm_up(systems)
        yield laboratory


def prompts_of(requests: Sequence[Lengths], vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids of the prompts."""
    dice = random.Random(f"prompts-{seed}")
    vocabulary = range(vocab_size)
    return [dice.choices(vocabulary, k=request.num_prompt) for request in requests]


def surroundings(config: EngineConfig) -> dict[str, Any]:
    """The machine, its load, the commit, the command and the settings of a measurement."""
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m orca_jax.bench " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "load_average": list(os.getloadavg()),
        "hardware": hardware(),
        "config": dataclasses.asdict(config),
    }


def _commit() -> str | None:
    """The commit of the source tree, with "+" after it if files have changed; None outside of a tree."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],
            cwd=_TREE, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
