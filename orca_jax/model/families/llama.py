"""Llama: rotary positions, RMSNorm, gated SiLU MLP, grouped key/value heads."""

import re

from orca_jax.config import ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.model.families import rope
from orca_jax.model.families.base import Family, Weight
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_float,
    get_int,
    token_ids,
)


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a Llama config.json; missing keys get the defaults of transformers, and without a key there are no
    end tokens.

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
    rotary, max_positions = rope.read_rope(hf, head_dim, get_int(hf, "max_position_embeddings", 2048))
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
        attention_bias=get_bool(hf, "attention_bias", False),
        mlp_bias=get_bool(hf, "mlp_bias", False),
        tied_embeddings=get_bool(hf, "tie_word_embeddings", False),
        rope=rotary,
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=first_token_id(hf, "bos_token_id"),
    )


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
    keys=frozenset(
        {
            "attention_bias",
            "head_dim",
            "hidden_act",
            "hidden_size",
            "intermediate_size",
            "max_position_embeddings",
            "mlp_bias",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "partial_rotary_factor",
            "rms_norm_eps",
            "vocab_size",
            *rope.KEYS,
        }
    ),
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),  # the last is the spelling of 2023
    weights=weights,
    prefixes=("model.", ""),
    ignored=re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # constants of old checkpoints
)
