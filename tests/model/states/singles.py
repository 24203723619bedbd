"""Small models whose layers are one part alone, as `hybrids.py` has those of LFM: sizes, and the shapes of tensors."""

from collections.abc import Mapping
from random import Random
from typing import Any

_MAMBA, _FULL, _MLP, _MOE = "linear_attention", "full_attention", "mlp", "moe"
_NAMES = (
    ("mamba_num_heads", "num_heads"),
    ("mamba_head_dim", "head_dim"),
    ("ssm_state_size", "state_size"),
)  # of sizes of Mamba-2, in hybrids and alone
_LETTERS = {_MAMBA: "M", _FULL: "*", _MLP: "-", _MOE: "E"}


def config(family: str, number: int) -> dict[str, Any]:
    """The part of a config.json that is this family's."""
    if family == "mamba2":
        return _mamba2(number)
    draw = Random(f"{family} {number}")
    groups = draw.choice((1, 2))
    kinds = [
        [_MAMBA, _MOE, _FULL, _MLP],
        [_MAMBA, _MLP, _FULL, _MLP, _MAMBA],
        [_MAMBA, _MOE, _MAMBA, _MOE, _FULL],
    ][number % 3]
    config: dict[str, Any] = {
        "hidden_size": draw.choice((16, 24)),
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_num_heads": groups * draw.choice((2, 4)),
        "mamba_head_dim": draw.choice((4, 6)),
        "n_groups": groups,
        "ssm_state_size": draw.choice((4, 6)),
        "conv_kernel": draw.choice((2, 4)),
        "use_conv_bias": number % 3 != 2,
        "use_bias": number % 3 == 1,
        "mlp_bias": number % 3 == 1,
        "time_step_min": 0.8,
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
    }
    key, value = (
        ("layers_block_type", kinds) if number % 2 else ("hybrid_override_pattern", _letters(kinds))
    )
    mixture = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 8,
        "n_group": 4 if number % 3 == 0 else 1,
        "topk_group": 2 if number % 3 == 0 else 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": number % 3 == 0,
    }
    return (
        config | {key: value, "num_hidden_layers": len(kinds)} | (mixture if _MOE in kinds else {})
    )


def _mamba2(number: int) -> dict[str, Any]:
    """The keys of Mamba-2 without attention."""
    draw = Random(f"mamba2 {number}")
    groups = draw.choice((1, 2))
    heads = groups * draw.choice((2, 4))
    config: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": draw.choice((2, 3)),
        "expand": 2,
        "num_heads": heads,
        "head_dim": 32 // heads,
        "n_groups": groups,
        "state_size": draw.choice((4, 6)),
        "conv_kernel": draw.choice((2, 4)),
        "use_conv_bias": number % 3 != 2,
        "use_bias": number % 3 == 1,
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if number % 2:
        config["time_step_limit"] = [0.5, 0.9]
    return config


def _letters(kinds: list[str]) -> str:
    return "".join(_LETTERS[kind] for kind in kinds)


def layer_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a layer."""
    if config["model_type"] == "mamba2":
        return {"norm.weight": (config["hidden_size"],)} | _mamba(config)
    letters = config.get("hybrid_override_pattern") or _letters(config["layers_block_type"])
    embed, bias = config["hidden_size"], config["mlp_bias"]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (embed,)}
    match letters[layer]:
        case "M":
            return shapes | _mamba(config)
        case "*":
            heads, groups = (
                config["head_dim"] * config[f"num_{name}_heads"]
                for name in ("attention", "key_value")
            )
            sizes = {
                "q": (heads, embed),
                "k": (groups, embed),
                "v": (groups, embed),
                "o": (embed, heads),
            }
            return shapes | {f"mixer.{name}_proj.weight": size for name, size in sizes.items()}
        case "-":
            return shapes | _mlp("mixer", embed, config["intermediate_size"], bias=bias)
    count = config["n_routed_experts"]
    for expert in range(count):
        shapes |= _mlp(
            f"mixer.experts.{expert}", embed, config["moe_intermediate_size"], bias=False
        )
    shapes |= _mlp(
        "mixer.shared_experts", embed, config["moe_shared_expert_intermediate_size"], bias=bias
    )
    return shapes | {
        "mixer.gate.weight": (count, embed),
        "mixer.gate.e_score_correction_bias": (count,),
    }


def _mlp(key: str, embed: int, inner: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{key}.up_proj.weight": (inner, embed),
        f"{key}.down_proj.weight": (embed, inner),
    }
    return shapes | (
        {f"{key}.up_proj.bias": (inner,), f"{key}.down_proj.bias": (embed,)} if bias else {}
    )


def _mamba(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed = config["hidden_size"]
    heads, dim, states = (config.get(of_hybrid, config.get(own)) for of_hybrid, own in _NAMES)
    inner = heads * dim
    channels = inner + 2 * config["n_groups"] * states
    shapes: dict[str, tuple[int, ...]] = {
        "mixer.in_proj.weight": (inner + channels + heads, embed),
        "mixer.out_proj.weight": (embed, inner),
        "mixer.conv1d.weight": (channels, 1, config["conv_kernel"]),
        "mixer.norm.weight": (inner,),
        **{f"mixer.{key}": (heads,) for key in ("A_log", "dt_bias", "D")},
    }
    if config["use_bias"]:
        shapes |= {
            "mixer.in_proj.bias": (inner + channels + heads,),
            "mixer.out_proj.bias": (embed,),
        }
    return shapes | ({"mixer.conv1d.bias": (channels,)} if config["use_conv_bias"] else {})
