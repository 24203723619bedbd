"""Models with states beside adapters, quantised weights, 8-bit pages, and embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orca_jax import LLM
from orca_jax.model.describe import read_model_config
from orca_jax.model.lora.peft_files import read_adapter
from orca_jax.model.matrices.quantise import expand, quantise, quantise_rows
from orca_jax.values.config import LoraConfig, Quantization
from orca_jax.values.errors import CheckpointError
from orca_jax.values.request import RequestUpdate
from tests.lora.directories import merge, write_adapter
from tests.model.states.hybrids import PROMPTS, config_of, layer_types, write
from tests.test_same_tokens import make_engine, run_updates
from tests.test_states import CLOSE, jobs_of, record

pytestmark = pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
TARGETS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"feed_forward.w{number}" for number in (1, 2, 3)),
)


def written(name: str, folder: Path) -> Path:
    folder.mkdir()
    write(name, folder)
    return folder


def tokens(job: Sequence[RequestUpdate]) -> list[int]:
    return [token for update in job for token in update.new_ids]


def logprobs(job: Sequence[RequestUpdate]) -> list[float]:
    return [entry.logprob for update in job for entry in update.logprobs]


def check_equal(
    found: Sequence[list[RequestUpdate]], expected: Sequence[list[RequestUpdate]], close: float
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert tokens(ours) == tokens(theirs)
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), rtol=0, atol=close)


def test_adapters_have_places_in_layers_with_attention_and_in_mlps(tmp_path: Path) -> None:
    base = written("lfm3-0", tmp_path / "base")
    model, lora = read_model_config(base), LoraConfig(num_slots=1, max_rank=2)
    values = read_adapter(
        write_adapter(tmp_path / "adapter", 1, TARGETS, base=base), model, lora, "float32"
    ).values
    has_attention = [kind != "conv" for kind in layer_types(config_of("lfm3-0"))]
    for target in ("query", "key", "value", "out", "attention.shrink", "attention_out.shrink"):
        assert values[target].any(axis=(1, 2)).tolist() == has_attention, target
    assert all(values[target].any(axis=(1, 2)).all() for target in ("gate", "up", "down"))
    refused = write_adapter(tmp_path / "refused", 1, ("conv.in_proj",), base=base)
    with pytest.raises(
        CheckpointError,
        match=r"conv\.in_proj\.lora_A.*: adapters of layers with states are not supp",
    ):
        read_adapter(refused, model, lora, "float32")
    gate = write_adapter(tmp_path / "gate", 1, ("self_attn.gate_proj",), base=base)
    with pytest.raises(CheckpointError, match=r"gate_proj.*: no linear layer of this model"):
        read_adapter(gate, model, lora, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "settings"),
    [
        ("lfm3-0", 2, {}),
        ("lfm3-2", 1, {"pipeline_parallel_size": 2}),
    ],
)
def test_adapters_equal_merged_weights(
    name: str, devices: int, settings: dict[str, Any], program_cache: str, tmp_path: Path
) -> None:
    """Beside requests without an adapter, in chunks, and the second time from the prefix cache."""
    base, options = written(name, tmp_path / "base"), {"max_num_batched_tokens": 8, **settings}
    adapter, plain = write_adapter(tmp_path / "adapter", 1, TARGETS, base=base), jobs_of(name)
    expected: list[list[RequestUpdate]] = []
    for directory in (merge(adapter, tmp_path / "merged", base=base), base):
        for engine in make_engine(str(directory), program_cache, 1, "chunked"):
            expected += run_updates(engine, plain)
    assert [tokens(job) for job in expected[:3]] != [tokens(job) for job in expected[3:]]
    lora = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 3,
        "lora_modules": (f"x={adapter}",),
    }
    jobs = [*(replace(job, adapter="x") for job in plain), *plain]
    for engine in make_engine(str(base), program_cache, devices, "chunked", **options, **lora):
        for _ in range(2):
            check_equal(run_updates(engine, jobs), expected, 1e-4)
        assert engine.pool.num_cache_hits == 2 * (PROMPTS[0] - 1)


def dequantised(base: Path, folder: Path, kind: Quantization) -> Path:
    """Write a model with the values that its quantised weights stand for."""
    folder.mkdir()
    (folder / "config.json").write_text(
        (base / "config.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    tensors = load_file(base / "model.safetensors")
    for key, weight in tensors.items():
        if key.endswith(("embed_tokens.weight", "lm_head.weight")):
            stored = quantise_rows(jnp.asarray(weight))
            tensors[key] = np.asarray(stored.values.astype(jnp.float32) * stored.scale[:, None])
        elif weight.ndim == 2 and not key.endswith("block_sparse_moe.gate.weight"):
            whole = expand(quantise(jnp.asarray(weight.T), kind), kind, jnp.dtype("float32"))
            tensors[key] = np.ascontiguousarray(np.asarray(whole).T)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        ("lfm3-0", "int4", 2),
        ("lfm3-3", "fp8", 1),
        ("minimax-0", "int8", 2),
    ],
)
def test_quantised_weights(
    name: str, kind: Quantization, devices: int, program_cache: str, tmp_path: Path
) -> None:
    base, jobs = written(name, tmp_path / "base"), jobs_of(name)
    for engine in make_engine(
        str(dequantised(base, tmp_path / "plain", kind)), program_cache, 1, "chunked"
    ):
        expected = run_updates(engine, jobs)
    options = {"quantization": kind, "max_num_batched_tokens": 8}
    for engine in make_engine(str(base), program_cache, devices, "chunked", **options):
        for _ in range(2):
            check_equal(run_updates(engine, jobs), expected, 1e-4)
        assert engine.pool.num_cache_hits == PROMPTS[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("lfm3-0", "int8"), ("minimax-0", "fp8")])
def test_pages_of_8_bits(name: str, dtype: str, program_cache: str, tmp_path: Path) -> None:
    """What a page stores does not depend on chunks; states keep their type, so results stay close to exact ones."""
    alone: list[list[RequestUpdate]] = []
    for budget in (64, 8):
        options = {"kv_cache_dtype": dtype, "max_num_batched_tokens": budget}
        for engine in make_engine(
            str(written(name, tmp_path / str(budget))), program_cache, 1, "chunked", **options
        ):
            alone = alone or [run_updates(engine, [job])[0] for job in jobs_of(name)]
            for _ in range(2):
                check_equal(run_updates(engine, jobs_of(name)), alone, CLOSE)
            assert engine.pool.num_cache_hits > 0
    first = [logprobs(job)[0] for job in alone]
    lines = [lines[length - 1] for (_, lines), length in zip(record(name), PROMPTS, strict=True)]
    exact = [float(line[tokens(job)[0]]) for line, job in zip(lines, alone, strict=True)]
    np.testing.assert_allclose(first, exact, rtol=0, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm3-0", "minimax-0"])
def test_embeddings(name: str, program_cache: str, tmp_path: Path) -> None:
    """The recorded log probabilities are those of the vectors and the head, up to a number for each position."""
    base = written(name, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    prompts = [ids[:length] for (ids, _), length in zip(record(name), PROMPTS, strict=True)]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "page_size": 8, "num_pages": 60}
    options = {
        "dtype": "float32",
        "tokenizer": "byte",
        "compile_cache": program_cache,
        "progress": False,
    }
    with LLM(str(base), **options, **sizes, tensor_parallel_size=1) as llm:
        for pooling in ("last", "mean"):
            for _ in range(2):
                outputs = llm.embed(prompts, pooling, normalize=False, use_tqdm=False)
                for output, (_, lines), length in zip(outputs, record(name), PROMPTS, strict=True):
                    wanted = lines[length - 1] if pooling == "last" else lines[:length].mean(axis=0)
                    found = head @ np.asarray(output.outputs.embedding, np.float32)
                    np.testing.assert_allclose(
                        found - found.mean(), wanted - wanted.mean(), rtol=0, atol=CLOSE
                    )
