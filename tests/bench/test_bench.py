"""Benchmarks on the toy engine: the workload is that of the paper, figures add up, and the last line is JSON."""

import json

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.helpers.reporting import percentile
from orca_jax.tools.bench import measure
from orca_jax.tools.bench.__main__ import main
from orca_jax.tools.bench.measure import PassResult, run_workload, summarize
from orca_jax.tools.bench.workload.generate import WorkloadRequest, make_workload
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError

REQUIRED = {
    "output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "median_normalized_latency_ms", "p99_ttft_ms",
    "median_itl_ms", "p99_itl_ms", "iterations", "mean_batch_size", "padding_fraction", "compiles_while_serving",
    "host_ms_per_iteration", "hardware", "config",
}  # fmt: skip


def test_nothing_is_warmed_up_with_more_tokens_than_the_workload_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The workload may fill the context of the model."""
    ran: list[WorkloadRequest] = []
    monkeypatch.setattr(measure, "run_workload", lambda engine, workload: ran.extend(workload))
    workload = [WorkloadRequest(0.0, (1,) * length, length // 2) for length in (4, 100)]
    with build_engine(EngineConfig(model="preset:toy")) as built:
        measure.warm_up(built.engine, workload)
    assert [(len(request.prompt_ids), request.num_output) for request in ran] == [(4, 2), (64, 4)]


def test_the_workload_is_that_of_the_paper() -> None:
    trace = make_workload("orca", num_requests=2000, vocab_size=100, seed=0, rate=4.0)
    inputs = [len(request.prompt_ids) for request in trace]
    outputs = [request.num_output for request in trace]
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (32, 512, 1, 128)
    assert sum(inputs) / 2000 == pytest.approx(272, rel=0.03)
    assert sum(outputs) / 2000 == pytest.approx(64.5, rel=0.03)
    assert trace[-1].arrival / 1999 == pytest.approx(1 / 4.0, rel=0.1)
    assert all(0 <= token < 100 for request in trace for token in request.prompt_ids)


def test_lengths_depend_on_the_seed_and_not_on_the_rate() -> None:
    def lengths(seed: int, rate: float | None) -> list[tuple[int, int]]:
        trace = make_workload("orca", num_requests=20, vocab_size=100, seed=seed, rate=rate)
        return [(len(request.prompt_ids), request.num_output) for request in trace]

    assert lengths(0, None) == lengths(0, 3.0) != lengths(1, None)
    assert {
        r.arrival for r in make_workload("orca", num_requests=5, vocab_size=9, seed=0, rate=None)
    } == {0.0}


@pytest.mark.parametrize(
    ("change", "param"),
    [({"name": "gone"}, "trace"), ({"num_requests": 0}, "num_requests"), ({"rate": 0.0}, "rate")],
)
def test_workloads_with_wrong_settings(change: dict[str, object], param: str) -> None:
    settings = {
        "name": "orca",
        "num_requests": 1,
        "vocab_size": 9,
        "seed": 0,
        "rate": None,
        **change,
    }
    with pytest.raises(ConfigError) as error:
        make_workload(**settings)  # type: ignore[arg-type]
    assert error.value.param == param


def test_one_prompt_in_eight_is_long_in_the_mix() -> None:
    trace = make_workload("orca-long", num_requests=2000, vocab_size=100, seed=0, rate=None)
    inputs = [len(request.prompt_ids) for request in trace]
    long = [length for length in inputs if length > 512]
    assert (min(long), max(long), min(inputs)) == (768, 896, 32)
    assert len(long) / 2000 == pytest.approx(1 / 8, rel=0.1)
    assert max(len(request.prompt_ids) + request.num_output for request in trace) <= 1024, (
        "GPT-2's positions"
    )


def test_inter_token_latencies_by_hand() -> None:
    run = PassResult(9.0, (), (), [[1.0, 3.0, 3.0], [2.0], [5.0, 6.5]], {})
    assert run.gaps == [2.0, 0.0, 1.5]


def test_every_token_has_its_time() -> None:
    built = build_engine(EngineConfig(model="preset:toy", scheduler="chunked", max_num_seqs=4))
    run = run_workload(
        built.engine, make_workload("orca", num_requests=6, vocab_size=257, seed=0, rate=None)
    )
    assert [len(times) for times in run.token_times] == [
        request.num_output for request in run.workload
    ]
    for times, metrics in zip(run.token_times, run.metrics, strict=True):
        assert (
            times == sorted(times)
            and metrics.first_token <= times[0]
            and metrics.finished <= times[-1]
        )
    assert summarize(run)["p99_itl_ms"] == pytest.approx(1e3 * percentile(run.gaps, 99))


def test_percentiles_by_hand() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(1, 201)], 99) == 198.0
    assert percentile([7.0], 99) == 7.0


def test_offline_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["offline", "--model", "preset:toy", "--num-requests", "12", "--max-num-seqs", "4"])
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result.keys() >= REQUIRED
    trace = make_workload("orca", num_requests=12, vocab_size=257, seed=0, rate=None)
    outputs = sum(request.num_output for request in trace)
    assert result["output_tokens_per_s"] * result["wall_s"] == pytest.approx(outputs)
    assert result["mean_batch_size"] * result["iterations"] == pytest.approx(outputs), (
        "one token per member and iteration"
    )
    assert result["compiles_while_serving"] == 0 and result["token_budget"] == 2048


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offline", "--model", "preset:none"]) == 2
    assert "unknown preset" in capsys.readouterr().err
