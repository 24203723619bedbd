"""Builds the engine of a laboratory, records its timelines, and describes the machine around it."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.paper.gpt import LONGEST
from lab.paper.systems import System
from lab.real.laboratory import Laboratory, settings_of
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.support import adapted
from orca_jax.helpers.reporting import hardware
from orca_jax.timeline.measure import Timeline, timeline_of
from orca_jax.timeline.writer import TimelineLine, TimelineWriter
from orca_jax.tools.bench.measure import reschedule
from orca_jax.values.config import EngineConfig

_TREE = Path(__file__).parents[2]


@contextmanager
def open_laboratory(config: EngineConfig, systems: Sequence[System]) -> Iterator[Laboratory]:
    """Build an engine with rows for the largest system. A context manager, which closes the engine at its end.

    Raises:
        ConfigError: a setting is wrong.
    """
    each = [settings_of(system, config) for system in systems]
    rows = max(choices_of(one).requests.num_rows for one in each)
    shared = adapted(replace(config, scheduler="orca", max_num_seqs=rows, n_workers=None))
    with build_engine(shared) as built:
        laboratory = Laboratory(
            built.engine,
            config,
            built.model_config,
            built.max_model_len,
            built.max_model_len / LONGEST,
            lambda settings: reschedule(built, settings),
            built.timeline_header,
            built.executor_config.dtype if built.executor_config else "none",
        )
        laboratory.warm_up(systems)
        yield laboratory


@contextmanager
def recording(laboratory: Laboratory, timelines: list[Timeline]) -> Iterator[None]:
    """Add the timeline of the runs in the block, all of one system, to a list."""
    assert laboratory.header is not None, "a laboratory without timelines"
    lines: list[TimelineLine] = []
    writer = TimelineWriter(laboratory.header, list, lines.extend)
    with laboratory.engine.observed_by(writer):
        yield
    writer.flush()
    timelines.append(timeline_of(lines))


def surroundings(config: EngineConfig) -> dict[str, Any]:
    """The machine, its load, the commit, the command and the settings of a measurement."""
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m lab " + " ".join(sys.argv[1:]),
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
