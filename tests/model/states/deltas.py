"""Small models with the gated delta rule, as `hybrids.py` has those of LFM: sizes, and the shapes of their tensors."""

from collections.abc import Mapping
from random import Random
from typing import Any

from tests.model.states.latents import mlp_shapes

FULL, LINEAR = "full_attention", "linear_attention"


def config(family: str, number: int) -> dict[str, Any]:
    """The part of a config.json that is this family's."""
    draw = Random(f"{family} {number}")
    heads = draw.choice((2, 4))
    keys = draw.choice((2, 4))
    config: dict[str, Any] = {
        "hidden_size": draw.choice((16, 24)),
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((2, heads // 2)),
        "head_dim": draw.choice((8, 16)),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice((1, 2)),
        "linear_key_head_dim": draw.choice((4, 6)),
        "linear_value_head_dim": draw.choice((4, 8)),
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "attention_bias": draw.random() < 0.3,
        "tie_word_embeddings": draw.random() < 0.5,
        # a small result of a head that is normalised is mostly rounding
        "rms_norm_eps": draw.choice((1e-2, 3e-2)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.25 * (1 + number % 2),
        },
    }
    if number:
        kinds = [[LINEAR, FULL] * 2, [LINEAR, LINEAR, FULL]][number] if number < 2 else None
        config["layer_types"] = kinds or [draw.choice((LINEAR, FULL)) for _ in range(3)] + [
            LINEAR,
            FULL,
        ]
        config["num_hidden_layers"] = len(config["layer_types"])
    if family == "qwen3_5_text":
        return config | {"intermediate_size": 20}
    mixture = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 8, "num_experts": 4}
    mixture |= {"norm_topk_prob": number % 2 == 0} if family == "qwen3_next" else {}
    return config | mixture | {"num_experts_per_tok": 2}


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer."""
    usual = [FULL if layer % 4 == 3 else LINEAR for layer in range(config["num_hidden_layers"])]
    return list(config.get("layer_types", usual))


def layer_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a layer."""
    embed = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (embed,),
        "post_attention_layernorm.weight": (embed,),
    }
    mixer = _delta_rule if layer_types(config)[layer] == LINEAR else _attention
    shapes |= mixer(config)
    if "num_experts" not in config:
        return shapes | mlp_shapes("mlp", embed, config["intermediate_size"])
    for expert in range(config["num_experts"]):
        shapes |= mlp_shapes(f"mlp.experts.{expert}", embed, config["moe_intermediate_size"])
    shapes |= mlp_shapes("mlp.shared_expert", embed, config["shared_expert_intermediate_size"])
    return shapes | {
        "mlp.gate.weight": (config["num_experts"], embed),
        "mlp.shared_expert_gate.weight": (1, embed),
    }


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, dim = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    sizes = {
        "q_proj": (2 * heads, embed),
        "k_proj": (groups, embed),
        "v_proj": (groups, embed),
        "o_proj": (embed, heads),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{key}.weight": shape for key, shape in sizes.items()
    }
    if config["attention_bias"]:
        shapes |= {f"self_attn.{key}.bias": shape[:1] for key, shape in sizes.items()}
    return shapes | {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}


def _delta_rule(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys, value = (
        config["linear_num_key_heads"] * config["linear_key_head_dim"],
        config["linear_value_head_dim"],
    )
    values = heads * value
    parts = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    parts = (
        {"qkvz": 2 * (keys + values), "ba": 2 * heads}
        if config["model_type"] == "qwen3_next"
        else parts
    )
    return {
        **{f"linear_attn.in_proj_{name}.weight": (size, embed) for name, size in parts.items()},
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (value,),
        "linear_attn.out_proj.weight": (embed, values),
    }
