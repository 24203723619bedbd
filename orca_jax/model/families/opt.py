"""OPT: learned positions from the third row of their table on, LayerNorm, ReLU, biases everywhere."""

import re

from orca_jax.config import ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.model.families.base import Family, Weight, head, linear, norm
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_equal_heads,
    get_int,
    get_layers,
    token_ids,
)

_UNUSED_POSITIONS = 2  # first rows of the table


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OPT; missing keys get the defaults of transformers, and without a key there are no
    end tokens.

    Raises:
        ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
    """
    heads, embed = get_equal_heads(hf, "num_attention_heads", 12, "hidden_size", 768)
    width = get_int(hf, "word_embed_proj_dim", embed)
    if width != embed:
        message = f"config.json: word_embed_proj_dim {width} is not supported; it must be hidden_size {embed}"
        raise ConfigError(message, param="word_embed_proj_dim")
    return ModelConfig(
        family="opt",
        vocab_size=get_int(hf, "vocab_size", 50272),
        num_layers=get_layers(hf, "num_hidden_layers", 12),
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        mlp_dim=get_int(hf, "ffn_dim", 3072),
        max_positions=get_int(hf, "max_position_embeddings", 2048),
        norm="layernorm",
        norm_eps=1e-5,
        activation=get_activation(hf, "activation_function", "relu"),
        gated_mlp=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=get_bool(hf, "tie_word_embeddings", True),
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=first_token_id(hf, "bos_token_id"),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    layer, attention = "layers.{layer}", "layers.{layer}.self_attn"
    return (
        Weight("embed_tokens.weight", "embedding.table"),
        Weight("embed_positions.weight", "positions.table", first_row=_UNUSED_POSITIONS),
        *norm(f"{layer}.self_attn_layer_norm", "blocks.attention_norm"),
        *linear(f"{attention}.q_proj", "blocks.attention.query", bias=True),
        *linear(f"{attention}.k_proj", "blocks.attention.key", bias=True),
        *linear(f"{attention}.v_proj", "blocks.attention.value", bias=True),
        *linear(f"{attention}.out_proj", "blocks.attention.out", bias=True),
        *norm(f"{layer}.final_layer_norm", "blocks.mlp_norm"),
        *linear(f"{layer}.fc1", "blocks.mlp.up", bias=True),
        *linear(f"{layer}.fc2", "blocks.mlp.down", bias=True),
        *norm("final_layer_norm", "final_norm"),
        *head(config),
    )


OPT = Family(
    name="opt",
    models="OPT, except OPT-350M",
    config_from_hf=config_from_hf,
    keys=frozenset(
        {
            "activation_function",
            "ffn_dim",
            "hidden_size",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "vocab_size",
            "word_embed_proj_dim",
        }
    ),
    architectures=("OPTForCausalLM", "OPTModel"),
    weights=weights,
    prefixes=("model.decoder.", "decoder.", ""),
    ignored=re.compile(r"(model\.)?decoder\.version"),  # a note of old checkpoints
    fixed={
        "_remove_final_layer_norm": (False, None),
        "do_layer_norm_before": (True, None),
        "enable_bias": (True, None),
        "layer_norm_elementwise_affine": (True, None),
    },
    harmless=frozenset({"activation_dropout", "dropout", "init_std", "layerdrop"}),
)
