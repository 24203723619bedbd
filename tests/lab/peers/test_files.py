"""Pairs of servers on GGUF files: figures by hand, the random file, and the part of the page."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.peers import files, random_file
from lab.peers.files_page import MEASURED, block, section
from lab.peers.results import without_places
from orca_jax.model.describe import read_model_config
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.tools.bench.online.closed_loop import Stream
from orca_jax.values.errors import ConfigError


class Client:
    """Answers whose first token comes after 2 s by the clock, and each other one after 0.5 s more."""

    def __init__(self, url: str) -> None:
        self.url, self.prompts = url, list[Sequence[int] | str]()

    def ask(self, prompts: Sequence[Sequence[int] | str], num_output: int) -> list[Stream]:
        self.prompts += prompts
        times = [2.0 + 0.5 * number for number in range(num_output)]
        return [Stream(times, [" a"] * num_output, "length") for _ in prompts]


def test_figures_of_a_round_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Client] = []
    monkeypatch.setattr(files, "_Client", lambda url: made.append(Client(url)) or made[0])  # type: ignore[func-returns-value]
    monkeypatch.setattr(files.time, "monotonic", lambda: 0.0)
    args = argparse.Namespace(streams=[1, 3], prompts=[40], num_output=5)
    found = files.measure_round("http://h:1", args, turns=2, seed=0)
    # 4 tokens in 2 s; three such streams; 40 tokens in 2 s; a turn's first token after 2 s
    assert found == {"streams_1": 2.0, "streams_3": 6.0, "prompt_40": 20.0, "next_turn_ms": 2000.0}
    first, second = (prompt for prompt in made[0].prompts if isinstance(prompt, str))
    assert (
        second.startswith(first + " a" * files.ANSWER)
        and len(second.split()) - len(first.split()) == 58
    )


def test_ratios_are_of_speeds() -> None:
    rounds = {
        "own": [{"streams_1": each, "next_turn_ms": 50.0} for each in (2.0, 3.0, 8.0)],
        "peer": [{"streams_1": 2.0, "next_turn_ms": 100.0}] * 3,
    }
    assert files.ratios_of(rounds) == {
        "streams_1": [1.0, 1.5, 4.0],
        "next_turn_ms": [2.0, 2.0, 2.0],
    }


@pytest.mark.parametrize("kind", ["BF16", *random_file.OTHERS])
def test_a_random_file_is_a_model_with_a_tokenizer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = random_file.OTHERS.get(kind, random_file.SMALL)
    experts = min(4, named.experts)
    shape = named._replace(
        width=64,
        layers=2,
        heads=4,
        kv_heads=2,
        inner=96,
        vocabulary=400,
        positions=128,
        experts=experts,
        chosen=experts // 2,
        head_dim=named.head_dim // 4,
    )
    monkeypatch.setattr(random_file, "SMALL", shape)
    monkeypatch.setitem(random_file.OTHERS, kind, shape)
    copies = tmp_path / "quantise"
    copies.write_text('#!/bin/sh\ncp "$1" "$2"\n', encoding="utf-8")
    copies.chmod(0o755)
    path = random_file.random_file(kind, tmp_path, copies)
    config = read_model_config(path)
    assert (config.embed_dim, config.num_layers, config.num_kv_heads, config.vocab_size) == (
        64,
        2,
        2,
        400,
    )
    assert config.tied_embeddings and config.max_positions == 128
    assert (config.experts.count if config.experts else 0) == experts
    assert len(load_tokenizer(path).encode("က")) == 1  # three bytes, two merges


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--files", "Q9_9"], "files: 'Q9_9' is not a GGUF file or one of BF16"),
        (["--streams", "33"], r"streams must be from 1 to 32, got \[33\]"),
        (["--num-output", "1"], "num_output must be at least 2, got 1"),
        (["--save", __file__], "save .* has no results of this command"),
    ],
)
def test_wrong_flags_are_named_before_anything_is_made(flags: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    files.add_args(parser)
    with pytest.raises(ConfigError, match=message):
        files.run(parser.parse_args(flags))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_the_part_of_the_page_has_every_measured_file(path: Path) -> None:
    results = json.loads(path.read_text(encoding="utf-8"))
    assert without_places(results) == results  # no place of this machine
    rows = [line.split(" | ")[0] for line in block().splitlines()]
    assert results["files"] and all(f"| {name}" in rows for name in results["files"])


def test_a_cell_by_hand() -> None:
    one = {
        "rounds": {"own": [{"streams_1": 12.0}], "peer": [{"streams_1": 10.0}]}, 
        "ratios": {"streams_1": [1.1, 1.2, 1.3]},
        "start_s": [30.4, 0.5], "read_gb_per_s": 12.3, "date": "2026-11-28", "commit": "abc",
    }  # fmt: skip
    found = section(
        {
            "files": {"a": one},
            "sides": {},
            "hardware": {"cpu": "X", "cpu_flags": ["avx2"], "cores": 2},
        }
    )
    row = "| a | 12.0, 10.0: **1.20** (1.10 to 1.30) | 30 and 0.5 | 12 | 2026-11-28 at abc |"
    assert row in found
