"""Small models with states and latents: their config.json and their weights, drawn from their names alone.

This module needs only NumPy and safetensors, and runs on Python 3.11 too: scripts/record_hybrids.py writes the same
directories there, and records the results of transformers for them.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.model.states import deltas, latents, mambas, singles, zambas

_TEXTS = (
    *(
        "lfm2",
        "lfm3",
        "minimax",
        "youtu",
        "qwen3_next",
        "bamba",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
    ),
    *(
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "granitemoehybrid",
        "nemotron_h",
        "lfm2_moe",
        "falcon_h1",
        "mistral4",
        "mamba2",
        "zamba2",
    ),
)
_OTHERS: Mapping[str, Any] = {
    **dict.fromkeys(("youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"), latents),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), deltas),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), mambas),
    **dict.fromkeys(("nemotron_h", "mamba2"), singles),
    "zamba2": zambas,
}  # modules with `config` and `layer_shapes`
_WRAPPERS = {
    "qwen3_5_moe": ("qwen3_5_moe_text", "model.language_model.", ""),
    "lfm2_vl": ("lfm2", "model.language_model.", ""),
    "kimi_k25": ("deepseek_v3", "language_model.model.", "language_model."),
}  # of images: the family of texts, and the prefixes of its tensors and of its head
_SIZES_OF_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
_STD = {"zamba2": 0.15}  # of matrices: its attention has inputs twice as wide
_SENSITIVE = {
    "bamba": (4, 5, 6),
    "lfm2_moe": (3,),
    "qwen3_5_moe_text": (2, 4, 7, 8, 9, 10, 11, 17, 18, 20, 21),
    "qwen3_5_text": (2, 7, 11, 14),
    "qwen3_next": (5, 11, 12, 14, 15),
}  # numbers of models whose log probabilities change by more than 1e-5 with the rounding of weights, after each prompt


def _numbers(family: str) -> Iterator[int]:
    """The numbers of a family's models, twelve at most."""
    used = (number for number in range(30) if number not in _SENSITIVE.get(family, ()))
    return islice(used, 1 if family in _WRAPPERS else 12)


NAMES = tuple(
    f"{family}-{number}" for family in (*_TEXTS, *_WRAPPERS) for number in _numbers(family)
)
FIRST = tuple(name for name in NAMES if name.endswith("-0"))
RECORD = Path("tests/fixtures/hybrids.npz")
PROMPTS, NEW, VOCAB = (29, 9, 1), 8, 53  # tokens of the prompts, generated tokens of each

_FULL, _SLIDING, _CONV, _LINEAR = "full_attention", "sliding_attention", "conv", "linear_attention"


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a model."""
    family, _, number = name.partition("-")
    if family in _WRAPPERS:
        text = config_of(f"{_WRAPPERS[family][0]}-{number}")
        tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
        return {
            "model_type": family,
            "text_config": text,
            "vision_config": _SIZES_OF_IMAGES,
            **tied,
        }
    if family in _OTHERS:
        config = _OTHERS[family].config(family, int(number))
    else:
        config = {"lfm2": _lfm2, "lfm2_moe": _lfm2_moe, "lfm3": _lfm3, "minimax": _minimax}[family](
            int(number)
        )
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {
        "model_type": family,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        **tokens,
        **config,
    }


def _lfm2(number: int) -> dict[str, Any]:
    """As LFM3 without what it has in addition."""
    config, draw = _lfm3(number), Random(f"lfm2 {number}")
    for key in (
        "head_dim",
        "rope_parameters",
        "sliding_window",
        "use_attention_gate",
        "use_sandwich_norm",
    ):
        config.pop(key, None)
    del config["attention_bias"]
    kinds = [
        _FULL if kind == _SLIDING else kind for kind in config.pop("layer_types", [_CONV, _FULL])
    ]
    config |= {"num_hidden_layers": len(kinds), "block_multiple_of": draw.choice((4, 7))}
    if number % 3 == 0:
        config["full_attn_idxs"] = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    else:
        config["layer_types"] = kinds
    config["block_auto_adjust_ff_dim"] = number % 4 != 1
    config["block_ffn_dim_multiplier"] = draw.choice((1.0, 1.3))
    if number % 2:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 50.0}
    return config


def _lfm2_moe(number: int) -> dict[str, Any]:
    """As LFM2, with experts behind some first layers."""
    config = _lfm2(number)
    kinds = layer_types({"model_type": "lfm2", **config})
    for key in (
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "full_attn_idxs",
    ):
        config.pop(key, None)
    mixture = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "num_dense_layers": number % 3,
    }
    router = {
        "use_expert_bias": number != 1,
        "norm_topk_prob": number != 2,
        "routed_scaling_factor": 1.5,
    }
    return config | {"layer_types": kinds, "num_hidden_layers": len(kinds)} | mixture | router


def _lfm3(number: int) -> dict[str, Any]:
    draw = Random(f"lfm3 {number}")
    heads = draw.choice((2, 4))
    config: dict[str, Any] = {
        "hidden_size": draw.choice((16, 24)),
        "intermediate_size": draw.choice((20, 32)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((2, heads // 2)),
        "head_dim": draw.choice((8, 12)),
        "conv_L_cache": draw.choice((2, 3, 4, 7)),
        "conv_bias": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.5,
        "use_attention_gate": draw.random() < 0.7,
        "use_sandwich_norm": draw.random() < 0.7,
        "tie_word_embeddings": draw.random() < 0.7,
        "sliding_window": draw.choice((2, 5, 9)),
        "norm_eps": draw.choice((1e-5, 1e-3)),
    }
    kinds = {
        0: [_CONV, _FULL, _CONV, _SLIDING],  # a period of two: windows are values
        1: None,  # the family's own pattern
        2: [_CONV, _SLIDING, _FULL] * 2,
    }.get(
        number,
        [draw.choice((_FULL, _SLIDING, _CONV)) for _ in range(draw.choice((3, 4, 5)))]
        + [_CONV, _FULL],
    )
    config["num_hidden_layers"] = 5 if kinds is None else len(kinds)
    if kinds is not None:
        config["layer_types"] = kinds
    if number % 2:
        config["rope_parameters"] = {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": draw.choice((50.0, 1e4)),
                "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0)),
                "factor": draw.choice((1.0, 3.0)),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": draw.choice((20.0, 1e4))},
        }
    return config


def _minimax(number: int) -> dict[str, Any]:
    draw = Random(f"minimax {number}")
    config: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": (4, 8, 6)[number % 3],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "block_size": (4, 16, 256)[number % 3],
    }
    if number:
        kinds = {1: [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL], 2: [_FULL, _LINEAR, _LINEAR]}.get(
            number
        )
        config["layer_types"] = kinds or [
            _LINEAR,
            _FULL,
            *draw.choices((_LINEAR, _FULL), k=draw.choice((1, 2, 3))),
        ]
        config["num_hidden_layers"] = len(config["layer_types"])
        names = [
            f"{name}_{part}_factor"
            for name in ("full_attn", "linear_attn", "mlp")
            for part in ("alpha", "beta")
        ]
        config |= {name: round(draw.uniform(0.5, 3.0), 2) for name in names}
    if number % 3 == 2:
        config["sliding_window"] = 6
    return config


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer."""
    if "layer_types" in config:
        return list(config["layer_types"])
    if "full_attn_idxs" in config:
        return [
            _FULL if layer in config["full_attn_idxs"] else _CONV
            for layer in range(config["num_hidden_layers"])
        ]
    layers = range(config["num_hidden_layers"])
    if config["model_type"] == "minimax":
        return [_LINEAR if layer % 2 else _FULL for layer in layers]
    return [
        _FULL if layer % 4 == 2 else _SLIDING if layer % 4 == 0 and layer else _CONV
        for layer in layers
    ]


def write(name: str, folder: Path) -> None:
    """Write config.json and the weights."""
    config = config_of(name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {key: _values(f"{name} {key}", shape) for key, shape in _shapes(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prompt(name: str, length: int, attempt: int) -> np.ndarray:
    """A prompt of a model; the record has that of the first attempt with clear margins."""
    return np.random.default_rng(zlib.crc32(f"{name} {length} {attempt}".encode())).integers(
        0, VOCAB, length
    )


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    is_scale = "norm" in name and name.endswith("weight")
    # the other norms of Qwen3-Next add 1
    is_scale &= not name.startswith("qwen3") or "linear_attn" in name
    std = 0.2 if len(shape) == 1 else 0.5 if "conv1d" in name else _STD.get(name[:6], 0.25)
    return np.asarray(std * values + (1.0 if is_scale else 0.0), np.float32)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, with the names of published files."""
    if "text_config" in config:
        _, prefix, of_head = _WRAPPERS[config["model_type"]]
        inner = _shapes(config["text_config"]).items()
        names = {
            key: prefix + key.removeprefix("model.") if "model." in key else of_head + key
            for key, _ in inner
        }
        return {names[key]: shape for key, shape in inner}
    embed, is_lfm = config["hidden_size"], config["model_type"].startswith("lfm")
    base = "backbone" if config["model_type"] in ("nemotron_h", "mamba2") else "model"
    outer = {"lfm": ("embed_tokens", "embedding_norm"), "bam": ("embed_tokens", "final_layernorm")}
    outer |= {"fal": outer["bam"], "nem": ("embeddings", "norm_f")}
    outer["mam"] = outer["nem"]
    outer["zam"] = outer["bam"]
    table, final = outer.get(config["model_type"][:3], ("embed_tokens", "norm"))
    shapes: dict[str, tuple[int, ...]] = {
        f"{base}.{table}.weight": (VOCAB, embed),
        f"{base}.{final}.weight": (embed,),
    }
    if not config.get("tie_word_embeddings", is_lfm):
        shapes["lm_head.weight"] = (VOCAB, embed)
    if (module := _OTHERS.get(config["model_type"])) is not None:
        for layer in range(config["num_hidden_layers"]):
            shapes |= {
                f"{base}.layers.{layer}.{key}": each
                for key, each in module.layer_shapes(config, layer).items()
            }
        return shapes
    for layer, kind in enumerate(layer_types(config)):
        of_layer = _lfm_layer(config, kind, layer) if is_lfm else _minimax_layer(config, kind)
        shapes |= {f"model.layers.{layer}.{key}": shape for key, shape in of_layer.items()}
    return shapes


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, dim = config["hidden_size"], _head_dim(config)
    heads, groups = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    sizes = {
        "q_proj": (heads, embed),
        "k_proj": (groups, embed),
        "v_proj": (groups, embed),
        "o_proj": (embed, heads),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{key}.weight": shape for key, shape in sizes.items()
    }
    if config.get("attention_bias"):
        shapes |= {f"self_attn.{key}.bias": shape[:1] for key, shape in sizes.items()}
    return shapes


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _inner(config: Mapping[str, Any]) -> int:
    """The width of an MLP."""
    inner, multiple = int(config["intermediate_size"]), config.get("block_multiple_of", 1)
    if not config.get("block_auto_adjust_ff_dim"):
        return inner
    inner = int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3))
    return int(multiple * -(-inner // multiple))


def _lfm_layer(config: Mapping[str, Any], kind: str, layer: int) -> dict[str, tuple[int, ...]]:
    embed, dim = config["hidden_size"], _head_dim(config)
    is_lfm2 = config["model_type"].startswith("lfm2")
    norms = ["operator_norm", "ffn_norm"]
    norms += ["post_operator_norm", "post_ffn_norm"] if config.get("use_sandwich_norm") else []
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (embed,) for name in norms}
    experts = range(
        config.get("num_experts", 0) if layer >= config.get("num_dense_layers", 0) else 0
    )
    inner = config["moe_intermediate_size"] if experts else _inner(config)
    for name in [f"feed_forward.experts.{expert}" for expert in experts] or ["feed_forward"]:
        sizes = {"w1": (inner, embed), "w3": (inner, embed), "w2": (embed, inner)}
        shapes |= {f"{name}.{key}.weight": shape for key, shape in sizes.items()}
    if experts:
        shapes["feed_forward.gate.weight"] = (len(experts), embed)
    if experts and config["use_expert_bias"]:
        shapes["feed_forward.expert_bias"] = (len(experts),)
    if kind == _CONV:
        sizes = {
            "conv": (embed, 1, config["conv_L_cache"]),
            "in_proj": (3 * embed, embed),
            "out_proj": (embed, embed),
        }
        shapes |= {f"conv.{key}.weight": shape for key, shape in sizes.items()}
        return shapes | (
            {f"conv.{key}.bias": shape[:1] for key, shape in sizes.items()}
            if config["conv_bias"]
            else {}
        )
    norm = "layernorm" if is_lfm2 else "norm"
    shapes |= {f"self_attn.q_{norm}.weight": (dim,), f"self_attn.k_{norm}.weight": (dim,)}
    shapes |= {
        key.replace("o_proj", "out_proj") if is_lfm2 else key: each
        for key, each in _attention(config).items()
    }
    if config.get("use_attention_gate"):
        shapes["self_attn.gate_proj.weight"] = (config["num_attention_heads"], embed)
    return shapes


def _minimax_layer(config: Mapping[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    embed, inner, count = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_local_experts"],
    )
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (embed,),
        "post_attention_layernorm.weight": (embed,),
        "block_sparse_moe.gate.weight": (count, embed),
    }
    for expert in range(count):
        for name, shape in {
            "w1": (inner, embed),
            "w3": (inner, embed),
            "w2": (embed, inner),
        }.items():
            shapes[f"block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    if kind == _FULL:
        return shapes | _attention(config)
    heads = config["num_attention_heads"] * config["head_dim"]
    sizes = {
        "qkv_proj": (3 * heads, embed),
        "out_proj": (embed, heads),
        "output_gate": (heads, embed),
    }
    return (
        shapes
        | {f"self_attn.{key}.weight": shape for key, shape in sizes.items()}
        | {"self_attn.norm.weight": (heads,)}
    )
