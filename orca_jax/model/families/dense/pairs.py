"""Families that rotate pairs of neighbours in each head, or have attention and MLP side by side.

Columns of queries and keys are put into another order while loading.
"""

import re

from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import (
    ATTENTION_BIASES,
    BIASES,
    Fields,
    attention_biases,
    flag,
    number,
    off,
)
from orca_jax.model.families.names import JOINED_GATE, NEIGHBOURS
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_int, refusal
from orca_jax.model.families.windows import all_but_each, rotated_windows, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RopeConfig

_GLM_SHAPE = LlamaShape(rules=RopeRules(share=0.5))
_GLM = NEIGHBOURS + JOINED_GATE
GLM4_NAMES = (
    _GLM
    + """
    post_self_attn_layernorm    attention_out_norm
    post_attention_layernorm    mlp_norm
    post_mlp_layernorm          mlp_out_norm
"""
)
_ONE_NORM = "input_layernorm {attention,mlp}_norm"  # for both parts of a layer
_COHERE_NAMES = NEIGHBOURS + _ONE_NORM
_COHERE: tuple[Fields, ...] = (
    ATTENTION_BIASES,
    {
        "norm": "layernorm",
        "norm_bias": False,
        "residual": "parallel",
        "logit_scale": number("logit_scale", 0.0625),
    },
)
_PHI: Fields = {
    "norm": "layernorm",
    "gated_mlp": False,
    "mlp_bias": True,
    "residual": "parallel",
    "head_bias": True,
}


def _gptj(hf: HfConfig, config: ModelConfig) -> Fields:
    """The rotated dimensions are the first ones of each head."""
    equal = config.embed_dim // config.num_heads
    has_equal = (config.head_dim, config.num_kv_heads) == (equal, config.num_heads)
    if not has_equal or config.embed_dim % config.num_heads:
        key = "num_key_value_heads" if config.head_dim == equal else "head_dim"
        raise refusal(key, "has no effect in transformers: remove it", hf.get(key))
    if config.rope != RopeConfig():
        key = "rope_theta" if "rope_theta" in hf else "rope_parameters"
        raise refusal(key, "has no effect in transformers: remove it", hf.get(key))
    rotated = get_int(hf, "rotary_dim", 64)
    is_null = "rotary_dim" in hf and hf["rotary_dim"] is None
    if rotated > config.head_dim or rotated % 2 or is_null:
        problem = f"must be an even number of the {config.head_dim} dimensions of a head"
        raise refusal("rotary_dim", problem, hf.get("rotary_dim", rotated))
    positions = RopeConfig()
    if rotated < config.head_dim:
        positions = RopeConfig(rotated_dim=rotated)
    width = get_int(hf, "intermediate_size", 4 * config.embed_dim)
    return {"rope": positions, "mlp_dim": width}


PAIRS = (
    Family("glm", ({"attention_bias": flag("attention_bias", True)},), _GLM, shape=_GLM_SHAPE),
    Family(
        "glm4",
        ({"attention_bias": flag("attention_bias", True), "residual": "both_norms"},),
        GLM4_NAMES,
        shape=_GLM_SHAPE,
    ),
    Family("ernie4_5", (attention_biases("use_bias"), {"mlp_bias": flag("use_bias")}), NEIGHBOURS),
    Family("helium", (BIASES, {"attention_out_bias": False}), NEIGHBOURS),
    Family(
        "cohere",
        _COHERE,
        _COHERE_NAMES,
        shape=LlamaShape("layer_norm_eps"),
        fixed=off("use_qk_norm"),
    ),
    Family(
        "cohere2",
        (*_COHERE, windows(all_but_each(4, "sliding_window_pattern")), rotated_windows),
        _COHERE_NAMES,
        shape=LlamaShape("layer_norm_eps"),
        fixed=off("use_qk_norm"),
        unread="cache_implementation",
    ),
    Family(
        "phi",
        (_PHI, {"attention_bias": True, "attention_out_bias": True}),
        f"""
        {_ONE_NORM}
        final_layernorm     final_norm
        self_attn.dense     attention.out
        mlp.fc{{1,2}}       mlp.{{up,down}}
        """,
        shape=LlamaShape("layer_norm_eps", "gelu_new", RopeRules(share=0.5)),
        fixed=off("qk_layernorm tie_word_embeddings"),
    ),
    Family(
        "gptj",
        (_PHI, _gptj),
        """
        wte                     embedding
        ln_f                    final_norm
        h.{layer}               blocks
        ln_1                    {attention,mlp}_norm
        attn.{q,k}_proj         attention.{query,key}   pairs
        attn.{v,out}_proj       attention.{value,out}
        mlp.fc_{in,out}         mlp.{up,down}
        """,
        shape=LlamaShape("layer_norm_eps", "gelu_new"),
        prefixes=("transformer.", ""),
        # causal masks of old files
        ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
        fixed=off("tie_word_embeddings"),
        aliases={
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "layer_norm_eps",
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
        },
        unread="rotary scale_attn_weights tokenizer_class",
    ),
)
