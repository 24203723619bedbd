"""Compare quantised weights and KV caches with plain ones: log probabilities, perplexity, speed and memory.

Quality is measured through the engine, so it includes the KV cache: log probabilities of the tokens of texts, in chunks
and pages as for any prompt. A model with random weights gets random tokens; its perplexity means nothing, and its
errors of log probabilities do. Passes for the speed alternate between all engines, which are in memory together.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orca_jax.bench.measure import run_workload, warm_up
from orca_jax.bench.workload.generate import WorkloadRequest
from orca_jax.build.engine import Built, build_engine
from orca_jax.build.settings import is_toy
from orca_jax.bundled import is_preset
from orca_jax.config import EngineConfig, KVCacheDType, Quantization
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError, system_message
from orca_jax.exec.cache import page_bytes
from orca_jax.model.stages import whole
from orca_jax.plan.memory import stage_weights
from orca_jax.reporting import hardware
from orca_jax.request import SamplingParams

HELP = "quality, speed and memory of quantised weights and KV caches"

# In the form of the demo's training data, and written for this benchmark: no model was trained with them.
TEXTS = (
    "<|user|>A shelf holds 9 jars. Each jar has 12 buttons. Olga takes 20 buttons out. How many buttons are left?"
    "<|assistant|>There are 9*12=108 buttons on the shelf.\nAfter Olga takes 20 of them, 108-20=88 are left.\n#### 88"
    "<|end|>",
    "<|user|>Ravi walks 3 miles to school and 3 miles back, five days a week. How many miles does he walk in 4 weeks?"
    "<|assistant|>He walks 3+3=6 miles a day.\nIn a week he walks 6*5=30 miles.\nIn 4 weeks he walks 30*4=120 miles.\n"
    "#### 120<|end|>",
    "<|user|>A ticket costs $15. A family buys 2 tickets for adults and 3 for children at half the price. How much do "
    "they pay?<|assistant|>The tickets for adults cost 2*15=$30.\nA child's ticket costs 15/2=$7.50.\nThree of them "
    "cost 3*7.5=$22.50.\nThey pay 30+22.5=$52.50.\n#### 52.50<|end|>",
    "<|user|>Mara reads 24 pages on Monday and twice as many on Tuesday. The book has 100 pages. How many pages remain?"
    "<|assistant|>She reads 24*2=48 pages on Tuesday.\nShe has read 24+48=72 pages.\nSo 100-72=28 pages remain.\n"
    "#### 28<|end|>",
    'The old count stood at the window and said nothing for a long time. Then he turned to his daughter. "You will '
    'write to him," he said, "and you will tell him that the house is sold, and that we leave for the country before '
    'the first snow." She looked at her hands, and did not answer.',
)
RANDOM_TOKENS = 256
LONGEST = 512


class Storage(NamedTuple):
    """A row of the table."""

    weights: Quantization | None = None
    kv: KVCacheDType | None = None

    @property
    def name(self) -> str:
        """Such as "int8 weights, fp8 KV cache"."""
        parts = [f"{self.weights} weights"] * bool(self.weights) + [f"{self.kv} KV cache"] * bool(self.kv)
        return ", ".join(parts) or "plain"


ROWS = (
    Storage(),
    Storage("int8"),
    Storage("fp8"),
    Storage("int4"),
    Storage(None, "int8"),
    Storage(None, "fp8"),
    Storage("int8", "int8"),
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", default="demo", metavar="MODEL", help="model to measure (default: demo)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of plain weights (default: float32)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="texts separated by empty lines; default: five short ones, bundled"
    )
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="requests at once (default: 8)")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens of each request (default: 32)")
    parser.add_argument(
        "--passes", type=int, default=3, metavar="N", help="timed passes of each engine; 0: none (default: 3)"
    )


def run(args: argparse.Namespace) -> None:
    """Measure all rows; print a table and a line of JSON.

    Raises:
        ConfigError: a flag is wrong.
    """
    for name, least in (("rows", 1), ("output_len", 1), ("passes", 0)):
        if getattr(args, name) < least:
            raise ConfigError(f"{name} must be at least {least}", param=name)
    if is_toy(args.model):
        raise ConfigError(f"model must be one with weights, not {args.model}", param="model")
    engines = [build_engine(_config(args, storage)) for storage in ROWS]
    texts = _texts(args, engines[0])
    quality = [[log_probabilities(built.engine, ids) for ids in texts] for built in engines]
    load_before = os.getloadavg()[0]
    speeds = _speeds(engines, args)
    report = [
        {
            "storage": storage.name,
            **compare(quality[0], found),
            "output_tokens_per_second": speed,
            **_memory(built, args.dtype),
        }
        for storage, built, found, speed in zip(ROWS, engines, quality, speeds, strict=True)
    ]
    for built in engines:
        built.close()
    _print(report)
    settings = {name: getattr(args, name) for name in ("model", "dtype", "rows", "output_len", "passes")}
    loads = [load_before, os.getloadavg()[0]]
    line = {"rows": report, "tokens": sum(map(len, texts)), "load_average": loads, "hardware": hardware()}
    print(json.dumps({**line, "config": {**settings, "text": args.text and str(args.text)}}))


def compare(plain: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> dict[str, float]:
    """Perplexity, and the difference of log probabilities to those of the plain model, in nats."""
    difference = np.abs(np.concatenate(found) - np.concatenate(plain))
    return {
        "perplexity": math.exp(-float(np.concatenate(found).mean())),
        "mean_error": float(difference.mean()),
        "largest_error": float(difference.max()),
    }


def log_probabilities(engine: Engine, ids: Sequence[int]) -> np.ndarray:
    """The log probability of each token after the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add("text", tuple(ids), params)
    found: list[float] = []
    while engine.has_work:
        for update in engine.step():
            assert update.error is None, update
            found += [scored.logprob for scored in update.prompt_logprobs or ()]
    assert len(found) == len(ids) - 1, f"{len(ids)} tokens have {len(found)} log probabilities"
    return np.array(found)


def _config(args: argparse.Namespace, storage: Storage) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        tokenizer="byte" if is_preset(args.model) else None,
        dtype=args.dtype,
        quantization=storage.weights,
        kv_cache_dtype=storage.kv or args.dtype,
        max_model_len=LONGEST,
        max_num_seqs=args.rows,
        max_num_batched_tokens=max(64, args.rows),
        num_pages=args.rows * (1 + LONGEST // 128),
        enable_prefix_caching=False,
        progress=False,
    )


def _texts(args: argparse.Namespace, built: Built) -> list[tuple[int, ...]]:
    """The ids of each text, shortened to the longest request."""
    if is_preset(args.model) and args.text is None:
        ids = np.random.default_rng(0).integers(0, built.model_config.vocab_size, RANDOM_TOKENS)
        return [tuple(ids.tolist())]
    given: Sequence[str] = TEXTS
    if args.text is not None:
        try:
            given = [text for text in args.text.read_text(encoding="utf-8").split("\n\n") if text.strip()]
        except (OSError, UnicodeDecodeError) as error:
            message = system_message(error) if isinstance(error, OSError) else f"{args.text} is not UTF-8"
            raise ConfigError(f"text: {message}", param="text") from None
    encoded = [tuple(built.tokenizer.encode(text))[: LONGEST - 1] for text in given]
    texts = [ids for ids in encoded if len(ids) > 1]
    if not texts:
        raise ConfigError(f"text: {args.text} has no text of two tokens or more", param="text")
    return texts


def _speeds(engines: Sequence[Built], args: argparse.Namespace) -> list[float | None]:
    """The median of output tokens per second over all passes of each engine."""
    if not args.passes:
        return [None] * len(engines)
    ids = np.random.default_rng(1).integers(0, engines[0].model_config.vocab_size, (args.rows, 16))
    workload = [WorkloadRequest(0.0, tuple(row), args.output_len) for row in ids.tolist()]
    for built in engines:
        warm_up(built.engine, workload)
    speeds: list[list[float]] = [[] for _ in engines]
    for _ in range(args.passes):
        for built, own in zip(engines, speeds, strict=True):
            own.append(args.rows * args.output_len / run_workload(built.engine, workload).wall)
    return [statistics.median(own) for own in speeds]


def _memory(built: Built, dtype: str) -> dict[str, float]:
    """Bytes of weights, and of a token in the KV cache, on all devices together."""
    assert built.executor_config is not None, "the toy has no weights"
    model, cache = built.model_config, built.executor_config.cache
    slots = page_bytes(model, cache.page_size, cache.dtype, cache.layout) / cache.page_size
    weights = stage_weights(model, "bfloat16" if dtype == "bfloat16" else "float32", 1, whole(model))
    return {"weight_bytes": weights, "kv_bytes_per_token": slots}


def _print(report: Sequence[dict[str, float | str | None]]) -> None:
    heads = ("perplexity", "mean error", "largest", "tokens/s", "weights, MB", "KV, bytes/token")
    print(f"{'':26}" + "".join(f"{head:>17}" for head in heads))
    for row in report:
        name, perplexity, mean, largest, speed, weights, slots = row.values()
        speed = f"{speed:.1f}" if isinstance(speed, float) else "-"
        cells = f"{perplexity:.3f}", f"{mean:.4f}", f"{largest:.3f}", speed, f"{float(weights or 0) / 1e6:.1f}"
        print(f"{name:26}" + "".join(f"{cell:>17}" for cell in (*cells, f"{slots:.0f}")))
