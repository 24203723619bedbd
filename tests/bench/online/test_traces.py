"""Traces of files, read and written."""

import argparse
import json
from pathlib import Path

import pytest

from orca_jax.tools.bench.online.command import add_args
from orca_jax.tools.bench.online.load import make_load, warmup_count
from orca_jax.tools.bench.online.settings import OpenLoopSettings, read_settings
from orca_jax.tools.bench.workload.generate import READERS, WorkloadRequest, make_workload
from orca_jax.tools.bench.workload.write import BlockNames, write_mooncake
from orca_jax.values.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:58.0000000,100,10
2023-11-16 23:59:59.0000000,400,2
2023-11-17 00:00:02.5000000,3000,900
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1100, "output_length": 64, "hash_ids": [7, 8, 9]}
{"timestamp": 3000, "input_length": 1024, "output_length": 32, "hash_ids": [7, 8]}
{"timestamp": 9000, "input_length": 600, "output_length": 320, "hash_ids": [7, 3]}
"""


def settings(*flags: str) -> OpenLoopSettings:
    parser = argparse.ArgumentParser()
    add_args(parser)
    return read_settings(parser.parse_args(["--base-url", "http://h", *flags]), tuple(READERS))


def load(*flags: str, max_model_len: int | None = None) -> list[WorkloadRequest]:
    chosen = settings(*flags)
    return make_load(chosen, chosen.rates[0], max_model_len)


def shape(workload: list[WorkloadRequest]) -> list[tuple[float, int, int]]:
    return [
        (round(request.arrival, 3), len(request.prompt_ids), request.num_output)
        for request in workload
    ]


@pytest.fixture
def azure(tmp_path: Path) -> list[str]:
    (tmp_path / "azure.csv").write_text(AZURE)
    return ["--trace", "azure", "--trace-data", str(tmp_path / "azure.csv")]


def test_files_arrive_as_recorded_unless_a_rate_is_given(azure: list[str]) -> None:
    assert shape(load(*azure, "--num-requests", "3")) == [
        (0, 100, 10),
        (1, 400, 2),
        (4.5, 3000, 900),
    ]
    assert [at for at, *_ in shape(load(*azure, "--num-requests", "3", "--request-rate", "1"))] == [
        0,
        0.444,
        2,
    ]
    assert {
        at for at, *_ in shape(load(*azure, "--num-requests", "3", "--request-rate", "inf"))
    } == {0}


def test_a_duration_ends_a_file_early(azure: list[str]) -> None:
    assert len(load(*azure, "--duration", "2")) == 2
    assert len(load(*azure, "--duration", "100")) == 3, "the end of the file"
    assert len(load(*azure, "--duration", "2", "--request-rate", "0.8")) == 2
    assert len(load(*azure, "--duration", "100", "--num-requests", "1")) == 1


def test_requests_of_files_fit_the_context(azure: list[str]) -> None:
    assert shape(load(*azure, "--num-requests", "3", max_model_len=1000))[2][1:] == (500, 500)
    assert shape(load(*azure, "--num-requests", "3", "--max-model-len", "400", max_model_len=1000))[
        2
    ][1:] == (200, 200)


def test_durations_of_drawn_arrivals() -> None:
    within = load("--request-rate", "20", "--duration", "10")
    assert within[-1].arrival <= 10 and len(within) == pytest.approx(200, rel=0.2)
    assert len(load("--request-rate", "20", "--duration", "10", "--num-requests", "5")) == 5
    paper = make_workload("orca", num_requests=5, vocab_size=256, seed=0, rate=None)
    assert [request.prompt_ids for request in load("--num-requests", "5")] == [
        request.prompt_ids for request in paper
    ]


@pytest.mark.parametrize("trace", ["azure", "mooncake"])
def test_round_trips(trace: str, azure: list[str], tmp_path: Path) -> None:
    source, copy = tmp_path / "source.jsonl", tmp_path / "copy.jsonl"
    source.write_text(MOONCAKE)
    flags = azure if trace == "azure" else ["--trace", "mooncake", "--trace-data", str(source)]
    first = load(*flags, "--num-requests", "3")
    write_mooncake(str(copy), first)
    again = load("--trace", "mooncake", "--trace-data", str(copy), "--num-requests", "3")
    assert shape(again) == shape(first)
    rows = [json.loads(line) for line in copy.read_text().splitlines()]
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 512) for row in rows)
    if trace == "mooncake":
        assert [row["hash_ids"] for row in rows] == [[0, 1, 2], [0, 1], [0, 3]], (
            "the same blocks under new names"
        )
        assert again[0].prompt_ids[:1024] == again[1].prompt_ids


def test_a_partly_filled_block_has_the_name_of_the_whole_one() -> None:
    names = BlockNames()
    long = list(range(600))
    assert names.of(long[:300]) == [0] and names.of(long) == [0, 1] and names.of(long[:512]) == [0]
    assert names.of([*long[:300], 0, 0]) == [2], "two prompts that part within a block"


def test_a_file_that_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        write_mooncake("/nowhere/at/all", [])
    assert caught.value.param == "write_trace"


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="has no requests"):
        load("--trace", "mooncake", "--trace-data", str(tmp_path / "empty"), "--duration", "5")


def test_warm_up() -> None:
    assert (
        warmup_count(settings(), 64) == 6
        and warmup_count(settings("--warmup-requests", "0"), 64) == 0
    )
    with pytest.raises(ConfigError) as caught:
        warmup_count(settings("--warmup-requests", "5"), 5)
    assert caught.value.param == "warmup_requests"
