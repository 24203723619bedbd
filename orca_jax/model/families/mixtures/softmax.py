"""Families whose experts are chosen by softmax scores: near Mixtral, Qwen and OLMo, Phi-3.5-MoE, ERNIE 4.5, Hunyuan."""

import re
from collections.abc import Sequence
from dataclasses import replace

from orca_jax.model.families.dense.normed import HUNYUAN_DENSE, OLMO2_FIELDS
from orca_jax.model.families.experts import (
    EVERY_LAYER,
    OF_ROUTERS,
    Mixture,
    shared_expert,
    shared_experts,
)
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import (
    ATTENTION_BIASES,
    Fields,
    flag,
    off,
    only_silu,
    same_layers,
)
from orca_jax.model.families.names import EXPERTS, MIXTRAL, NEIGHBOURS, POST_NORMS, SHARED_EXPERT
from orca_jax.model.families.rope import RopeRules, no_scaling
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_count,
    get_float,
    get_int,
    refusal,
)
from orca_jax.model.families.windows import read_window, window, windowed_rope, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RouterConfig

_NORMALISED = flag("norm_topk_prob", True)
_UNNORMALISED = flag("norm_topk_prob")


def _window_if_used(hf: HfConfig, config: ModelConfig) -> Fields:
    """The window of Qwen3 with experts, which all layers have, or none."""
    found = read_window(hf, 4096)
    if not get_bool(hf, "use_sliding_window", False):
        return {}
    return {"window": found}


def _phimoe_head(hf: HfConfig, config: ModelConfig) -> Fields:
    """The bias of the head, and the factor of rotary positions."""
    has_bias = get_bool(hf, "lm_head_bias", False)
    if has_bias and config.tied_embeddings:
        raise refusal("lm_head_bias", "must be false where tie_word_embeddings is true", has_bias)
    rope = config.rope
    if rope is not None and rope.kind == "longrope":
        scaling = hf.get("rope_scaling") or hf["rope_parameters"]
        rope = replace(rope, attention_factor=get_float(scaling, "short_mscale"))
    return {"norm": "layernorm", "rope": rope, "head_bias": has_bias}


def _phimoe_router(hf: HfConfig) -> RouterConfig:
    """The router, which chooses two experts; the key of training masks experts in inference as well."""
    per_token = get_int(hf, "num_experts_per_tok", 2)
    if per_token != 2:
        raise refusal(
            "num_experts_per_tok", "must be 2, as transformers chooses two experts", per_token
        )
    return RouterConfig("two_softmaxes", reach=2 * get_float(hf, "router_jitter_noise", 0.01))


def _ernie_layers(hf: HfConfig, config: ModelConfig) -> tuple[int, ...]:
    """The layers of ERNIE 4.5 without experts."""
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
    return dense


def _ernie_router(hf: HfConfig) -> RouterConfig:
    return RouterConfig(has_bias=True, least_sum=get_float(hf, "moe_norm_min", 1e-12))


def _one_of_all(hf: HfConfig, key: str, default: int) -> int:
    """A positive integer, or a list of the same one for each layer."""
    values = hf.get(key)
    if isinstance(values, Sequence) and not isinstance(values, str) and values:
        if any(value != values[0] for value in values):
            raise refusal(key, "must be the same number for all layers", values)
        return get_int({key: values[0]}, key)
    return get_int(hf, key, default)


def _hunyuan(hf: HfConfig, config: ModelConfig) -> Fields:
    """The experts, which are as wide as the shared one: transformers reads no other width."""
    count = _one_of_all(hf, "num_experts", 1)
    per_token = _one_of_all(hf, "moe_topk", 1)
    if per_token > count:
        raise refusal("moe_topk", f"must be at most num_experts {count}", per_token)
    return {
        "experts": ExpertsConfig(count, per_token, shared_dim=config.mlp_dim, shared_gate=False)
    }


ARIA_TEXT = Family(
    "aria_text",
    (
        ATTENTION_BIASES,
        only_silu,
        Mixture(
            "moe_num_experts",
            (8, 2),
            per_token="moe_topk",
            shared=shared_experts("moe_num_shared_experts", 2),
            options={"shared_gate": False},
        ),
    ),
    """
    mlp.router                              experts.router
    mlp.experts.fc1.weight[{expert}]        experts.{gate,up}       in_out
    mlp.experts.fc2.weight[{expert}]        experts.down            in_out
    mlp.shared_experts.{gate,up,down}_proj  shared.{gate,up,down}
    """,
    fixed=off("mlp_bias"),
    unread=OF_ROUTERS,
)
SOFTMAX = (
    ARIA_TEXT,
    Family(
        "mixtral",
        (window(None), Mixture("num_local_experts", (8, 2))),
        MIXTRAL,
        aliases={"num_experts": "num_local_experts"},
        unread=OF_ROUTERS,
    ),
    Family(
        "qwen2_moe",
        (
            {"attention_bias": flag("qkv_bias", True)},
            same_layers("layer_types", "full_attention"),
            Mixture(
                "num_experts",
                (60, 4),
                1408,
                is_normalised=_UNNORMALISED,
                shared=shared_expert(5632),
            ),
        ),
        EXPERTS + SHARED_EXPERT,
        fixed={**EVERY_LAYER, **off("use_sliding_window")},
        unread=OF_ROUTERS + "max_window_layers sliding_window",
    ),
    Family(
        "qwen3_moe",
        (
            ATTENTION_BIASES,
            {"qk_norm": "head"},
            _window_if_used,
            Mixture("num_experts", (128, 8), 768, is_normalised=_UNNORMALISED),
        ),
        EXPERTS,
        fixed=EVERY_LAYER,
        aliases={"num_local_experts": "num_experts"},
        unread=OF_ROUTERS + "max_window_layers",
    ),
    Family(
        "mellum",
        (
            windows((False,), 1024),
            windowed_rope(RopeRules(None, part="sliding_attention")),
            no_scaling,
            same_layers("mlp_layer_types", "sparse"),
            ATTENTION_BIASES,
            {"qk_norm": "head"},
            Mixture("num_experts", (64, 8), 896, is_normalised=_NORMALISED),
        ),
        EXPERTS,
        shape=LlamaShape(rules=RopeRules(None, part="full_attention")),
        aliases={"num_local_experts": "num_experts"},
        unread=OF_ROUTERS
        + "mtp_layer_types mtp_mlp_layer_types num_mtp_layers num_nextn_predict_layers",
    ),
    Family(
        "olmoe",
        (
            ATTENTION_BIASES,
            {"qk_norm": "all"},
            Mixture("num_experts", (64, 8), is_normalised=_UNNORMALISED),
        ),
        EXPERTS,
        fixed={"clip_qkv": (None,)},
        aliases={"num_local_experts": "num_experts"},
        unread=OF_ROUTERS,
    ),
    Family(
        "flex_olmo",
        (*OLMO2_FIELDS, Mixture("num_experts", (7, 5), is_normalised=_UNNORMALISED)),
        POST_NORMS + EXPERTS,
        aliases={"num_local_experts": "num_experts"},
        unread=OF_ROUTERS,
    ),
    Family(
        "phimoe",
        (
            ATTENTION_BIASES,
            Mixture("num_local_experts", (16, 2), is_normalised=False, router=_phimoe_router),
            _phimoe_head,
            window(None),
        ),
        MIXTRAL,
        shape=LlamaShape(
            rules=RopeRules(
                kinds=("default", "longrope"), notes=frozenset({"short_mscale", "long_mscale"})
            )
        ),
        aliases={"num_experts": "num_local_experts"},
        unread="input_jitter_noise output_router_logits router_aux_loss_coef",
    ),
    Family(
        "ernie4_5_moe",
        (
            Mixture(
                "moe_num_experts",
                (64, 6),
                1536,
                per_token="moe_k",
                shared=shared_experts("moe_num_shared_experts", 2),
                router=_ernie_router,
                dense=_ernie_layers,
                options={"shared_gate": False},
            ),
        ),
        f"""
        {NEIGHBOURS}
        {EXPERTS}
        mlp.moe_statics.e_score_correction_bias     experts.choice_bias     row
        mlp.shared_experts.{{gate,up,down}}_proj    shared.{{gate,up,down}}
        """,
        ignored=re.compile(r"(model\.)?mtp_.*"),
        fixed=off("use_bias"),
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        unread=OF_ROUTERS + "moe_capacity moe_gate moe_use_aux_free num_nextn_predict_layers",
    ),
    replace(
        HUNYUAN_DENSE,
        name="hunyuan_v1_moe",
        fields=(*HUNYUAN_DENSE.fields, _hunyuan),
        names=HUNYUAN_DENSE.names
        + f"""
        {EXPERTS}
        mlp.gate.wg                                 experts.router
        mlp.shared_mlp.{{gate,up,down}}_proj        shared.{{gate,up,down}}
        """,
        aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        unread=HUNYUAN_DENSE.unread
        + " "
        + OF_ROUTERS
        + "moe_intermediate_size num_shared_expert norm_topk_prob",
    ),
)
