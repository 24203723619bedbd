"""Small models of Zamba2, as `hybrids.py` has those of LFM: sizes, and the shapes of their tensors."""

from collections.abc import Mapping
from random import Random
from typing import Any

from tests.model.states import mambas

_KINDS = (
    ["mamba", "hybrid", "mamba", "hybrid"],
    ["hybrid", "hybrid", "mamba", "hybrid"],
    ["linear_attention", "hybrid", "linear_attention"],
)
_RANK = 3


def config(family: str, number: int) -> dict[str, Any]:
    """The part of a config.json that is this family's."""
    draw = Random(f"{family} {number}")
    kinds = _KINDS[number % 3]
    groups = draw.choice((1, 2))
    heads = draw.choice((2, 4))
    # additions to keys and values have as many outputs as those to queries
    has_additions = number % 2 == 1
    return {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if has_additions else 2,
        "n_mamba_heads": groups * draw.choice((2, 4)),
        "mamba_ngroups": groups,
        "mamba_d_state": draw.choice((4, 6)),
        "mamba_d_conv": draw.choice((2, 4)),
        "mamba_expand": draw.choice((1, 2)),
        "num_mem_blocks": 1 + (number % 3 == 1),
        "adapter_rank": _RANK,
        "use_shared_attention_adapter": has_additions,
        "use_mem_rope": number % 4 < 2,
        "tie_word_embeddings": number % 4 != 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    }


def layer_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a layer of the files."""
    embed = config["hidden_size"]
    of_mamba = {
        "mamba_n_heads": config["n_mamba_heads"],
        "mamba_n_groups": config["mamba_ngroups"],
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    }
    shapes = {"input_layernorm.weight": (embed,), **mambas.mamba_shapes({**config, **of_mamba})}
    kinds = config["layers_block_type"]
    if kinds[layer] != "hybrid":
        return shapes
    shapes = {f"mamba_decoder.{key}": shape for key, shape in shapes.items()}
    shapes["linear.weight"] = (embed, embed)
    hybrids = [number for number, kind in enumerate(kinds) if kind == "hybrid"]
    number = hybrids.index(layer)
    # the first layer of a block has its tensors; transformers writes copies where embeddings are not tied
    if number < config["num_mem_blocks"] or not config["tie_word_embeddings"]:
        users = range(number % config["num_mem_blocks"], len(hybrids), config["num_mem_blocks"])
        block = _block(config, users)
        shapes |= {f"shared_transformer.{key}.weight": shape for key, shape in block.items()}
    return shapes


def _block(config: Mapping[str, Any], users: range) -> dict[str, tuple[int, ...]]:
    """The tensors of a shared block, with the additions of the layers `users`."""
    embed = config["hidden_size"]
    inner = config["intermediate_size"]
    wide = 2 * embed
    keys = wide // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (wide,),
        "pre_ff_layernorm": (embed,),
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (keys, wide),
        "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (embed, wide),
        "feed_forward.gate_up_proj": (2 * inner, embed),
        "feed_forward.down_proj": (embed, inner),
    }
    for user in users:
        addition = f"feed_forward.gate_up_proj_adapter_list.{user}"
        shapes |= {f"{addition}.0": (_RANK, embed), f"{addition}.1": (2 * inner, _RANK)}
        if config["use_shared_attention_adapter"]:
            for name in "qkv":
                addition = f"self_attn.linear_{name}_adapter_list.{user}"
                shapes |= {f"{addition}.0": (_RANK, wide), f"{addition}.1": (wide, _RANK)}
    return shapes
