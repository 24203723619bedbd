"""The comparison of schedulers on the toy engine: contestants, independence of passes, and the picture."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.tools.bench.__main__ import main
from orca_jax.tools.bench.load_plot import plot_loads
from orca_jax.tools.bench.measure import reschedule, run_workload
from orca_jax.tools.bench.schedulers import parse_contestants
from orca_jax.tools.bench.workload.generate import make_workload
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError

TOY = ["--model", "preset:toy", "--num-requests", "4", "--max-num-seqs", "2"]


@pytest.mark.slow
def test_iteration_level_needs_fewer_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["request_level", "orca", "chunked --max-num-batched-tokens 64"]
    path = tmp_path / "sweep.svg"
    assert (
        main(["schedulers", *TOY, "--load", "5", "--schedulers", *names, "--plot", str(path)]) == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    saturated, loaded = result["loads"]
    assert list(saturated["results"]) == list(loaded["results"]) == names
    baseline, orca, chunked = saturated["results"].values()
    assert orca["iterations"] < baseline["iterations"]
    assert chunked["iterations"] > orca["iterations"], (
        "prompts of up to 512 tokens take several iterations of 64"
    )
    assert (saturated["rate"], loaded["load"]) == (None, 5)
    assert loaded["rate"] == pytest.approx(5 * baseline["requests_per_s"])
    again = tmp_path / "again.svg"
    (tmp_path / "line.json").write_text(json.dumps(result))
    assert main(["schedulers", "--redraw", str(tmp_path / "line.json"), "--plot", str(again)]) == 0
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())
    assert again.read_bytes() == path.read_bytes(), "equal figures are equal files"
    assert texts[-4:] == [*names, "saturation of request_level"], (
        "the legend has the order of schedulers"
    )
    assert "time to first token, largest of 4, ms (log)" in texts


def test_contestants_are_named_with_their_flags() -> None:
    config = EngineConfig(model="preset:toy", max_num_batched_tokens=128)
    contestants = parse_contestants(
        ["orca", "chunked --no-overlap --max-num-batched-tokens 64"], config
    )
    orca, chunked = contestants.values()
    assert (orca.scheduler, orca.max_num_batched_tokens, orca.model) == ("orca", 128, "preset:toy")
    assert (chunked.scheduler, chunked.overlap, chunked.max_num_batched_tokens) == (
        "chunked",
        False,
        64,
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fastest"], "fastest"),
        (["orca --quick"], "--quick"),
        (["orca", "orca"], "twice"),
        (["orca --page-size 8"], "page_size"),
    ],
)
def test_wrong_contestants(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_contestants(words, EngineConfig())


def test_a_new_pool_finds_no_pages_of_an_earlier_pass() -> None:
    config = EngineConfig(model="preset:toy", scheduler="chunked", max_num_seqs=2)
    built = build_engine(config)
    trace = make_workload("orca", num_requests=3, vocab_size=257, seed=0, rate=None)
    hits = []
    for is_new in (False, False, True):
        if is_new:
            reschedule(built, config)
        hits.append(run_workload(built.engine, trace).figures["cache_hits"])
    assert hits[0] == hits[2] == 0 < hits[1]


def test_a_budget_beyond_the_largest_launch() -> None:
    built = build_engine(EngineConfig(model="preset:toy"))
    with pytest.raises(ConfigError, match="largest launch"):
        reschedule(
            built,
            EngineConfig(model="preset:toy", scheduler="chunked", max_num_batched_tokens=1 << 20),
        )


class FixedLoad(NamedTuple):
    load: float | None
    rate: float | None
    results: dict[str, dict[str, float]]


@pytest.mark.parametrize(
    ("name", "rate", "why"), [("a.png", None, "rates"), ("a.txt", 1.0, "written")]
)
def test_pictures_that_fail(name: str, rate: float | None, why: str, tmp_path: Path) -> None:
    figures = dict.fromkeys(
        ("output_tokens_per_s", "median_normalized_latency_ms", "p99_ttft_ms", "p99_itl_ms"), 1.0
    )
    with pytest.raises(ConfigError, match=why):
        plot_loads(str(tmp_path / name), [FixedLoad(1.0, rate, {"orca": figures})], "title", 4)
