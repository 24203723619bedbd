"""Compilation for TPUs that are not there: topologies, refusals, and the arithmetic against the compiler."""

import os
import sys

import pytest

from orca_jax.model.describe import read_model_config
from orca_jax.tools.plan import compiled
from orca_jax.tools.plan.__main__ import main
from orca_jax.tools.plan.accelerators import parse_devices
from orca_jax.tools.plan.compiled import compiled_memory, topology_of
from orca_jax.tools.plan.memory import Capacity, Demand, Split, fit
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError, OrcaError
from tests.aot.compilers import FOLDER, skip_without

DEMAND = Demand("bfloat16", "bfloat16", 0.9, max_num_seqs=8, max_model_len=256)


def capacity_of(model: ModelConfig) -> Capacity:
    return fit(model, Split(1, 1), parse_devices("v5e-4").kind, DEMAND)


@pytest.mark.parametrize(
    ("devices", "tensor", "topology"),
    [
        ("v5e-8", 1, "v5e:2x2"),
        ("v5e-8", 8, "v5e:2x4"),
        ("v5p-16", 8, "v5p:2x2x2"),
        ("tpu7x-8", 8, "tpu7x:2x2x1"),
    ],
)
def test_the_smallest_topology_is_used(devices: str, tensor: int, topology: str) -> None:
    assert topology_of(parse_devices(devices), tensor) == topology


def test_gpus_and_huge_slices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="at most 64 devices, got 65"):
        topology_of(parse_devices("v5e-256"), 65)
    assert main(["--model", "preset:gpt2", "--devices", "h200x8", "--compile"]) == 2
    printed = capsys.readouterr()
    assert "compile needs a TPU, one of v5e" in printed.err and printed.out == ""


def test_a_failure_shows_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_VARIABLES", ())
    monkeypatch.setattr(compiled.sys, "executable", "false")
    model = read_model_config("preset:gpt2-tiny")
    with pytest.raises(OrcaError, match="cannot be compiled: no output; to install the compiler"):
        compiled_memory("preset:gpt2-tiny", parse_devices("v5e-4"), capacity_of(model), DEMAND)


@pytest.mark.slow
@pytest.mark.aot
def test_the_arithmetic_agrees_with_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("libtpu")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *filter(None, sys.path)]))
    capacity = capacity_of(read_model_config("preset:gpt2"))
    (stage,) = capacity.stages
    found = compiled_memory("preset:gpt2", parse_devices("v5e-4"), capacity, DEMAND)
    arguments = stage.weights + stage.cache + 4 * 8 * 256  # and the history of all rows
    assert arguments <= found["arguments"] < arguments + 2**20  # and small vectors
    assert max(found["temporary"], found["sampler"]) < stage.workspace
