"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied embeddings. GPT-3 is a larger GPT-2."""

import re

from orca_jax.config import ModelConfig
from orca_jax.model.families.base import Family, JoinedPart, Weight, head, norm
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_equal_heads,
    get_float,
    get_int,
    get_layers,
    token_ids,
)


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a GPT-2 config.json; missing keys get the defaults of transformers, and without a key there are no
    end tokens.

    Raises:
        ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
    """
    heads, embed = get_equal_heads(hf, "n_head", 12, "n_embd", 768)
    return ModelConfig(
        family="gpt2",
        vocab_size=get_int(hf, "vocab_size", 50257),
        num_layers=get_layers(hf, "n_layer", 12),
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        mlp_dim=get_int(hf, "n_inner", 4 * embed),
        max_positions=get_int(hf, "n_positions", 1024),
        norm="layernorm",
        norm_eps=get_float(hf, "layer_norm_epsilon", 1e-5),
        activation=get_activation(hf, "activation_function", "gelu_new"),
        gated_mlp=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=get_bool(hf, "tie_word_embeddings", True),
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=first_token_id(hf, "bos_token_id"),
    )


def _linear(key: str, path: str, part: JoinedPart | None = None) -> tuple[Weight, Weight]:
    """Rows for a linear layer. GPT-2 stores its matrices as [in, out], so nothing is transposed."""
    return Weight(f"{key}.weight", f"{path}.kernel", part=part), Weight(f"{key}.bias", f"{path}.bias", part=part)


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. Queries, keys and values are thirds of one tensor."""
    thirds = (config.embed_dim,) * 3
    return (
        Weight("wte.weight", "embedding.table"),
        Weight("wpe.weight", "positions.table"),
        *norm("h.{layer}.ln_1", "blocks.attention_norm"),
        *_linear("h.{layer}.attn.c_attn", "blocks.attention.query", JoinedPart(0, thirds)),
        *_linear("h.{layer}.attn.c_attn", "blocks.attention.key", JoinedPart(1, thirds)),
        *_linear("h.{layer}.attn.c_attn", "blocks.attention.value", JoinedPart(2, thirds)),
        *_linear("h.{layer}.attn.c_proj", "blocks.attention.out"),
        *norm("h.{layer}.ln_2", "blocks.mlp_norm"),
        *_linear("h.{layer}.mlp.c_fc", "blocks.mlp.up"),
        *_linear("h.{layer}.mlp.c_proj", "blocks.mlp.down"),
        *norm("ln_f", "final_norm"),
        *head(config),
    )


GPT2 = Family(
    name="gpt2",
    models="GPT-2, DistilGPT2, DialoGPT, Cerebras-GPT",
    config_from_hf=config_from_hf,
    keys=frozenset(
        {
            "activation_function",
            "layer_norm_epsilon",
            "n_embd",
            "n_head",
            "n_inner",
            "n_layer",
            "n_positions",
            "vocab_size",
        }
    ),
    architectures=("GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel"),
    weights=weights,
    prefixes=("transformer.", ""),
    ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),  # causal masks of old checkpoints
    fixed={"scale_attn_weights": (True, None), "scale_attn_by_inverse_layer_idx": (False, None)},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
