"""OLMo 2 and 3, OLMoE and FlexOlmo: Llama with norms of queries and keys over all heads together.

OLMo 2, OLMo 3 and FlexOlmo have their other norms after attention and MLP. OLMo 3 has windows, and other rotary
positions in layers without one. OLMoE and FlexOlmo have experts.
"""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import experts, llama, rope
from orca_jax.model.families.base import Family, Weight
from orca_jax.model.families.values import HfConfig, get_bool
from orca_jax.model.families.windows import windows_of_gemma

# Scaling and `rope_theta` outside the objects are those of layers without a window.
_GLOBAL = rope.RopeRules(theta=5e5, part="full_attention")
_LOCAL = rope.RopeRules(theta_key=None, theta=5e5, part="sliding_attention")


def olmo2_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OLMo 2; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "olmo2", norm_eps=1e-5)
    return replace(config, **llama.attention_biases(hf), qk_norm="all", residual="post_norm")


def olmo3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OLMo 3; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "olmo3", norm_eps=1e-5, rules=_GLOBAL)
    local, _ = rope.read_rope(hf, config.head_dim, config.max_positions, _LOCAL)
    return replace(
        config,
        **llama.attention_biases(hf),
        qk_norm="all",
        residual="post_norm",
        windowed_rope=local,
        **windows_of_gemma(hf, config.num_layers, config.max_positions, 4)._asdict(),
    )


def olmoe_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OLMoE; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "olmoe", norm_eps=1e-5)
    return replace(
        config,
        **llama.attention_biases(hf),
        qk_norm="all",
        experts=experts.read_experts(hf, "num_experts", (64, 8), is_normalised=get_bool(hf, "norm_topk_prob", False)),
    )


def flex_olmo_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of FlexOlmo; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "flex_olmo", rules=rope.RopeRules(theta=5e5))
    return replace(
        config,
        **llama.attention_biases(hf),
        qk_norm="all",
        residual="post_norm",
        experts=experts.read_experts(hf, "num_experts", (7, 5), is_normalised=get_bool(hf, "norm_topk_prob", False)),
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

OLMO3 = Family(
    name="olmo3",
    models="OLMo 3",
    config_from_hf=olmo3_from_hf,
    keys=llama.KEYS | {"attention_bias", "layer_types", "sliding_window"},
    architectures=("Olmo3ForCausalLM", "Olmo3Model"),
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

FLEX_OLMO = replace(
    OLMOE,
    name="flex_olmo",
    models="FlexOlmo",
    config_from_hf=flex_olmo_from_hf,
    architectures=("FlexOlmoForCausalLM", "FlexOlmoModel"),
    fixed={},
)
