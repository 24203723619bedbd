"""GGUF files, written by the library from reference models: the same logits, and refusals by name."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.numpy import load_file

from orca_jax.assembly.described import describe
from orca_jax.assembly.engine import build_engine
from orca_jax.helpers.bundled import texts_of
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.parameters import flat_parameters
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import CheckpointError, ConfigError
from orca_jax.values.layer_config import RopeConfig
from tests.covering import slow
from tests.model.reference import REFERENCE, logits, mesh_of
from tests.text.test_gguf_texts import add_fields

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do

ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt2-12-heads": "gpt2",
    "llama-12-heads-3-groups": "llama",
    "llama-biases-sharded": "llama",
    "llama-rope-llama3": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "phi3-window": "phi3",
    "qwen2-tied": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
OTHERS = ("gemma3", "gpt2-12-heads", "llama-12-heads-3-groups", "phi3-window")
OF_GPT2 = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def tensors_of(name: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted((REFERENCE / name).glob("*.safetensors")):
        found |= load_file(file)
    return found


def merged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, with the matrices of all experts of a layer in one."""
    found: dict[str, list[np.ndarray]] = {}
    for key in sorted(tensors):  # fewer than ten experts
        found.setdefault(re.sub(r"experts\.\d", "experts", key), []).append(tensors[key])
    return {
        key: np.stack(parts) if ".experts." in key else parts[0] for key, parts in found.items()
    }


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = (num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


def frequency_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """As `LlamaModel.generate_extra_tensors` of llama.cpp's convert_hf_to_gguf.py."""
    length, found = rope.original_max_position, []
    for freq in 1 / rope.theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / freq
        smooth = (length / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        if wavelength < length / rope.high_freq_factor:
            found.append(1.0)
        elif wavelength > length / rope.low_freq_factor:
            found.append(rope.factor)
        else:
            found.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(found, np.float32)


def write(
    path: Path,
    name: str,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    texts: dict[str, Any] | None = None,
    split: int = 0,
    **changes: Any,
) -> Path:
    """Write a reference model, or a directory, as llama.cpp's converter does.

    Args:
        path: the file.
        name: of the model, or the path of a directory with such a name.
        kind: the type of matrices, or a function of their names.
        texts: see `add_fields`.
        split: tensors of a part; 0 for a single file.
        changes: further keys of the architecture.
    """
    kind_of = kind if callable(kind) else lambda theirs: kind
    architecture = ARCHITECTURES[Path(name).name]
    config = read_model_config(REFERENCE / name)
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_file_type(0)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        assert config.rope is not None
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.rope.rotated_dim or config.head_dim)
        if architecture != "phi3":
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        windows = {kind.window for kind in config.layers} - {None}
        for window in windows:
            writer.add_sliding_window(window)
        if config.attention_soft_cap is not None:
            writer.add_attn_logit_softcapping(config.attention_soft_cap)
        if config.experts is not None:
            writer.add_expert_count(config.experts.count)
            writer.add_expert_used_count(config.experts.per_token)
            if architecture != "llama":
                writer.add_expert_feed_forward_length(config.mlp_dim)
        if config.logit_soft_cap is not None:
            writer.add_final_logit_softcapping(config.logit_soft_cap)
    for key, value in changes.items():
        writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    if config.rope is not None and config.rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", frequency_factors(config.rope, config.head_dim))
    writer.add_eos_token_id(5)
    add_fields(writer, **(texts or {}))
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_layers
    )
    for key, values in merged(tensors_of(name)).items():
        if key.endswith(OF_GPT2):
            values = values.T
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            values = permuted(values, config.num_heads if "q_proj" in key else config.num_kv_heads)
        theirs = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            continue
        if config.norm_offset and theirs.endswith("norm.weight"):
            values = values + config.norm_offset
        if config.attention_scale is not None and theirs.endswith(
            "attn_q_norm.weight" if config.qk_norm else "attn_q.weight"
        ):
            # of queries: files have no scale of scores
            values = values * config.attention_scale * config.head_dim**0.5
        values = np.ascontiguousarray(values, np.float32)
        own = kind_of(theirs)
        if own != Kind.F32 and values.shape[-1] % 32 == 0 and values.ndim > 1:
            writer.add_tensor(theirs, gguf.quantize(values, own), raw_dtype=own)
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name",
    [
        "llama-rope-llama3",
        "gemma2",
        *(slow(name) for name in OTHERS),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    decoder = load_decoder(write(tmp_path / "model.gguf", name), dtype="float32", mesh=mesh_of(2))
    expected = np.load(REFERENCE / name / "expected.npz")
    ours, theirs = logits(decoder, expected["ids_1"]), expected["logits_1"]
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
    "name",
    [
        "llama-biases-sharded",
        *(slow(name) for name in ("olmo2", "qwen2-tied")),
    ],
)
def test_parameters_are_those_of_safetensors(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", name)
    ours, theirs = (
        load_decoder(source, dtype="float32", mesh=mesh_of(1))
        for source in (path, REFERENCE / name)
    )
    found, expected = (flat_parameters(nnx.state(decoder)) for decoder in (ours, theirs))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(value, expected[key]) for key, value in found.items())
    assert ours.config == dataclasses.replace(theirs.config, eos_token_ids=(5,))


@pytest.mark.parametrize(
    "kind",
    [
        Kind.BF16,
        Kind.Q4_0,
        *(slow(kind) for kind in (Kind.F16, Kind.Q8_0)),
    ],
)
def test_types_are_dequantised_by_the_library(tmp_path: Path, kind: Kind) -> None:
    name = "qwen3"
    path = write(tmp_path / "model.gguf", name, kind)
    found = flat_parameters(nnx.state(load_decoder(path, dtype="float32", mesh=mesh_of(2))))
    stored = tensors_of(name)["model.layers.1.self_attn.q_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(stored, kind), kind).T
    np.testing.assert_array_equal(found["blocks.attention.query.kernel"][1], expected)


def test_parts_of_a_file_are_read_as_one(tmp_path: Path) -> None:
    whole, path = (
        write(tmp_path / "model.gguf", "qwen3"),
        write(tmp_path / "parts.gguf", "qwen3", split=9),
    )
    first, *others = sorted(path.parent.glob("parts-*.gguf"))
    ours, theirs = (
        load_decoder(source, dtype="float32", mesh=mesh_of(1)) for source in (first, whole)
    )
    found, expected = (flat_parameters(nnx.state(decoder)) for decoder in (ours, theirs))
    assert len(others) > 1 and all(
        np.array_equal(value, expected[key]) for key, value in found.items()
    )
    assert "is one of several parts: give the first one" in refused(others[0])
    others[0].unlink()
    os.utime(first)
    assert str(others[0]) in refused(first)


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_decoder(path, dtype="float32", mesh=mesh_of(1))
    return caught.value.message


def test_unsupported_files_are_refused_by_name(tmp_path: Path) -> None:
    name, path = "qwen3", tmp_path / "model.gguf"
    write(path, name, **{"expert_count": 0})
    load_decoder(path, dtype="float32", mesh=mesh_of(1))
    write(path, name, **{"expert_count": 8})
    assert "qwen3.expert_count = 8 is not supported from GGUF" in refused(path)
    write(path, name, **{"rope.scaling.type": "yarn"})
    assert "qwen3.rope.scaling.type = 'yarn' is not supported" in refused(path)
    write(path, name, **{"vocab_size": 0})
    assert refused(path).startswith(f"{path}: vocab_size must be a positive integer")
    writer = GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert (
        "architecture 'mamba' is not supported, only gemma, gemma2, gemma3, gpt2, llama"
        in refused(path)
    )
    writer = GGUFWriter(path, "phi3")
    writer.add_rope_dimension_count(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "phi3.rope.dimension_count = 8 is not supported from GGUF" in refused(path), (
        "of heads without a size"
    )
    path.write_bytes(b"GGUF but not much more")
    assert "cannot be read as GGUF" in refused(path)
    path.unlink()
    assert "is not a file" in refused(path)


@pytest.mark.parametrize(
    ("architecture", "experts"),
    [("llama", 0), ("llama", 8), ("gemma3", 0), ("phi3", 0), ("qwen3moe", 8)],
)
def test_a_missing_base_of_rotary_positions_is_that_of_llama_cpp(
    tmp_path: Path, architecture: str, experts: int
) -> None:
    """Mixtral and Gemma 3 have another default in transformers."""
    writer = GGUFWriter(path := tmp_path / "model.gguf", architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    if architecture == "phi3":
        writer.add_sliding_window(0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = read_model_config(path)
    assert config.rope is not None and config.rope.theta == 10_000.0
    assert {kind.rope.theta for kind in config.layers if kind.rope is not None} == {10_000.0}
    windows = {kind.window for kind in config.layers}
    assert windows == {16 if architecture == "gemma3" else None}


def test_a_part_that_changes_between_opening_and_loading(tmp_path: Path) -> None:
    """Its tensors may lie elsewhere, so nothing is read."""
    write(tmp_path / "parts.gguf", "qwen3", split=9)
    first, second, *_ = sorted(tmp_path.glob("parts-*.gguf"))
    loading = prepare_load(first, dtype="float32")
    loading.load(mesh_of(1))
    os.utime(second, ns=(0, 0))
    with pytest.raises(CheckpointError, match="has changed since its header was read") as caught:
        loading.load(mesh_of(1))
    assert caught.value.source == str(second)


def test_tensors_that_do_not_fit_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "model.gguf", tensors_of

    def changed(name: str) -> dict[str, np.ndarray]:
        tensors = plain(name)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        return {**tensors, "model.norm.weight": np.zeros(7, np.float32)}

    monkeypatch.setattr("tests.model.gguf.test_gguf.tensors_of", changed)
    write(path, "qwen3")
    with pytest.raises(CheckpointError) as caught:
        load_decoder(path, dtype="float32", mesh=mesh_of(1))
    assert set(caught.value.problems) == {
        "model.layers.1.mlp.up_proj.weight: missing",
        "model.norm.weight: shape [7], the model needs [32]",
    }


def test_the_tokenizer_and_the_template_are_those_of_the_file(tmp_path: Path) -> None:
    """All tokens of a turn end a text, as in llama.cpp."""
    tokens = ["a", "b", "<|end|>", "ab", "c", "<|eos|>"]
    texts = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1, 1, 3, 1, 1, 3],
        "merges": ["a b"],
    }
    path = str(write(tmp_path / "model.gguf", "qwen3", texts={**texts, "eot_token_id": 2}))
    found = describe(EngineConfig(path), None)
    assert (found.tokenizer.source, found.texts) == (path, path) and found.tokenizer.encode(
        "ab"
    ) == [3]
    assert found.model.eos_token_ids == (5, 2)


def test_a_tokenizer_beside_the_file_brings_its_own_template(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "qwen3")
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.tokens must be a list .* with --tokenizer"
    ) as caught:
        build_engine(EngineConfig(str(path)))
    assert caught.value.param == "tokenizer"
    assert texts_of(EngineConfig(str(path), tokenizer=str(tmp_path))) == str(tmp_path)
    assert texts_of(EngineConfig(str(path), tokenizer="byte")) == ""
    with pytest.raises(ConfigError, match="use auto or dummy"):
        build_engine(EngineConfig(str(path), tokenizer="byte", load_format="orbax"))
