"""More families with sigmoid scores of experts: MiniMax-M2, Hunyuan 3, EXAONE 4 with experts, AFMoE (Trinity)."""

import re
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Family, Weight, linear, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.dense.partly_rotated import rotated_windows
from orca_jax.model.families.experts import HARMLESS, read_experts
from orca_jax.model.families.mixtures.mixtral import expert_weights
from orca_jax.model.families.mixtures.sigmoid import (
    GROUPED_KEYS,
    dense_layers_first,
    grouped_experts,
    mixture_weights,
)
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal
from orca_jax.model.families.windows import all_but_each, windows_of_pattern
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RouterConfig

_MLP = "layers.{layer}.mlp"
_ALIASES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_AFMOE_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


def _minimax_m2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """Published files give the rotated dimensions by their number."""
    rope = config.rope
    rotated = get_count(hf, "rotary_dim", 0)
    assert rope is not None, "read_shape reads them"
    if rotated and rope.rotated_dim is None and hf.get("partial_rotary_factor") is None:
        if rotated > config.head_dim or rotated % 2:
            raise refusal(
                "rotary_dim", f"must be an even number up to head_dim {config.head_dim}", rotated
            )
        rope = replace(rope, rotated_dim=rotated)
    experts = read_experts(hf, "num_local_experts", (256, 8), is_normalised=True)
    experts = replace(experts, router=RouterConfig("sigmoid", has_bias=True))
    return {"rope": rope, "qk_norm": "all", "experts": experts}


def _of_minimax_m2(config: ModelConfig) -> tuple[Weight, ...]:
    bias = Weight(
        "layers.{layer}.block_sparse_moe.e_score_correction_bias", "blocks.mlp.choice_bias"
    )
    return *llama.weights_beside_mlp(config), *expert_weights(), bias


def _ungrouped(
    hf: HfConfig, config: ModelConfig, defaults: tuple[int, int, int], **options: Any
) -> dict[str, Any]:
    """The fields of `grouped_experts` for a router without groups, whose weights are always normalised."""
    found = grouped_experts(hf, config, defaults, **options)
    if found["experts"].router.groups != 1:
        raise refusal("n_group", "must be 1", hf.get("n_group"))
    if not found["experts"].is_normalised:
        raise refusal("norm_topk_prob", "must be true", False)
    return found


def _renamed(rows: tuple[Weight, ...], names: dict[str, str]) -> tuple[Weight, ...]:
    """The rows with other names of tensors: theirs by our names, of which the longest in a key is replaced."""
    return tuple(replace(row, key=_theirs(row.key, names)) for row in rows)


def _theirs(key: str, names: dict[str, str]) -> str:
    for ours in sorted(names, key=len, reverse=True):
        if ours in key:
            return key.replace(ours, names[ours])
    return key


def _hy_v3(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    num_dense = dense_layers_first(hf, config.num_layers, 1)
    others = {"routed_scaling_factor": 2.826}
    return {
        **llama.attention_biases(hf),
        **_ungrouped(hf, config, (192, 8, 1536), num_dense=num_dense, others=others),
        "qk_norm": "head",
    }


def _of_hy_v3(config: ModelConfig) -> tuple[Weight, ...]:
    names = {
        f"{_MLP}.gate.e_score_correction_bias": f"{_MLP}.expert_bias",
        f"{_MLP}.gate.": f"{_MLP}.router.gate.",
        f"{_MLP}.shared_experts.": f"{_MLP}.shared_mlp.",
    }
    rows = _renamed(mixture_weights(config), names)
    return *llama.weights_beside_mlp(config), *rows


def _exaone_moe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    num_dense = dense_layers_first(hf, config.num_layers, get_count(hf, "first_k_dense_replace", 1))
    others = {"routed_scaling_factor": 2.5}
    return {
        **rotated_windows(hf, config),
        **grouped_experts(hf, config, (64, 8, 1024), num_dense=num_dense, others=others),
        "qk_norm": "head",
    }


def _of_exaone_moe(config: ModelConfig) -> tuple[Weight, ...]:
    names = {f"{_MLP}.gate.e_score_correction_bias": f"{_MLP}.e_score_correction_bias"}
    return *llama.weights_beside_mlp(config), *_renamed(mixture_weights(config), names)


def _afmoe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """Layers without a window have no rope."""
    period = get_int(hf, "global_attn_every_n_layers", 4)
    default = {"n_shared_experts": 2}
    pattern = all_but_each(period, config.num_layers)
    windows = windows_of_pattern(hf, config.num_layers, config.max_positions, pattern, 1024)
    num_dense = get_count(hf, "num_dense_layers", 1)
    scale = 1.0
    if get_bool(hf, "mup_enabled", False):
        scale = config.embed_dim**0.5
    return {
        **windows._asdict(),
        **_ungrouped(hf, config, (64, 6, 1408), num_dense=num_dense, others=default),
        "attention_gate": "all",
        "embedding_scale": scale,
        "qk_norm": "head",
        "residual": "both_norms",
        "rope_pattern": windows.window_pattern,
    }


def _of_afmoe(config: ModelConfig) -> tuple[Weight, ...]:
    names = {
        f"{_MLP}.gate.e_score_correction_bias": f"{_MLP}.expert_bias",
        f"{_MLP}.gate.": f"{_MLP}.router.gate.",
    }
    return (
        *llama.outer_weights(config, _AFMOE_NORMS),
        *llama.attention_weights(config),
        *linear("layers.{layer}.self_attn.gate_proj", "blocks.attention.gate", bias=False),
        *_renamed(mixture_weights(config), names),
    )


MINIMAX_M2 = near_llama(
    "minimax_m2",
    "MiniMax-M2, with weights in bfloat16",
    "MiniMaxM2",
    LlamaShape(rules=RopeRules(theta=5e6, share=1.0)),
    _minimax_m2,
    frozenset({"num_experts_per_tok", "num_local_experts", "rotary_dim"}),
    _of_minimax_m2,
    aliases={"num_experts": "num_local_experts"},
    fixed={"scoring_func": ("sigmoid", None), "use_qk_norm": (True, None)},
    harmless=HARMLESS
    | words(
        "attn_type_list mtp_transformer_layers num_mtp_modules qk_norm_type shared_intermediate_size shared_moe_mode "
        "use_mtp use_routing_bias"
    ),  # not read by transformers either
)
HY_V3 = near_llama(
    "hy_v3",
    "Hunyuan 3",
    "HYV3",
    LlamaShape(1e-5, rules=RopeRules(theta=11_158_840.0)),
    _hy_v3,
    GROUPED_KEYS | {"attention_bias", "mlp_layer_types"},
    _of_hy_v3,
    aliases={**_ALIASES, "router_scaling_factor": "routed_scaling_factor"},
    fixed={"mlp_bias": (False, None)},
    harmless=HARMLESS | {"enable_moe_fp32_combine", "num_nextn_predict_layers"},
    has_further_layers=True,
)
EXAONE_MOE = near_llama(
    "exaone_moe",
    "K-EXAONE",
    "ExaoneMoe",
    LlamaShape(1e-5),
    _exaone_moe,
    GROUPED_KEYS
    | words(
        "first_k_dense_replace layer_types mlp_layer_types sliding_window sliding_window_pattern"
    ),
    _of_exaone_moe,
    aliases=_ALIASES,
    harmless=HARMLESS | {"num_nextn_predict_layers"},
    ignored=re.compile(r"mtp\..*"),
)
AFMOE = near_llama(
    "afmoe",
    "Trinity Nano and Mini",
    "Afmoe",
    LlamaShape(1e-5),
    _afmoe,
    GROUPED_KEYS
    | words("global_attn_every_n_layers layer_types mup_enabled num_dense_layers sliding_window"),
    _of_afmoe,
    aliases={**_ALIASES, "route_scale": "routed_scaling_factor"},
    fixed={
        "attention_bias": (False, None),
        "score_func": ("sigmoid", None),
        "route_norm": (True, None),
    },
    harmless=HARMLESS
    | {"load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm"},
)
OTHER_SIGMOID: tuple[Family, ...] = (MINIMAX_M2, HY_V3, EXAONE_MOE, AFMOE)
