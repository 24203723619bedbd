"""Llama: rotary positions, RMSNorm, gated SiLU MLP, grouped key/value heads."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from orca_jax.config import ModelConfig, RopeConfig
from orca_jax.errors import ConfigError
from orca_jax.model.families.base import (
    Family,
    HfConfig,
    Weight,
    first_token_id,
    get_activation,
    get_float,
    get_int,
    reject,
    token_ids,
)


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a Llama config.json; missing keys get the defaults of transformers.

    Raises:
        ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
    """
    embed, heads = get_int(hf, "hidden_size", 4096), get_int(hf, "num_attention_heads", 32)
    kv_heads = get_int(hf, "num_key_value_heads", heads)
    if hf.get("head_dim") is None and embed % heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} does not divide hidden_size {embed}; set head_dim",
            param="num_attention_heads",
        )
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}",
            param="num_key_value_heads",
        )
    head_dim = get_int(hf, "head_dim", embed // heads)
    rope, max_positions = _read_rope(hf, head_dim)
    return ModelConfig(
        family="llama",
        vocab_size=get_int(hf, "vocab_size", 32000),
        num_layers=get_int(hf, "num_hidden_layers", 32),
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=get_int(hf, "intermediate_size", 11008),
        max_positions=max_positions,
        norm="rmsnorm",
        norm_eps=get_float(hf, "rms_norm_eps", 1e-6),
        activation=get_activation(hf, "hidden_act", "silu"),
        gated_mlp=True,
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        rope=rope,
        eos_token_ids=token_ids(hf.get("eos_token_id", 2)),
        bos_token_id=first_token_id(hf, "bos_token_id"),
    )


def _read_rope(hf: HfConfig, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotary positions, and their number.

    `rope_parameters` is the key of transformers 5. In the older `rope_scaling`, `type` once named the kind.
    """
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    scaling = hf.get(key) or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"config.json: {key} must be an object, got {scaling!r}", param=key)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in _KINDS:
        raise ConfigError(
            f"config.json: rope_type {kind!r} is not supported, only {', '.join(sorted(_KINDS))}",
            param="rope_type",
        )
    reject(hf, {"partial_rotary_factor": 1.0})
    reject(scaling, {"partial_rotary_factor": 1.0})
    if head_dim % 2:
        raise ConfigError(f"config.json: rotary positions need an even head_dim, got {head_dim}", param="head_dim")
    limit = get_int(hf, "max_position_embeddings", 2048)
    original = get_int(scaling, "original_max_position_embeddings", hf.get("original_max_position_embeddings") or limit)
    theta = get_float(scaling, "rope_theta", hf.get("rope_theta") or 10000.0)
    rope = _KINDS[kind](scaling, theta, original, limit)
    if kind == "longrope":
        if len(rope.short_factor) != head_dim // 2:
            raise ConfigError(
                f"config.json: rope_type longrope needs {head_dim // 2} values in short_factor, "
                f"got {len(rope.short_factor)}",
                param="short_factor",
            )
        # Beyond `original` all frequencies would change, and with them all cached keys.
        limit = min(limit, original)
    return rope, limit


def _default(scaling: Mapping[str, Any], theta: float, original: int, limit: int) -> RopeConfig:
    return RopeConfig(theta=theta)


def _linear_scaling(scaling: Mapping[str, Any], theta: float, original: int, limit: int) -> RopeConfig:
    return RopeConfig(theta=theta, kind="linear", factor=get_float(scaling, "factor"))


def _dynamic(scaling: Mapping[str, Any], theta: float, original: int, limit: int) -> RopeConfig:
    """Dynamic scaling: frequencies change only beyond `max_position_embeddings`, and no text is longer here."""
    return RopeConfig(theta=theta, kind="dynamic", factor=get_float(scaling, "factor"))


def _llama3(scaling: Mapping[str, Any], theta: float, original: int, limit: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=get_float(scaling, "factor"),
        original_max_position=original,
        low_freq_factor=get_float(scaling, "low_freq_factor"),
        high_freq_factor=get_float(scaling, "high_freq_factor"),
    )


def _yarn(scaling: Mapping[str, Any], theta: float, original: int, limit: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=get_float(scaling, "factor", limit / original),
        original_max_position=original,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )


def _longrope(scaling: Mapping[str, Any], theta: float, original: int, limit: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="longrope",
        factor=get_float(scaling, "factor", limit / original),
        original_max_position=original,
        attention_factor=scaling.get("attention_factor"),
        short_factor=tuple(scaling.get("short_factor") or ()),
    )


_KINDS: Mapping[str, Callable[[Mapping[str, Any], float, int, int], RopeConfig]] = {
    "default": _default,
    "linear": _linear_scaling,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _linear(key: str, path: str, bias: bool) -> tuple[Weight, ...]:
    """Rows for a linear layer. Llama stores its matrices as [out, in]."""
    kernel = Weight(f"{key}.weight", f"{path}.kernel", transpose=True)
    return (kernel, Weight(f"{key}.bias", f"{path}.bias")) if bias else (kernel,)


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    layer, attention, mlp = "layers.{layer}", config.attention_bias, config.mlp_bias
    head = () if config.tied_embeddings else (Weight("lm_head.weight", "head.table", prefixed=False),)
    return (
        Weight("embed_tokens.weight", "embedding.table"),
        Weight(f"{layer}.input_layernorm.weight", "blocks.attention_norm.scale"),
        *_linear(f"{layer}.self_attn.q_proj", "blocks.attention.query", attention),
        *_linear(f"{layer}.self_attn.k_proj", "blocks.attention.key", attention),
        *_linear(f"{layer}.self_attn.v_proj", "blocks.attention.value", attention),
        *_linear(f"{layer}.self_attn.o_proj", "blocks.attention.out", attention),
        Weight(f"{layer}.post_attention_layernorm.weight", "blocks.mlp_norm.scale"),
        *_linear(f"{layer}.mlp.gate_proj", "blocks.mlp.gate", mlp),
        *_linear(f"{layer}.mlp.up_proj", "blocks.mlp.up", mlp),
        *_linear(f"{layer}.mlp.down_proj", "blocks.mlp.down", mlp),
        Weight("norm.weight", "final_norm.scale"),
        *head,
    )


LLAMA = Family(
    name="llama",
    config_from_hf=config_from_hf,
    weights=weights,
    prefixes=("model.", ""),
    ignored=re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # constants of old checkpoints
)
