"""OLMo 2 and 3, OLMoE and FlexOlmo: Llama with norms of queries and keys over all heads together.

OLMo 2, OLMo 3 and FlexOlmo have their other norms after attention and MLP. OLMo 3 has windows, and other rotary
positions in layers without one. OLMoE and FlexOlmo have experts.
"""

from typing import Any

from orca_jax.model.families import experts, llama, rope
from orca_jax.model.families.base import Weight
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.values import HfConfig, get_bool
from orca_jax.model.families.windows import windows_of_gemma
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig

# Scaling and `rope_theta` outside the objects are those of layers without a window.
_GLOBAL = rope.RopeRules(theta=5e5, part="full_attention")
_LOCAL = rope.RopeRules(theta_key=None, theta=5e5, part="sliding_attention")
_OF_EXPERTS = frozenset({"attention_bias", "norm_topk_prob", "num_experts", "num_experts_per_tok"})


def _olmo2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**llama.attention_biases(hf), "qk_norm": "all", "residual": "post_norm"}


def _olmo3(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    local, _ = rope.read_rope(hf, config.head_dim, config.max_positions, _LOCAL)
    windows = windows_of_gemma(hf, config.num_layers, config.max_positions, 4)
    return {**_olmo2(hf, config), "windowed_rope": local, **windows._asdict()}


def _olmoe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**llama.attention_biases(hf), "qk_norm": "all", "experts": _experts(hf, (64, 8))}


def _flex_olmo(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**_olmo2(hf, config), "experts": _experts(hf, (7, 5))}


def _experts(hf: HfConfig, defaults: tuple[int, int]) -> ExpertsConfig:
    is_normalised = get_bool(hf, "norm_topk_prob", False)
    return experts.read_experts(hf, "num_experts", defaults, is_normalised=is_normalised)


def _of_olmoe(config: ModelConfig) -> tuple[Weight, ...]:
    return *llama.weights_beside_mlp(config), *experts.expert_weights("layers.{layer}.mlp")


OLMO2 = near_llama(
    "olmo2", "OLMo 2", "Olmo2", LlamaShape(1e-5), _olmo2, frozenset({"attention_bias"})
)
OLMO3 = near_llama(
    "olmo3",
    "OLMo 3",
    "Olmo3",
    LlamaShape(1e-5, rules=_GLOBAL),
    _olmo3,
    frozenset({"attention_bias", "layer_types", "sliding_window"}),
)
OLMOE = near_llama(
    "olmoe",
    "OLMoE",
    "Olmoe",
    LlamaShape(1e-5),
    _olmoe,
    _OF_EXPERTS,
    _of_olmoe,
    fixed={"clip_qkv": (None,)},
    aliases={"num_local_experts": "num_experts"},
    harmless=experts.HARMLESS,
)
FLEX_OLMO = near_llama(
    "flex_olmo",
    "FlexOlmo",
    "FlexOlmo",
    LlamaShape(rules=rope.RopeRules(theta=5e5)),
    _flex_olmo,
    _OF_EXPERTS,
    _of_olmoe,
    aliases=OLMOE.aliases,
    harmless=experts.HARMLESS,
)
