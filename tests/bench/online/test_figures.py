"""Figures by hand, under vLLM's names."""

import pytest

from orca_jax.tools.bench.online.answers import CallOutcome
from orca_jax.tools.bench.online.figures import (
    client_figures,
    figures,
    is_good,
    most_at_once,
    statistics_ms,
    steady_figures,
    tpot,
    warnings,
)
from orca_jax.tools.bench.workload.generate import WorkloadRequest

# The keys of `vllm bench serve --save-result` for completed requests, with its default percentile.
VLLM = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip

PLANNED = [
    WorkloadRequest(0.0, (1,) * 10, 3),
    WorkloadRequest(1.0, (1,) * 20, 1),
    WorkloadRequest(2.0, (1,), 5),
]
OUTCOMES = [
    # the server counts two more input tokens
    CallOutcome(0.0, 0.0, 0.1, 4.0, [1.0, 2.0, 4.0], 12, 3),
    CallOutcome(1.0, 1.5, 1.6, 3.5, [3.5]),
    CallOutcome(2.0, 2.0, None, 5.0, failure="timeout", detail="after 3 s"),
]


def test_figures_by_hand() -> None:
    result = figures(PLANNED, OUTCOMES, {"ttft": 1500.0, "tpot": 1500.0})
    assert result.keys() >= VLLM
    assert (result["completed"], result["failed"], result["errors"]) == (2, 1, {"timeout": 1})
    assert result["error_examples"] == {"timeout": "after 3 s"}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 + 20, 3 + 1)
    assert result["duration"] == 5.0 and result["request_throughput"] == 2 / 5
    assert result["output_throughput"] == 4 / 5 and result["total_token_throughput"] == 36 / 5
    assert result["request_goodput"] == 1 / 5, "the second request's first token came after 2 s"
    assert result["mean_ttft_ms"] == 1500 and result["std_ttft_ms"] == 500
    assert result["p99_ttft_ms"] == pytest.approx(1990), "interpolated, as in numpy"
    assert result["median_tpot_ms"] == 1500, "(4 - 1) / 2; a single token has none"
    assert result["mean_itl_ms"] == 1500 and result["std_itl_ms"] == 500
    assert result["mean_e2el_ms"] == 3000
    assert result["median_normalized_latency_ms"] == pytest.approx((4000 / 3 + 2000) / 2)
    assert result["max_concurrent_requests"] == 3 and result["uncounted_by_server"] == 1


def test_a_wrong_output_length_is_counted() -> None:
    assert (
        figures(PLANNED[2:], [CallOutcome(0.0, 0.0, 0.0, 2.0, [1.0, 2.0])], {})[
            "other_output_lengths"
        ]
        == 1
    )


def test_without_completed_requests_latencies_are_unknown() -> None:
    result = figures(PLANNED[2:], OUTCOMES[2:], {})
    assert result["mean_ttft_ms"] is None and result["p99_normalized_latency_ms"] is None
    assert (
        result["request_throughput"] == 0
        and result["request_goodput"] is None
        and result.keys() >= VLLM
    )


def test_goodput_needs_every_limit() -> None:
    first = OUTCOMES[0]
    assert is_good(first, {"ttft": 1000, "tpot": 1500, "e2el": 4000})
    for name, limit in (("ttft", 999), ("tpot", 1499), ("e2el", 3999)):
        assert not is_good(first, {name: limit})
    assert tpot(OUTCOMES[1]) == 0


def test_the_steady_part_ends_with_the_last_arrival() -> None:
    calls = [
        # warms up; 2 of its tokens fall into the part
        CallOutcome(0, 0.0, 0, 1.5, [0.5, 1.5], None, 4),
        CallOutcome(0, 1.0, 0, 2.0, [2.0]),
        CallOutcome(0, 1.5, 0, 2.5, failure="timeout"),
        CallOutcome(0, 3.0, 0, 5.0, [4.0, 5.0]),
    ]
    assert steady_figures(calls, 1) == {
        "steady_request_throughput": 2 / 2,
        "steady_output_throughput": 3 / 2,
    }
    assert set(steady_figures(calls[:1], 0).values()) == {None}


def test_calls_that_touch_are_not_concurrent() -> None:
    assert (
        most_at_once(
            [CallOutcome(0, 0.0, 0, 1.0), CallOutcome(0, 1.0, 0, 2.0), CallOutcome(0, 1.5, 0, 3.0)]
        )
        == 2
    )


def test_the_client_reports_its_own_lateness() -> None:
    client = client_figures(OUTCOMES, 0.25)
    assert client["median_send_lateness_ms"] == 0 and client[
        "p99_send_lateness_ms"
    ] == pytest.approx(490)
    assert client["median_connect_ms"] == pytest.approx(100) and client["client_cpu_share"] == 0.25
    assert statistics_ms("x", [0.001])["p90_x_ms"] == 1


@pytest.mark.parametrize(
    ("changes", "is_burst", "found"),
    [
        ({}, False, ""),
        ({"p99_send_lateness_ms": 51.0}, False, "bottleneck"),
        ({"p99_send_lateness_ms": 51.0}, True, ""),
        ({"client_cpu_share": 0.9}, True, "bottleneck"),
        ({"failed": 2, "error_examples": {"timeout": "late"}}, False, "timeout"),
        ({"other_output_lengths": 1}, False, "ignore_eos"),
        ({"uncounted_by_server": 1}, False, "usage"),
    ],
)
def test_doubts_are_said(changes: dict[str, object], is_burst: bool, found: str) -> None:
    good = {
        "p99_send_lateness_ms": 1.0, "client_cpu_share": 0.1, "failed": 0, "error_examples": {},
        "other_output_lengths": 0, "uncounted_by_server": 0,
    }  # fmt: skip
    said = warnings({**good, **changes}, is_burst, ignores_eos=True)  # type: ignore[arg-type]
    assert len(said) == bool(found) and all(found in warning for warning in said)
