"""Configurations are read without JAX, and errors name the options without support in the decoder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import ConfigError
from orca_jax.model.describe import config_from_hf, preset_names, read_model_config

# name: layers, embed, heads, KV heads, MLP, vocabulary, positions
PRESETS = {
    "gpt2-tiny": (2, 64, 2, 2, 256, 512, 1024),
    "gpt2": (12, 768, 12, 12, 3072, 50257, 1024),
    "gpt2-medium": (24, 1024, 16, 16, 4096, 50257, 1024),
    "gpt2-large": (36, 1280, 20, 20, 5120, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 25, 6400, 50257, 1024),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, 131072),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, 8192),
    "gpt3-13b": (40, 5120, 40, 40, 20480, 50257, 2048),
    "gpt3-101b": (80, 10240, 80, 80, 40960, 50257, 2048),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 50257, 2048),
    "gpt3-341b": (120, 15360, 120, 120, 61440, 50257, 2048),
}

GPT2: dict[str, Any] = {"model_type": "gpt2"}
LLAMA: dict[str, Any] = {"model_type": "llama"}


def test_presets() -> None:
    assert set(preset_names()) == set(PRESETS)
    for name, shape in PRESETS.items():
        c = read_model_config(f"preset:{name}")
        sizes = (c.num_layers, c.embed_dim, c.num_heads, c.num_kv_heads, c.mlp_dim, c.vocab_size, c.max_positions)
        assert sizes == shape, name
        assert c.head_dim * c.num_heads == c.embed_dim, name


def test_describing_a_model_imports_no_jax() -> None:
    code = (
        "import sys, orca_jax.model.describe as d; d.read_model_config('preset:gpt2');"
        "print([m for m in ('jax', 'flax', 'numpy', 'orbax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("hf", "param"),
    [
        ({"model_type": "t5"}, "model"),
        ({}, "model"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ({**GPT2, "activation_function": "mish"}, "activation_function"),
        ({**GPT2, "n_head": 7}, "n_head"),
        ({**GPT2, "n_layer": 0}, "n_layer"),
        ({**GPT2, "n_layer": True}, "n_layer"),
        ({**GPT2, "n_embd": "768"}, "n_embd"),
        ({**GPT2, "layer_norm_epsilon": -1}, "layer_norm_epsilon"),
        ({**GPT2, "eos_token_id": 50257}, "eos_token_id"),
        ({**GPT2, "eos_token_id": "</s>"}, "eos_token_id"),
        ({**LLAMA, "hidden_act": "relu2"}, "hidden_act"),
        ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads"),
        ({**LLAMA, "hidden_size": 100}, "num_attention_heads"),
        ({**LLAMA, "head_dim": 3}, "head_dim"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "proportional"}}, "rope_type"),
        ({**LLAMA, "rope_scaling": {"type": "su"}}, "rope_type"),
        ({**LLAMA, "rope_scaling": ["linear"]}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({**LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_by_name(hf: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError, match=param) as caught:
        config_from_hf(hf)
    assert caught.value.param == param


def test_old_and_new_spellings_of_rope_agree() -> None:
    kind = {"factor": 4.0}
    old = config_from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", **kind}})
    new = config_from_hf({**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, **kind}})
    assert old == new
    assert new.rope is not None
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == ("linear", 5e5, 4.0)


def test_changing_frequencies_limit_the_context() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **factors}
    assert config_from_hf({**LLAMA, "max_position_embeddings": 131072, "rope_parameters": rope}).max_positions == 4096


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "eos_token_id": 7}))
    assert read_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"gpt2"'])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt5'.*gpt2-xl"):
        read_model_config("preset:gpt5")
