"""GPT-NeoX and Pythia: LayerNorm, partial rotary positions, attention and MLP in parallel, heads side by side."""

import re
from dataclasses import replace

from orca_jax.model.families import gpt2, rope
from orca_jax.model.families.base import Family, JoinedPart, Weight, head, linear, norm
from orca_jax.model.families.values import HfConfig, get_bool
from orca_jax.values.config import ModelConfig

_ROPE = rope.RopeRules(theta_key="rotary_emb_base", share_key="rotary_pct", share=0.25)
_OWN_KEYS = {"attention_bias", "rotary_emb_base", "rotary_pct", "use_parallel_residual"}
_KEYS = gpt2.GPTKeys(
    ("num_attention_heads", 64),
    ("hidden_size", 6144),
    ("num_hidden_layers", 44),
    ("intermediate_size", 24576),
    ("max_position_embeddings", 2048),
    ("hidden_act", "gelu"),
    50432,
    "layer_norm_eps",
)


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of GPT-NeoX; raises `ConfigError` as `gpt2.read_shape` does."""
    config = gpt2.read_shape(hf, "gpt_neox", _KEYS)
    bias = get_bool(hf, "attention_bias", True)
    rotary, max_positions = rope.read_rope(hf, config.head_dim, config.max_positions, _ROPE)
    return replace(
        config,
        max_positions=max_positions,
        attention_bias=bias,
        attention_out_bias=bias,
        tied_embeddings=get_bool(hf, "tie_word_embeddings", False),
        residual="parallel" if get_bool(hf, "use_parallel_residual", True) else "pre_norm",
        rope=rotary,
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. One tensor has the query, key and value of the first head, then of the next."""
    layer, key = "layers.{layer}", "layers.{layer}.attention.query_key_value"
    joined: list[Weight] = []
    for index, name in enumerate(("query", "key", "value")):
        path = f"blocks.attention.{name}"
        part = JoinedPart(index, (config.head_dim,) * 3, config.num_heads)
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
    keys=_KEYS.names | (rope.KEYS - {"rope_theta"}) | _OWN_KEYS,
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    weights=weights,
    prefixes=("gpt_neox.", ""),
    # Causal masks and constants of old checkpoints.
    ignored=re.compile(
        r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    ),
)
