"""Mixtures near Qwen3's, Flint with sinks and Mellum 2; and Aria near Llama."""

from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Weight, rows_if, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.experts import HARMLESS, expert_weights, joined_experts, read_experts
from orca_jax.model.families.rope import RopeRules, read_rope
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_count,
    get_int,
    layer_list,
    refusal,
)
from orca_jax.model.families.windows import windows_of_pattern
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RouterConfig

_MLP = "layers.{layer}.mlp"
_KEYS = frozenset({"attention_bias", "moe_intermediate_size", "num_experts", "num_experts_per_tok"})


def _mixture(
    hf: HfConfig, defaults: tuple[int, int, int], *, is_normalised: bool = True
) -> dict[str, Any]:
    """The fields of Qwen3: a norm of each head, biases, and experts, by their number, that of a token and the width."""
    return {
        **llama.attention_biases(hf),
        "qk_norm": "head",
        "mlp_dim": get_int(hf, "moe_intermediate_size", defaults[2]),
        "experts": read_experts(hf, "num_experts", defaults[:2], is_normalised=is_normalised),
    }


def _flint(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """Layers with a window have positions, the others none."""
    layers = config.num_layers
    pattern = tuple(layer > 1 and layer % 4 != 1 and layer < layers - 1 for layer in range(layers))
    windows = windows_of_pattern(hf, layers, config.max_positions, pattern, 513)
    dense = [0, 1]
    named = hf.get("mlp_only_layers")
    if named is not None:
        dense = layer_list("mlp_only_layers", named, layers)
    if {*range(layers)} <= {*dense}:
        raise refusal("mlp_only_layers", "must leave a layer with experts", named)
    fields = _mixture(hf, (256, 6, 512), is_normalised=get_bool(hf, "norm_topk_prob", True))
    experts = replace(
        fields["experts"],
        shared_dim=get_int(hf, "shared_expert_intermediate_size", 1024),
        shared_gate=False,
        router=RouterConfig("sigmoid"),
        dense_layers=tuple(sorted({*dense})),
        dense_dim=config.mlp_dim,
    )
    return {
        **fields,
        **windows._asdict(),
        "rope_pattern": windows.window_pattern,
        "attention_sinks": True,
        "experts": experts,
    }


def _of_flint(config: ModelConfig) -> tuple[Weight, ...]:
    return (
        *llama.weights_beside_mlp(config),
        Weight("layers.{layer}.self_attn.softmax_offset", "blocks.attention.sinks"),
        *expert_weights(_MLP),
        *llama.mlp_weights(f"{_MLP}.shared_expert", "blocks.mlp.shared.mlp", bias=False),
        *llama.mlp_weights(_MLP, "blocks.dense_mlp", bias=False),
    )


def _mellum(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    windows = windows_of_pattern(hf, config.num_layers, config.max_positions, (False,), 1024)
    local, _ = read_rope(
        hf, config.head_dim, config.max_positions, RopeRules(None, part="sliding_attention")
    )
    if hf.get("rope_scaling") is not None:
        raise refusal(
            "rope_scaling", "must be null: rope_parameters has all types", hf["rope_scaling"]
        )
    kinds = hf.get("mlp_layer_types")
    if kinds is not None and kinds != ["sparse"] * config.num_layers:
        raise refusal(
            "mlp_layer_types", f"must be sparse for each of {config.num_layers} layers", kinds
        )
    fields = _mixture(hf, (64, 8, 896), is_normalised=get_bool(hf, "norm_topk_prob", True))
    return {**fields, **windows._asdict(), "windowed_rope": local}


def _aria(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    if config.activation != "silu":
        raise refusal("hidden_act", "must be silu for aria_text", hf["hidden_act"])
    count = get_int(hf, "moe_num_experts", 8)
    per_token = get_int(hf, "moe_topk", 2)
    if per_token > count:
        raise refusal("moe_topk", f"must be at most moe_num_experts {count}", per_token)
    shared = get_count(hf, "moe_num_shared_experts", 2) * config.mlp_dim
    return {
        **llama.attention_biases(hf),
        "experts": ExpertsConfig(count, per_token, True, shared, shared_gate=False),
    }


def _of_aria(config: ModelConfig) -> tuple[Weight, ...]:
    experts = config.experts
    assert experts is not None, "the family has experts"
    shared = llama.mlp_weights(f"{_MLP}.shared_experts", "blocks.mlp.shared.mlp", bias=False)
    return (
        *llama.weights_beside_mlp(config),
        Weight(f"{_MLP}.router.weight", "blocks.mlp.router", transpose=True),
        *joined_experts(
            f"{_MLP}.experts.fc1.weight",
            f"{_MLP}.experts.fc2.weight",
            config.mlp_dim,
            transpose=False,
        ),
        *rows_if(experts.shared_dim, *shared),
    )


FLINT = near_llama(
    "flint",
    "Flint",
    "Flint",
    LlamaShape(),
    _flint,
    _KEYS
    | words(
        "layer_types mlp_only_layers norm_topk_prob shared_expert_intermediate_size sliding_window"
    ),
    _of_flint,
    fixed={"decoder_sparse_step": (1, None)},
    harmless=HARMLESS,
)
_MELLUM = near_llama(
    "mellum",
    "Mellum 2",
    "Mellum",
    LlamaShape(rules=RopeRules(None, 5e5, part="full_attention")),
    _mellum,
    _KEYS | {"layer_types", "mlp_layer_types", "norm_topk_prob", "sliding_window"},
    lambda config: (*llama.weights_beside_mlp(config), *expert_weights(_MLP)),
    aliases={"num_local_experts": "num_experts"},
    harmless=HARMLESS
    | {"mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers", "num_nextn_predict_layers"},
)
MELLUM = replace(_MELLUM, keys=_MELLUM.keys - {"rope_theta"})
ARIA_TEXT = near_llama(
    "aria_text",
    "Aria for texts alone",
    "AriaText",
    LlamaShape(),
    _aria,
    frozenset({"attention_bias", "moe_num_experts", "moe_num_shared_experts", "moe_topk"}),
    _of_aria,
    fixed={"mlp_bias": (False, None)},
    harmless=HARMLESS,
)
NEAR_QWEN = (FLINT, MELLUM, ARIA_TEXT)
