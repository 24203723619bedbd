"""Small models with Mamba-2, as `hybrids.py` has those of LFM: sizes, and the shapes of their tensors."""

from collections.abc import Mapping
from random import Random
from typing import Any

from tests.model.states.latents import mlp_shapes


def config(family: str, number: int) -> dict[str, Any]:
    """The part of a config.json that is this family's."""
    draw = Random(f"{family} {number}")
    heads, groups = draw.choice((2, 4)), draw.choice((1, 2))
    attention = [[1, 3], [2], [0, 1]][number] if number < 3 else draw.sample(range(4), 2)
    config = {
        "hidden_size": draw.choice((16, 32)),
        "intermediate_size": 20,
        "num_hidden_layers": 4 - number % 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "attn_layer_indices": [layer for layer in attention if layer < 4 - number % 2],
        "mamba_n_heads": groups * draw.choice((2, 4)),
        "mamba_n_groups": groups,
        "mamba_d_state": draw.choice((4, 6)),
        "mamba_d_conv": draw.choice((2, 4)),
        "mamba_expand": draw.choice((1, 2)),
        "mamba_conv_bias": number % 3 != 2,
        "mamba_proj_bias": number % 2 == 0,
        "attention_bias": number % 2 == 0,
        "mlp_bias": number % 2 == 0,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    }
    makers = {"granitemoehybrid": _granite, "falcon_h1": _falcon}
    return makers[family](config, draw, number) if family in makers else config


def _falcon(config: dict[str, Any], draw: Random, number: int) -> dict[str, Any]:
    """The keys of Falcon-H1, with all its factors."""
    del config["attn_layer_indices"]
    names = ("attention_in", "attention_out", "embedding", "key", "ssm_in", "ssm_out")
    lists = {"ssm_multipliers": 5, "mlp_multipliers": 2}
    factors: dict[str, Any] = {
        name: [draw.choice((0.5, 0.8, 1.3)) for _ in range(count)] for name, count in lists.items()
    }
    factors |= {f"{name}_multiplier": draw.choice((0.5, 0.8, 1.3)) for name in names} | {
        "lm_head_multiplier": 0.3
    }
    norm = {"mamba_rms_norm": number != 1, "mamba_norm_before_gate": number != 2}
    width = {"mamba_d_ssm": 2 * config["mamba_n_heads"] * 2 if number == 2 else None}
    bias = {"projectors_bias": config["mamba_proj_bias"], "num_hidden_layers": 2}
    return config | factors | norm | width | bias


def _granite(config: dict[str, Any], draw: Random, number: int) -> dict[str, Any]:
    """The keys of Granite 4, with experts or without."""
    kinds = ("linear_attention", "full_attention") if number % 2 else ("mamba", "attention")
    full = config.pop("attn_layer_indices")
    config["layer_types"] = [kinds[layer in full] for layer in range(config["num_hidden_layers"])]
    del config["mlp_bias"]
    factors = (
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
    )
    config |= {name: draw.choice((0.4, 0.7)) for name in factors} | {"logits_scaling": 6.0}
    experts = {"num_local_experts": 4 * (number % 3 != 1), "num_experts_per_tok": 2}
    positions = (
        {} if number % 3 == 1 else {"position_embedding_type": ("rope", "", "nope")[number % 3]}
    )
    return config | experts | positions | {"shared_intermediate_size": 12}


def layer_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a layer."""
    embed = config["hidden_size"]
    if "layer_types" in config:
        norm, mlp, is_full = (
            "post_attention_layernorm",
            _experts(config),
            "full" in config["layer_types"][layer],
        )
        is_full |= config["layer_types"][layer] == "attention"
    else:
        norm, mlp, is_full = (
            "pre_ff_layernorm",
            _mlp(config),
            layer in config.get("attn_layer_indices", ()),
        )
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (embed,),
        f"{norm}.weight": (embed,),
    }
    if config["model_type"] == "falcon_h1":
        return shapes | mlp | _attention(config) | mamba_shapes(config)
    return shapes | mlp | (_attention if is_full else mamba_shapes)(config)


def _mlp(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    mlp = mlp_shapes("feed_forward", config["hidden_size"], config["intermediate_size"])
    return mlp | _biases(mlp, is_there=config["mlp_bias"])


def _experts(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of Granite's MLPs, and of its experts in joined tensors."""
    embed, count, inner = (
        config["hidden_size"],
        config["num_local_experts"],
        config["intermediate_size"],
    )
    width, moe = config["shared_intermediate_size"], "block_sparse_moe"
    shapes: dict[str, tuple[int, ...]] = {
        "shared_mlp.input_linear.weight": (2 * width, embed),
        "shared_mlp.output_linear.weight": (embed, width),
    }
    experts: dict[str, tuple[int, ...]] = {
        f"{moe}.router.layer.weight": (count, embed),
        f"{moe}.input_linear.weight": (count, 2 * inner, embed),
        f"{moe}.output_linear.weight": (count, embed, inner),
    }
    return shapes | (experts if count else {})


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    groups = config["num_key_value_heads"] * dim
    sizes = {
        "q_proj": (embed, embed),
        "k_proj": (groups, embed),
        "v_proj": (groups, embed),
        "o_proj": (embed, embed),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{key}.weight": shape for key, shape in sizes.items()
    }
    return shapes | _biases(shapes, is_there=config["attention_bias"])


def mamba_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of Mamba-2."""
    embed, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * embed
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    shapes: dict[str, tuple[int, ...]] = {
        "mamba.in_proj.weight": (inner + channels + heads, embed),
        "mamba.out_proj.weight": (embed, inner),
    }
    shapes |= _biases(shapes, is_there=config["mamba_proj_bias"])
    convolution: dict[str, tuple[int, ...]] = {
        "mamba.conv1d.weight": (channels, 1, config["mamba_d_conv"])
    }
    shapes |= convolution | _biases(convolution, is_there=config["mamba_conv_bias"])
    norm = {"mamba.norm.weight": (inner,)} if config.get("mamba_rms_norm", True) else {}
    return shapes | {f"mamba.{key}": (heads,) for key in ("A_log", "dt_bias", "D")} | norm


def _biases(shapes: Mapping[str, tuple[int, ...]], *, is_there: bool) -> dict[str, tuple[int, ...]]:
    return (
        {key.replace("weight", "bias"): shape[:1] for key, shape in shapes.items()}
        if is_there
        else {}
    )
