"""GPT-NeoX and Pythia: LayerNorm, partial rotary positions, attention and MLP in parallel, heads side by side."""

import re

from orca_jax.config import ModelConfig
from orca_jax.model.families import rope
from orca_jax.model.families.base import Family, JoinedPart, Weight, head, linear, norm
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

_ROPE = rope.RopeRules(theta_key="rotary_emb_base", share_key="rotary_pct", share=0.25)


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of GPT-NeoX; missing keys get the defaults of transformers, and without a key there are no
    end tokens.

    Raises:
        ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
    """
    heads, embed = get_equal_heads(hf, "num_attention_heads", 64, "hidden_size", 6144)
    limit = get_int(hf, "max_position_embeddings", 2048)
    rotary, max_positions = rope.read_rope(hf, embed // heads, limit, _ROPE)
    bias = get_bool(hf, "attention_bias", True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=get_int(hf, "vocab_size", 50432),
        num_layers=get_layers(hf, "num_hidden_layers", 44),
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        mlp_dim=get_int(hf, "intermediate_size", 24576),
        max_positions=max_positions,
        norm="layernorm",
        norm_eps=get_float(hf, "layer_norm_eps", 1e-5),
        activation=get_activation(hf, "hidden_act", "gelu"),
        gated_mlp=False,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        tied_embeddings=get_bool(hf, "tie_word_embeddings", False),
        residual="parallel" if get_bool(hf, "use_parallel_residual", True) else "pre_norm",
        rope=rotary,
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=first_token_id(hf, "bos_token_id"),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. One tensor has the query, key and value of the first head, then of the next."""
    layer, key = "layers.{layer}", "layers.{layer}.attention.query_key_value"
    joined: list[Weight] = []
    for index, name in enumerate(("query", "key", "value")):
        path, part = f"blocks.attention.{name}", JoinedPart(index, (config.head_dim,) * 3, config.num_heads)
        joined.append(Weight(f"{key}.weight", f"{path}.kernel", transpose=True, part=part))
        if config.attention_bias:
            joined.append(Weight(f"{key}.bias", f"{path}.bias", part=part))
    return (
        Weight("embed_in.weight", "embedding.table"),
        *norm(f"{layer}.input_layernorm", "blocks.attention_norm"),
        *joined,
        *linear(f"{layer}.attention.dense", "blocks.attention.out", bias=config.attention_out_bias),
        *norm(f"{layer}.post_attention_layernorm", "blocks.mlp_norm"),
        *linear(f"{layer}.mlp.dense_h_to_4h", "blocks.mlp.up", bias=True),
        *linear(f"{layer}.mlp.dense_4h_to_h", "blocks.mlp.down", bias=True),
        *norm("final_layer_norm", "final_norm"),
        *head(config, "embed_out.weight", ("lm_head.weight",)),
    )


GPT_NEOX = Family(
    name="gpt_neox",
    models="GPT-NeoX-20B, Pythia, Dolly",
    config_from_hf=config_from_hf,
    keys=frozenset(
        {
            "attention_bias",
            "hidden_act",
            "hidden_size",
            "intermediate_size",
            "layer_norm_eps",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "rotary_emb_base",
            "rotary_pct",
            "use_parallel_residual",
            "vocab_size",
            *(rope.KEYS - {"rope_theta"}),
        }
    ),
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    weights=weights,
    prefixes=("gpt_neox.", ""),
    # Causal masks and constants of old checkpoints.
    ignored=re.compile(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
