"""Predictions of held-out runs: exact without noise, and the command on the clock model."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lab.__main__ import main
from lab.paper.runs import Lengths, RunResult, paper_lengths, serve
from lab.paper.systems import parse_system
from lab.real.curves import arrivals_at
from lab.real.laboratory import Laboratory, prompts_of, settings_of
from lab.real.page import held_out_section, read_results
from lab.simulated.cost import FeatureCost
from lab.simulated.features import fit_features
from lab.simulated.held_out import compared, figures_of
from lab.simulated.prediction import predicted_run, scaled_cost, skewed_lengths
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.scheduler import build_scheduling
from orca_jax.engine import Engine
from orca_jax.model.describe import read_model_config
from orca_jax.sim.executor import SimExecutor, VirtualClock
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.read import parse_timeline
from orca_jax.timeline.writer import TIMELINE_VERSION, TimelineHeader, TimelineWriter
from orca_jax.tools.bench.feed import Drive
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, EngineConfig

BUCKETS = (8, 32, 128)
TRUE = FeatureCost(
    {"steps": 0.02, "chunk_tokens": 0.001, "increments": 0.002, "context": 1e-5}, buckets=BUCKETS
)
HOST = 0.003  # seconds to select: a tenth of an iteration
CONFIG = EngineConfig(model="lab", max_num_batched_tokens=128, enable_prefix_caching=False)
CACHE = CacheConfig(one_group(TOY_MODEL.layer_caches), (2000,), 16, "float32")
HEAD = TimelineHeader(TIMELINE_VERSION, CONFIG, CACHE, 1024, 128, BUCKETS, 0.0)


class SlowHost(TimelineWriter):
    """A host that takes time to select, on the virtual clock."""

    virtual: VirtualClock

    def selecting(self) -> None:
        super().selecting()
        self.virtual.now += HOST


class Lab:
    """A laboratory in virtual time."""

    def __init__(self) -> None:
        scheduler, pool = build_scheduling(
            choices_of(settings_of(parse_system("orca(16)"), CONFIG)), TOY_MODEL, 1024, CACHE, 128
        )
        engine = Engine(SimExecutor(TRUE, VirtualClock(), {}), scheduler, pool)
        self.laboratory = Laboratory(engine, CONFIG, TOY_MODEL, 1024, 0.25, self.reschedule, HEAD)

    def reschedule(self, config: EngineConfig) -> None:
        engine = self.laboratory.engine
        engine.reschedule(*build_scheduling(choices_of(config), TOY_MODEL, 1024, CACHE, 128))

    def record(
        self, name: str, requests: list[Lengths], arrivals: list[float]
    ) -> tuple[RunResult, Timeline]:
        self.reschedule(settings_of(parse_system(name), CONFIG))
        clock, parts = VirtualClock(), list[bytes]()
        writer = SlowHost(HEAD, msgspec.json.Encoder().encode_lines, parts.append, clock)
        writer.virtual = clock
        lengths = {str(n): each.num_generated for n, each in enumerate(requests)}
        executor, real = SimExecutor(TRUE, clock, lengths), self.laboratory.engine
        engine = Engine(executor, real.scheduler, real.pool, clock=clock, observer=writer)
        drive = Drive.in_virtual_time(engine, executor, clock)
        result = serve(drive, requests, prompts_of(requests, 200, 1), arrivals, has_gaps=True)
        writer.flush()
        return result, parse_timeline(b"".join(parts))


@pytest.mark.parametrize("kind", ["orca", "chunked"])
def test_held_out_runs_are_predicted_without_noise(kind: str) -> None:
    """Other seed, rate, lengths and batch size: the arrivals, the host's time and the overlap cause no error."""
    lab = Lab()
    requests = paper_lengths(60, 0, 0.25)
    fitting = [
        lab.record(f"{kind}(16)", requests, arrivals_at(rate, 60, 0))[1]
        for rate in (3.0, 8.0, None)
    ]
    cost = fit_features(fitting[0], *fitting[1:]).cost
    assert cost.host == pytest.approx(HOST, rel=0.1)
    held = skewed_lengths(60, 1, 0.25)
    for rate in (6.0, None):
        arrivals = arrivals_at(rate, 60, 1)
        recorded, _ = lab.record(f"{kind}(12)", held, arrivals)
        predicted = predicted_run(
            lab.laboratory, parse_system(f"{kind}(12)"), cost, held, arrivals, 1
        )
        rows = compared([figures_of(recorded, arrivals)], figures_of(predicted, arrivals))
        assert {name: row["error"] for name, row in rows.items()} == pytest.approx(
            dict.fromkeys(rows, 0), abs=1e-6
        )


def test_the_cost_of_another_model() -> None:
    """Twice the layers: all weights but the sampler's grow; the unembedding is the same."""
    model = read_model_config("preset:gpt2-tiny")
    deeper = replace(model, layers=2 * model.layers)
    weights = {"launches": 1.0, "chunk_tokens": 1.0, "context": 1.0, "sampler_rows": 1.0}
    found = scaled_cost(FeatureCost(weights, 0.5), model, deeper)
    assert (
        found.weights["chunk_tokens"] == found.weights["context"] == 2
        and found.weights["sampler_rows"] == 1
    )
    assert 1 < found.weights["launches"] < 2 and found.host == 0.5
    fixed = scaled_cost(FeatureCost({"steps": 1.0}), model, deeper, overhead=0.75).weights["steps"]
    assert fixed == pytest.approx(0.75 + 0.25 * found.weights["launches"])


def test_skewed_lengths_have_the_bounds_of_the_trace() -> None:
    prompts, outputs, _ = zip(*skewed_lengths(2000, 0, 0.5), strict=True)
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (16, 256, 1, 64)
    assert sorted(prompts)[1000] < 80, "most are short"


CLOCK = ["held_out", "--model", "preset:clock-1", "--num-requests", "20", "--max-model-len", "64"]


def test_the_command_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measured").mkdir()
    flags = ["--held-out-model", "preset:toy", "--docs", str(tmp_path)]
    assert main([*CLOCK, "--fit", "orca(4)", "--predict", "chunked(3)", *flags]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"]["costs"].keys() == {"orca"} and found["model"]["saturation"].keys() == {
        "orca(4)"
    }
    assert len(found["model"]["runs"]) == len(found["held_out_model"]["runs"]) == 2
    for row in (row for rows in found["model"]["runs"].values() for row in rows.values()):
        assert row["error"] == pytest.approx(
            row["predicted"] / row["recorded"] - 1, abs=1e-3, rel=1e-3
        )
    page = held_out_section(read_results(str(tmp_path)))
    assert page.count("all at once") == 2 and "| toy, chunked(3), " in page


@pytest.mark.parametrize(
    "flags", [["--num-requests", "5"], ["--fit", "ft(4"], ["--predict", "cells(4)"]]
)
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CLOCK, *flags]) == 2
    assert "error:" in capsys.readouterr().err
