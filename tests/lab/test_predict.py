"""Predictions from timelines: a fit of many features, its errors, and a simulated run predicted exactly."""

import copy
import json
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.simulated.cost import FeatureCost
from lab.simulated.features import HELD_OUT, fit_features, iteration_errors
from lab.simulated.predict import PREDICTED, compared
from orca_jax.sim.cost import ALL_TOKENS
from orca_jax.timeline.measure import Timeline, figures
from orca_jax.tools.bench.replay import replay
from orca_jax.tools.timeline.fit import work_in
from orca_jax.values.errors import ConfigError
from tests.timeline.traced import ONE, TracedLab

TRUE = FeatureCost(
    {"launches": 1.0, "chunk_tokens": 0.05, "chunk_pairs": 0.01, "increments": 0.1, "context": 0.02}
)
REQUESTS = [(str(n), 3 + 7 * n % 23, 4 + 5 * n % 17) for n in range(24)]


def traced() -> TracedLab:
    lab = TracedLab(max_bs=4, shape=ONE._replace(budget=12))
    for request in REQUESTS:
        lab.add(*request)
    lab.run()
    return lab


@pytest.fixture(scope="module")
def run() -> Timeline:
    """A timeline with the device times of a known cost."""
    timeline = traced().timeline
    return replay(timeline, timeline.head.config, TRUE)


def test_the_fit_predicts_iterations_that_it_has_not_seen(run: Timeline) -> None:
    fit = fit_features(run)
    assert fit.held_out["iterations"] == len(run.iterations) // HELD_OUT
    assert fit.held_out["mean_abs_error"] < 1e-6 and fit.held_out["r_squared"] == pytest.approx(1)
    wrong = FeatureCost({"launches": 1.0})
    assert iteration_errors(wrong, run.iterations, ALL_TOKENS)["error_of_sum"] < -0.1, (
        "it leaves out most of the work"
    )


def test_a_simulated_run_is_predicted(run: Timeline) -> None:
    again = figures(replay(run, run.head.config, fit_features(run).cost))
    rows = compared(figures(run), again)
    assert all(abs(row["error"] or 0) < 1e-6 for row in rows.values())


def test_a_few_slow_iterations_bend_no_weight(run: Timeline) -> None:
    """Every tenth iteration takes 20 times as long: all predictions grow by one factor, that of the sum."""
    slow = copy.deepcopy(run)
    for iteration in slow.iterations[::10]:
        iteration.device *= 20
    fitted, true = fit_features(slow).cost, fit_features(run).cost
    factor = sum(each.device for each in slow.iterations) / sum(
        each.device for each in run.iterations
    )
    work = [work_in(each, ALL_TOKENS) for each in run.iterations]
    ratios = [fitted.stages(each, 1)[0] / true.stages(each, 1)[0] for each in work]
    assert ratios == pytest.approx([factor] * len(ratios), rel=0.05)


def test_a_short_timeline_is_refused(run: Timeline) -> None:
    with pytest.raises(ConfigError, match="at least"):
        fit_features(Timeline(run.head, run.arrivals, run.iterations[:5], run.ends))


def test_figures_of_zero_have_no_error() -> None:
    zeros = compared(dict.fromkeys(PREDICTED, 0.0), dict.fromkeys(PREDICTED, 1.0))
    assert {row["error"] for row in zeros.values()} == {None}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = traced()
    lab.writer.flush()
    path = tmp_path / "timeline.jsonl"
    path.write_bytes(b"".join(lab.parts))
    assert main(["predict", "--timeline", str(path), "--held-out", str(path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["iterations"]) == {"held_out_fifth", "held_out_timeline"}
    assert found["runs"]["requests_per_s"]["recorded"] > 0
