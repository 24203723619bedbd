"""OPT: learned positions from the third row of their table on, LayerNorm, ReLU, biases everywhere."""

import re

from orca_jax.model.families import gpt2
from orca_jax.model.families.base import Family, Weight, head, linear, norm
from orca_jax.model.families.values import HfConfig, get_int
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

_UNUSED_POSITIONS = 2  # first rows of the table
_KEYS = gpt2.GPTKeys(
    ("num_attention_heads", 12),
    ("hidden_size", 768),
    ("num_hidden_layers", 12),
    ("ffn_dim", 3072),
    ("max_position_embeddings", 2048),
    ("activation_function", "relu"),
    50272,
)


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OPT; raises `ConfigError` as `gpt2.read_shape` does."""
    config = gpt2.read_shape(hf, "opt", _KEYS)
    width = get_int(hf, "word_embed_proj_dim", config.embed_dim)
    if width != config.embed_dim:
        message = (
            f"config.json: word_embed_proj_dim {width} is not supported; it must be hidden_size "
            f"{config.embed_dim}"
        )
        raise ConfigError(message, param="word_embed_proj_dim")
    return config


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
    keys=_KEYS.names | {"word_embed_proj_dim"},
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
