"""Families with parallel attention and MLP, one norm for both, and a bias of the head: Phi 1 to 2, GPT-J."""

import re
from collections.abc import Mapping
from typing import Any

from orca_jax.model.families import rope
from orca_jax.model.families.base import Weight, head, linear, norm, paired
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.values import HfConfig, get_int, refusal
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RopeConfig

_FIELDS: Mapping[str, Any] = {
    "norm": "layernorm",
    "gated_mlp": False,
    "mlp_bias": True,
    "residual": "parallel",
    "head_bias": True,
}
_UNTIED: Mapping[str, tuple[object, ...]] = {"tie_word_embeddings": (False, None)}


def _weights(
    config: ModelConfig, layer: str, names: Mapping[str, str], final: str
) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. The norm of both parts is in the norms of each."""
    rows: list[Weight] = []
    for theirs, ours in names.items():
        key = f"{layer}.{theirs}"
        if ours == "norm":
            rows += norm(key, "blocks.attention_norm")
            rows += norm(key, "blocks.mlp_norm")
        else:
            has_bias = config.attention_bias or ours.startswith("mlp")
            rows += linear(key, f"blocks.{ours}", bias=has_bias)
    return (
        *rows,
        *norm(final, "final_norm"),
        *head(config),
        Weight("lm_head.bias", "head.bias", prefixed=False),
    )


def _phi(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**_FIELDS, "attention_bias": True, "attention_out_bias": True}


def _of_phi(config: ModelConfig) -> tuple[Weight, ...]:
    projections = {f"self_attn.{name}_proj": f"attention.{ours}" for name, ours in _QKV.items()}
    names = {
        **projections,
        "self_attn.dense": "attention.out",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    }
    rows = _weights(
        config, "layers.{layer}", {"input_layernorm": "norm", **names}, "final_layernorm"
    )
    return Weight("embed_tokens.weight", "embedding.table"), *rows


def _gptj(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """The rotated dimensions are the first ones of each head, in pairs of neighbours."""
    equal = config.embed_dim // config.num_heads
    if (config.head_dim, config.num_kv_heads) != (
        equal,
        config.num_heads,
    ) or config.embed_dim % config.num_heads:
        key = "num_key_value_heads" if config.head_dim == equal else "head_dim"
        raise refusal(key, "has no effect in transformers: remove it", hf.get(key))
    if config.rope != RopeConfig():
        key = "rope_theta" if "rope_theta" in hf else "rope_parameters"
        raise refusal(key, "has no effect in transformers: remove it", hf.get(key))
    rotated = get_int(hf, "rotary_dim", 64)
    if (
        rotated > config.head_dim
        or rotated % 2
        or ("rotary_dim" in hf and hf["rotary_dim"] is None)
    ):
        problem = f"must be an even number of the {config.head_dim} dimensions of a head"
        raise refusal("rotary_dim", problem, hf.get("rotary_dim", rotated))
    positions = RopeConfig()
    if rotated < config.head_dim:
        positions = RopeConfig(rotated_dim=rotated)
    return {
        **_FIELDS,
        "rope": positions,
        "mlp_dim": get_int(hf, "intermediate_size", 4 * config.embed_dim),
    }


def _of_gptj(config: ModelConfig) -> tuple[Weight, ...]:
    projections = {f"attn.{name}_proj": f"attention.{ours}" for name, ours in _QKV.items()}
    names = {
        **projections,
        "attn.out_proj": "attention.out",
        "mlp.fc_in": "mlp.up",
        "mlp.fc_out": "mlp.down",
    }
    rows = _weights(config, "h.{layer}", {"ln_1": "norm", **names}, "ln_f")
    return Weight("wte.weight", "embedding.table"), *paired(rows, config)


_QKV = {"q": "query", "k": "key", "v": "value"}
PHI = near_llama(
    "phi",
    "Phi 1, 1.5 and 2",
    "Phi",
    LlamaShape(1e-5, "layer_norm_eps", activation="gelu_new", rules=rope.RopeRules(share=0.5)),
    _phi,
    weights=_of_phi,
    fixed={"qk_layernorm": (False, None), **_UNTIED},
)
GPTJ = near_llama(
    "gptj",
    "GPT-J",
    "GPTJ",
    LlamaShape(1e-5, "layer_norm_eps", activation="gelu_new"),
    _gptj,
    frozenset({"rotary_dim"}),
    _of_gptj,
    fixed=_UNTIED,
    aliases={
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    },
    harmless=frozenset({"rotary", "scale_attn_weights", "tokenizer_class"}),
    prefixes=("transformer.", ""),
    # causal masks of old files
    ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
)
BIASED_HEADS = (PHI, GPTJ)
