"""Plans of recorded runs: the milliseconds of a token by `plan --cost profile:` beside the median of the recording.

A plan has the mean number of requests that generate at the same time, their mean context, and their mean prompt. New
requests follow those that end.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from lab.gpus.runs import GpuRun, RecordedTimes, own_requests
from lab.pages.markdown import table
from orca_jax.model.describe import read_model_config
from orca_jax.tools.bench.virtual import SimulatedRequest
from orca_jax.tools.plan.accelerators import PeakShares, parse_devices
from orca_jax.tools.plan.memory import Demand
from orca_jax.tools.plan.options import options
from orca_jax.tools.plan.profile import PROFILE
from orca_jax.tools.plan.timing import kernel_times
from orca_jax.values.config import ModelConfig

LIMIT = 0.15


class Load(NamedTuple):
    """The load of a recording: means over its time of requests and context, and over requests of the prompt."""

    requests: int
    context: int
    prompt: int


class PlannedRun(NamedTuple):
    """A plan beside a recording; seconds of a token."""

    run: GpuRun
    load: Load
    alone: float  # without prompts
    planned: float
    recorded: float

    @property
    def error(self) -> float:
        """The error of the plan, as a share."""
        return self.planned / self.recorded - 1

    @property
    def is_within(self) -> bool:
        """Return True if the error is within its limit."""
        return abs(self.error) <= LIMIT


def planned(run: GpuRun, folder: Path) -> PlannedRun:
    """The plan of a recorded run. Raises ConfigError: a file is missing or wrong."""
    requests, times = own_requests(run, folder)
    load = load_of(requests, times)
    model = _model(run)
    devices = parse_devices(run.devices)
    demand = Demand("bfloat16", "bfloat16", 0.95, load.context, load.requests, 2 * load.context)
    kernels = kernel_times(f"{PROFILE}{folder}/{run.cost}", devices.name)
    found = options(model, devices, demand, load.prompt, PeakShares(), kernels)
    (chosen,) = [option for option in found if option.is_measured]
    assert chosen.times is not None, "a measured option has no times"
    assert chosen.times.loaded_seconds is not None, "prompts are longer than contexts"
    recorded = median([each.per_token for each in times])
    return PlannedRun(run, load, chosen.times.token_seconds, chosen.times.loaded_seconds, recorded)


def _model(run: GpuRun) -> ModelConfig:
    if isinstance(run.model, str):
        return read_model_config(run.model)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(run.model), encoding="utf-8")
        return read_model_config(folder)


def load_of(requests: Sequence[SimulatedRequest], times: Sequence[RecordedTimes]) -> Load:
    """The load of requests by their times. A request counts from its first token to its last one."""
    begins = []
    ends = []
    token_seconds = 0.0
    for request, each in zip(requests, times, strict=True):
        begins.append(request.arrival + each.first_token)
        ends.append(request.arrival + each.latency)
        token_seconds += (each.latency - each.first_token) * _mean_context(request)
    seconds = sum(ends) - sum(begins)
    return Load(
        round(seconds / (max(ends) - min(begins))),
        round(token_seconds / seconds),
        round(fmean([_num_prompt(request) for request in requests])),
    )


def _mean_context(request: SimulatedRequest) -> float:
    return _num_prompt(request) + request.num_output / 2


def _num_prompt(request: SimulatedRequest) -> int:
    return request.prompt if isinstance(request.prompt, int) else len(request.prompt)


def plans_text(plans: Sequence[PlannedRun]) -> str:
    """The plans beside the recordings, in Markdown."""
    rows = []
    for each in plans:
        milliseconds = [f"{1e3 * value:.1f}" for value in (each.alone, each.planned, each.recorded)]
        verdict = "" if each.is_within else " FAIL"
        cells = [each.run.title, *map(str, each.load), *milliseconds]
        rows.append([*cells, f"{each.error:+.1%}{verdict}", f"{LIMIT:.0%}"])
    head = [
        "run",
        "requests",
        "context",
        "prompt",
        "ms/token without prompts",
        "ms/token",
        "recorded median",
    ]
    return (
        "\n`plan --cost profile:` at the mean load of each recording; ms/token is its `loaded_seconds`:\n\n"
        + table([*head, "error", "limit"], rows)
    )
