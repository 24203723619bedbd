"""The configuration of a model in a GGUF file, from its metadata, with the names of a Hugging Face config.json.

A key of the architecture that is not known here may change the results, so it is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca_jax.helpers.gguf_file.header import GgufHeader, read_header, read_vector
from orca_jax.values.checks import short
from orca_jax.values.errors import ConfigError

FREQUENCIES = "rope_freqs.weight"
"""The tensor with divisors of the frequencies of rotary positions."""

_LLAMA = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_GPT2 = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "vocab_size": "vocab_size",
}
_GEMMA = {
    **_LLAMA,
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_ROPE_BASE = 10_000.0  # of llama.cpp, for files without rope.freq_base; families have other ones
_WITHOUT_EFFECT: Mapping[str, Callable[[object, Mapping[str, Any]], bool]] = {
    "attention.value_length": lambda value, hf: value == _head_dim(hf),
    "expert_count": lambda value, hf: value == 0,
    "expert_used_count": lambda value, hf: value == 0,
    "rope.dimension_count": lambda value, hf: value == _head_dim(hf),
    "rope.scaling.type": lambda value, hf: value == "none",
}
"""Other keys, each with a test of values without effect."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
        model_type: the `model_type` of the same models in a config.json.
        keys: names in config.json by names in the metadata.
        constants: other keys of the config.json.
        is_permuted: True if the rows of queries and keys are stored in another order.
        transposed: ends of the names of matrices that are stored the other way round than in safetensors.
        biases: keys of the config.json, each True if this tensor is in the file.
        norm_offset: what scales of norms have more than in safetensors.
        largest: the number of layers of the model that scales its scores by width instead of head size; 0 for none.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    constants: Mapping[str, Any] = field(default_factory=dict)
    is_permuted: bool = False
    transposed: tuple[str, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    largest: int = 0


ARCHITECTURES = {
    "gemma": Architecture("gemma", constants={"hidden_act": "gelu_pytorch_tanh"}, norm_offset=1.0),
    "gemma2": Architecture("gemma2", _GEMMA, _GEMMA_GELU, norm_offset=1.0, largest=46),
    "gemma3": Architecture("gemma3_text", _GEMMA, _GEMMA_GELU, norm_offset=1.0, largest=62),
    "gpt2": Architecture(
        "gpt2",
        _GPT2,
        transposed=(
            "attn.c_attn.weight",
            "attn.c_proj.weight",
            "mlp.c_fc.weight",
            "mlp.c_proj.weight",
        ),
    ),
    "llama": Architecture(
        "llama",
        constants={"hidden_act": "silu"},
        is_permuted=True,
        biases={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
    ),
    "olmo2": Architecture("olmo2", constants={"hidden_act": "silu"}),
    "phi3": Architecture(
        "phi3",
        {
            **_LLAMA,
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        {"hidden_act": "silu"},
    ),
    "qwen2": Architecture("qwen2", constants={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Architecture("qwen3", constants={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {
            **_LLAMA,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # as in llama.cpp
        {"hidden_act": "silu", "use_sliding_window": False, "norm_topk_prob": True},
    ),
}
_LLAMA_WITH_EXPERTS = Architecture(
    "mixtral",
    {**_LLAMA, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    {"hidden_act": "silu"},
    is_permuted=True,
)


def architecture_of(header: GgufHeader, path: str | Path) -> tuple[str, Architecture]:
    """The architecture of a file, with its name. Raises ConfigError if it is not supported."""
    name = header.fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"{path}: architecture {short(name)} is not supported, only {known}", param="model"
        )
    has_experts = name == "llama" and header.fields.get("llama.expert_count", 0) != 0
    return name, _LLAMA_WITH_EXPERTS if has_experts else ARCHITECTURES[name]


def hf_config_of(path: str | Path) -> dict[str, Any]:
    """The metadata of a file with the names of a config.json.

    Raises:
        ConfigError: the file cannot be read, is not the first one of several parts, or has an architecture or a key
            that is not supported. The message names it.
    """
    header = read_header(path)
    name, architecture = architecture_of(header, path)
    tensors = header.tensors
    begin = f"{name}."
    values = {
        key.removeprefix(begin): value
        for key, value in header.fields.items()
        if key.startswith(begin)
    }
    found = {
        architecture.keys[key]: value for key, value in values.items() if key in architecture.keys
    }
    if "rope.freq_base" in architecture.keys:
        found.setdefault("rope_theta", _ROPE_BASE)
    if name == "phi3" and found.get("sliding_window") == 0:
        found["sliding_window"] = None  # as in llama.cpp, which writes no "none"
    hf = {"model_type": architecture.model_type, **architecture.constants, **found}
    if "token_embd.weight" in tensors:
        hf.setdefault("vocab_size", tensors["token_embd.weight"].shape[0])
    hf["tie_word_embeddings"] = "output.weight" not in tensors
    hf |= {key: tensor in tensors for key, tensor in architecture.biases.items()}
    hf["bos_token_id"] = header.fields.get("tokenizer.ggml.bos_token_id")
    ends = (header.fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    hf["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
    others = values.keys() - architecture.keys.keys()
    rotated = values.get("rope.dimension_count")
    head_dim = _head_dim(hf)
    if architecture.model_type == "phi3" and isinstance(rotated, int) and head_dim > 0:
        hf["partial_rotary_factor"] = rotated / head_dim
        others -= {"rope.dimension_count"}
    if architecture.largest and head_dim > 0:  # as in llama.cpp, which has no key for it
        is_largest = hf.get("num_hidden_layers") == architecture.largest
        hf["query_pre_attn_scalar"] = (
            hf["hidden_size"] / hf["num_attention_heads"] if is_largest else head_dim
        )
    # as of Llama 3.1: the divisor of each frequency, at all positions
    if FREQUENCIES in tensors and name == "llama":
        factors = read_vector(path, tensors[FREQUENCIES])
        kind = {
            "rope_type": "longrope",
            "attention_factor": 1.0,
            "short_factor": factors,
            "long_factor": factors,
        }
        hf["rope_parameters"] = kind
    for key in sorted(others):
        if key not in _WITHOUT_EFFECT or not _WITHOUT_EFFECT[key](values[key], hf):
            message = f"{path}: {name}.{key} = {short(values[key])} is not supported from GGUF; use safetensors"
            raise ConfigError(message, param="model")
    return hf


def _head_dim(hf: Mapping[str, Any]) -> int:
    """The dimensions of a head; 0 if the metadata have no sizes of heads."""
    heads = hf.get("num_attention_heads")
    embed = hf.get("hidden_size")
    head_dim = hf.get("head_dim")
    if isinstance(head_dim, int):
        return head_dim
    if isinstance(heads, int) and isinstance(embed, int) and heads > 0:
        return embed // heads
    return 0
