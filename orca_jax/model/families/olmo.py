"""OLMo 2 and OLMoE: Llama with norms of queries and keys over all heads together.

OLMo 2 has its other norms after attention and MLP. OLMoE has experts.
"""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import experts, llama
from orca_jax.model.families.base import Family, Weight
from orca_jax.model.families.values import HfConfig, get_bool


def olmo2_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OLMo 2; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {"vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048}
    config = llama.read_shape(hf, "olmo2", defaults, norm_eps=1e-5)
    return replace(config, **llama.attention_biases(hf), qk_norm="all", residual="post_norm")


def olmoe_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OLMoE; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {
        "vocab_size": 50304,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
    }
    config = llama.read_shape(hf, "olmoe", defaults, norm_eps=1e-5)
    return replace(
        config,
        **llama.attention_biases(hf),
        qk_norm="all",
        experts=experts.read_experts(hf, "num_experts", (64, 8), is_normalised=get_bool(hf, "norm_topk_prob", False)),
    )


def olmoe_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    return *llama.weights_beside_mlp(config), *experts.expert_weights("layers.{layer}.mlp")


OLMO2 = Family(
    name="olmo2",
    models="OLMo 2",
    config_from_hf=olmo2_from_hf,
    keys=llama.KEYS | {"attention_bias"},
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    weights=llama.weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
)

OLMOE = Family(
    name="olmoe",
    models="OLMoE",
    config_from_hf=olmoe_from_hf,
    keys=llama.KEYS | {"attention_bias", "norm_topk_prob", "num_experts", "num_experts_per_tok"},
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    weights=olmoe_weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    fixed={"clip_qkv": (None,)},
    aliases={"num_local_experts": "num_experts"},
    harmless=experts.HARMLESS,
)
