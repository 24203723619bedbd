"""Families whose experts are chosen by softmax scores, near Mixtral and Qwen-MoE: Phi-3.5-MoE, ERNIE 4.5, Hunyuan."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Family, Weight, paired, rows_if, words
from orca_jax.model.families.dense.hunyuan import (
    HUNYUAN_HARMLESS,
    HUNYUAN_SHAPE,
    attention_of_hunyuan,
    hunyuan_fields,
)
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.experts import HARMLESS, expert_weights, read_experts
from orca_jax.model.families.mixtures.mixtral import expert_weights as mixtral_experts
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_count,
    get_float,
    get_int,
    refusal,
)
from orca_jax.model.families.windows import window_of_all
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RouterConfig

_MLP = "layers.{layer}.mlp"


def _phimoe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    experts = read_experts(hf, "num_local_experts", (16, 2), is_normalised=False)
    if experts.per_token != 2:
        raise refusal(
            "num_experts_per_tok",
            "must be 2, as transformers chooses two experts",
            experts.per_token,
        )
    has_bias = get_bool(hf, "lm_head_bias", False)
    if has_bias and get_bool(hf, "tie_word_embeddings", False):
        raise refusal("lm_head_bias", "must be false where tie_word_embeddings is true", has_bias)
    rope = config.rope
    if rope is not None and rope.kind == "longrope":
        scaling = hf.get("rope_scaling") or hf["rope_parameters"]
        rope = replace(rope, attention_factor=get_float(scaling, "short_mscale"))
    # of training, but it masks experts in inference as well
    reach = 2 * get_float(hf, "router_jitter_noise", 0.01)
    return {
        **llama.attention_biases(hf),
        "norm": "layernorm",
        "rope": rope,
        "head_bias": has_bias,
        "sliding_window": window_of_all(hf, None, config.max_positions),
        "experts": replace(experts, router=RouterConfig("two_softmaxes", reach=reach)),
    }


def _of_phimoe(config: ModelConfig) -> tuple[Weight, ...]:
    """Norms have biases, and the head may have one."""
    rows = llama.weights_beside_mlp(config)
    names = ("norm.scale", "head.table") if config.head_bias else ("norm.scale",)
    biases = (
        replace(
            row, key=row.key.replace(".weight", ".bias"), path=f"{row.path.rpartition('.')[0]}.bias"
        )
        for row in rows
        if row.path.endswith(names)
    )
    return *rows, *biases, *mixtral_experts()


def _ernie(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    layers = config.num_layers
    first = get_count(hf, "moe_layer_start_index", 1)
    last = layers - 1
    if hf.get("moe_layer_end_index") not in (None, -1):
        last = get_count(hf, "moe_layer_end_index", 0)
    interval = get_int(hf, "moe_layer_interval", 1)
    dense = tuple(
        layer for layer in range(layers) if (layer + 1) % interval or not first <= layer <= last
    )
    if len(dense) == layers:
        raise refusal(
            "moe_layer_start_index",
            "and moe_layer_end_index must leave a layer with experts",
            first,
        )
    width = get_int(hf, "moe_intermediate_size", 1536)
    count = get_int(hf, "moe_num_experts", 64)
    per_token = get_int(hf, "moe_k", 6)
    if per_token > count:
        raise refusal("moe_k", f"must be at most moe_num_experts {count}", per_token)
    experts = ExpertsConfig(
        count,
        per_token,
        shared_dim=get_count(hf, "moe_num_shared_experts", 2) * width,
        shared_gate=False,
        router=RouterConfig(has_bias=True, least_sum=get_float(hf, "moe_norm_min", 1e-12)),
        dense_layers=dense,
        dense_dim=config.mlp_dim if dense else 0,
    )
    return {"mlp_dim": width, "experts": experts}


def _of_ernie(config: ModelConfig) -> tuple[Weight, ...]:
    experts = config.experts
    assert experts is not None, "the family has experts"
    shared = llama.mlp_weights(f"{_MLP}.shared_experts", "blocks.mlp.shared.mlp", bias=False)
    dense = llama.mlp_weights(_MLP, "blocks.dense_mlp", bias=False)
    return (
        *paired(llama.weights_beside_mlp(config), config),
        *expert_weights(_MLP),
        Weight(
            f"{_MLP}.moe_statics.e_score_correction_bias", "blocks.mlp.choice_bias", is_row=True
        ),
        *rows_if(experts.shared_dim, *shared),
        *rows_if(experts.dense_layers, *dense),
    )


def _one_of_all(hf: HfConfig, key: str, default: int) -> int:
    """A positive integer, or a list of the same one for each layer."""
    values = hf.get(key)
    if isinstance(values, Sequence) and not isinstance(values, str) and values:
        if any(value != values[0] for value in values):
            raise refusal(key, "must be the same number for all layers", values)
        return get_int({key: values[0]}, key)
    return get_int(hf, key, default)


def _hunyuan(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """The experts are as wide as the shared one: transformers reads no other width."""
    count = _one_of_all(hf, "num_experts", 1)
    per_token = _one_of_all(hf, "moe_topk", 1)
    if per_token > count:
        raise refusal("moe_topk", f"must be at most num_experts {count}", per_token)
    experts = ExpertsConfig(count, per_token, shared_dim=config.mlp_dim, shared_gate=False)
    return {**hunyuan_fields(hf, config), "experts": experts}


def _of_hunyuan(config: ModelConfig) -> tuple[Weight, ...]:
    router, *experts = expert_weights(_MLP)
    return (
        *attention_of_hunyuan(config),
        replace(router, key=f"{_MLP}.gate.wg.weight"),
        *experts,
        *llama.mlp_weights(f"{_MLP}.shared_mlp", "blocks.mlp.shared.mlp", bias=False),
    )


PHIMOE = near_llama(
    "phimoe",
    "Phi-3.5-MoE, Phi-mini-MoE",
    "Phimoe",
    LlamaShape(
        1e-5,
        rules=RopeRules(
            theta=1e6,
            kinds=("default", "longrope"),
            notes=frozenset({"short_mscale", "long_mscale"}),
        ),
    ),
    _phimoe,
    words(
        "attention_bias lm_head_bias num_experts_per_tok num_local_experts router_jitter_noise sliding_window"
    ),
    _of_phimoe,
    aliases={"num_experts": "num_local_experts"},
    harmless=(HARMLESS - {"router_jitter_noise"}) | {"input_jitter_noise"},
)
ERNIE4_5_MOE = near_llama(
    "ernie4_5_moe",
    "ERNIE 4.5 21B-A3B and 300B-A47B",
    "Ernie4_5_Moe",
    LlamaShape(1e-5, rules=RopeRules(theta=5e5), is_tied=True),
    _ernie,
    words(
        "moe_intermediate_size moe_k moe_layer_end_index moe_layer_interval moe_layer_start_index moe_norm_min "
        "moe_num_experts moe_num_shared_experts"
    ),
    _of_ernie,
    fixed={"use_bias": (False, None)},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    harmless=HARMLESS
    | {"moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"},
    ignored=re.compile(r"(model\.)?mtp_.*"),
)
HUNYUAN_V1_MOE = near_llama(
    "hunyuan_v1_moe",
    "Hunyuan-A13B",
    "HunYuanMoEV1",
    HUNYUAN_SHAPE,
    _hunyuan,
    frozenset({"attention_bias", "moe_topk", "num_experts"}),
    _of_hunyuan,
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    harmless=HARMLESS
    | HUNYUAN_HARMLESS
    | {"moe_intermediate_size", "num_shared_expert", "norm_topk_prob"},
)
SOFTMAX: tuple[Family, ...] = (PHIMOE, ERNIE4_5_MOE, HUNYUAN_V1_MOE)
