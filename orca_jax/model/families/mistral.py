"""Mistral: Llama with a sliding window in all layers."""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import llama
from orca_jax.model.families.base import Family
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import window_of_all


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Mistral; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
    }
    config = llama.read_shape(hf, "mistral", defaults)
    return replace(config, sliding_window=window_of_all(hf, 4096, config.max_positions))


MISTRAL = Family(
    name="mistral",
    models="Mistral 7B, Mistral Nemo, Mistral Small 2409 and 2501",
    config_from_hf=config_from_hf,
    keys=llama.KEYS | {"sliding_window"},
    architectures=("MistralForCausalLM", "MistralModel"),
    weights=llama.weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
)
