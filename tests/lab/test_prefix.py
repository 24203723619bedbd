"""The engine has the hits of an LRU cache of its pages; misses are counted by reason."""

import json
import random
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.prefix_hits import Admissions, count_missed, num_common, possible_hits
from orca_jax.assembly.engine import build_engine
from orca_jax.tools.bench.measure import run_workload
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import EngineConfig


def request(text: str, num_output: int = 1) -> WorkloadRequest:
    return WorkloadRequest(0.0, tuple(text.encode()), num_output)


def test_common_beginnings() -> None:
    assert [num_common("abc", other) for other in ("", "b", "ab", "abd", "abcd")] == [0, 0, 2, 2, 3]


@pytest.mark.parametrize(
    ("texts", "num_pages", "hits"),
    [
        (["aabbcc", "aabbdd"], 9, 4),
        (["aabbcc", "aabbcc"], 9, 5),  # the last token is computed
        (["aabbc", "aabbd"], 9, 4),
        (["aabbcd", "ccbb"], 9, 0),
        (["aabbcc", "aabbccx"], 9, 6),
        (["aabbcc", "xxyyzz", "aabbcc"], 6, 5),
        (["aabbcc", "xxyyzz", "aabbcc"], 5, 4),  # cc, the oldest, is evicted
        (["aabbcc", "xxyyzz", "aabbcc"], 4, 2),
        (["aabbcc", "xxyyzz", "aabbcc"], 3, 0),
    ],
)
def test_possible_hits_by_hand(texts: list[str], num_pages: int, hits: int) -> None:
    assert possible_hits([request(text) for text in texts], 2, num_pages) == hits


def test_generated_tokens_take_memory_too() -> None:
    trace = [request("aabb"), request("x", num_output=4), request("aabbc")]
    assert [possible_hits(trace, 2, num_pages) for num_pages in (4, 3)] == [4, 2], (
        "x and three of its four are 2 pages"
    )


def conversations(seed: int) -> list[WorkloadRequest]:
    """Turns of a few conversations in random order; each turn begins with all earlier turns of its conversation."""
    chance = random.Random(seed)
    histories = [chance.choices(range(256), k=20) for _ in range(6)]
    trace = []
    for _ in range(40):
        history = chance.choice(histories)
        history += chance.choices(range(256), k=chance.randint(1, 30))
        trace.append(WorkloadRequest(0.0, tuple(history), chance.randint(1, 6)))
    return trace


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [80, 200, 2000])
def test_in_order_the_engine_finds_all_possible_hits(num_pages: int, overlap: bool) -> None:
    trace = conversations(num_pages)
    config = EngineConfig(
        model="preset:toy", scheduler="chunked", max_num_seqs=1, page_size=8, num_pages=num_pages, max_model_len=640,
        overlap=overlap, max_num_batched_tokens=64,
    )  # fmt: skip
    found = run_workload(build_engine(config).engine, trace).figures["cache_hits"]
    assert found == possible_hits(trace, 8, num_pages) > 0


def test_misses_are_evicted_or_in_flight() -> None:
    trace = conversations(1)
    for num_rows, num_pages in ((1, 60), (4, 60), (4, 2000)):
        config = EngineConfig(
            model="preset:toy", scheduler="chunked", max_num_seqs=num_rows, page_size=8, num_pages=num_pages,
            max_model_len=400,
        )  # fmt: skip
        engine = build_engine(config).engine
        admissions = Admissions()
        with engine.observed_by(admissions):
            found = run_workload(engine, trace).figures["cache_hits"]
        missed = count_missed(trace, 8, admissions)
        assert found + sum(missed) == possible_hits(trace, 8, 1 << 20), "all shared tokens"
        assert (missed.in_flight > 0) == (num_rows > 1) and (missed.evicted > 0) == (
            num_pages < 2000
        )


def test_prefix_ends_with_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": n, "input_length": 1024, "output_length": 32, "hash_ids": [0, n % 2]}
        for n in range(1, 7)
    ]
    path = tmp_path / "data"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    flags = [
        "--trace-data",
        str(path),
        "--num-requests",
        "6",
        "--length-scale",
        "0.03125",
        "--max-num-seqs",
        "1",
    ]
    assert main(["prefix", "--model", "preset:toy", *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        result["hit_rate"]
        == result["possible_hit_rate_in_order"]
        == pytest.approx((16 + 4 * 31) / (6 * 32))
    )
    assert 0 < result["reuse_share_of_wall"] < 0.5 and result["missed_evicted_tokens"] == 0
    assert main(["prefix", "--model", "preset:toy", *flags, "--scheduler", "orca"]) == 2
