"""The log probabilities of a request follow from its own tokens: not from its batch, its chunks or the scheduler."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.engine import Engine
from orca_jax.helpers.bundled import model_directory
from orca_jax.values.request import SamplingParams
from tests.covering import chosen, slow
from tests.kernels.native.machine import needs_library
from tests.model import eight_heads
from tests.test_same_tokens import Job, make_engine

pytestmark = [needs_library, pytest.mark.usefixtures("compiled_when_used")]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 256,
        "vocab_size": 300,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": 256,
        "vocab_size": 300,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    },
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "vocab_size": 300,
        "sliding_window": 40,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
    },
}

ANY_WIDTH: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "vocab_size": 300,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 50,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "vocab_size": 300,
    },
    "odd": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 256,
        "vocab_size": 300,
    },
}
"""Models with matrices of other widths than whole blocks of the library, as a router of 8 experts."""
TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {"dtype": "auto", "quantization": "int4"},
    "int8 pages": {"dtype": "auto", "kv_cache_dtype": "int8"},
}
PLAIN: dict[str, Any] = {
    "page_size": 16,
    "num_pages": 800,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
}
# so requests are preempted
FEW = {"num_pages": 60, "max_num_seqs": 16, "max_num_batched_tokens": 48}
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chunked", {}),
    ("chunked", {"max_num_batched_tokens": 17, "max_num_seqs": 16}),
    ("chunked", FEW),
    ("orca", {}),
    ("request_level", {"max_num_seqs": 16}),
)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The directory of a model with random weights, or of the bundled one."""
    name = request.param
    return (
        model_directory(name)
        if name == "demo"
        else str(eight_heads.write_model(MODELS[name], tmp_path / name))
    )


def make_jobs(number: int, length: int) -> list[Job]:
    """Make greedy and seeded requests; two of three prompts have the same beginning of 40 tokens."""
    draw, jobs = np.random.default_rng(0), []
    shared = draw.integers(3, 300, 40).tolist()
    for index in range(number):
        own = draw.integers(3, 300, int(draw.integers(2, 60))).tolist()
        seeded = {"seed": index, "temperature": 0.9, "top_p": 0.95 if index % 4 else 1.0}
        kind: dict[str, Any] = {"temperature": 0} if index % 2 else seeded
        params = SamplingParams(max_tokens=length, ignore_eos=True, logprobs=2, **kind)
        jobs.append(Job(tuple(own if index % 3 == 0 else shared + own), params))
    return jobs


def scores(engine: Engine, jobs: list[Job]) -> list[list[tuple[float, ...]]]:
    """Run jobs together. Returns each token of each job, with its log probability and the two largest ones."""
    found: list[list[tuple[float, ...]]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        engine.add_request(str(index), job.prompt, job.params)
    while engine.has_work:
        for update in engine.step():
            pairs = zip(update.new_ids, update.logprobs, strict=True)
            found[int(update.request_id)] += [
                (token, each.logprob, *each.top_logprobs) for token, each in pairs
            ]
    return found


def alone(
    name: str, cache: str, jobs: list[Job], settings: dict[str, Any]
) -> list[list[tuple[float, ...]]]:
    """Run jobs one after the other, each with its whole prompt."""
    for engine in make_engine(
        name, cache, 1, "chunked", **PLAIN | settings, enable_prefix_caching=False
    ):
        expected = [scores(engine, [job])[0] for job in jobs]
    return expected


def engines(name: str, cache: str, settings: dict[str, Any]) -> Iterator[Engine]:
    """Make an engine for each way to schedule requests."""
    for scheduler, own in WAYS:
        yield from make_engine(name, cache, 1, scheduler, **PLAIN | settings | own)


@pytest.mark.usefixtures("few_programs", "quick_compiles")
def test_bits_follow_from_the_tokens_of_a_request(tmp_path: Path, program_cache: str) -> None:
    """In chunks, with preemption and with pages of others; the slow tests have more requests, types and schedulers."""
    name, jobs = str(eight_heads.write_model(MODELS["llama"], tmp_path / "llama")), make_jobs(4, 8)
    settings = (
        PLAIN
        | TYPES["bfloat16"]
        | {"num_pages": 12, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    )
    for engine in make_engine(name, program_cache, 1, "chunked", **settings):
        expected = [scores(engine, [job])[0] for job in jobs]
        assert scores(engine, jobs) == expected
        assert engine.pool.num_preemptions > 0 and engine.pool.num_cache_hits > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("odd", "float32"),
        slow("odd", "bfloat16"),
        slow("mixtral", "bfloat16"),
        slow("qwen2_moe", "float32"),
    ],
)
@pytest.mark.usefixtures("few_programs", "quick_compiles")
def test_bits_of_matrices_of_any_width(
    name: str, dtype: str, tmp_path: Path, program_cache: str
) -> None:
    directory = str(eight_heads.write_model(ANY_WIDTH[name], tmp_path / name))
    jobs = make_jobs(6, 4)
    settings = PLAIN | {"dtype": dtype, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    for engine in make_engine(directory, program_cache, 1, "chunked", **settings):
        expected = [scores(engine, [job])[0] for job in jobs]
        assert scores(engine, jobs) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("model", "types"), chosen(product(["demo", *MODELS], TYPES), size=1), indirect=["model"]
)
def test_bits_of_many_requests(model: str, types: str, program_cache: str) -> None:
    jobs = make_jobs(64, 64)
    expected = alone(model, program_cache, jobs, TYPES[types])
    preemptions = hits = 0
    for engine in engines(model, program_cache, TYPES[types]):
        assert scores(engine, jobs) == expected, "cold"
        assert scores(engine, jobs) == expected, "again"
        preemptions, hits = (
            preemptions + engine.pool.num_preemptions,
            hits + engine.pool.num_cache_hits,
        )
    assert preemptions > 0 and hits > 0
