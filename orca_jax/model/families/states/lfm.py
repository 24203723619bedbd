"""LFM2: layers with attention over all tokens, and with short convolutions; also with experts. LFM3: also windows.

Layers of LFM3 without a window have rotary positions whose lower frequencies are zero. A gate weights each head's
output.
"""

from collections.abc import Sequence

from orca_jax.model.families.experts import OF_ROUTERS, Mixture, first_layers
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, Fields, either, flag, only_silu
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_conv_width,
    get_float,
    get_int,
    layer_list,
    refusal,
)
from orca_jax.model.families.windows import read_layer_types, read_window, windowed_rope
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MixerName, RouterConfig, ShortConvConfig

_FULL, _SLIDING, _CONV = _TYPES = "full_attention", "sliding_attention", "conv"
_MIXERS: dict[str, MixerName] = {_FULL: "attention", _SLIDING: "attention", _CONV: "short_conv"}
_ELSEWHERE = (
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
_DEFAULT_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
_ROPES = {
    kind: RopeRules(theta=1e6, part=kind, kinds=("default", "proportional"), default=default)
    for kind, default in _DEFAULT_ROPES.items()
}


def _lfm2(hf: HfConfig, config: ModelConfig) -> Fields:
    kinds = read_layer_types(hf, config.num_layers, (_FULL, _CONV))
    if kinds is None:
        layers = range(config.num_layers)
        full = hf.get("full_attn_idxs")
        if full is None:
            full = [*layers]
        full = layer_list("full_attn_idxs", full, config.num_layers)
        kinds = [_FULL if layer in full else _CONV for layer in layers]
    return {**_mixers(hf, kinds, width=3), "mlp_dim": _width_of_mlp(hf, config.mlp_dim)}


def _width_of_mlp(hf: HfConfig, width: int) -> int:
    """The width of an MLP, which follows from `intermediate_size`."""
    if not get_bool(hf, "block_auto_adjust_ff_dim", True):
        return width
    width = int(get_float(hf, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = get_int(hf, "block_multiple_of", 256)
    return multiple * ceil_div(width, multiple)


def _mixers(hf: HfConfig, kinds: Sequence[str], *, width: int) -> Fields:
    """The fields for the mixers of `kinds`; `width` is the default of the convolutions."""
    conv = ShortConvConfig(
        get_conv_width(hf, "conv_L_cache", width), get_bool(hf, "conv_bias", False)
    )
    mixers = tuple(_MIXERS[kind] for kind in kinds)
    if _CONV not in kinds:
        return {"mixer": mixers}
    return {"mixer": mixers, "short_conv": conv}


def _lfm2_moe(hf: HfConfig, config: ModelConfig) -> Fields:
    kinds = read_layer_types(hf, config.num_layers, (_FULL, _CONV))
    if kinds is None:
        raise refusal("layer_types", f"must have {config.num_layers} of {_FULL} and {_CONV}", None)
    return _mixers(hf, kinds, width=3)


def _router(hf: HfConfig) -> RouterConfig:
    return RouterConfig(
        "sigmoid",
        has_bias=get_bool(hf, "use_expert_bias", True),
        eps=1e-6,
        scale=get_float(hf, "routed_scaling_factor", 1.0),
    )


class _Lfm3Shape(LlamaShape):
    """The shape of LFM3, whose rotary positions are in objects alone."""

    def read(self, hf: HfConfig, family: str, **sizes: int) -> ModelConfig:
        """Read the shape; raises as `FamilyShape.read`."""
        for key in _ELSEWHERE:
            if hf.get(key) is not None:
                raise refusal(
                    key,
                    "is not supported for lfm3: rope_parameters has an object for each kind of layer",
                    hf[key],
                )
        return super().read(hf, family, **sizes)


def _lfm3(hf: HfConfig, config: ModelConfig) -> Fields:
    kinds = read_layer_types(hf, config.num_layers, _TYPES) or [
        _default_kind(i) for i in range(config.num_layers)
    ]
    parts = hf.get("rope_parameters")
    if parts and (missing := sorted({*kinds} - {_CONV} - parts.keys())):
        raise refusal(
            "rope_parameters", f"must have {missing[0]}, the kind of some layers", sorted(parts)
        )
    window = read_window(hf, 256)
    if _SLIDING in kinds and window is None:
        raise refusal(
            "sliding_window", f"must be a positive integer for layers with {_SLIDING}", None
        )
    windows = tuple(window if kind == _SLIDING else None for kind in kinds)
    return {**_mixers(hf, kinds, width=7), "window": windows}


def _default_kind(layer: int) -> str:
    """The kind of a layer without `layer_types`."""
    if layer % 4 == 2:
        return _FULL
    if layer % 4 == 0 and layer > 0:
        return _SLIDING
    return _CONV


_LFM3_NAMES = """
    embedding_norm                              final_norm
    {operator,ffn}_norm                         {attention,mlp}_norm
    post_{operator,ffn}_norm                    {attention,mlp}_out_norm
    self_attn.gate_proj                         attention.gate
    conv.conv                                   short_conv.kernel
    conv.conv.bias                              short_conv.bias
    conv.in_proj                                short_conv.{before,after,value}
    conv.out_proj                               short_conv.out
    feed_forward.{w1,w3,w2}                     mlp.{gate,up,down}
    feed_forward.gate                           experts.router
    feed_forward.expert_bias                    experts.choice_bias
    feed_forward.experts.{expert}.{w1,w3,w2}    experts.{gate,up,down}
"""
_LFM2_NAMES = (
    _LFM3_NAMES
    + """
    self_attn.{q,k}_layernorm   attention.{query,key}_norm
    self_attn.out_proj          attention.out
"""
)
_SHAPE = LlamaShape()
_OF_LFM2 = {
    "norm_eps": "rms_norm_eps",
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
}
LFM2 = Family(
    "lfm2",
    (only_silu, _lfm2, {"qk_norm": "head"}),
    _LFM2_NAMES,
    shape=_SHAPE,
    aliases=_OF_LFM2,
    unread=(
        "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
        "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc"
    ),  # in published files; transformers reads none of them
)
LFMS = (
    LFM2,
    Family(
        "lfm2_moe",
        (
            only_silu,
            _lfm2_moe,
            {"qk_norm": "head"},
            Mixture(
                "num_experts",
                (32, 4),
                1792,
                is_normalised=flag("norm_topk_prob", True),
                router=_router,
                dense=first_layers(2, "num_dense_layers"),
            ),
        ),
        _LFM2_NAMES,
        shape=_SHAPE,
        aliases=_OF_LFM2,
        unread=OF_ROUTERS,
        needed={"layer_types": 32 * ["conv"]},
    ),
    Family(
        "lfm3",
        (
            only_silu,
            _lfm3,
            windowed_rope(_ROPES[_SLIDING]),
            ATTENTION_BIASES,
            {
                "qk_norm": "head",
                "attention_gate": either("use_attention_gate", True, "head", None),
                "residual": either("use_sandwich_norm", True, "both_norms", "pre_norm"),
            },
        ),
        _LFM3_NAMES,
        shape=_Lfm3Shape(rules=_ROPES[_FULL]),
        aliases={"norm_eps": "rms_norm_eps"},
    ),
)
