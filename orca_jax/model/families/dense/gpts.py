"""Families near GPT-2 and OPT, with learned positions and LayerNorm; and GPT-NeoX and StarCoder 2 with a rope."""

import re
from typing import Any

from orca_jax.model.families.base import words
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import (
    Fields,
    attention_biases,
    either,
    flag,
)
from orca_jax.model.families.names import LLAMA, names
from orca_jax.model.families.rope import RopeRules, read_rope
from orca_jax.model.families.shape import GPTShape, LlamaShape
from orca_jax.model.families.values import HfConfig, get_activation, get_bool, get_int, refusal
from orca_jax.model.families.windows import window
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

_LOCAL, _GLOBAL = "local", "global"
_GPT2_SHAPE = GPTShape(
    ("n_head", 12),
    ("n_embd", 768),
    ("n_layer", 12),
    ("n_inner", None),
    ("n_positions", 1024),
    ("activation_function", "gelu_new"),
    50257,
    "layer_norm_epsilon",
)
_OPT_SHAPE = GPTShape(
    ("num_attention_heads", 12),
    ("hidden_size", 768),
    ("num_hidden_layers", 12),
    ("ffn_dim", 3072),
    ("max_position_embeddings", 2048),
    ("activation_function", "relu"),
    50272,
)
_NEO_SHAPE = GPTShape(
    ("num_heads", 16),
    ("hidden_size", 2048),
    ("num_layers", 24),
    ("intermediate_size", None),
    ("max_position_embeddings", 2048),
    ("activation_function", "gelu_new"),
    50257,
    "layer_norm_epsilon",
)
_BIOGPT_SHAPE = GPTShape(
    ("num_attention_heads", 16),
    ("hidden_size", 1024),
    ("num_hidden_layers", 24),
    ("intermediate_size", 4096),
    ("max_position_embeddings", 1024),
    ("hidden_act", "gelu"),
    42384,
)
_NEOX_SHAPE = GPTShape(
    ("num_attention_heads", 64),
    ("hidden_size", 6144),
    ("num_hidden_layers", 44),
    ("intermediate_size", 24576),
    ("max_position_embeddings", 2048),
    ("hidden_act", "gelu"),
    50432,
    "layer_norm_eps",
)
_NEOX_ROPE = RopeRules(theta_key="rotary_emb_base", share_key="rotary_pct", share=0.25)
_OF_GPT2 = names("""
    wte                     embedding
    wpe                     positions
    ln_f                    final_norm
    lm_head                 head
    h.{layer}               blocks
    ln_{1,2}                {attention,mlp}_norm
    attn.c_attn             attention.{query,key,value}
    attn.c_proj             attention.out
    mlp.c_{fc,proj}         mlp.{up,down}
""")
_OF_OPT = names("""
    embed_tokens                        embedding
    embed_positions                     positions    skips=2
    final_layer_norm                    final_norm
    lm_head                             head
    layers.{layer}                      blocks
    self_attn_layer_norm                attention_norm
    final_layer_norm                    mlp_norm
    self_attn.{q,k,v,out}_proj          attention.{query,key,value,out}
    fc{1,2}                             mlp.{up,down}
""")
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
    return {
        **fields,
        "activation": get_activation(hf, "activation_function", "gelu_pytorch_tanh"),
    }


def _neo(hf: HfConfig, config: ModelConfig) -> Fields:
    window = get_int(hf, "window_size", 256)
    kinds = _kinds(hf, config.num_layers)
    return {
        "attention_bias": False,
        "attention_scale": 1.0,
        "sliding_window": window if window < config.max_positions else None,
        "window_pattern": tuple(kind == _LOCAL for kind in kinds),
    }


def _kinds(hf: HfConfig, num_layers: int) -> list[str]:
    """The kind of each layer: those of `attention_types`, pairs of some kinds and the number of their repetitions."""
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


def _biogpt(hf: HfConfig, config: ModelConfig) -> Fields:
    if not get_bool(hf, "scale_embedding", True):
        return {}
    return {"embedding_scale": config.embed_dim**0.5}


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
    return {"rope": rope, "max_positions": longest}


GPTS = (
    Family(
        "gpt2",
        "GPT-2, DistilGPT2, DialoGPT, Cerebras-GPT",
        ("GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel"),
        _GPT2_SHAPE,
        # matrices are [in, out]
        names=names(
            """
            attn.c_attn             attention.{query,key,value}     in_out
            attn.c_proj             attention.out                   in_out
            mlp.c_{fc,proj}         mlp.{up,down}                   in_out
            """,
            _OF_GPT2,
        ),
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
        "StarCoder 1, SantaCoder",
        "GPTBigCode",
        _GPT2_SHAPE,
        (_bigcode,),
        names("attn.c_attn attention.{query,key,value} by=kv_heads", _OF_GPT2),
        prefixes=_IN_TRANSFORMER,
        ignored=_MASKS,
        aliases=_GPT2_ALIASES,
        harmless=words(
            "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 num_key_value_heads"
        ),
    ),
    Family(
        "gpt_neo",
        "GPT-Neo",
        "GPTNeo",
        _NEO_SHAPE,
        (_neo,),
        names("attn.attention.{q,k,v,out}_proj attention.{query,key,value,out}", _OF_GPT2),
        prefixes=_IN_TRANSFORMER,
        # causal masks
        ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)"),
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        harmless=words("embed_dropout resid_dropout"),
    ),
    Family(
        "gpt_neox",
        "GPT-NeoX-20B, Pythia, Dolly",
        "GPTNeoX",
        _NEOX_SHAPE,
        (
            attention_biases(default=True),
            _neox_rope,
            {
                "tied_embeddings": flag("tie_word_embeddings"),
                "residual": either("use_parallel_residual", True, "parallel", "pre_norm"),
            },
        ),
        names("""
            embed_in                                embedding
            final_layer_norm                        final_norm
            embed_out                               head
            lm_head                                 head                            or
            layers.{layer}                          blocks
            {input,post_attention}_layernorm        {attention,mlp}_norm
            attention.query_key_value               attention.{query,key,value}     by=heads
            attention.dense                         attention.out
            mlp.dense_{h_to_4h,4h_to_h}             mlp.{up,down}
        """),
        prefixes=("gpt_neox.", ""),
        # Causal masks and constants of old checkpoints.
        ignored=re.compile(
            r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
        ),
    ),
    Family(
        "opt",
        "OPT, except OPT-350M",
        "OPT",
        _OPT_SHAPE,
        (_opt,),
        _OF_OPT,
        prefixes=("model.decoder.", "decoder.", ""),
        ignored=re.compile(r"(model\.)?decoder\.version"),  # a note of old checkpoints
        fixed={
            "_remove_final_layer_norm": (False, None),
            "do_layer_norm_before": (True, None),
            "enable_bias": (True, None),
            "layer_norm_elementwise_affine": (True, None),
        },
        harmless=words("activation_dropout dropout init_std layerdrop"),
    ),
    Family(
        "biogpt",
        "BioGPT",
        "BioGpt",
        _BIOGPT_SHAPE,
        (_biogpt,),
        names("layer_norm final_norm \n output_projection head", _OF_OPT),
        prefixes=("biogpt.", ""),
        ignored=re.compile(r"(model\.)?decoder\.version"),
        # eps is not read by transformers
        harmless=words("activation_dropout layer_norm_eps layerdrop"),
    ),
    Family(
        "starcoder2",
        "StarCoder 2",
        "Starcoder2",
        LlamaShape(1e-5, "norm_epsilon", "gelu_pytorch_tanh", is_tied=True),
        (
            {"norm": "layernorm", "gated_mlp": False, "mlp_bias": flag("use_bias", True)},
            attention_biases("use_bias", True),
            window(None),
        ),
        names("mlp.c_{fc,proj} mlp.{up,down}", LLAMA),
        harmless=words("embedding_dropout residual_dropout"),
    ),
)
