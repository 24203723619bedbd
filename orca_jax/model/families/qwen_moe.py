"""Qwen2 and Qwen3 with experts in all layers. Qwen2 has another expert of all tokens."""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import experts, llama
from orca_jax.model.families.base import Family, Weight
from orca_jax.model.families.values import HfConfig, get_bool, get_int, refusal
from orca_jax.model.families.windows import window_of_all

_KEYS = frozenset({"moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok"})
_MOE = "layers.{layer}.mlp"


def qwen2_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Qwen2-MoE; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "qwen2_moe")
    kinds = hf.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * config.num_layers:
        raise refusal("layer_types", f"must be full_attention for each of {config.num_layers} layers", kinds)
    return replace(
        config,
        attention_bias=get_bool(hf, "qkv_bias", True),
        mlp_dim=get_int(hf, "moe_intermediate_size", 1408),
        experts=experts.read_experts(
            hf,
            "num_experts",
            (60, 4),
            is_normalised=get_bool(hf, "norm_topk_prob", False),
            shared_dim=get_int(hf, "shared_expert_intermediate_size", 5632),
        ),
    )


def qwen3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Qwen3-MoE; raises `ConfigError` as `llama.config_from_hf` does."""
    config = llama.read_shape(hf, "qwen3_moe")
    window = window_of_all(hf, 4096, config.max_positions)
    return replace(
        config,
        **llama.attention_biases(hf),
        qk_norm="head",
        sliding_window=window if get_bool(hf, "use_sliding_window", False) else None,
        mlp_dim=get_int(hf, "moe_intermediate_size", 768),
        experts=experts.read_experts(hf, "num_experts", (128, 8), is_normalised=get_bool(hf, "norm_topk_prob", False)),
    )


def qwen2_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters, with those of the shared expert."""
    return *llama.weights_beside_mlp(config), *moe_weights()


def moe_weights(width: int | None = None) -> tuple[Weight, ...]:
    """The weights of experts and of the shared expert. `width` of an expert: files may have one tensor for all."""
    rows = experts.expert_weights(_MOE)
    if width is not None:
        joined = experts.joined_experts(f"{_MOE}.experts.gate_up_proj", f"{_MOE}.experts.down_proj", width)
        rows = (rows[0], *(replace(row, instead=other) for row, other in zip(rows[1:], joined, strict=True)))
    return (
        *rows,
        *llama.mlp_weights(f"{_MOE}.shared_expert", "blocks.mlp.shared.mlp", bias=False),
        Weight(f"{_MOE}.shared_expert_gate.weight", "blocks.mlp.shared.weight", transpose=True),
    )


def qwen3_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    return *llama.weights_beside_mlp(config), *experts.expert_weights(_MOE)


QWEN2_MOE = Family(
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    config_from_hf=qwen2_from_hf,
    keys=llama.KEYS | _KEYS | {"layer_types", "qkv_bias", "shared_expert_intermediate_size"},
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    weights=qwen2_weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    fixed={**experts.EVERY_LAYER, "use_sliding_window": (False, None)},
    harmless=experts.HARMLESS | {"max_window_layers", "sliding_window"},
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder with the same architecture",
    config_from_hf=qwen3_from_hf,
    keys=llama.KEYS | _KEYS | {"attention_bias", "sliding_window", "use_sliding_window"},
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    weights=qwen3_weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    fixed=experts.EVERY_LAYER,
    aliases={"num_local_experts": "num_experts"},
    harmless=experts.HARMLESS | {"max_window_layers"},
)
