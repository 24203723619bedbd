"""The benchmark of the timeline writer measures every hook, and writes the file of `--trace-file`."""

import json
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.timeline_cost import HOOKS
from orca_jax.observer import Observer
from orca_jax.timeline.read import load_timeline


def test_every_hook_is_timed() -> None:
    assert set(HOOKS) == {name for name in vars(Observer) if not name.startswith("_")}


def test_tracing_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    flags = ["--model", "preset:toy", "--num-requests", "8", "--max-num-seqs", "4", "--trace-file", str(path)]
    assert main(["tracing", *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    run = load_timeline(str(path))
    warm_up = 4  # requests of four tokens each, in addition to the eight
    assert len(run.ends) == 8 + warm_up and all(end.reason == "length" for end in run.ends.values())
    assert result["iterations"] <= len(run.iterations)
    assert 0 < result["share_of_wall_time"] < 0.5 and result["bytes_per_iteration"] > 100
    assert sum(each.tokens for each in run.iterations) >= sum(arrival.prompt for arrival in run.arrivals.values())
