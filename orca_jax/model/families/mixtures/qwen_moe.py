"""Qwen2 and Qwen3 with experts in all layers. Qwen2 has another expert of all tokens."""

from typing import Any

from orca_jax.model.families import experts, llama
from orca_jax.model.families.base import Weight
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.values import HfConfig, get_bool, get_int, refusal
from orca_jax.model.families.windows import window_of_all
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig

_KEYS = frozenset({"moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok"})
_MOE = "layers.{layer}.mlp"


def _qwen2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    kinds = hf.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * config.num_layers:
        raise refusal(
            "layer_types", f"must be full_attention for each of {config.num_layers} layers", kinds
        )
    shared = get_int(hf, "shared_expert_intermediate_size", 5632)
    return {
        "attention_bias": get_bool(hf, "qkv_bias", True),
        "mlp_dim": get_int(hf, "moe_intermediate_size", 1408),
        "experts": _experts(hf, (60, 4), shared),
    }


def _qwen3(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    window = window_of_all(hf, 4096, config.max_positions)
    return {
        **llama.attention_biases(hf),
        "qk_norm": "head",
        "sliding_window": window if get_bool(hf, "use_sliding_window", False) else None,
        "mlp_dim": get_int(hf, "moe_intermediate_size", 768),
        "experts": _experts(hf, (128, 8)),
    }


def _experts(hf: HfConfig, defaults: tuple[int, int], shared_dim: int = 0) -> ExpertsConfig:
    is_normalised = get_bool(hf, "norm_topk_prob", False)
    return experts.read_experts(
        hf, "num_experts", defaults, is_normalised=is_normalised, shared_dim=shared_dim
    )


def moe_weights(width: int | None = None) -> tuple[Weight, ...]:
    """The weights of experts and of the shared expert. `width` of an expert: files may have one tensor for all."""
    return (
        *experts.expert_weights(_MOE, width=width),
        *llama.mlp_weights(f"{_MOE}.shared_expert", "blocks.mlp.shared.mlp", bias=False),
        Weight(f"{_MOE}.shared_expert_gate.weight", "blocks.mlp.shared.weight", transpose=True),
    )


QWEN2_MOE = near_llama(
    "qwen2_moe",
    "Qwen1.5-MoE, Qwen2-57B-A14B",
    "Qwen2Moe",
    LlamaShape(),
    _qwen2,
    _KEYS | {"layer_types", "qkv_bias", "shared_expert_intermediate_size"},
    lambda config: (*llama.weights_beside_mlp(config), *moe_weights()),
    fixed={**experts.EVERY_LAYER, "use_sliding_window": (False, None)},
    harmless=experts.HARMLESS | {"max_window_layers", "sliding_window"},
)
QWEN3_MOE = near_llama(
    "qwen3_moe",
    "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder with the same architecture",
    "Qwen3Moe",
    LlamaShape(),
    _qwen3,
    _KEYS | {"attention_bias", "sliding_window", "use_sliding_window"},
    lambda config: (*llama.weights_beside_mlp(config), *experts.expert_weights(_MOE)),
    fixed=experts.EVERY_LAYER,
    aliases={"num_local_experts": "num_experts"},
    harmless=experts.HARMLESS | {"max_window_layers"},
)
