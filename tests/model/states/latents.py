"""Small models with latent attention, as `hybrids.py` has those with states: sizes, and the shapes of their tensors."""

from collections.abc import Mapping
from random import Random
from typing import Any


def config(family: str, number: int) -> dict[str, Any]:
    """The part of a config.json that is this family's."""
    draw = Random(f"{family} {number}")
    heads = draw.choice((2, 4))
    config: dict[str, Any] = {
        "hidden_size": draw.choice((16, 24)),
        "intermediate_size": draw.choice((20, 32)),
        "num_hidden_layers": draw.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": draw.choice((8, 12)),
        "q_lora_rank": None if number % 3 == 1 else 10,
        "qk_nope_head_dim": draw.choice((6, 8)),
        "qk_rope_head_dim": draw.choice((4, 8)),
        "v_head_dim": draw.choice((6, 10)),
        "rope_interleave": number != 1,
        "attention_bias": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice((50.0, 1e4))},
    }
    if number % 2 == 0 or family == "mistral4":
        sizes = {
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": draw.choice((0.7, 1.0)),
        }
        scaling = {"rope_type": "yarn", "mscale_all_dim": draw.choice((0.7, 1.0)), **sizes}
        config["rope_parameters"] |= scaling
    if family == "deepseek_v2":
        del config["rope_interleave"]
    if family == "mistral4":
        config["rope_parameters"]["llama_4_scaling_beta"] = 0.3
    return (
        config
        if family == "youtu"
        else config | _mixture(family, number, config["num_hidden_layers"])
    )


def _mixture(family: str, number: int, layers: int) -> dict[str, Any]:
    """The keys of experts: four groups of two, and one first layer without."""
    groups = {"n_group": 4, "topk_group": 2} if number != 1 else {"n_group": 1, "topk_group": 1}
    config: dict[str, Any] = {
        **groups,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1 + number % 2,
        "moe_intermediate_size": 12,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": number % 2 == 0,
    }
    if family == "deepseek_v2":
        config["topk_method"] = "greedy" if number == 1 else "group_limited_greedy"
    if family != "glm4_moe_lite":
        return config | {"first_k_dense_replace": 1}
    return config | {"mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1)}


def layer_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a layer."""
    embed, heads, bias = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["attention_bias"],
    )
    rank, inner, rotated = config["kv_lora_rank"], config["q_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    sizes = {
        "kv_a_proj_with_mqa": (rank + rotated, embed),
        "kv_b_proj": (heads * (plain + value), rank),
        "o_proj": (embed, heads * value),
        "q_proj" if inner is None else "q_b_proj": (heads * (plain + rotated), inner or embed),
    }
    if inner is not None:
        sizes["q_a_proj"] = (inner, embed)
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{key}.weight": shape for key, shape in sizes.items()
    }
    if bias:
        biased = ("kv_a_proj_with_mqa", "o_proj", "q_a_proj")
        shapes |= {
            f"self_attn.{key}.bias": shape[:1] for key, shape in sizes.items() if key in biased
        }
    if inner is not None:
        shapes["self_attn.q_a_layernorm.weight"] = (inner,)
    shapes |= {
        "self_attn.kv_a_layernorm.weight": (rank,),
        "input_layernorm.weight": (embed,),
        "post_attention_layernorm.weight": (embed,),
    }
    if layer == 0 or config["model_type"] == "youtu":
        return shapes | mlp_shapes("mlp", embed, config["intermediate_size"])
    count, width = config["n_routed_experts"], config["moe_intermediate_size"]
    if config["model_type"] == "mistral4":
        shapes["mlp.experts.gate_up_proj"] = (count, 2 * width, embed)
        shapes["mlp.experts.down_proj"] = (count, embed, width)
    else:
        for expert in range(count):
            shapes |= mlp_shapes(f"mlp.experts.{expert}", embed, width)
    shapes |= mlp_shapes("mlp.shared_experts", embed, config["n_shared_experts"] * width)
    bias = (
        {}
        if config["model_type"] in ("deepseek_v2", "mistral4")
        else {"mlp.gate.e_score_correction_bias": (count,)}
    )
    return shapes | bias | {"mlp.gate.weight": (count, embed)}


def mlp_shapes(name: str, embed: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a gated MLP."""
    sizes = {"gate_proj": (inner, embed), "up_proj": (inner, embed), "down_proj": (embed, inner)}
    return {f"{name}.{key}.weight": shape for key, shape in sizes.items()}
