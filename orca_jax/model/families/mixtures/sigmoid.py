"""Families whose experts are chosen by sigmoid scores, with a bias for the choice: GLM, Hunyuan 3, MiniMax-M2, ..."""

import re
from dataclasses import replace

from orca_jax.model.families.dense.normed import windows_of_exaone
from orca_jax.model.families.experts import (
    GROUPED_ALIASES,
    NEXT_TOKENS,
    OF_ROUTERS,
    Mixture,
    first_layers,
    first_of_types,
    grouped_experts,
    no_groups,
    shared_expert,
)
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import (
    ATTENTION_BIASES,
    Fields,
    either,
    flag,
    off,
    root_of_width,
)
from orca_jax.model.families.names import EXPERTS, MIXTRAL, SIGMOID
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_count, layer_list, refusal
from orca_jax.model.families.windows import all_but_each, rotated_windows, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RouterConfig

_ALIASES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def _from_layer(hf: HfConfig, config: ModelConfig) -> tuple[bool, ...]:
    """The layers of dots.llm1 with a window, if there is one."""
    first = get_count(hf, "max_window_layers", 62)
    has_window = hf.get("sliding_window", 4096) is not None
    return tuple(has_window and layer >= first for layer in range(config.num_layers))


def _minimax_rope(hf: HfConfig, config: ModelConfig) -> Fields:
    """Rotary positions; published files give the rotated dimensions by their number."""
    rope = config.rope
    rotated = get_count(hf, "rotary_dim", 0)
    assert rope is not None, "the shape has them"
    is_read = rope.rotated_dim is not None or hf.get("partial_rotary_factor") is not None
    if not rotated or is_read:
        return {}
    if rotated > config.head_dim or rotated % 2:
        raise refusal(
            "rotary_dim", f"must be an even number up to head_dim {config.head_dim}", rotated
        )
    return {"rope": replace(rope, rotated_dim=rotated)}


def _middle_layers(hf: HfConfig, config: ModelConfig) -> tuple[bool, ...]:
    """The layers of Flint with a window."""
    layers = config.num_layers
    return tuple(layer > 1 and layer % 4 != 1 and layer < layers - 1 for layer in range(layers))


def _flint_layers(hf: HfConfig, config: ModelConfig) -> tuple[int, ...]:
    """The layers of Flint without experts."""
    named = hf.get("mlp_only_layers")
    dense = {0, 1}
    if named is not None:
        dense = {*layer_list("mlp_only_layers", named, config.num_layers)}
    if {*range(config.num_layers)} <= dense:
        raise refusal("mlp_only_layers", "must leave a layer with experts", named)
    return tuple(sorted(dense))


GLM4_MOE = Family(
    "glm4_moe",
    (
        grouped_experts((128, 8, 1408), first_layers(1)),
        {
            "attention_bias": flag("attention_bias"),
            "qk_norm": either("use_qk_norm", False, "head", None),
        },
    ),
    SIGMOID,
    shape=LlamaShape(rules=RopeRules(share=0.5)),
    has_further_layers=True,
    aliases=GROUPED_ALIASES,
    unread=OF_ROUTERS + NEXT_TOKENS,
    needed={"head_dim": 128},
)
SIGMOIDS = (
    GLM4_MOE,
    Family(
        "solar_open",
        (grouped_experts((128, 8, 1280)), {"attention_bias": flag("attention_bias")}),
        SIGMOID,
        aliases=GROUPED_ALIASES,
        unread=OF_ROUTERS + "first_k_dense_replace use_qk_norm",  # nor by transformers
    ),
    Family(
        "dots1",
        (
            grouped_experts((128, 6, 1408), first_layers(0), is_normalised=False),
            ATTENTION_BIASES,
            windows(_from_layer),
            {"qk_norm": "head"},
        ),
        SIGMOID,
        aliases=GROUPED_ALIASES,
        unread=OF_ROUTERS + NEXT_TOKENS,
    ),
    Family(
        "minimax_m2",
        (
            _minimax_rope,
            {"qk_norm": "all"},
            Mixture(
                "num_local_experts",
                (256, 8),
                options={"router": RouterConfig("sigmoid", has_bias=True)},
            ),
        ),
        MIXTRAL + "block_sparse_moe.e_score_correction_bias experts.choice_bias",
        shape=LlamaShape(rules=RopeRules(share=1.0)),
        fixed={"scoring_func": ("sigmoid", None), "use_qk_norm": (True, None)},
        aliases={"num_experts": "num_local_experts"},
        unread=OF_ROUTERS
        + (
            "attn_type_list mtp_transformer_layers num_mtp_modules qk_norm_type shared_intermediate_size "
            "shared_moe_mode use_mtp use_routing_bias"
        ),  # not read by transformers either
    ),
    Family(
        "hy_v3",
        (
            ATTENTION_BIASES,
            grouped_experts((192, 8, 1536), first_of_types(1), scale=2.826),
            no_groups,
            {"qk_norm": "head"},
        ),
        SIGMOID
        + """
        mlp.router.gate                         experts.router
        mlp.expert_bias                         experts.choice_bias
        mlp.shared_mlp.{gate,up,down}_proj      shared.{gate,up,down}
        """,
        has_further_layers=True,
        fixed=off("mlp_bias"),
        aliases={**_ALIASES, "router_scaling_factor": "routed_scaling_factor"},
        unread=OF_ROUTERS + "enable_moe_fp32_combine num_nextn_predict_layers",
    ),
    Family(
        "exaone_moe",
        (
            windows_of_exaone,
            grouped_experts((64, 8, 1024), first_of_types(1, "first_k_dense_replace"), scale=2.5),
            {"qk_norm": "head"},
        ),
        SIGMOID + "mlp.e_score_correction_bias experts.choice_bias",
        ignored=re.compile(r"mtp\..*"),
        aliases=_ALIASES,
        unread=OF_ROUTERS + "num_nextn_predict_layers",
    ),
    Family(
        "afmoe",
        (
            windows(all_but_each(4, "global_attn_every_n_layers"), 1024),
            rotated_windows,
            grouped_experts((64, 6, 1408), first_layers(1, "num_dense_layers"), shared=2),
            no_groups,
            {"attention_gate": "all", "qk_norm": "head", "residual": "both_norms"},
            root_of_width("mup_enabled", False),
        ),
        SIGMOID
        + """
        post_attention_layernorm    attention_out_norm
        {pre,post}_mlp_layernorm    {mlp,mlp_out}_norm
        self_attn.gate_proj         attention.gate
        mlp.router.gate             experts.router
        mlp.expert_bias             experts.choice_bias
        """,
        fixed={
            **off("attention_bias"),
            "score_func": ("sigmoid", None),
            "route_norm": (True, None),
        },
        aliases={**_ALIASES, "route_scale": "routed_scaling_factor"},
        unread=OF_ROUTERS
        + "load_balance_coeff num_expert_groups num_limited_groups use_grouped_mm",
    ),
    Family(
        "flint",
        (
            ATTENTION_BIASES,
            {"qk_norm": "head", "attention_sinks": True},
            windows(_middle_layers, 513),
            rotated_windows,  # layers with a window have positions, the others none
            Mixture(
                "num_experts",
                (256, 6),
                512,
                is_normalised=flag("norm_topk_prob", True),
                shared=shared_expert(1024),
                dense=_flint_layers,
                options={"shared_gate": False, "router": RouterConfig("sigmoid")},
            ),
        ),
        f"""
        {EXPERTS}
        self_attn.softmax_offset                    attention.sinks
        mlp.shared_expert.{{gate,up,down}}_proj     shared.{{gate,up,down}}
        """,
        fixed={"decoder_sparse_step": (1, None)},
        unread=OF_ROUTERS,
    ),
)
