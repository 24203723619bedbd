"""Plans by ZeroMQ and by a collective: the plans of a full batch, the table, and a small run of both processes."""

import json
from pathlib import Path

import pytest

from lab import control_plane
from lab.control_plane import NUM_INPUT, NUM_OUTPUT, WAYS, measure, plans
from lab.real.opening import surroundings
from orca_jax.cluster.messages import Iteration, decode_call
from orca_jax.values.config import EngineConfig


def test_the_plans_are_those_of_a_full_batch() -> None:
    config = EngineConfig(
        "preset:toy",
        scheduler="orca",
        max_num_seqs=3,
        max_model_len=NUM_INPUT + NUM_OUTPUT,
        progress=False,
    )
    decoded = [decode_call(payload) for payload in plans(config)]
    assert len(decoded) == NUM_OUTPUT
    assert all(isinstance(each, Iteration) and len(each.plan.members) == 3 for each in decoded)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "RESULT", tmp_path / "control-plane.json")
    row = {"median_host_us": 12.4, "median_trip_us": 1234.5, "p99_trip_us": 2000.0}
    found = surroundings(EngineConfig("preset:toy")) | dict.fromkeys(WAYS, row)
    control_plane.RESULT.write_text(
        json.dumps(found | {"load_average": 1.5, "steal": None, "attempts": 1})
    )
    assert "| collective | 12 | 1,234 | 2,000 |" in control_plane.block().splitlines()


@pytest.mark.slow
def test_both_ways_between_two_processes() -> None:
    config = EngineConfig(
        "preset:toy", max_num_seqs=2, max_model_len=NUM_INPUT + NUM_OUTPUT, progress=False
    )
    payloads = plans(config)
    taken = measure(payloads, 2)
    for way in WAYS:
        assert len(taken[way]["trip"]) == len(taken[way]["host"]) == 2 * len(payloads)
        assert all(
            0 < host < trip
            for host, trip in zip(taken[way]["host"], taken[way]["trip"], strict=True)
        )
