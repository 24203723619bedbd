"""Measure the shares of device time of the parts of the model."""

import argparse
import dataclasses
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import jax

from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.flags import add_engine_args, engine_config_from_args
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.tools.bench.measure import run_workload, warm_up
from orca_jax.tools.bench.workload.generate import (
    WorkloadRequest,
    add_workload_args,
    workload_from_args,
    workload_settings,
)
from orca_jax.values.errors import ConfigError

Operation = tuple[str, str]
"""Module and instruction. Both are needed, since layers and samplers have instructions with the same names."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", re.MULTILINE)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the workload and of the engine."""
    add_workload_args(parser)
    add_engine_args(parser, model="preset:gpt2")


def run(args: argparse.Namespace) -> None:
    """Run the workload under the profiler; print a table and a line of JSON."""
    config = engine_config_from_args(args)
    with build_engine(config) as built:
        vocab_size = built.model_config.vocab_size
        most = built.max_model_len
        workload = workload_from_args(args, vocab_size=vocab_size, max_model_len=most, rate=None)
        warm_up(built.engine, workload)
        parts = profile(built.engine, workload)
    print_table("share of device time", parts)
    settings = {**dataclasses.asdict(config), **workload_settings(args)}
    print(json.dumps({"profile": parts, "hardware": hardware(), "config": settings}))


def profile(engine: Engine, workload: Sequence[WorkloadRequest]) -> dict[str, float]:
    """Run the workload under the profiler of JAX, and attribute the own time of each operation to a part.

    The programs name their parts with `jax.named_scope`: attention with the write of the KV cache, sampling with the
    unembedding, and the rest, which is token-wise. The time of nested operations, such as the body of a loop, counts
    for the inner ones alone.

    Returns:
        Shares of the time by part; their sum is 1.

    Raises:
        ConfigError: the engine has no device.
    """
    if not isinstance(engine.executor, JaxExecutor):
        raise ConfigError("the toy model has no device to profile; give another one", param="model")
    parts: dict[Operation, str] = {}
    programs = chain.from_iterable(stage.programs.values() for stage in engine.executor.stages)
    for program in programs:
        text = program.as_text() or ""
        module = text.removeprefix("HloModule ").partition(",")[0]
        parts |= {(module, name): _part(op) for name, op in _INSTRUCTION.findall(text)}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run_workload(engine, workload)
        (dump,) = Path(folder).rglob("*.xplane.pb")
        time = _own_time(dump, parts)
    total = sum(time.values())
    return {part: seconds / total for part, seconds in sorted(time.items())}


def _part(op_name: str) -> str:
    return next(
        (part for part in ("attention", "sampling") if f"/{part}/" in op_name), "token-wise"
    )


def _module(event: jax.profiler.ProfileEvent) -> str:
    """Return the module of an operation, or an empty string."""
    with warnings.catch_warnings():
        # jax: "builtin type event_stats has no __module__"
        warnings.simplefilter("ignore", DeprecationWarning)
        return next((str(value) for name, value in event.stats if name == "hlo_module"), "")


def _own_time(dump: Path, parts: dict[Operation, str]) -> Counter[str]:
    """Sum the nanoseconds of each part over all lines of the profile with operations of these programs."""
    time: Counter[str] = Counter()
    names = {name for _, name in parts}
    for plane in jax.profiler.ProfileData.from_file(str(dump)).planes:
        for line in plane.lines:
            operations = [
                (e.start_ns, -e.duration_ns, (_module(e), e.name))
                for e in line.events
                if e.name in names
            ]
            stack: list[tuple[float, str]] = []  # (end, part) of the enclosing operations
            for start, negative, operation in sorted(operations):
                if operation not in parts:
                    continue
                while stack and stack[-1][0] <= start:
                    stack.pop()
                if stack:
                    time[stack[-1][1]] += negative
                time[parts[operation]] -= negative
                stack.append((start - negative, parts[operation]))
    return time
