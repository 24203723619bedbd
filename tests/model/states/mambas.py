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
    return {
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


def layer_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a layer."""
    embed = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (embed,), "pre_ff_layernorm.weight": (embed,)}
    mlp = mlp_shapes("feed_forward", embed, config["intermediate_size"])
    if config["mlp_bias"]:
        mlp |= {key.replace("weight", "bias"): shape[:1] for key, shape in mlp.items()}
    return shapes | mlp | (_attention if layer in config["attn_layer_indices"] else _mamba)(config)


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    groups = config["num_key_value_heads"] * dim
    sizes = {"q_proj": (embed, embed), "k_proj": (groups, embed), "v_proj": (groups, embed), "o_proj": (embed, embed)}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{key}.weight": shape for key, shape in sizes.items()}
    return shapes | _biases(shapes, is_there=config["attention_bias"])


def _mamba(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config["mamba_expand"] * embed
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    shapes: dict[str, tuple[int, ...]] = {
        "mamba.in_proj.weight": (inner + channels + heads, embed),
        "mamba.out_proj.weight": (embed, inner),
    }
    shapes |= _biases(shapes, is_there=config["mamba_proj_bias"])
    convolution: dict[str, tuple[int, ...]] = {"mamba.conv1d.weight": (channels, 1, config["mamba_d_conv"])}
    shapes |= convolution | _biases(convolution, is_there=config["mamba_conv_bias"])
    return shapes | {f"mamba.{key}": (heads,) for key in ("A_log", "dt_bias", "D")} | {"mamba.norm.weight": (inner,)}


def _biases(shapes: Mapping[str, tuple[int, ...]], *, is_there: bool) -> dict[str, tuple[int, ...]]:
    return {key.replace("weight", "bias"): shape[:1] for key, shape in shapes.items()} if is_there else {}
