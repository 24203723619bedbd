"""The open loop against a real server with the toy model, and its flags."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_jax.helpers.reporting import need_matplotlib
from orca_jax.tools.bench.__main__ import main
from orca_jax.tools.bench.online.plot import plot_passes
from orca_jax.values.errors import ConfigError
from tests.bench.online.test_figures import VLLM
from tests.serve.running import Server, running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(
        "--max-num-seqs", "32", "--max-model-len", "4096", "--api-key", "k", api_key="k"
    ) as started:
        yield started


@pytest.mark.slow
def test_a_sweep_with_all_outputs(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    plot, saved = tmp_path / "rates.svg", tmp_path / "rates.json"
    flags = [
        "--request-rate",
        "40",
        "80",
        "--num-requests",
        "20",
        "--goodput",
        "ttft:20000",
        "e2el:60000",
    ]
    assert (
        main(
            ["online", "--base-url", server.url, *flags, "--plot", str(plot), "--save", str(saved)]
        )
        == 0
    )
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert json.loads(saved.read_text()) == result and "normalised latency" in plot.read_text()
    assert [figures["request_rate"] for figures in result["passes"]] == [40, 80]
    for figures in result["passes"]:
        assert figures.keys() >= VLLM | {
            "median_normalized_latency_ms",
            "p99_normalized_latency_ms",
        }
        assert (figures["completed"], figures["failed"], figures["warmup_requests"]) == (18, 0, 2)
        assert figures["other_output_lengths"] == figures["uncounted_by_server"] == 0
        assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
        assert (
            figures["median_ttft_ms"] <= figures["median_e2el_ms"]
            and figures["client_cpu_share"] > 0
        )
    assert result["uses_token_ids"] and result["ignores_eos"] and result["model_id"] == "preset:toy"
    assert "the first 2 warm up" in out and '"api_key"' not in out


def test_one_pass_has_its_figures_at_the_top(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = ["--base-url", f"{server.url}/v1", "--api-key", "k", "--num-requests", "5"]
    assert main(["online", *flags, "--endpoint", "chat", "--write-trace", str(trace)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["passes"] == [{name: result[name] for name in result["passes"][0]}]
    planned = [json.loads(line) for line in trace.read_text().splitlines()]
    assert result["total_output_tokens"] == sum(row["output_length"] for row in planned)
    assert main(["online", *flags, "--trace", "mooncake", "--trace-data", str(trace)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["total_output_tokens"] == result["total_output_tokens"]
    assert again["total_input_tokens"] == sum(row["input_length"] for row in planned)
    assert result["total_input_tokens"] == pytest.approx(again["total_input_tokens"], rel=0.1), (
        "text of about that length"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--base-url localhost:8000", "is not a URL such as http://localhost:8000"),
        ("--base-url ftp://localhost", "is not a URL"),
        ("--base-url http://h:99999", "is not a URL"),
        ("--base-url http://127.0.0.1:1", "base_url http://127.0.0.1:1 is not reachable"),
        ("--base-url http://h --goodput ttfft:5", "limits are ttft, tpot, e2el"),
        ("--base-url http://h --goodput ttft:soon", "ttft:500"),
        ("--base-url http://h --goodput ttft:1 ttft:2", "twice"),
        ("--base-url http://h --request-rate 0", "request_rate must be above 0"),
        ("--base-url http://h --timeout inf", "timeout must be finite"),
        ("--base-url http://h --duration 5", "finite --request-rate"),
        ("--base-url http://h --trace azure --burstiness 2", "burstiness"),
        ("--base-url http://h --burstiness 2", "burstiness needs a finite"),
        ("--base-url http://h --max-model-len 99", "max_model_len is for trace files"),
        ("--base-url http://h --request-rate 1 2 --write-trace x", "write_trace"),
        ("--base-url http://h --endpoint chat --prompts ids", "prompts must be text"),
        ("--base-url http://h --warmup-requests -1", "warmup_requests"),
        ("--base-url http://h --extra-body [", "extra_body is not valid JSON"),
        ("--base-url http://h --extra-body []", "extra_body is not a JSON object"),
        (
            "--base-url http://h --save /nowhere/x.json",
            "cannot be written: No such file or directory; check the path",
        ),
        ("--base-url http://h --plot .", "Is a directory; give a file"),
        ("--base-url http://h --trace mooncake", "trace_data"),
        ("--base-url http://h --model m --clients 3 --seed 1", "seed"),
        ("--request-rate 3", "request_rate needs --base-url"),
    ],
)
def test_wrong_flags_are_named(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["online", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_line_of_a_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 1}\n'
    )
    flags = ["--trace", "mooncake", "--trace-data", str(path), "--num-requests", "2"]
    assert main(["online", "--base-url", "http://h", *flags]) == 2
    assert "line 2 has no input_length" in capsys.readouterr().err


def test_keys_are_not_sent_in_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "two\r\nlines")
    assert main(["online", "--base-url", "http://h"]) == 2
    assert "OPENAI_API_KEY" in capsys.readouterr().err


def test_plots_need_matplotlib_and_a_known_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("normalized_latency", "ttft", "tpot")
    figures = {f"{kind}_{name}_ms": None for kind in ("median", "p90", "p99") for name in names}
    throughput = {"steady_request_throughput": None, "request_throughput": 1.0}
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_passes(str(tmp_path / "x.unknown"), [{**throughput, **figures}], "t")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        need_matplotlib()
