"""Configurations of families with experts."""

from collections.abc import Callable
from random import Random

from tests.model.recorded.configs.sizes import (
    FULL,
    SLIDING,
    Config,
    hunyuan,
    llama,
    rope,
    theta,
    windows,
    without,
)


def experts(draw: Random, count: str = "num_experts") -> Config:
    """The number of experts, and of those of a token."""
    number = draw.choice((4, 6))
    return {count: number, "num_experts_per_tok": draw.choice((1, 2, 3))}


def flex_olmo(draw: Random, number: int) -> Config:
    """FlexOlmo."""
    config = without(llama(draw, number), "head_dim") | {
        "rope_theta": theta(draw),
        "intermediate_size": 12,
    }
    return (
        config
        | experts(draw)
        | {"norm_topk_prob": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}
    )


def glm4_moe(draw: Random, number: int) -> Config:
    """GLM-4.5, and Solar Open and dots.llm1 with the same keys."""
    groups = 2 if number % 2 == 0 else 1
    config = llama(draw, number) | {
        "rope_theta": theta(draw),
        "attention_bias": draw.random() < 0.5,
        "head_dim": 8,
    }
    return config | {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2 * groups,
        "topk_group": groups,
        "n_shared_experts": draw.choice((1, 2)),
        "routed_scaling_factor": draw.choice((1.5, 2.5)),
        "norm_topk_prob": number % 3 != 1,
        "first_k_dense_replace": draw.choice((1, 2)),
        "use_qk_norm": draw.random() < 0.5,
        "partial_rotary_factor": 0.5,
    }


def solar_open(draw: Random, number: int) -> Config:
    """Solar Open, without layers without experts."""
    return without(
        glm4_moe(draw, number), "first_k_dense_replace", "use_qk_norm", "partial_rotary_factor"
    )


def dots1(draw: Random, number: int) -> Config:
    """dots.llm1, which has windows."""
    config = without(glm4_moe(draw, number), "use_qk_norm", "partial_rotary_factor")
    if number % 3 == 1:
        return config | {"sliding_window": 7, "max_window_layers": 2}
    return config | windows(draw, config)


def phimoe(draw: Random, number: int) -> Config:
    """Phi-3.5-MoE."""
    config = without(llama(draw, number), "head_dim") | {"num_local_experts": draw.choice((4, 6))}
    positions = {"rope_type": "default", "rope_theta": theta(draw)}
    if number != 1:
        half = config["hidden_size"] // config["num_attention_heads"] // 2
        positions |= {
            "rope_type": "longrope",
            "short_factor": [draw.choice((1.0, 1.5, 2.0)) for _ in range(half)],
            "long_factor": [4.0] * half,
            "short_mscale": 1.25,
            "long_mscale": 1.5,
            "original_max_position_embeddings": 48,
        }
    return config | {
        "attention_bias": draw.random() < 0.5,
        "intermediate_size": 12,
        "lm_head_bias": number % 2 == 0,
        "rope_parameters": positions,
        "router_jitter_noise": draw.choice((0.2, 0.4)),
        "sliding_window": 9 if number == 1 else None,
        "tie_word_embeddings": False,
    }


def ernie4_5_moe(draw: Random, number: int) -> Config:
    """ERNIE 4.5 with experts."""
    config = without(llama(draw, number), "head_dim") | {
        "rope_theta": theta(draw),
        "num_hidden_layers": 3,
    }
    layers = ({"moe_layer_start_index": 1}, {"moe_layer_interval": 2}, {"moe_layer_end_index": 1})[
        number % 3
    ]
    return (
        config
        | layers
        | {
            "moe_intermediate_size": 12,
            "moe_k": draw.choice((1, 2, 3)),
            "moe_num_experts": draw.choice((4, 6)),
            "moe_num_shared_experts": draw.choice((0, 1, 2)) if number else 2,
            "moe_norm_min": 0.9 if number % 2 == 0 else 1e-12,
        }
    )


def hunyuan_v1_moe(draw: Random, number: int) -> Config:
    """Hunyuan with experts."""
    config, experts = hunyuan(draw, number), draw.choice((4, 6))
    chosen = draw.choice((1, 2, 3))
    return config | {
        "num_experts": experts,
        "moe_topk": [chosen] * config["num_hidden_layers"] if number else chosen,
    }


def gpt_oss(draw: Random, number: int) -> Config:
    """gpt-oss."""
    config = llama(draw, number) | {"rope_parameters": rope(draw, kinds=("yarn", "default"))}
    sizes = {
        "num_local_experts": draw.choice((4, 6)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
    }
    # whole groups of MXFP4
    sizes |= {"hidden_size": 32, "intermediate_size": 32} if number == 2 else {}
    clamp = {"swiglu_limit": 0.5, "swiglu_alpha": 1.3} if number % 2 == 0 else {}
    return (
        config
        | sizes
        | clamp
        | {"sliding_window": draw.choice((3, 7)), "attention_bias": number != 1}
    )


def minimax_m2(draw: Random, number: int) -> Config:
    """MiniMax-M2."""
    config = llama(draw, number) | {
        "rope_theta": theta(draw),
        "intermediate_size": 12,
        "head_dim": 8,
    }
    return (
        config | experts(draw, "num_local_experts") | ({"rotary_dim": 4} if number % 2 == 0 else {})
    )


def hy_v3(draw: Random, number: int) -> Config:
    """Hunyuan 3."""
    config = llama(draw, number) | {
        "rope_theta": theta(draw),
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
    }
    kinds = ["dense"] * (1 + number % 2) + ["sparse"] * (2 - number % 2)
    shared = {"num_shared_experts": draw.choice((1, 2)), "mlp_layer_types": kinds}
    return config | experts(draw) | shared


def exaone_moe(draw: Random, number: int) -> Config:
    """EXAONE 4 with experts."""
    config = without(
        glm4_moe(draw, number), "use_qk_norm", "partial_rotary_factor", "attention_bias"
    )
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {names.get(key, key): value for key, value in config.items()}
    return config | windows(draw, config) | {"sliding_window_pattern": "LLLG"}


def afmoe(draw: Random, number: int) -> Config:
    """AFMoE."""
    config = llama(draw, number) | {
        "rope_theta": theta(draw),
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
    }
    config |= experts(draw) | windows(draw, config) | {"num_dense_layers": 1, "route_scale": 1.5}
    return config | {"mup_enabled": number % 2 == 0, "num_shared_experts": 1}


def granitemoe(draw: Random, number: int) -> Config:
    """Granite with experts."""
    config = llama(draw, number) | {"rope_theta": theta(draw), "intermediate_size": 12}
    factors = (
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
    )
    return (
        without(config, "head_dim")
        | experts(draw, "num_local_experts")
        | {name: draw.choice((0.5, 1.5)) for name in factors}
    )


def granitemoeshared(draw: Random, number: int) -> Config:
    """The same with a shared expert."""
    return granitemoe(draw, number) | {"shared_intermediate_size": (8, 12, 0)[number % 3]}


def flint(draw: Random, number: int) -> Config:
    """Flint: windows, sinks, and first layers without experts."""
    config = llama(draw, number) | {
        "rope_theta": theta(draw),
        "num_hidden_layers": 4,
        **experts(draw),
    }
    config |= {
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 8,
        "attention_bias": number == 1,
    }
    kinds = (
        {"layer_types": [FULL, SLIDING, SLIDING, FULL], "mlp_only_layers": [1]} if number else {}
    )
    return config | {"norm_topk_prob": number != 1, "sliding_window": 6, **kinds}


def mellum(draw: Random, number: int) -> Config:
    """Mellum 2, with positions of its own in layers with a window."""
    config = without(
        llama(draw, number) | experts(draw) | {"moe_intermediate_size": 12}, "rope_theta"
    )
    positions = {FULL: rope(draw), SLIDING: {"rope_type": "default", "rope_theta": 40.0}}
    kinds = [FULL, SLIDING] * config["num_hidden_layers"]
    config |= {
        "rope_parameters": positions,
        "layer_types": kinds[: config["num_hidden_layers"]],
        "sliding_window": 6,
    }
    return config | {"norm_topk_prob": number != 1, "attention_bias": number == 1}


def aria_text(draw: Random, number: int) -> Config:
    """The texts of Aria."""
    config = without(llama(draw, number), "head_dim") | {
        "rope_theta": theta(draw),
        "intermediate_size": 12,
    }
    counts = {
        "moe_num_experts": 4,
        "moe_topk": draw.choice((1, 2)),
        "moe_num_shared_experts": 1 + number % 2,
    }
    return config | counts | {"attention_bias": number == 1}


def llama4_text(draw: Random, number: int) -> Config:
    """Llama 4: layers without positions, and some without experts."""
    config = llama(draw, number) | {
        "num_hidden_layers": 4,
        "rope_parameters": rope(draw, kinds=("default", "llama3")),
    }
    config |= {
        "num_local_experts": draw.choice((4, 6)),
        "intermediate_size": 12,
        "intermediate_size_mlp": 20,
    }
    config |= {"interleave_moe_layer_step": 1 + number % 2, "attention_bias": draw.random() < 0.5}
    if number == 2:  # as in Scout
        config["rope_parameters"] |= {
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
        }
        config["rope_parameters"] |= {"factor": 16.0, "original_max_position_embeddings": 16}
    if number % 3 == 1:
        config |= {"no_rope_layers": [0, 1, 1, 1], "moe_layers": [1, 2]}
    return config | {
        "no_rope_layer_interval": draw.choice((2, 3, 4)),
        "use_qk_norm": number % 4 != 2,
    }


def laguna(draw: Random, number: int) -> Config:
    """Laguna: other positions, and mostly other heads, in layers with a window."""
    config = llama(draw, number) | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "sliding_window": draw.choice((3, 7)),
        "layer_types": [FULL, SLIDING, SLIDING, FULL],
    }
    scaled = rope(draw, kinds=("yarn", "default")) | {"partial_rotary_factor": 0.5}
    plain = {"rope_type": "default", "rope_theta": theta(draw), "partial_rotary_factor": 1.0}
    heads = ([4, 6, 6, 4], [2, 2, 2, 2], [6, 4, 4, 6])[number % 3]
    return config | {
        "rope_parameters": {FULL: scaled, SLIDING: plain},
        "num_attention_heads_per_layer": heads,
        "gating": (True, "per-element", "per-head")[number % 3],
        "mlp_layer_types": ["dense"] * (number % 3) + ["sparse"] * (4 - number % 3),
        "num_experts": 6,
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": draw.choice((8, 12)),
        "moe_routed_scaling_factor": draw.choice((1.5, 2.5)),
        "moe_router_logit_softcapping": 0.5 if number % 2 == 0 else 0.0,
    }


MIXTURES: dict[str, Callable[[Random, int], Config]] = {
    maker.__name__: maker
    for maker in (
        flex_olmo,
        glm4_moe,
        solar_open,
        dots1,
        phimoe,
        ernie4_5_moe,
        hunyuan_v1_moe,
        gpt_oss,
        minimax_m2,
        hy_v3,
        exaone_moe,
        afmoe,
        granitemoe,
        granitemoeshared,
        flint,
        mellum,
        aria_text,
        llama4_text,
        laguna,
    )
}
