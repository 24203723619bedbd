"""Metrics and log lines of requests and of the engine, with a clock moved by the test."""

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from orca_jax.engine import EngineStats
from orca_jax.link.wire import Heartbeat
from orca_jax.serve.telemetry.instruments import Distribution
from orca_jax.serve.telemetry.metrics import END_REASONS, ENGINE_STATES, TWINS
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.values.request import RequestMetrics, RequestUpdate
from orca_jax.values.startup import EngineSummary, StartReport
from orca_jax.values.step import ExecutorStats

STATS = EngineStats(
    iterations=0,
    scheduled_requests=0,
    scheduled_tokens=0,
    schedule_seconds=0.0,
    update_seconds=0.0,
    wait_seconds=0.0,
    waiting=0,
    running=0,
    in_flight=0,
    preemptions=0,
    cache_queries=0,
    cache_hits=0,
    num_pages=100,
    free_pages=100,
    reserved_slots=0,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class PlayedClient:
    state: str = "ready"
    running: int = 0
    waiting: int = 0
    self_tests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    summary: EngineSummary | None = None


def samples(observer: ServerObserver) -> dict[str, float]:
    """The values of a scrape, by `name{label=value}`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(observer.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, f"{key} is published twice"
            found[key] = sample.value
    return found


def tokens(*ids: int, metrics: RequestMetrics | None = None) -> RequestUpdate:
    return RequestUpdate("r0", ids, "stop" if metrics else None, metrics=metrics)


def beat(
    phase: Any = "serving", executor: dict[str, Any] | None = None, **engine: Any
) -> Heartbeat:
    if phase != "serving":
        return Heartbeat(phase, 1.5)
    return Heartbeat(
        phase, 0.0, dataclasses.replace(STATS, **engine), ExecutorStats(**executor or {})
    )


# Requests of the engine.


def play_request(clock: Clock) -> ServerObserver:
    """A request of 7 prompt tokens: 0.2 s in the queue, 0.1 s of prefill, three more tokens in 0.052 s."""
    observer = ServerObserver(ServerConfig(served_model_name=("m",)), clock=clock)
    record = observer.begin("req_a", "/v1/completions", 7)
    clock.now += 0.3
    record.take_update(tokens(1))
    clock.now += 0.012
    record.take_update(tokens(2))
    clock.now += 0.04
    record.take_update(
        tokens(
            3,
            4,
            metrics=RequestMetrics(arrival=5.0, first_scheduled=5.2, first_token=5.3, finished=5.4),
        )
    )
    record.end("stop")
    return observer


def test_times_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        observer = play_request(Clock())
    (line,) = caplog.records
    shown = {name: getattr(line, name) for name in ("request_id", "endpoint", "finish_reason")}
    assert shown == {"request_id": "req_a", "endpoint": "/v1/completions", "finish_reason": "stop"}
    figures = [
        line.prompt_tokens,
        line.completion_tokens,
        line.queue_ms,
        line.ttft_ms,
        line.duration_ms,
    ]
    assert figures == pytest.approx([7, 4, 200, 300, 352])
    assert line.tokens_per_s == pytest.approx(3 / 0.052, rel=1e-3)
    found = samples(observer)
    gaps = "orca_jax_inter_token_latency_seconds"
    assert found[f"{gaps}_count"] == 3
    assert found[f"{gaps}_sum"] == pytest.approx(0.052)
    assert [
        found[f"{gaps}_bucket{{le={le}}}"] for le in ("0.01", "0.015", "0.02", "0.03", "+Inf")
    ] == [0, 1, 3, 3, 3]
    for name, value in (
        *(
            ("time_to_first_token", 0.3),
            ("e2e_request_latency", 0.352),
            ("request_queue_time", 0.2),
        ),
        *(
            ("request_prefill_time", 0.1),
            ("request_decode_time", 0.052),
            ("request_inference_time", 0.152),
        ),
        ("request_time_per_output_token", 0.052 / 3),
    ):
        assert found[f"orca_jax_{name}_seconds_count"] == 1
        assert found[f"orca_jax_{name}_seconds_sum"] == pytest.approx(value)
    assert (found["orca_jax_prompt_tokens_total"], found["orca_jax_generation_tokens_total"]) == (
        7,
        4,
    )


def test_line_of_a_choice_has_the_calls_id(caplog: pytest.LogCaptureFixture) -> None:
    """All log lines of a call carry its `x-request-id`."""
    observer = ServerObserver(ServerConfig())
    with caplog.at_level(logging.INFO):
        with structlog.contextvars.bound_contextvars(request_id="call"):
            records = [observer.begin(name, "/v1/completions", 1) for name in ("call", "call-0")]
        for record in records:
            record.end("abort")  # later, and perhaps in another task
    assert [(line.request_id, getattr(line, "choice_id", None)) for line in caplog.records] == [
        ("call", None),
        ("call", "call-0"),
    ]


@pytest.mark.parametrize("reason", END_REASONS)
def test_ends_count_once(reason: str) -> None:
    observer = ServerObserver(ServerConfig())
    record = observer.begin("req_a", "/v1/completions", 7)
    record.end(reason)
    record.end("stop")
    found = samples(observer)
    ended = {
        key: value
        for key, value in found.items()
        if key.startswith("orca_jax_request_success_total")
    }
    assert len(ended) == len(END_REASONS), "a reason that has not occurred is 0, not absent"
    assert {key for key, value in ended.items() if value} == {
        f"orca_jax_request_success_total{{finished_reason={reason}}}"
    }
    complete = reason in ("stop", "length", "tool_calls")
    assert found["orca_jax_e2e_request_latency_seconds_count"] == complete
    assert found["orca_jax_prompt_tokens_total"] == 0, "the request never got a token"


def test_unknown_reason_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="is not one of"):
        ServerObserver(ServerConfig()).begin("a", "/v1/completions", 1).end("anything else")


def test_log_line_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    observer = ServerObserver(ServerConfig(log_requests=False))
    with caplog.at_level(logging.INFO):
        observer.begin("req_a", "/v1/completions", 7).end("stop")
    assert not caplog.records
    assert samples(observer)["orca_jax_request_success_total{finished_reason=stop}"] == 1


def test_updates_without_tokens_are_no_tokens() -> None:
    observer = ServerObserver(ServerConfig())
    record = observer.begin("a", "/v1/completions", 7)
    record.take_update(RequestUpdate("r0", ()))
    record.take_update(RequestUpdate("r0", (), "error", "no finite logits"))
    record.end("error")
    found = samples(observer)
    assert (
        found["orca_jax_generation_tokens_total"],
        found["orca_jax_time_to_first_token_seconds_count"],
    ) == (0, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 4)), max_size=30))
def test_distribution_counts_as_prometheus_defines(values: list[tuple[float, int]]) -> None:
    class Family:
        def add_metric(
            self, labels: Any, buckets: list[tuple[str, float]], sum_value: float
        ) -> None:
            self.buckets, self.sum = buckets, sum_value

    distribution, family = Distribution((0.5, 1, 10)), Family()
    for value, times in values:
        distribution.observe(value, times)
    distribution.add_to(family, ())  # type: ignore[arg-type]
    for bound, count in family.buckets:
        assert count == sum(times for value, times in values if value <= float(bound))
    assert family.sum == pytest.approx(sum(value * times for value, times in values))


# The engine, by its heartbeats.


def test_heartbeats() -> None:
    observer = ServerObserver(ServerConfig())
    engine = {"running": 3, "waiting": 2, "free_pages": 75, "preemptions": 4, "iterations": 10}
    engine |= {
        "cache_queries": 50,
        "cache_hits": 20,
        "group_blocks": (20, 5),
        "state_blocks": (3, 8, 1),
    }
    seconds = {"schedule_seconds": 0.1, "update_seconds": 0.2}
    executor = {
        **{
            "tokens": 50,
            "padding_tokens": 6,
            "compiles": 8,
            "compiles_while_serving": 1,
            "launches": 11,
        },
        **{"pack_seconds": 0.3, "dispatch_seconds": 9.0, "wait_seconds": 2.0, "idle_seconds": 0.5},
    }
    observer.heartbeat(beat(executor=executor, **engine, **seconds))
    found = samples(observer)
    expected = {
        **{"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25},
        **{
            "kv_pages_used": 25,
            "kv_pages": 100,
            "num_preemptions_total": 4,
            "iterations_total": 10,
        },
        **{"prefix_cache_queries_total": 50, "prefix_cache_hits_total": 20},
        **{"kv_group_blocks{group=0}": 20, "kv_group_blocks{group=1}": 5},
        **{
            "kv_state_blocks{use=requests}": 3,
            "kv_state_blocks{use=snapshots}": 8,
            "kv_state_blocks{use=unused}": 1,
        },
        **{
            "iteration_tokens_total": 50,
            "padding_tokens_total": 6,
            "compiles_total": 8,
            "launches_total": 11,
        },
        **{
            "compiles_while_serving_total": 1,
            "host_seconds_per_iteration": 0.06,
            "engine_restarts_total": 0,
        },
        **{"engine_seconds_total{part=dispatch}": 9.0, "engine_seconds_total{part=wait}": 2.0},
        "device_idle_seconds_total": 0.5,
        "engine_state{state=ready}": 1,
    }
    assert {name: found[f"orca_jax_{name}"] for name in expected} == pytest.approx(expected)


def test_proposals_have_names_of_vllm() -> None:
    """Totals continue after a restart; without a proposal there are no samples."""
    observer = ServerObserver(ServerConfig(served_model_name=("m",)))
    observer.heartbeat(beat(iterations=1))
    assert not [name for name in samples(observer) if "spec_decode" in name]
    counts = {
        "spec_decode_drafts": 4,
        "spec_decode_draft_tokens": 12,
        "spec_decode_accepted_tokens": 7,
    }
    observer.heartbeat(beat(iterations=3, **counts, spec_decode_accepted_per_pos=(4, 2, 1)))
    observer.heartbeat(beat("loading"))
    observer.heartbeat(beat(iterations=1, **counts, spec_decode_accepted_per_pos=(4, 3)))
    found = {
        name.removeprefix("vllm:spec_decode_num_"): value
        for name, value in samples(observer).items()
    }
    expected = {
        "drafts_total{engine=0,model_name=m}": 8,
        "draft_tokens_total{engine=0,model_name=m}": 24,
    }
    expected["accepted_tokens_total{engine=0,model_name=m}"] = 14
    per_pos = {0: 8, 1: 5, 2: 1}
    expected |= {
        f"accepted_tokens_per_pos_total{{engine=0,model_name=m,position={k}}}": v
        for k, v in per_pos.items()
    }
    assert {name: found.get(name) for name in expected} == expected


def test_gateway_finds_its_names() -> None:
    observer = ServerObserver(ServerConfig(served_model_name=("m", "alias")))
    observer.heartbeat(beat(running=3, waiting=2, free_pages=50))
    found = samples(observer)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [found[f"vllm:{name}{{engine=0,model_name=m}}"] for name in names] == [3, 2, 0.5]


def test_a_name_of_vllm_has_the_samples_of_ours() -> None:
    observer = play_request(Clock())
    work = {"scheduled_tokens": 41, "plans_by_tokens": (1, 0, 0, 2)}
    busy = beat(
        preemptions=2, cache_queries=9, cache_hits=4, waiting=1, running=2, free_pages=50, **work
    )
    observer.heartbeat(busy)
    found = samples(observer)
    for ours, twins in TWINS.items():
        own = {
            key: value
            for key, value in found.items()
            if re.match(rf"orca_jax_{ours}(_bucket|_sum|_count)?({{|$)", key)
        }
        assert any(own.values()), ours
        for twin, labels in twins.items():
            theirs = {
                key: value
                for key, value in found.items()
                if re.match(rf"vllm:{twin}(_bucket|_sum|_count)?{{", key)
            }
            assert list(theirs.values()) == list(own.values())
            assert all(f"{name}={value}" in key for key in theirs for name, value in labels.items())
    assert found["vllm:request_success_total{engine=0,finished_reason=stop,model_name=m}"] == 1


def test_iterations_are_counted_by_their_tokens() -> None:
    observer = ServerObserver(ServerConfig(served_model_name=("m",)))
    # the last one is of a new engine
    for counts, total in (((1,), 1), ((1, 0, 0, 2), 41), ((1,), 1)):
        observer.heartbeat(
            beat(iterations=sum(counts), scheduled_tokens=total, plans_by_tokens=counts)
        )
    found = samples(observer)
    name, labels = "vllm:iteration_tokens_total", "engine=0,model_name=m"
    assert found[f"{name}_count{{{labels}}}"] == 4 and found[f"{name}_sum{{{labels}}}"] == 42
    below = [
        found[f"{name}_bucket{{engine=0,le={bound}.0,model_name=m}}"]
        for bound in (1, 8, 16, 32, 64)
    ]
    assert below == [2, 2, 2, 4, 4]


def test_names_of_earlier_versions_of_vllm() -> None:
    observer = play_request(Clock())
    observer.heartbeat(beat(free_pages=25))
    found = samples(observer)
    labels = "{engine=0,model_name=m}"
    assert found[f"vllm:gpu_cache_usage_perc{labels}"] == 0.75
    assert found[f"vllm:time_per_output_token_seconds_count{labels}"] == 3


def test_client_knows_better_than_an_old_heartbeat() -> None:
    clock, client = Clock(), PlayedClient()
    observer = ServerObserver(ServerConfig(), clock=clock)
    observer.follow(client)
    observer.heartbeat(beat(running=1, waiting=1, free_pages=50))
    client.running, client.waiting, client.state = 5, 6, "hung"
    clock.now += 4
    found = samples(observer)
    assert (
        found["orca_jax_num_requests_running"],
        found["vllm:num_requests_waiting{engine=0,model_name=demo}"],
    ) == (
        5,
        6,
    )
    assert found["orca_jax_engine_heartbeat_age_seconds"] == 4
    states = {state: found[f"orca_jax_engine_state{{state={state}}}"] for state in ENGINE_STATES}
    assert [state for state, value in states.items() if value] == ["hung"]
    client.state = "dead"
    assert samples(observer)["orca_jax_kv_pages_used"] == 0


def test_results_of_the_attention_kernels_are_those_of_the_last_start() -> None:
    client = PlayedClient()
    observer = ServerObserver(ServerConfig())
    observer.follow(client)

    def found() -> dict[str, float]:
        return {key: value for key, value in samples(observer).items() if "self_test" in key}

    assert not found()
    client.self_tests = {"gpu": "wrong", "triton": "ok"}
    assert found() == {
        "orca_jax_attention_self_test{implementation=gpu,result=wrong}": 1,
        "orca_jax_attention_self_test{implementation=triton,result=ok}": 1,
    }
    client.self_tests = {"gpu": "ok"}
    assert found() == {"orca_jax_attention_self_test{implementation=gpu,result=ok}": 1}


def test_settings_and_times_are_those_of_the_last_start() -> None:
    client = PlayedClient()
    observer = ServerObserver(ServerConfig())
    observer.follow(client)
    parts = ("engine_info", "token_budget", "orca_jax_start_", "cache_config")

    def found() -> dict[str, float]:
        return {
            key: value
            for key, value in samples(observer).items()
            if any(part in key for part in parts)
        }

    assert found() == {"orca_jax_token_budget": 0, "orca_jax_start_total_seconds": 0}, (
        "before the first start"
    )
    for dtype, seconds in (("bfloat16", 9.0), ("float32", 4.0)):
        start = StartReport({"import": 1.5, "compile": seconds}, 8.0, 16, 12)
        pages = 100 + int(seconds)
        client.summary = EngineSummary(
            64, 1000, 15, 128, "chunked", start, "cpu", 2, dtype, dtype, "xla", 16, pages
        )
    assert found() == {
        "orca_jax_engine_info{attention=xla,device=cpu,dtype=float32,kv_cache_dtype=float32,num_devices=2,"
        "scheduler=chunked}": 1,
        "orca_jax_token_budget": 128,
        "orca_jax_start_total_seconds": 8,
        "orca_jax_start_seconds{phase=import}": 1.5,
        "orca_jax_start_seconds{phase=compile}": 4,
        "orca_jax_start_programs{source=compiled}": 4,
        "orca_jax_start_programs{source=cache}": 12,
        "vllm:cache_config_info{block_size=16,cache_dtype=float32,enable_prefix_caching=False,engine=0,"
        "gpu_memory_utilization=0.9,kv_cache_size_tokens=1000,num_gpu_blocks=104,num_gpu_blocks_override=None}": 1,
    }


def test_totals_go_on_over_restarts() -> None:
    observer = ServerObserver(ServerConfig())
    for message in (
        beat("loading"),
        beat("compiling"),
        beat(iterations=10, preemptions=1),
        beat(iterations=15, preemptions=1),
        beat("loading"),
        beat("compiling"),
        beat(iterations=20, preemptions=2),
        beat(iterations=3, preemptions=2),  # a new engine whose first heartbeats were lost
    ):
        observer.heartbeat(message)
    found = samples(observer)
    assert found["orca_jax_iterations_total"] == 15 + 20 + 3
    assert found["orca_jax_num_preemptions_total"] == 1 + 2 + 2
    assert found["orca_jax_engine_restarts_total"] == 2


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(0, 9), max_size=20))
def test_totals_never_fall(steps: list[int | None]) -> None:
    """In `steps`, None means that the engine died and another one starts."""
    observer, total, before, expected = ServerObserver(ServerConfig()), 0, 0.0, 0
    for step in steps:
        if step is None:
            total = 0
            observer.heartbeat(beat("loading"))
        else:
            total, expected = total + step, expected + step
            observer.heartbeat(beat(iterations=total, executor={"tokens": total}))
        (sample,) = observer.metrics.engine.totals["iterations"].family().samples
        now = sample.value
        assert before <= now == expected
        before = now
