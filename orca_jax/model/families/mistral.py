"""Mistral: Llama with a sliding window in all layers. Ministral has it in some.

Ministral 3 has none, and multiplies queries by a factor that grows with their positions.
"""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import Family
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import window_of_all, windows_of_pattern

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_TEMPERED = rope.RopeRules(
    default=_YARN, notes=frozenset({"max_position_embeddings"}), temperature_key="llama_4_scaling_beta"
)


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Mistral; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "mistral")
    return replace(config, sliding_window=window_of_all(hf, 4096, config.max_positions))


def ministral_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Ministral; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "ministral")
    pattern = (hf.get("sliding_window", 4096) is not None,)
    windows = windows_of_pattern(hf, config.num_layers, config.max_positions, pattern)
    return replace(config, **windows._asdict())


def ministral3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Ministral 3; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "ministral3", norm_eps=1e-5, rules=_TEMPERED)
    return replace(config, sliding_window=window_of_all(hf, None, config.max_positions))


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

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    models="Ministral 8B",
    config_from_hf=ministral_from_hf,
    keys=MISTRAL.keys | {"layer_types"},
    architectures=("MinistralForCausalLM", "MinistralModel"),
)

MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    models="Ministral 3",
    config_from_hf=ministral3_from_hf,
    architectures=("Ministral3ForCausalLM", "Ministral3Model"),
)
