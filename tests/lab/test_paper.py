"""The paper's evaluation: systems, runs by hand, distances of curves, and a small pass of the command."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lab.baselines import POLICIES
from lab.paper.curves import Point, throughput_at
from lab.paper.effort import Effort
from lab.paper.fits import FITTED, one_pair
from lab.paper.pipeline import figure_8, stage_times
from lab.paper.places import Place, serve_system
from lab.paper.points import latency_errors, read_figure_10, saturation_error
from lab.paper.runs import Lengths, homogeneous, paper_lengths, poisson
from lab.paper.systems import System, parse_system
from lab.reproduce.fig9 import batch_ms
from orca_jax.values.errors import ConfigError

POINTS = """# read off a figure
model,system,throughput_req_s,median_norm_latency_ms_per_token
175B,orca(8),0.5,58
175B,orca(8),3.1,1000
175B,ft(1;1),0.1,90
"""


def test_names_of_systems() -> None:
    assert (
        parse_system("ft(16;8)") == System("ft", 16, 8)
        and parse_system("ft(16,8)").name == "ft(16,8)"
    )
    assert parse_system("orca(32)").name == "orca(32)"
    for wrong in ("orca", "orca(0)", "ft(8)", "vllm(8)"):
        with pytest.raises(ConfigError, match=r"size|is not a system"):
            parse_system(wrong)


def test_preallocation_out_of_memory() -> None:
    assert not Place("13B").fits(System("ft", 8, 8)) and Place("13B").fits(System("ft", 4, 4))
    assert Place("13B").fits(System("orca", 32)) and not Place("175B", "v5e").fits(
        System("orca", 1)
    )
    with pytest.raises(ConfigError, match="out of memory"):
        serve_system(System("ft", 16, 8), Place("101B"), homogeneous(32, 1, 2), [0.0, 0.0])


@pytest.mark.parametrize(("size", "num_prompt"), [(1, 32), (4, 128)])
def test_a_batch_of_figure_9_by_hand(size: int, num_prompt: int) -> None:
    cost = Place("101B").cost
    seconds = 32 * cost.weights + size * (num_prompt * cost.initiation + 31 * cost.increment)
    seconds += size * cost.context * sum(range(num_prompt + 1, num_prompt + 32))
    assert batch_ms("ft", "101B", num_prompt, size) == pytest.approx(1e3 * seconds)
    not_batched = 32 * size * cost.request
    assert batch_ms("orca", "101B", num_prompt, size) == pytest.approx(
        1e3 * (seconds + not_batched)
    )
    assert batch_ms("ft", "101B", num_prompt, 16) is None


def test_figure_9c_has_no_pipeline() -> None:
    """Each of two stages works on the whole batch, one after the other, under both engines."""
    cost, size = Place("175B").cost, 4
    seconds = 32 * cost.weights + size * (32 * cost.initiation + 31 * cost.increment)
    seconds += size * cost.context * sum(range(33, 64))
    ours, theirs = batch_ms("orca", "175B", 32, size), batch_ms("ft", "175B", 32, size)
    assert ours == pytest.approx(2e3 * (seconds + 32 * size * cost.request))
    assert theirs == pytest.approx(2e3 * FITTED.ft_factor * seconds)


def test_the_baseline_runs_for_the_longest_prompt_and_the_longest_output() -> None:
    """Of prompts of 3 and 5 tokens with 4 and 2 generated ones: 2 forced tokens and 4 generated ones."""
    requests = [Lengths(3, 4, 4), Lengths(5, 2, 2)]
    # the weights alone take time
    place = Place("101B", fit=replace(FITTED, efficiencies=one_pair(0.5, 1e6)))
    ends = serve_system(System("ft", 2, 2), place, requests, [0.0, 0.0]).ends
    assert ends == pytest.approx([6 * place.cost.weights] * 2, rel=1e-3)
    assert serve_system(System("request_level", 2, 2), place, requests, [0.0, 0.0]).ends < ends


def test_the_baseline_computes_whole_batches() -> None:
    place, one = Place("101B"), [Lengths(100, 1, 1)]
    alone = serve_system(System("ft", 1, 1), place, one, [0.0]).ends[0]
    of_eight = serve_system(System("ft", 8, 8), place, one, [0.0]).ends[0]
    assert of_eight - alone == pytest.approx(7 * 100 * place.cost.initiation)


def test_an_arrival_does_not_wait_for_a_pipeline_with_room() -> None:
    """The second request comes while the first is on the first stage, and enters as soon as it is free."""
    place, one = Place("175B"), Lengths(64, 1, 1)
    stage = place.cost.weights + 64 * place.cost.initiation + place.cost.request
    ends = serve_system(System("orca", 1), place, [one] * 2, [0.0, stage / 2]).ends
    assert ends == [pytest.approx(2 * stage), pytest.approx(3 * stage)]


def test_figures_of_a_run() -> None:
    """Two tokens each, one request at a time: no request waits, so all latencies are equal."""
    requests = homogeneous(32, 2, 20)
    run = serve_system(
        System("orca", 8), Place("101B"), requests, [10.0 * n for n in range(20)], has_gaps=True
    )
    cost = Place("101B").cost
    first = cost.weights + 32 * cost.initiation + cost.request
    second = cost.weights + cost.increment + 33 * cost.context + cost.request
    assert run.point == (pytest.approx(17 / 170), pytest.approx(1e3 * (first + second) / 2))
    assert run.first == pytest.approx([first] * 18) and len(run.gaps) == 18, (
        "two warm-up requests are not measured"
    )
    assert run.figures["p99_itl_ms"] == pytest.approx(1e3 * second)


def test_requests_do_not_depend_on_the_rate() -> None:
    assert [2 * at for at in poisson(2.0, 5, 0)] == pytest.approx(poisson(1.0, 5, 0))
    prompts, outputs, _ = zip(*paper_lengths(2000, 1), strict=True)
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (32, 512, 1, 128)


@pytest.mark.parametrize(("system", "together"), [("orca(8)", True), ("cells(8)", False)])
def test_cells_of_different_positions_do_not_join(system: str, together: bool) -> None:
    """Prompts of 40 and 50 tokens at once, against two of 40."""
    place, one, other = Place("101B", n_workers=1), Lengths(40, 4, 4), Lengths(50, 4, 4)
    unequal = serve_system(parse_system(system, POLICIES), place, [one, other], [0.0, 0.0])
    equal = serve_system(parse_system(system, POLICIES), place, [one, one], [0.0, 0.0])
    ratio = max(unequal.ends) / max(equal.ends)
    assert ratio < 1.1 if together else ratio > 1.7


def test_errors_by_hand() -> None:
    """Flat at 100 ms up to 1 request/s, and 400 ms at 2 requests/s; compared up to 90 % of the paper's 2."""
    curve = [Point(1.0, 100.0), Point(2.0, 400.0)]
    points = [Point(0.5, 110.0), Point(math.sqrt(2), 200.0), Point(1.9, 1.0), Point(2.0, 1.0)]
    assert latency_errors(curve, points, tolerance=0.0) == pytest.approx([math.log(1.1), 0.0])
    assert latency_errors(curve, [Point(1.01, 105.0), Point(2.0, 1.0)]) == [0.0], (
        "the curve is read within 0.02"
    )
    assert latency_errors(curve[:1], [Point(1.5, 100.0), Point(2.0, 1.0)]) == [math.log(2)], (
        "beyond the curve"
    )
    assert saturation_error(1.0, points) == pytest.approx(-math.log(2))


def test_the_throughput_at_a_latency() -> None:
    """A latency of 100 / (1 - rate) reaches 200 at half of the rate."""
    found = throughput_at(
        200.0, lambda rate: Point(rate, 100 / (1 - rate) if rate < 1 else math.inf), 2.0, steps=20
    )
    assert found.throughput == pytest.approx(0.5, abs=1e-4) and found.latency <= 200


WRONG = ["model,system\n175B,orca(8)\n", POINTS.replace("58", "fast"), POINTS + "175B,x,1,1\n"]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_digitised_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_figure_10(path)


def test_effort_follows_the_work() -> None:
    effort = Effort(requests=400)
    assert [effort.of(parse_system(name)) for name in ("orca(32)", "ft(1,1)", "ft(8,8)")] == [
        400,
        400,
        100,
    ]


def test_batches_on_the_stages_of_figure_8() -> None:
    """A stage runs one batch at a time, after the stage before it; four batches begin before the first one ends."""
    for busy in stage_times().values():
        by_stage = {stage: [box for box in busy if box.stage == stage] for stage in range(4)}
        for boxes in by_stage.values():
            assert all(before.end <= after.start for before, after in pairwise(boxes))
        for first, second in pairwise(by_stage.values()):
            assert all(
                one.end <= two.start and one.requests == two.requests
                for one, two in zip(first, second, strict=True)
            )
        assert by_stage[0][3].end <= by_stage[3][0].end + 1e-9
        assert {number for box in busy if box.is_initiation for number in box.requests} == set(
            range(16)
        )


@pytest.mark.slow
def test_whole_batches_fill_the_pipeline_and_microbatches_do_not() -> None:
    """200 requests; the last ones leave stages idle (`tests/sim/test_executor.py` measures between them)."""
    gain = figure_8(Effort(requests=80))["gain"]["equal"]
    assert gain["orca"]["4"] > 3.4 and gain["chunked"]["4"] > 3.4
    assert gain["ft"]["4"] < 1.1


def test_cells_choose_among_all_requests_that_the_memory_holds() -> None:
    """Prompts of 40 and 50 tokens in turns: a batch of two cells of 40 exists only among more than two candidates."""
    one, other, place = Lengths(40, 4, 4), Lengths(50, 4, 4), Place("101B", n_workers=1)
    mixed = serve_system(
        parse_system("cells(2)", POLICIES), place, [one, other, one, other], [0.0] * 4
    )
    apart = serve_system(
        parse_system("cells(2)", POLICIES), place, [one, one, other, other], [0.0] * 4
    )
    assert max(mixed.ends) == pytest.approx(max(apart.ends), rel=1e-6)


def test_cells_of_one_token_take_prompts_token_by_token() -> None:
    place, one = Place("101B", n_workers=1), Lengths(40, 4, 4)
    whole, by_token = (
        serve_system(parse_system(name, POLICIES), place, [one], [0.0])
        for name in ("cells(2)", "token_cells(2)")
    )
    assert by_token.ends[0] - whole.ends[0] == pytest.approx(39 * place.cost.weights, rel=0.05)
