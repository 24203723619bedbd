"""Compare quantised weights and KV caches with plain ones: log probabilities, perplexity, speed and memory.

Quality is that of the decoder over whole texts, with keys and values rounded as in the pages of a CPU. A model with
random weights gets random tokens; its perplexity means nothing, and its errors of log probabilities do. Forms of GGUF
are those of gguf's own code. For the speed there is an engine for each other row, all in memory together, and their
passes alternate.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from jaxtyping import Array, Float, Int

from orca_jax.assembly.choices import PAGE_SIZE, is_toy
from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.executor import arrange
from orca_jax.assembly.quantised import is_dynamic, weights_of
from orca_jax.exec.cache import page_bytes
from orca_jax.exec.memory import limit_threads
from orca_jax.helpers.bundled import is_preset, model_directory
from orca_jax.helpers.reporting import hardware
from orca_jax.kernels.kv_pages import needs_scales, quantise_tokens
from orca_jax.kernels.native.library import require_library
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder, tensor_mesh
from orca_jax.model.stages import whole
from orca_jax.model.transformer import Decoder
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.tools.bench.measure import run_workload, warm_up
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.tools.plan.memory import stage_weights
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import (
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    QuantizationName,
    page_dtype,
)
from orca_jax.values.errors import ConfigError, system_message
from orca_jax.values.platforms import platform_named

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
LONGEST, MOST_TOKENS = 512, 4096  # of a part of a given text, and of all parts
PROMPT_TOKENS = 16


class StorageRow(NamedTuple):
    """A row of the table."""

    weights: QuantizationName | None = None
    kv: KVCacheDType | None = None
    form: str | None = None  # of matrices in a GGUF file, without an engine
    directory: str | None = None  # with the same model in another form

    @property
    def has_engine(self) -> bool:
        """True if the speed is measured."""
        return self.form is None and self.directory is None

    @property
    def name(self) -> str:
        """Such as "int8 weights, fp8 KV cache"."""
        if self.directory is not None:
            return self.directory
        if self.form is not None:
            return f"{self.form} of GGUF"
        parts = [f"{self.weights} weights"] * bool(self.weights) + [f"{self.kv} KV cache"] * bool(
            self.kv
        )
        return ", ".join(parts) or "plain"


ROWS = (
    StorageRow(),
    StorageRow("int8"),
    StorageRow("fp8"),
    StorageRow("int4"),
    StorageRow(None, "int8"),
    StorageRow(None, "fp8"),
    StorageRow("int8", "int8"),
    StorageRow("int8-dynamic"),
    StorageRow("int4-dynamic"),
    *(StorageRow(form=form) for form in ("Q8_0", "Q5_0", "Q4_0", "Q4_1")),
)
TABLES = "Q8_0"  # the form of tables in such a file


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
    source = model_directory(args.model) or args.model
    model = read_model_config(source)
    if model.quantization is not None:
        raise ConfigError(
            f"model must have plain weights, and {args.model} has {model.quantization} ones",
            param="model",
        )
    if (
        len(set(model.layers)) > 1
        or model.attention_soft_cap is not None
        or model.attention_scale is not None
    ):
        message = (
            f"{args.model} has layers of several kinds or scores of its own, which this "
            "measurement does not compute; choose another model"
        )
        raise ConfigError(message, param="model")
    texts = _texts(args, source, model)
    rows = (*ROWS, *[StorageRow(directory=directory) for directory in args.published])
    quality = _quality(args, source, model, texts, rows)
    load_before = os.getloadavg()[0]
    speeds = _speeds(args, model, rows)
    report = [
        {
            "storage": storage.name,
            **compare(quality[0], found),
            "output_tokens_per_second": speed,
            **_memory(model, storage, args.dtype),
        }
        for storage, found, speed in zip(rows, quality, speeds, strict=True)
    ]
    _print(report)
    settings = {
        name: getattr(args, name) for name in ("model", "dtype", "rows", "output_len", "passes")
    }
    loads = [load_before, os.getloadavg()[0]]
    line = {
        "rows": report,
        "tokens": sum(map(len, texts)),
        "load_average": loads,
        "hardware": hardware(),
    }
    print(json.dumps({**line, "config": {**settings, "text": args.text and str(args.text)}}))


def compare(plain: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> dict[str, float]:
    """Perplexity, and the difference of log probabilities to those of the plain model, in nats."""
    difference = np.abs(np.concatenate(found) - np.concatenate(plain))
    return {
        "perplexity": math.exp(-float(np.concatenate(found).mean())),
        "mean_error": float(difference.mean()),
        "largest_error": float(difference.max()),
    }


def log_probabilities(
    decoder: Decoder, ids: Int[Array, " T"], kv: KVCacheDType | None
) -> Float[Array, " N"]:
    """The log probability of each of the N = T - 1 tokens after the first; `kv` is the type of keys and values."""

    def attend(_: int | Array, q: Array, k: Array, v: Array, cache: int) -> tuple[Array, int]:
        k, v = (rounded(each, kv) for each in (k, v))
        return causal_attention(q, k, v, decoder.config.layers[0].window), cache

    hidden, _ = decoder(ids, jnp.arange(len(ids), dtype=jnp.int32), attend, 0)
    scores = jax.nn.log_softmax(decoder.unembed(hidden)[:, : decoder.config.vocab_size])
    return scores[jnp.arange(len(ids) - 1), ids[1:]]


def rounded(tokens: Float[Array, "T K D"], kv: KVCacheDType | None) -> Float[Array, "T K D"]:
    """Keys or values after their way through pages of a CPU."""
    if kv is None:
        return tokens
    dtype = jnp.dtype(page_dtype(kv))
    if not needs_scales(dtype):
        return tokens.astype(dtype).astype(jnp.float32)
    values, scale = quantise_tokens(tokens, dtype)
    return values.astype(jnp.float32) * scale[..., None]


def causal_attention(
    q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], window: int | None
) -> Float[Array, "T H D"]:
    """Attention of one request over all of its tokens, or the last `window` ones."""
    k, v = (jnp.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
    ahead = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    is_seen = (ahead >= 0) & (ahead < (window or len(q)))
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf)), v)


def _quality(
    args: argparse.Namespace,
    source: str,
    model: ModelConfig,
    texts: Sequence[tuple[int, ...]],
    rows: Sequence[StorageRow],
) -> list[list[np.ndarray]]:
    """The log probabilities of each text, for each row."""
    limit_threads()
    longest = max(map(len, texts))
    padded = jnp.array([[*ids, *[0] * (longest - len(ids))] for ids in texts], jnp.int32)
    score = jax.jit(log_probabilities, static_argnames="kv")
    quality: dict[StorageRow, list[np.ndarray]] = {}
    decoder = None
    held = None
    for row in sorted(rows, key=_weights_of_row):
        if decoder is None or _weights_of_row(row) != held:
            decoder = _stored(args, source, model, row)
            held = _weights_of_row(row)
        quality[row] = [
            np.asarray(score(decoder, line, kv=row.kv))[: len(ids) - 1]
            for line, ids in zip(padded, texts, strict=True)
        ]
    return [quality[row] for row in rows]


def _weights_of_row(row: StorageRow) -> tuple[str, str, str]:
    """What the weights of a row are; rows with equal ones share a decoder."""
    return row.weights or "", row.form or "", row.directory or ""


def _stored(args: argparse.Namespace, source: str, model: ModelConfig, row: StorageRow) -> Decoder:
    """The decoder with weights as in a row."""
    mesh = tensor_mesh(jax.local_devices()[:1])
    if row.directory is not None:
        return load_decoder(row.directory, dtype=args.dtype, mesh=mesh)
    config = replace(model, quantization=weights_of(row.weights))
    decoder = load_decoder(source, dtype=args.dtype, mesh=mesh, config=config)
    if is_dynamic(row.weights):
        arrange(platform_named("cpu"), decoder)
        decoder.pack(require_library(None)._replace(activation_bits=8), 1)
    if row.form is not None:
        state = nnx.state(decoder)
        for path, variable in nnx.to_flat_state(state):
            if path[-1] in ("kernel", "table"):
                form = TABLES if path[-1] == "table" else row.form
                variable.set_value(
                    _rounded_as(
                        form, np.asarray(variable.get_value()), is_table=path[-1] == "table"
                    )
                )
        nnx.update(decoder, state)
    return decoder


def _rounded_as(form: str, values: np.ndarray, *, is_table: bool) -> Array:
    """Matrices [*L, I, O], or a table [V, E], after their way through a GGUF file."""
    # a file has the inputs of an output together
    rows = values if is_table else np.swapaxes(values, -1, -2)
    kind = GGMLQuantizationType[form]
    found = dequantize(quantize(rows.astype(np.float32), kind), kind)
    return jnp.asarray(found if is_table else np.swapaxes(found, -1, -2), values.dtype)


def _config(args: argparse.Namespace, model: ModelConfig, storage: StorageRow) -> EngineConfig:
    length = PROMPT_TOKENS + args.output_len
    if length > model.max_positions:
        raise ConfigError(
            f"output_len must be at most {model.max_positions - PROMPT_TOKENS}", param="output_len"
        )
    return EngineConfig(
        model=args.model,
        tokenizer="byte" if is_preset(args.model) else None,
        dtype=args.dtype,
        quantization=storage.weights,
        kv_cache_dtype=storage.kv or args.dtype,
        max_model_len=length,
        max_num_seqs=args.rows,
        max_num_batched_tokens=max(64, args.rows),
        num_pages=args.rows * (1 + ceil_div(length, PAGE_SIZE)),
        enable_prefix_caching=False,
        progress=False,
    )


def _texts(args: argparse.Namespace, source: str, model: ModelConfig) -> list[tuple[int, ...]]:
    """The ids of each text, shortened to the longest request; of a given one those of its parts."""
    if is_preset(args.model):
        if args.text is not None:
            raise ConfigError(
                f"text has no effect on {args.model}, which has no tokenizer; leave it out",
                param="text",
            )
        ids = np.random.default_rng(0).integers(0, model.vocab_size, RANDOM_TOKENS)
        return [tuple(ids.tolist())]
    tokenizer = load_tokenizer(source)
    longest = min(LONGEST, model.max_positions)
    given: Sequence[str] = TEXTS
    if args.text is not None:
        try:
            given = (args.text.read_text(encoding="utf-8"),)
        except (OSError, UnicodeDecodeError) as error:
            message = (
                system_message(error) if isinstance(error, OSError) else f"{args.text} is not UTF-8"
            )
            raise ConfigError(f"text: {message}", param="text") from None
    encoded: list[tuple[int, ...]] = [tuple(tokenizer.encode(text)) for text in given]
    if args.text is not None:
        encoded = [
            encoded[0][start : start + longest]
            for start in range(0, min(len(encoded[0]), MOST_TOKENS), longest)
        ]
    texts = [ids[:longest] for ids in encoded if len(ids) > 1]
    if not texts:
        raise ConfigError(f"text: {args.text} has fewer than two tokens", param="text")
    return texts


def _speeds(
    args: argparse.Namespace, model: ModelConfig, rows: Sequence[StorageRow]
) -> list[float | None]:
    """The median of output tokens per second over all passes of each row's engine."""
    measured = [row for row in rows if row.has_engine] if args.passes else []
    engines = [build_engine(_config(args, model, storage)) for storage in measured]
    ids = np.random.default_rng(1).integers(0, model.vocab_size, (args.rows, PROMPT_TOKENS))
    workload = [WorkloadRequest(0.0, tuple(row), args.output_len) for row in ids.tolist()]
    for built in engines:
        warm_up(built.engine, workload)
    speeds: list[list[float]] = [[] for _ in engines]
    for _ in range(args.passes):
        for built, own in zip(engines, speeds, strict=True):
            own.append(args.rows * args.output_len / run_workload(built.engine, workload).wall)
    for built in engines:
        built.close()
    return [statistics.median(own) for own in speeds] + [None] * (len(rows) - len(engines))


def _memory(model: ModelConfig, storage: StorageRow, dtype: DType) -> dict[str, float | None]:
    """Bytes of weights, but not those of a file, and of a token in the KV cache of a CPU."""
    weights = stage_weights(
        replace(model, quantization=weights_of(storage.weights)), dtype, 1, whole(model)
    )
    slot = page_bytes(model, PAGE_SIZE, page_dtype(storage.kv or dtype)) / PAGE_SIZE
    return {"weight_bytes": weights if storage.has_engine else None, "kv_bytes_per_token": slot}


def _print(report: Sequence[dict[str, float | str | None]]) -> None:
    heads = ("perplexity", "mean error", "largest", "tokens/s", "weights, MB", "KV, bytes/token")
    print(f"{'':26}" + "".join(f"{head:>17}" for head in heads))
    for row in report:
        name, perplexity, mean, largest, speed, weights, slots = row.values()
        speed = f"{speed:.1f}" if isinstance(speed, float) else "-"
        size = f"{weights / 1e6:.1f}" if isinstance(weights, int | float) else "-"
        cells = f"{perplexity:.3f}", f"{mean:.4f}", f"{largest:.3f}", speed, size
        print(f"{name:26}" + "".join(f"{cell:>17}" for cell in (*cells, f"{slots:.0f}")))
