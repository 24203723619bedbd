"""Results of comparisons: their page, their places, and the tokenizer of random weights."""

import json
import random
from pathlib import Path

import pytest
import tokenizers

from lab.peers.page import MEASURED
from lab.peers.registry import PEERS
from lab.peers.results import add, latency_ratios, new_results, ratios, without_places
from lab.peers.served import medians
from lab.peers.tokenizer import write_tokenizer


def test_the_measured_results_are_of_known_peers() -> None:
    results = json.loads(MEASURED.read_text(encoding="utf-8"))
    names = {name.split("/")[0] for name in results["settings"]}
    assert names and names <= set(PEERS)


def test_measured_results_name_no_place() -> None:
    assert without_places(json.loads(MEASURED.read_text(encoding="utf-8"))) == json.loads(
        MEASURED.read_text("utf-8")
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/scratch/abc/model/model.gguf", "model.gguf"),
        (
            "pip -c '/a/b.txt' failed at https://host.example/simple/torch: no",
            "pip -c 'b.txt' failed at (URL) no",
        ),
        ("12 tokens/s, a/b and either/or", "12 tokens/s, a/b and either/or"),
    ],
)
def test_places_are_removed_from_texts(text: str, kept: str) -> None:
    assert without_places({"a": [text]}) == {"a": [kept]}


def test_a_measured_peer_is_available_again() -> None:
    results = new_results(None)
    add(
        results,
        {"unavailable": {"vllm": "no network", "vllm (server)": "no port", "easydel": "no"}},
        2,
    )
    add(results, {"settings": {"vllm/float32/eager/2": {"ratio": 1.0}}}, 2)
    assert results["unavailable"] == {"vllm (server)": "no port", "easydel": "no"}
    assert results["settings"]["vllm/float32/eager/2"]["num_requests"] == 2


def test_servers_that_were_measured_apart_have_no_ratio() -> None:
    results = new_results(None)
    for name, value in {"vllm/float32/compiled/2": 4.0, "orca-jax/float32/chunked/2": 5.0}.items():
        figures = {"output_throughput": value, "median_normalized_latency_ms": value}
        add(results, {"online": {name: {"burst": figures}}}, 2)
    together = {"vllm/float32/compiled/2/online": 1.25}, {"vllm/float32/compiled/2/burst": 1.25}
    assert (ratios(results), latency_ratios(results)) == together
    for stamp in ("date", "commit"):
        own = results["online"]["orca-jax/float32/chunked/2"] | {stamp: "earlier"}
        apart = results | {"online": results["online"] | {"orca-jax/float32/chunked/2": own}}
        assert ratios(apart) == latency_ratios(apart) == {}


def test_medians_of_visits_by_hand() -> None:
    visits = [
        {"burst": {"x": value, "y": other}}
        for value, other in ((1.0, 1.0), (5.0, None), (2.0, 3.0))
    ]
    assert medians(visits) == {"burst": {"x": 2.0, "y": None}}


@pytest.mark.parametrize("size", [100, 512, 50257])
def test_the_tokenizer_has_all_ids_and_keeps_characters(tmp_path: Path, size: int) -> None:
    write_tokenizer(tmp_path, size)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    # Ids from 256 on are characters, but for the first of each 65 and some that remain.
    whole = [number for number in range(256, min(size, 50_000)) if (number - 256) % 65] or [65, 66]
    ids = random.Random(0).choices(whole, k=50)
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
