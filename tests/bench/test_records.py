"""Records of other engines and load generators: samples of their own runs, malformed ones, and bounds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orca_jax.timeline.read import encoded
from orca_jax.tools.bench.workload import entries
from orca_jax.tools.bench.workload.records import read_recording
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, simulate
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import Urgency

SAMPLES = Path(__file__).parents[1] / "fixtures" / "records"
LINE = {
    "input_toks": 9,
    "output_toks": 4,
    "queued_ts": 5.0,
    "first_token_ts": 5.5,
    "last_token_ts": 7,
}
"""A request as vLLM's recordings have it."""


@pytest.mark.parametrize(
    ("file", "form", "lengths"),
    [
        ("vllm_bench.jsonl", "vLLM's bench", [(77, 22), (67, 14), (61, 14)]),
        ("guidellm.json", "guidellm", [(79, 27), (52, 21), (48, 29)]),
        ("inference_perf.json", "inference-perf", [(62, 24), (77, 26), (87, 50)]),
        ("otel.jsonl", "OpenTelemetry", [(62, 24), (77, 26), (87, 50)]),
        ("mooncake.jsonl", "Mooncake", [(456, 6), (491, 63), (406, 67)]),
    ],
)
def test_records_of_runs_against_this_server(
    file: str, form: str, lengths: list[tuple[int, int]]
) -> None:
    found = read_recording(str(SAMPLES / file))
    assert found.form == form and found.num_left_out == 0
    assert [(each.num_input, each.num_output) for each in found.requests] == lengths
    assert found.requests == sorted(found.requests, key=lambda each: each.arrival)
    if form != "Mooncake":  # it has no times
        for each in found.requests:
            assert each.first_token is not None and each.latency is not None
            assert 0 < each.first_token <= each.latency < 1


def test_a_line_per_request(tmp_path: Path) -> None:
    later = {**LINE, "queued_ts": 4.0, "tenant": "a", "deadline": 3.0, "program": "p"}
    (path := tmp_path / "run").write_text(f"{json.dumps(LINE)}\n\n{json.dumps(later)}\n")
    first, second = read_recording(str(path)).requests
    assert (first.arrival, first.first_token, first.latency) == (4.0, 1.5, 3.0)
    assert first.urgency == Urgency(tenant="a", deadline=3.0, program="p")
    assert (second.arrival, second.first_token, second.latency) == (5.0, 0.5, 2.0)


def test_a_timeline_keeps_shared_pages_and_times(tmp_path: Path) -> None:
    prompt = list(range(10, 42))
    load = [SimulatedRequest(at, [*prompt, 50 + at], 3) for at in range(3)]
    cost = LinearCost(0.25, 0.0, 0.0)
    run = simulate("chunked", load, cost, enable_prefix_caching=True)
    (path := tmp_path / "timeline").write_bytes(encoded(run.lines))
    found = read_recording(str(path))
    assert (found.form, found.num_left_out) == ("timeline", 0)
    assert [each.blocks for each in found.requests] == [found.requests[0].blocks] * 3
    assert len(found.requests[0].blocks) == 2 and found.requests[0].block_size == 16
    for each in found.requests:
        assert (each.first_token, each.latency) == pytest.approx((0.25, 0.75))


def test_requests_without_a_token_are_left_out(tmp_path: Path) -> None:
    failed = {**LINE, "output_toks": 0}
    (path := tmp_path / "run").write_text(f"{json.dumps(LINE)}\n{json.dumps(failed)}\n")
    found = read_recording(str(path))
    assert (len(found.requests), found.num_left_out) == (1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"queued_ts": "now"}, "line 2: a time must be a number of seconds, got 'now'"),
        ({"queued_ts": float("nan")}, "line 2: a time must be"),
        ({"queued_ts": 6.0}, "line 2: the first token is 0.5 s before the arrival"),
        ({"last_token_ts": 5.25}, "line 2: the last token is before"),
        ({"input_toks": 1e9}, "line 2: a length must be a whole number"),
        ({"input_toks": -1}, "line 2: a length must not be negative"),
        ({"input_toks": 10**9}, "line 2: a length must be at most"),
        ({"input_toks": True}, "line 2: a length must be a whole number"),
        ({"deadline": -1}, "line 2: deadline must"),
    ],
)
def test_a_wrong_line_is_named(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    (path := tmp_path / "run").write_text(f"{json.dumps(LINE)}\n{json.dumps({**LINE, **change})}\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        read_recording(str(path))
    assert caught.value.param == "recorded" and str(path) in caught.value.message


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("inference_perf.json", lambda text: text[:-300], "line [0-9]+: "),
        ("inference_perf.json", lambda text: text.replace('input_tokens": 77', 'x": 1'), "line 38: there is no"),
        ("inference_perf.json", lambda text: "[" + "[" * 100_000, "is in no known form"),
        ("inference_perf.json", lambda text: text[:5] + '"start_time": ' + "[" * 10**5, "nested"),
        ("guidellm.json", lambda text: text[:-900], "line 1: "),
        ("guidellm.json", lambda text: text.replace('tokens": 79', 'tokens": []'), "line 1: a length must"),
        ("otel.jsonl", lambda text: text + "{\n", "line 2: "),
        ("otel.jsonl", lambda text: text.replace("startTimeUnixNano", "start"), "no startTimeUnixNano"),
        ("otel.jsonl", lambda text: '{"resourceSpans": {"a": 1}}', "line 1: "),
        ("vllm_bench.jsonl", lambda text: text.replace("[77, ", "["), "line 1: zip"),
        ("mooncake.jsonl", lambda text: text.replace('"hash_ids"', '"ids"'), "line 1 has no hash_ids"),
        ("mooncake.jsonl", lambda text: "", "is in no known form; known are Azure, Mooncake, vLLM"),
        ("mooncake.jsonl", lambda text: "\udcff" * 9, "cannot be read"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_named_by_file_and_line(
    file: str, change: Callable[[str], str], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    text = change((SAMPLES / file).read_text())
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=reason) as caught:
        read_recording(str(path))
    assert caught.value.param == "recorded" and str(path) in caught.value.message


def test_entries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MOST_CHARACTERS", 200)
    for file in ("vllm_bench.jsonl", "inference_perf.json"):
        with pytest.raises(ConfigError, match="it has more than 200 characters"):
            read_recording(str(SAMPLES / file))


def test_a_report_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_recording(str(SAMPLES / "guidellm.json"))
    monkeypatch.setattr(entries, "READ", 64)
    assert read_recording(str(SAMPLES / "guidellm.json")) == whole
