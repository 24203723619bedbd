"""Mixtral: Mistral with experts."""

from typing import Any

from orca_jax.model.families import experts, llama
from orca_jax.model.families.base import Weight
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import window_of_all
from orca_jax.values.config import ModelConfig


def _fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {
        "sliding_window": window_of_all(hf, None, config.max_positions),
        "experts": experts.read_experts(hf, "num_local_experts", (8, 2), is_normalised=True),
    }


def expert_weights() -> tuple[Weight, ...]:
    """The weights of the experts."""
    return experts.expert_weights("layers.{layer}.block_sparse_moe", ("w1", "w3", "w2"))


MIXTRAL = near_llama(
    "mixtral",
    "Mixtral 8x7B and 8x22B",
    "Mixtral",
    LlamaShape(1e-5, rules=RopeRules(theta=1e6)),
    _fields,
    frozenset({"num_experts_per_tok", "num_local_experts", "sliding_window"}),
    lambda config: (*llama.weights_beside_mlp(config), *expert_weights()),
    aliases={"num_experts": "num_local_experts"},
    harmless=experts.HARMLESS,
)
