"""Recorded runs of vLLM 0.19 on GPUs, and the settings that they had.

The recordings and tables are those of LLMServingSim 2.0 (casys-kaist/LLMServingSim at 5daddb21, MIT): 300 requests of
each run, with measured operators of one layer on the same card.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.tools.bench.virtual import SimulatedRequest
from orca_jax.values.errors import ConfigError


class Limits(NamedTuple):
    """The most that means of the simulation may differ, as shares; None: any."""

    first_token: float | None
    per_token: float
    latency: float


class GpuRun(NamedTuple):
    """A recorded run.

    Attributes:
        title: the model and the card.
        model: its preset, or its config.json.
        devices: the card, and how many of them have a copy, as `plan` takes them.
        recording: the file of requests.
        cost: what `--cost profile:` takes after the folder.
        settings: those of the engine.
        limits: of errors of means.
        assumed: numbers that no table has, in words.
        replicas: engines that take requests in turns; the first one is simulated.
    """

    title: str
    model: str | Mapping[str, Any]
    devices: str
    recording: str
    cost: str
    settings: Mapping[str, Any]
    limits: Limits
    assumed: str
    replicas: int = 1


class RecordedTimes(NamedTuple):
    """Seconds of one request: from its arrival to the first token, between tokens, and to the last one."""

    first_token: float
    per_token: float
    latency: float


HOST = "host=500e-6"
"""Seconds of vLLM's host for an iteration, fitted to the time per token of the first run."""

LLAMA_8B = "preset:llama-3-8b"  # the sizes of 3.1 are the same
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "eos_token_id": 151645,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
BUDGET = {"max_num_batched_tokens": 2048, "page_size": 16, "overlap": False}
RUNS = (
    GpuRun(
        "Llama-3.1-8B, RTX 4090",
        LLAMA_8B,
        "rtx4090x1",
        "rtx4090_llama_8b_requests.jsonl.gz",
        f"rtx4090_llama_8b_tp1,layers=32,{HOST}",
        {**BUDGET, "max_num_seqs": 256, "num_pages": 2588},
        Limits(0.03, 0.02, 0.03),
        "0.5 ms of the host for an iteration, fitted to this run's time per token",
    ),
    GpuRun(
        "Llama-3.1-8B, RTX PRO 6000",
        LLAMA_8B,
        "rtxpro6000x1",
        "rtxpro6000_llama_8b_requests.jsonl.gz",
        f"rtxpro6000_llama_8b_tp1,layers=32,{HOST}",
        {**BUDGET, "max_num_seqs": 128},
        Limits(0.10, 0.05, 0.06),
        "the same time of the host",
    ),
    GpuRun(
        "Qwen3-32B, two RTX PRO 6000",
        QWEN3_32B,
        "rtxpro6000x2",
        "rtxpro6000_qwen3_32b_requests.jsonl.gz",
        f"rtxpro6000_qwen3_32b_tp2,layers=64,{HOST},devices=2,width=5120,bandwidth=20e9,hop=30e-6",
        {**BUDGET, "max_num_seqs": 128},
        Limits(0.10, 0.10, 0.10),
        "the same time of the host, and sums over PCIe at 20 GB/s with 30 us each: the best of three "
        "pairs of such numbers for this run",
    ),
    GpuRun(
        "Qwen3-30B-A3B, two RTX PRO 6000",
        "preset:qwen3-30b-a3b",
        "rtxpro6000x1",
        "rtxpro6000_qwen3_30b_a3b_requests.jsonl.gz",
        f"rtxpro6000_qwen3_30b_a3b_tp1,layers=48,{HOST},experts=128,active=8,replicas=2,devices=2,width=2048,"
        "bandwidth=20e9,hop=30e-6",
        {**BUDGET, "max_num_seqs": 128},
        Limits(None, 0.10, 0.10),
        "the same, and requests that take turns between two engines with equal loads",
        replicas=2,
    ),
)


def own_requests(run: GpuRun, folder: Path) -> tuple[list[SimulatedRequest], list[RecordedTimes]]:
    """The requests of the simulated engine. Raises ConfigError: the recording is missing."""
    try:
        requests, times = read_recording(folder / run.recording)
    except OSError as error:
        raise ConfigError(f"{folder}: {error}", param="data") from error
    return requests[:: run.replicas], times[:: run.replicas]


def read_recording(path: Path) -> tuple[list[SimulatedRequest], list[RecordedTimes]]:
    """The requests of a recording in the order of arrival, and their times. Raises OSError."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    lines.sort(key=lambda line: line["queued_ts"])
    begin = lines[0]["queued_ts"]
    requests = [
        SimulatedRequest(line["queued_ts"] - begin, line["input_toks"], line["output_toks"])
        for line in lines
    ]
    return requests, [_times(line) for line in lines]


def _times(line: Mapping[str, float]) -> RecordedTimes:
    generation = line["last_token_ts"] - line["first_token_ts"]
    return RecordedTimes(
        line["first_token_ts"] - line["queued_ts"],
        generation / (line["output_toks"] - 1),
        line["last_token_ts"] - line["queued_ts"],
    )


def their_errors(path: Path) -> dict[str, float]:
    """The errors of means and percentiles that the source's own simulator prints, as shares. Raises OSError."""
    found = {}
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        words: Sequence[str] = line.split()
        if words and words[-1].endswith("%") and len(words) == 5:
            found[" ".join(words[:2])] = float(words[-1].rstrip("%")) / 100
    return found
