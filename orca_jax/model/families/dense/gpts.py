"""Families near GPT-2 and OPT, with learned positions and LayerNorm; and GPT-NeoX and StarCoder 2 with a rope."""

import re
from typing import Any

from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import Fields, attention_biases, either, flag, root_of_width
from orca_jax.model.families.rope import RopeRules, read_rope
from orca_jax.model.families.shape import GPTShape, LlamaShape
from orca_jax.model.families.values import HfConfig, get_activation, get_bool, get_int, refusal
from orca_jax.model.families.windows import window
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

_LOCAL, _GLOBAL = "local", "global"
_GPT2_SHAPE = GPTShape(
    "n_head n_embd n_layer n_inner n_positions activation_function",
    "gelu_new",
    "layer_norm_epsilon",
)
_NEO_SHAPE = GPTShape(
    "num_heads hidden_size num_layers intermediate_size max_position_embeddings activation_function",
    "gelu_new",
    "layer_norm_epsilon",
)
_USUAL = (
    "num_attention_heads hidden_size num_hidden_layers intermediate_size max_position_embeddings"
)
_OPT_SHAPE = GPTShape(
    "num_attention_heads hidden_size num_hidden_layers ffn_dim max_position_embeddings activation_function",
    "relu",
)
_NEOX_ROPE = RopeRules(theta_key="rotary_emb_base", share_key="rotary_pct", share=0.25)
_OF_GPT2 = """
    wte                     embedding
    wpe                     positions
    ln_f                    final_norm
    lm_head                 head
    h.{layer}               blocks
    ln_{1,2}                {attention,mlp}_norm
    attn.c_attn             attention.{query,key,value}
    attn.c_proj             attention.out
    mlp.c_{fc,proj}         mlp.{up,down}
"""
_OF_OPT = """
    embed_tokens                        embedding
    embed_positions                     positions    skips=2
    final_layer_norm                    final_norm
    lm_head                             head
    layers.{layer}                      blocks
    self_attn_layer_norm                attention_norm
    final_layer_norm                    mlp_norm
    self_attn.{q,k,v,out}_proj          attention.{query,key,value,out}
    fc{1,2}                             mlp.{up,down}
"""
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_IN_TRANSFORMER = ("transformer.", "")
# causal masks of old checkpoints
_MASKS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")


def _bigcode(hf: HfConfig, config: ModelConfig) -> Fields:
    fields: dict[str, Any] = {}
    if get_bool(hf, "multi_query", True):
        fields["num_kv_heads"] = 1
    if not get_bool(hf, "scale_attn_weights", True):
        fields["attention_scale"] = 1.0
    return {**fields, "activation": get_activation(hf, "activation_function", "gelu_pytorch_tanh")}


def _neo(hf: HfConfig, config: ModelConfig) -> Fields:
    window = get_int(hf, "window_size", 256)
    kinds = _kinds(hf, config.num_layers)
    return {
        "attention_bias": False,
        "attention_scale": 1.0,
        "window": tuple(window if kind == _LOCAL else None for kind in kinds),
    }


def _kinds(hf: HfConfig, num_layers: int) -> list[str]:
    """The kind of each layer. `attention_types` has pairs of some kinds and the number of their repetitions."""
    types: Any = hf.get("attention_types")
    if types is None and num_layers == 24:
        types = [[[_GLOBAL, _LOCAL], num_layers // 2]]
    try:
        kinds: list[str] = []
        for names, times in types:
            kinds += min(times, num_layers + 1) * [*names]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or not {*map(str, kinds)} <= {_LOCAL, _GLOBAL}:
        raise refusal(
            "attention_types",
            f"must give {_LOCAL} or {_GLOBAL} to each of {num_layers} layers",
            types,
        )
    listed = hf.get("attention_layers")
    if listed is not None and listed != kinds:
        raise refusal("attention_layers", "must be the layers of attention_types", listed)
    return kinds


def _opt(hf: HfConfig, config: ModelConfig) -> Fields:
    width = get_int(hf, "word_embed_proj_dim", config.embed_dim)
    if width != config.embed_dim:
        message = (
            f"config.json: word_embed_proj_dim {width} is not supported; it must be hidden_size "
            f"{config.embed_dim}"
        )
        raise ConfigError(message, param="word_embed_proj_dim")
    return {}


def _neox_rope(hf: HfConfig, config: ModelConfig) -> Fields:
    rope, longest = read_rope(hf, config.head_dim, config.max_positions, _NEOX_ROPE)
    return {"rope": rope, "learned_positions": False, "max_positions": longest}


GPTS = (
    Family(
        "gpt2",
        # matrices are [in, out]
        names=_OF_GPT2
        + """
        attn.c_attn             attention.{query,key,value}     in_out
        attn.c_proj             attention.out                   in_out
        mlp.c_{fc,proj}         mlp.{up,down}                   in_out
        """,
        shape=_GPT2_SHAPE,
        prefixes=_IN_TRANSFORMER,
        ignored=_MASKS,
        fixed={
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
        },
        aliases=_GPT2_ALIASES,
    ),
    Family(
        "gpt_bigcode",
        (_bigcode,),
        _OF_GPT2 + "attn.c_attn attention.{query,key,value} by=kv_heads",
        shape=_GPT2_SHAPE,
        prefixes=_IN_TRANSFORMER,
        ignored=_MASKS,
        aliases=_GPT2_ALIASES,
        unread="attention_softmax_in_fp32 scale_attention_softmax_in_fp32 num_key_value_heads",
    ),
    Family(
        "gpt_neo",
        (_neo,),
        _OF_GPT2 + "attn.attention.{q,k,v,out}_proj attention.{query,key,value,out}",
        shape=_NEO_SHAPE,
        prefixes=_IN_TRANSFORMER,
        # causal masks
        ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)"),
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        unread="embed_dropout resid_dropout",
    ),
    Family(
        "gpt_neox",
        (
            attention_biases(default=True),
            _neox_rope,
            {"residual": either("use_parallel_residual", True, "parallel", "pre_norm")},
        ),
        """
        embed_in                                embedding
        final_layer_norm                        final_norm
        embed_out                               head
        lm_head                                 head                            or
        layers.{layer}                          blocks
        {input,post_attention}_layernorm        {attention,mlp}_norm
        attention.query_key_value               attention.{query,key,value}     by=heads
        attention.dense                         attention.out
        mlp.dense_{h_to_4h,4h_to_h}             mlp.{up,down}
    """,
        shape=GPTShape(f"{_USUAL} hidden_act", "gelu", "layer_norm_eps"),
        prefixes=("gpt_neox.", ""),
        # Causal masks and constants of old checkpoints.
        ignored=re.compile(
            r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
        ),
    ),
    Family(
        "opt",
        (_opt,),
        _OF_OPT,
        shape=_OPT_SHAPE,
        prefixes=("model.decoder.", "decoder.", ""),
        ignored=re.compile(r"(model\.)?decoder\.version"),  # a note of old checkpoints
        fixed={
            "_remove_final_layer_norm": (False, None),
            "do_layer_norm_before": (True, None),
            "enable_bias": (True, None),
            "layer_norm_elementwise_affine": (True, None),
        },
        unread="activation_dropout dropout init_std layerdrop",
    ),
    Family(
        "biogpt",
        (root_of_width("scale_embedding"),),
        _OF_OPT + "layer_norm final_norm \n output_projection head",
        shape=GPTShape(f"{_USUAL} hidden_act", "gelu"),
        prefixes=("biogpt.", ""),
        ignored=re.compile(r"(model\.)?decoder\.version"),
        # eps is not read by transformers
        unread="activation_dropout layer_norm_eps layerdrop",
    ),
    Family(
        "starcoder2",
        (
            {"norm": "layernorm", "gated_mlp": False, "mlp_bias": flag("use_bias", True)},
            attention_biases("use_bias", True),
            window(None),
        ),
        "mlp.c_{fc,proj} mlp.{up,down}",
        shape=LlamaShape("norm_epsilon", "gelu_pytorch_tanh"),
        unread="embedding_dropout residual_dropout",
    ),
)
