"""Workloads from files: lengths, arrivals and shared prefixes of the file, and errors for wrong files."""

from itertools import pairwise
from pathlib import Path

import pytest

from orca_jax.tools.bench.workload.generate import WorkloadRequest, make_workload
from orca_jax.values.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:58.0000000,100,10
2023-11-16 23:59:59.0000000,400,0
2023-11-17 00:00:02.5000000,3000,900
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 64, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1024, "output_length": 32, "hash_ids": [0, 1]}
{"timestamp": 9000, "input_length": 600, "output_length": 320, "hash_ids": [0, 3]}
"""


def read(tmp_path: Path, name: str, text: str, **settings: object) -> list[WorkloadRequest]:
    path = tmp_path / "data"
    path.write_text(text, encoding="utf-8")
    values = {
        "num_requests": 3,
        "vocab_size": 50,
        "seed": 0,
        "rate": None,
        "data": str(path),
        **settings,
    }
    return make_workload(name, **values)  # type: ignore[arg-type]


def lengths(trace: list[WorkloadRequest]) -> list[tuple[int, int]]:
    return [(len(request.prompt_ids), request.num_output) for request in trace]


def test_azures_lengths(tmp_path: Path) -> None:
    assert lengths(read(tmp_path, "azure", AZURE)) == [(100, 10), (400, 1), (3000, 900)]
    assert lengths(read(tmp_path, "azure", AZURE, length_scale=0.1)) == [
        (10, 1),
        (40, 1),
        (300, 90),
    ]
    assert lengths(read(tmp_path, "azure", AZURE, max_model_len=1000)) == [
        (100, 10),
        (400, 1),
        (500, 500),
    ]


def test_arrivals_are_stretched_to_a_rate_and_stay_as_bursty_as_they_were(tmp_path: Path) -> None:
    assert [request.arrival for request in read(tmp_path, "azure", AZURE)] == [0, 0, 0]
    for rate in (0.5, 4.0):
        arrivals = [request.arrival for request in read(tmp_path, "azure", AZURE, rate=rate)]
        assert arrivals[-1] == pytest.approx(2 / rate)
        first, second = (later - earlier for earlier, later in pairwise(arrivals))
        assert second / first == pytest.approx(3.5)


def test_prompts_begin_alike_exactly_where_hashes_agree(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, "mooncake", MOONCAKE, length_scale=1 / 32)
    assert lengths([first, second, third]) == [(35, 2), (32, 1), (19, 10)], (
        "blocks of 16: 2 + 76/32, 2, 1 + 88/32"
    )
    assert first.prompt_ids[:32] == second.prompt_ids
    assert (
        first.prompt_ids[:16] == third.prompt_ids[:16]
        and first.prompt_ids[16:19] != third.prompt_ids[16:]
    )
    assert lengths(read(tmp_path, "mooncake", MOONCAKE, length_scale=1 / 32, max_model_len=18)) == [
        (16, 2), (17, 1), (9, 9)
    ]  # fmt: skip
    other = read(tmp_path, "mooncake", MOONCAKE, length_scale=1 / 32, seed=1)
    assert other[0].prompt_ids[:16] != first.prompt_ids[:16]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("azure", MOONCAKE, "columns TIMESTAMP"),
        ("azure", AZURE.replace("400", "many"), "line 3"),
        ("azure", AZURE.replace("00:00:02", "25:00:02"), "line 4"),
        ("azure", AZURE.replace("11-17", "11-15"), "line 4: the request arrives before"),
        ("azure", "", "columns"),
        ("azure", AZURE.rpartition("2023")[0], "has only 2 of 3 requests"),
        ("mooncake", AZURE, "line 1"),
        ("mooncake", MOONCAKE.replace("[0, 3]", "[0]"), "line 3: 600 tokens are not 1 blocks"),
        ("mooncake", MOONCAKE.replace('"output_length": 32, ', ""), "line 2 has no output_length"),
        ("mooncake", "[1]\n", "line 1"),
    ],
)
def test_a_file_that_is_something_else(name: str, text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        read(tmp_path, name, text, length_scale=1 / 32)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"data": None}, "trace"),
        ({"data": "nowhere"}, "trace_data"),
        ({"length_scale": 0.001}, "length_scale"),
        ({"length_scale": 0.0}, "length_scale"),
        ({"num_requests": 1, "rate": 1.0}, "rate"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], param: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "mooncake", MOONCAKE, **{"length_scale": 1 / 32, **settings})
    assert error.value.param == param


def test_made_up_traces_take_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave trace_data out"):
        read(tmp_path, "orca", AZURE)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"\xff\xfe\x00")
    for name in ("azure", "mooncake"):
        with pytest.raises(ConfigError, match="not a file of this trace"):
            make_workload(name, num_requests=1, vocab_size=9, seed=0, rate=None, data=str(path))
