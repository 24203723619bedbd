"""Gemma 1 to 3 for texts. From the second on there are norms before and after attention and MLP, and windows.

Scales of norms are stored as their difference from one. Gemma 2 caps scores and logits. Gemma 3 has norms of queries
and keys instead, and other rotary positions in layers with a window. VaultGemma is Gemma 2 without norms after parts.
"""

import re
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import Family, Weight, with_change, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.keys import check_keys
from orca_jax.model.families.values import HfConfig, get_float, get_int, get_optional_float, refusal
from orca_jax.model.families.windows import windows_of_gemma
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

_KEYS = words(
    "attention_bias final_logit_softcapping layer_types query_pre_attn_scalar sliding_window"
)
# `hidden_act` is not read by transformers either, and neither are these notes of the windows.
_HARMLESS = frozenset(
    {"_sliding_window_pattern", "cache_implementation", "hidden_act", "sliding_window_size"}
)
_CAUSAL = {"use_bidirectional_attention": (False, None)}
_GLOBAL = rope.RopeRules(theta=1e6, part="full_attention", kinds=("default", "linear"))
_LOCAL = rope.RopeRules(
    theta_key="rope_local_base_freq", part="sliding_attention", kinds=("default", "linear")
)


def _gemma(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {
        **llama.attention_biases(hf),
        # as in transformers
        "activation": "gelu_tanh" if config.activation == "gelu" else config.activation,
        "embedding_scale": config.embed_dim**0.5,
        "norm_offset": 1.0,
    }


def vaultgemma_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
    mlp = llama.mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=False)
    return *llama.outer_weights(config, norms), *llama.attention_weights(config), *mlp


def _gemma2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {
        **_both_norms(hf, config),
        "attention_soft_cap": _cap(hf, "attn_logit_softcapping", 50.0),
        "logit_soft_cap": _cap(hf, "final_logit_softcapping", 30.0),
        **windows_of_gemma(hf, config.num_layers, config.max_positions, 2)._asdict(),
    }


def _gemma3(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    local, _ = rope.read_rope(hf, config.head_dim, config.max_positions, _LOCAL)
    period = get_int(hf, "sliding_window_pattern", 6)
    return {
        **_both_norms(hf, config),
        "qk_norm": "head",
        "logit_soft_cap": _cap(hf, "final_logit_softcapping", None),
        "windowed_rope": local,
        **windows_of_gemma(hf, config.num_layers, config.max_positions, period)._asdict(),
    }


def gemma3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read the texts' part of a config.json of Gemma 3 for images and texts, `text_config`.

    Raises:
        ConfigError: as in `llama.config_from_hf`.
    """
    text = hf.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise refusal("text_config", "must be an object or null", text)
    # The head and the end tokens are those of the whole model.
    outer = {key: hf.get(key) for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id")}
    whole = {
        "model_type": "gemma3_text",
        **(text or {}),
        **{key: value for key, value in outer.items() if key in hf},
    }
    if whole["model_type"] != "gemma3_text":
        raise refusal("text_config", "must have the model_type gemma3_text", whole["model_type"])
    if whole.get("final_logit_softcapping") is not None:
        problem = "final_logit_softcapping must be null: transformers' models for images and texts do not cap logits"
        raise ConfigError(f"config.json: text_config: {problem}", param="final_logit_softcapping")
    try:
        check_keys(whole, GEMMA3_TEXT)
        config = GEMMA3_TEXT.config_from_hf(whole)
    except ConfigError as error:
        raise ConfigError(
            error.message.replace("json:", "json: text_config:", 1), param=error.param
        ) from None
    return replace(config, family="gemma3")


def gemma3_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. An untied head may be inside or outside the model of texts."""
    others = ("language_model.lm_head.weight",)
    return with_change(llama.weights(config), "head.table", others=others)


def _both_norms(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """The fields of Gemma 2 and 3 without those of windows and caps."""
    return {
        **llama.attention_biases(hf),
        "residual": "both_norms",
        "attention_scale": get_float(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_scale": config.embed_dim**0.5,
        "norm_offset": 1.0,
    }


def _cap(hf: HfConfig, key: str, default: float | None) -> float | None:
    """A soft cap; null is none."""
    cap = get_optional_float(hf, key)
    return default if cap is None and key not in hf else cap


_SHAPE = LlamaShape(activation="gelu_pytorch_tanh", is_tied=True)
_SHAPE_2 = _SHAPE._replace(activation_key="hidden_activation")
GEMMA = near_llama(
    "gemma",
    "Gemma 1, CodeGemma",
    "Gemma",
    _SHAPE,
    _gemma,
    frozenset({"attention_bias"}),
    fixed=_CAUSAL,
    harmless=frozenset({"hidden_activation"}),  # not read by transformers either
)
_KEYS_2 = _KEYS | {"attn_logit_softcapping"}
GEMMA2 = near_llama(
    "gemma2", "Gemma 2", "Gemma2", _SHAPE_2, _gemma2, _KEYS_2, fixed=_CAUSAL, harmless=_HARMLESS
)
VAULTGEMMA = near_llama(
    "vaultgemma",
    "VaultGemma",
    "VaultGemma",
    _SHAPE_2,
    lambda hf, config: {**_gemma2(hf, config), "residual": "pre_norm"},
    _KEYS_2,
    vaultgemma_weights,
    fixed=_CAUSAL,
    harmless=_HARMLESS,
)
GEMMA3_TEXT = near_llama(
    "gemma3_text",
    "Gemma 3 270M and 1B",
    "Gemma3",
    _SHAPE_2._replace(rules=_GLOBAL),
    _gemma3,
    _KEYS | {"rope_local_base_freq", "sliding_window_pattern"},
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    fixed={**_CAUSAL, "attn_logit_softcapping": (None,)},
    harmless=_HARMLESS,
)
GEMMA3 = Family(
    name="gemma3",
    models="Gemma 3 4B, 12B and 27B, for texts alone: the weights for images are not loaded",
    config_from_hf=gemma3_from_hf,
    keys=frozenset({"text_config"}),
    architectures=("Gemma3ForConditionalGeneration", "Gemma3Model"),
    weights=gemma3_weights,
    prefixes=("language_model.model.", "model.language_model.", "language_model."),
    ignored=re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    harmless=words(
        "boi_token_index eoi_token_index image_token_index mm_tokens_per_image vision_config"
    ),
)
