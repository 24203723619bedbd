"""Mistral 4: latent attention as in DeepSeek-V3, and a softmax over the experts."""

from dataclasses import replace

from orca_jax.model.families import rope
from orca_jax.model.families.mixtures.deepseek import (
    LatentDefaults,
    read_latents,
    with_latent_experts,
)
from orca_jax.model.families.mixtures.sigmoid import grouped_experts
from orca_jax.model.families.values import HfConfig, get_count
from orca_jax.values.config import ModelConfig

_MISTRAL4_ROPE = rope.RopeRules(
    # with others transformers has the frequencies of whole heads, and fails
    kinds=("yarn",),
    default={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    notes=frozenset({"max_position_embeddings"}),
    temperature_key="llama_4_scaling_beta",
)


def mistral4_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Mistral 4; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = LatentDefaults(1024, 64, 128, 256)
    config = read_latents(hf, "mistral4", defaults, rules=_MISTRAL4_ROPE, is_share=True)
    num_dense = get_count(hf, "first_k_dense_replace", 0)
    found = grouped_experts(hf, config, (128, 4, 2048), num_dense=num_dense)
    experts = found["experts"]
    router = replace(experts.router, scores="softmax", has_bias=False)
    return replace(config, **found | {"experts": replace(experts, router=router)})


MISTRAL4 = with_latent_experts(
    "mistral4",
    "Mistral Small 4, for texts alone",
    "Mistral4",
    mistral4_from_hf,
    keys=frozenset({"first_k_dense_replace"}),
    scores="softmax",
    fixed={},
)
