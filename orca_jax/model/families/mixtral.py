"""Mixtral: Mistral with experts."""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import experts, llama
from orca_jax.model.families.base import Family, Weight
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import window_of_all


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Mixtral; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "mixtral", norm_eps=1e-5, rules=RopeRules(theta=1e6))
    return replace(
        config,
        sliding_window=window_of_all(hf, None, config.max_positions),
        experts=experts.read_experts(hf, "num_local_experts", (8, 2), is_normalised=True),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    return *llama.weights_beside_mlp(config), *expert_weights()


def expert_weights() -> tuple[Weight, ...]:
    """The weights of the experts."""
    return experts.expert_weights("layers.{layer}.block_sparse_moe", ("w1", "w3", "w2"))


MIXTRAL = Family(
    name="mixtral",
    models="Mixtral 8x7B and 8x22B",
    config_from_hf=config_from_hf,
    keys=llama.KEYS | {"num_experts_per_tok", "num_local_experts", "sliding_window"},
    architectures=("MixtralForCausalLM", "MixtralModel"),
    weights=weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    aliases={"num_experts": "num_local_experts"},
    harmless=experts.HARMLESS,
)
