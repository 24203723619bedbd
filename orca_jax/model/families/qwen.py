"""Qwen2, Qwen2.5 and Qwen3, without experts: Llama with biases of queries, keys and values, or with norms of heads."""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import llama
from orca_jax.model.families.base import Family
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import QWEN_KEYS, windows_of_qwen


def qwen2_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Qwen2; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "qwen2")
    windows = windows_of_qwen(hf, config.num_layers, config.max_positions)
    return replace(config, attention_bias=True, **windows._asdict())


def qwen3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Qwen3; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "qwen3")
    windows = windows_of_qwen(hf, config.num_layers, config.max_positions)
    return replace(config, qk_norm="head", **llama.attention_biases(hf), **windows._asdict())


QWEN2 = Family(
    name="qwen2",
    models="Qwen2, Qwen2.5",
    config_from_hf=qwen2_from_hf,
    keys=llama.KEYS | QWEN_KEYS,
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    weights=llama.weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    fixed={"use_mrope": (False, None)},
)

QWEN3 = Family(
    name="qwen3",
    models="Qwen3 without experts",
    config_from_hf=qwen3_from_hf,
    keys=llama.KEYS | QWEN_KEYS | {"attention_bias"},
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    weights=llama.weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
)
