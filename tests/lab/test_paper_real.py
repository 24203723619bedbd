"""The paper's figures on a real engine: plans of runs, throughput by hand, and small passes of the command."""

import json
import math
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from lab.__main__ import main
from lab.paper.curves import Point
from lab.paper.systems import parse_system
from lab.real.budget import LEAST_REQUESTS, SHARE, PlannedRun, seconds_of_a_run
from lab.real.curves import LOADS, Sweep, arrivals_at, ratios, steady_throughput
from lab.real.laboratory import Laboratory, RealWaits, settings_of
from lab.real.page import read_results, section
from lab.real.quiet import ATTEMPTS, Quiet
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.step import Executor

SYSTEMS = ["--systems", "ft(1,1)", "orca(4)", "chunked(4)"]
CLOCK = ["--model", "preset:clock-1", "--max-model-len", "64", "--minutes", "0.01"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 5 requests, on a machine that seems quiet."""
    for module in ("budget", "curves"):
        monkeypatch.setattr(f"lab.real.{module}.LEAST_REQUESTS", 5)
    monkeypatch.setattr("lab.real.curves.BATCHES", 2)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))


def test_runs_fill_the_budget() -> None:
    runs = [PlannedRun(name, load) for load in LOADS for name in ("fast", "slow")]
    saturations = {"fast": 4.0, "slow": 1.0}
    seconds = seconds_of_a_run(runs, saturations, 1500)
    counts = [run.requests(seconds, saturations[run.system]) for run in runs]
    taken = sum(
        run.seconds(count, saturations[run.system]) for run, count in zip(runs, counts, strict=True)
    )
    assert 0.7 * SHARE * 1500 < taken <= SHARE * 1500 and min(counts) == LEAST_REQUESTS


def test_throughput_of_short_runs() -> None:
    """Two per second after three seconds without an end; batches of four every two seconds."""
    assert steady_throughput([3 + n / 2 for n in range(40)]) == pytest.approx(2)
    assert steady_throughput([2.0] * 4 + [4.0] * 4 + [6.0] * 4) == pytest.approx(2)
    assert steady_throughput([5.0] * 10) == 2


def test_arrivals_have_the_exact_rate() -> None:
    at = arrivals_at(4.0, 40, 0)
    assert len(at) == 40 and at[0] > 0 and 8 < at[-1] < 10 and at == sorted(at)
    assert arrivals_at(None, 3, 0) == [0.0] * 3


def test_ratios_at_equal_latencies() -> None:
    curves = {"a": [Point(1, 100), Point(4, 400)], "b": [Point(0.5, 100), Point(1, 200)]}
    found = ratios(curves, "a", "b", [200, 400])
    assert found["200 ms"] == {"a": pytest.approx(2), "b": 1, "ratio": pytest.approx(2)}
    assert found["400 ms"]["ratio"] is None, "b never has this latency"


class Machine:
    """Loads of a machine at each reading, and the runs and the pauses on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loads: list[float]) -> None:
        self.loads, self.runs, self.pauses = loads, 0, 0.0
        monkeypatch.setattr("os.getloadavg", lambda: (self.loads.pop(0), 0.0, 0.0))
        monkeypatch.setattr("time.sleep", self.pause)

    def pause(self, seconds: float) -> None:
        self.pauses += seconds

    def run(self) -> int:
        self.runs += 1
        return self.runs


def test_a_disturbed_run_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [1.0, 5.0, 4.0, 3.5, 2.0, 2.9])
    result, about = Quiet(most_load=3.0).run_quietly(machine.run)
    assert result == 2 and machine.pauses == 2, "it waits until the load has fallen, and runs again"
    assert about["attempts"] == 2 and about["load_average"] == 2.9
    assert about["steal"] is None or 0 <= about["steal"] <= 1


def test_the_quietest_attempt_counts_on_a_machine_that_stays_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, [9.0, 9.0, 9.0, 6.0, 7.0])
    quiet = Quiet(most_load=3.0, patience=2.0)
    result, about = quiet.run_quietly(machine.run)
    assert (
        result == 2
        and about["load_average"] == 6.0
        and about["attempts"] == ATTEMPTS == machine.runs
    )
    assert machine.pauses == 2, "the patience is that of all runs"


def test_a_latency_beyond_a_curve_has_no_point() -> None:
    curve = [Point(1, 100), Point(4, 142)]
    sweep = Sweep(
        cast(Laboratory, None), lambda count: [], ["a"], 0, [0.5, 1.0], curves={"a": curve}
    )
    sweep.saturations["a"] = 4.0
    assert sweep.at_latency(228, ["a"], 1.0)["a"].throughput == 0


def test_settings_of_systems() -> None:
    config = EngineConfig(model="preset:toy")
    ft = settings_of(parse_system("ft(8,4)"), config)
    assert (ft.scheduler, ft.max_num_seqs, ft.n_workers) == ("request_level", 8, 2)
    with pytest.raises(ConfigError, match="simulations alone"):
        settings_of(parse_system("cells(4)"), config)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_small_figure_10_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measured").mkdir()
    assert (
        main(
            [
                "paper_real",
                "fig10",
                *CLOCK,
                *SYSTEMS,
                "--loads",
                "0.5",
                "1.3",
                "--docs",
                str(tmp_path),
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads(
        (tmp_path / "measured" / "paper-real-fig10-clock-1.json").read_text()
    )
    assert {
        name: len(points) for name, points in found["curves"]["paper"].items()
    } == dict.fromkeys(SYSTEMS[1:], 2)
    assert found["saturation"]["paper"]["ft(1,1)"] < 1000, (
        "a request has an iteration of a millisecond at least"
    )
    assert (
        found["headline_points"].keys() == {"orca(4)", "ft(1,1)"}
        and found["length_scale"] == 64 / 2048
    )
    order = [run["system"] for run in found["runs"]["paper"]]
    assert order[3:9] == [*SYSTEMS[1:], *SYSTEMS[:0:-1]], "the systems alternate"
    assert {"cpu_flags", "cores"} <= set(found["hardware"]) and len(found["load_average"]) == 3
    assert (
        "**Headline.**" in section(read_results(str(tmp_path)))
        and "orca(4)" in (tmp_path / "paper-real-fig10-clock-1.svg").read_text()
    )


@pytest.mark.usefixtures("few")
@pytest.mark.slow
def test_small_figures_9_and_11(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measured").mkdir()
    assert (
        main(["paper_real", "fig9", *CLOCK, "--systems", "orca(4)", "--docs", str(tmp_path)]) == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["batch_sizes"] == [1, 2, 4] and len(found["padded_by_merged"]) == 3
    assert (
        min(times[0] for engines in found["batch_ms"].values() for times in engines.values()) >= 1
    ), "a millisecond"
    assert found["batch_ms"]["equal"].keys() == {"orca(1)", "orca(4)", "ft(1)", "ft(4)"}
    assert (
        main(
            [
                "paper_real",
                "fig11",
                *CLOCK,
                "--systems",
                "orca(2)",
                "--loads",
                "0.5",
                "--docs",
                str(tmp_path),
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["curves"].keys() == {"(1,1)", "(8,8)"} and found["loads"] == [0.5]
    assert {len(points) for curves in found["curves"].values() for points in curves.values()} == {1}
    assert found["latency_unit"] == "ms"
    for label, sweep in found["curves"].items():
        runs = [run for run in found["runs"][label] if run["rate"] is not None]
        assert [latency for _, latency in sweep["orca(2)"]] == [
            run["median_latency_ms"] for run in runs
        ]
        assert all(run["attempts"] == 1 and run["load_average"] == 0.5 for run in runs)
    eight = next(run for run in found["runs"]["(8,8)"] if run["rate"] is not None)
    assert eight["median_latency_ms"] == pytest.approx(
        8 * eight["median_normalized_latency_ms"], rel=1e-3
    )
    results = read_results(str(tmp_path))
    assert results.keys() == {"fig9-clock-1", "fig11-clock-1"}
    assert "| ms at 0.5 of it |" in section(results) and section(results).count("measured.**") == 2
    assert main(["paper_real", "draw", "--docs", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"drawn": list(results)}


class Slow:
    """An executor with one iteration, until it is released."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def is_ready(self, handle: object) -> bool:
        return self.end.is_set()

    def wait(self, handle: object) -> None:
        self.end.wait()


def test_waits_end_with_the_result_or_the_time() -> None:
    executor, handle = Slow(), object()
    waits = RealWaits(cast(Executor, executor))
    assert not waits(handle, time.monotonic() + 0.01) and not waits(handle, time.monotonic())
    threading.Timer(0.02, executor.end.set).start()
    assert waits(handle, math.inf) and waits(handle, 0.0)
    waits.close()


@pytest.mark.parametrize(
    "flags",
    [
        ["fig10", "--minutes", "0"],
        ["fig10", "--systems", "x"],
        ["fig10", "--loads", "1", "0.5"],
        ["draw"],
        ["draw", "--docs", "/nowhere"],
    ],
)
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper_real", *flags, "--model", "preset:toy"]) == 2
    assert "error:" in capsys.readouterr().err
