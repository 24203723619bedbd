"""The paper's evaluation: systems, runs by hand, distances of curves, and a small pass of the command."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from lab.paper.effort import Effort
from lab.paper.figures import micro
from lab.paper.pipeline import figure_8, stage_times
from lab.paper.places import FT_FACTOR, Place, simulate
from lab.paper.points import distance, read_digitised
from orca_jax.bench.__main__ import main
from orca_jax.bench.paper.curves import Point, throughput_at
from orca_jax.bench.paper.runs import Lengths, homogeneous, paper_lengths, poisson
from orca_jax.bench.paper.systems import System, parse_system
from orca_jax.errors import ConfigError

POINTS = """# read off a figure
model,system,throughput_req_s,median_norm_latency_ms_per_token
175B,orca(8),0.5,58
175B,orca(8),3.1,1000
175B,ft(1;1),0.1,90
"""


@pytest.fixture
def digitised(tmp_path: Path) -> str:
    path = tmp_path / "points.csv"
    path.write_text(POINTS)
    return str(path)


def test_names_of_systems() -> None:
    assert parse_system("ft(16;8)") == System("ft", 16, 8) and parse_system("ft(16,8)").name == "ft(16,8)"
    assert parse_system("orca(32)").name == "orca(32)"
    for wrong in ("orca", "orca(0)", "ft(8)", "vllm(8)"):
        with pytest.raises(ConfigError, match=r"size|is not a system"):
            parse_system(wrong)


def test_preallocation_out_of_memory() -> None:
    assert not Place("13B").fits(System("ft", 8, 8)) and Place("13B").fits(System("ft", 4, 4))
    assert Place("13B").fits(System("orca", 32)) and not Place("175B", "v5e").fits(System("orca", 1))
    with pytest.raises(ConfigError, match="out of memory"):
        simulate(System("ft", 16, 8), Place("101B"), homogeneous(32, 1, 2), [0.0, 0.0])


@pytest.mark.parametrize(("size", "num_prompt"), [(1, 32), (4, 128)])
def test_a_batch_of_figure_9_by_hand(size: int, num_prompt: int) -> None:
    cost = Place("101B").cost
    seconds = 32 * cost.weights + size * (num_prompt * cost.initiation + 31 * cost.increment)
    seconds += size * cost.context * sum(range(num_prompt + 1, num_prompt + 32))
    assert micro("orca", "101B", num_prompt, size) == pytest.approx(1e3 * seconds)
    assert micro("ft", "101B", num_prompt, size) == pytest.approx(1e3 * seconds), "one stage: the engines are equal"
    assert micro("ft", "101B", num_prompt, 16) is None


def test_the_baseline_is_slower_in_a_pipeline() -> None:
    ours, theirs = micro("orca", "175B", 32, 1), micro("ft", "175B", 32, 1)
    assert ours is not None and theirs == pytest.approx(FT_FACTOR * ours)


def test_an_arrival_does_not_wait_for_a_pipeline_with_room() -> None:
    """The second request comes while the first is on the first stage, and enters as soon as it is free."""
    place, one = Place("175B"), Lengths(64, 1, 1)
    stage = place.cost.weights + 64 * place.cost.initiation
    ends = simulate(System("orca", 1), place, [one] * 2, [0.0, stage / 2]).ends
    assert ends == [pytest.approx(2 * stage), pytest.approx(3 * stage)]


def test_figures_of_a_run() -> None:
    """Two tokens each, one request at a time: no request waits, so all latencies are equal."""
    requests = homogeneous(32, 2, 20)
    run = simulate(System("orca", 8), Place("101B"), requests, [10.0 * n for n in range(20)], has_gaps=True)
    cost = Place("101B").cost
    first = cost.weights + 32 * cost.initiation
    second = cost.weights + cost.increment + 33 * cost.context
    assert run.point == (pytest.approx(17 / 170), pytest.approx(1e3 * (first + second) / 2))
    assert run.first == pytest.approx([first] * 18) and len(run.gaps) == 18, "two warm-up requests are not measured"
    assert run.figures["p99_itl_ms"] == pytest.approx(1e3 * second)


def test_requests_do_not_depend_on_the_rate() -> None:
    assert [2 * at for at in poisson(2.0, 5, 0)] == pytest.approx(poisson(1.0, 5, 0))
    prompts, outputs, _ = zip(*paper_lengths(2000, 1), strict=True)
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (32, 512, 1, 128)


@pytest.mark.parametrize(("system", "together"), [("orca(8)", True), ("cells(8)", False)])
def test_cells_of_different_positions_do_not_join(system: str, together: bool) -> None:
    """Prompts of 40 and 50 tokens at once, against two of 40."""
    place, one, other = Place("101B", n_workers=1), Lengths(40, 4, 4), Lengths(50, 4, 4)
    unequal = simulate(parse_system(system), place, [one, other], [0.0, 0.0])
    equal = simulate(parse_system(system), place, [one, one], [0.0, 0.0])
    ratio = max(unequal.ends) / max(equal.ends)
    assert ratio < 1.1 if together else ratio > 1.7


def test_distances_by_hand() -> None:
    """Flat at 100 ms up to 2 requests/s, then vertical."""
    curve = [Point(1.0, 100.0), Point(2.0, 100.0), Point(2.0, 1000.0)]
    flat, steep = distance(curve, Point(1.5, 110.0)), distance(curve, Point(2.2, 700.0))
    assert flat.nearest == pytest.approx(math.log(1.1)) and steep.nearest == pytest.approx(math.log(1.1))
    assert steep.latency == math.inf, "the curve never reaches its throughput"
    assert distance(curve, Point(2.0, 5000.0)).nearest == 0, "a longer run reaches any latency"
    assert distance(curve, Point(0.5, 100.0)).nearest == 0


def test_the_throughput_at_a_latency() -> None:
    """A latency of 100 / (1 - rate) reaches 200 at half of the rate."""
    found = throughput_at(200.0, lambda rate: Point(rate, 100 / (1 - rate) if rate < 1 else math.inf), 2.0, steps=20)
    assert found.throughput == pytest.approx(0.5, abs=1e-4) and found.latency <= 200


WRONG = ["model,system\n175B,orca(8)\n", POINTS.replace("58", "fast"), POINTS + "175B,x,1,1\n"]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_digitised_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_digitised(str(path))


def test_effort_follows_the_work() -> None:
    effort = Effort(requests=400)
    assert [effort.of(parse_system(name)) for name in ("orca(32)", "ft(1,1)", "ft(8,8)")] == [400, 400, 100]


def test_the_old_command_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "fig10", "--digitised", "points.csv"]) == 2
    assert "python -m lab reproduce fig10" in capsys.readouterr().err


def test_batches_on_the_stages_of_figure_8() -> None:
    """A stage runs one batch at a time, after the stage before it; four batches begin before the first one ends."""
    for busy in stage_times().values():
        by_stage = {stage: [box for box in busy if box.stage == stage] for stage in range(4)}
        for boxes in by_stage.values():
            assert all(before.end <= after.start for before, after in pairwise(boxes))
        for first, second in pairwise(by_stage.values()):
            assert all(
                one.end <= two.start and one.requests == two.requests for one, two in zip(first, second, strict=True)
            )
        assert by_stage[0][3].end <= by_stage[3][0].end + 1e-9
        assert {number for box in busy if box.is_initiation for number in box.requests} == set(range(16))


def test_whole_batches_fill_the_pipeline_and_microbatches_do_not() -> None:
    """200 requests; the last ones leave stages idle (`tests/sim/test_executor.py` measures between them)."""
    gain = figure_8(Effort(requests=80))["gain"]["equal"]
    assert gain["orca"]["4"] > 3.4 and gain["chunked"]["4"] > 3.4
    assert gain["ft"]["4"] < 1.1
