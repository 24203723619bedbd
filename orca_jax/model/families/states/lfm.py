"""LFM2: layers with attention over all tokens, and with short convolutions; also with experts. LFM3: also windows.

Layers of LFM3 without a window have rotary positions whose lower frequencies are zero. A gate weights each head's
output.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import (
    Family,
    JoinedPart,
    Weight,
    head,
    linear,
    linears,
    rows_if,
    words,
)
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.experts import HARMLESS, expert_weights, read_experts
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_conv_width,
    get_count,
    get_float,
    get_int,
    layer_list,
    refusal,
)
from orca_jax.model.families.windows import read_layer_types, window_of_all
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, MixerName, RouterConfig, ShortConvConfig

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
    kind: rope.RopeRules(theta=1e6, part=kind, kinds=("default", "proportional"), default=default)
    for kind, default in _DEFAULT_ROPES.items()
}
_LFM2_NAMES = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}
_CONV_PARTS = ("before", "after", "value")  # the order of their rows in one tensor


def _lfm2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    kinds = read_layer_types(hf, config.num_layers, (_FULL, _CONV))
    if kinds is None:
        full = hf.get("full_attn_idxs")
        layers = range(config.num_layers)
        if full is None:
            full = [*layers]
        full = layer_list("full_attn_idxs", full, config.num_layers)
        kinds = [_FULL if layer in full else _CONV for layer in layers]
    _check_activation(config, hf)
    return {
        **_mixers(hf, kinds, width=3),
        "qk_norm": "head",
        "mlp_dim": _width_of_mlp(hf, config.mlp_dim),
    }


def _lfm2_moe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    _check_activation(config, hf)
    kinds = read_layer_types(hf, config.num_layers, (_FULL, _CONV))
    if kinds is None:
        raise refusal("layer_types", f"must have {config.num_layers} of {_FULL} and {_CONV}", None)
    num_dense = get_count(hf, "num_dense_layers", 2)
    if num_dense >= config.num_layers:
        raise refusal(
            "num_dense_layers", f"must be less than the {config.num_layers} layers", num_dense
        )
    router = RouterConfig(
        "sigmoid",
        has_bias=get_bool(hf, "use_expert_bias", True),
        eps=1e-6,
        scale=get_float(hf, "routed_scaling_factor", 1.0),
    )
    is_normalised = get_bool(hf, "norm_topk_prob", True)
    experts = replace(
        read_experts(hf, "num_experts", (32, 4), is_normalised=is_normalised),
        router=router,
        dense_layers=tuple(range(num_dense)),
        dense_dim=config.mlp_dim if num_dense else 0,
    )
    width = get_int(hf, "moe_intermediate_size", 1792)
    return {**_mixers(hf, kinds, width=3), "qk_norm": "head", "mlp_dim": width, "experts": experts}


def _check_activation(config: ModelConfig, hf: HfConfig) -> None:
    """Refuse what transformers ignores: another activation."""
    if config.activation != "silu":
        raise refusal("hidden_act", f"must be silu for {config.family}", hf.get("hidden_act"))


def _width_of_mlp(hf: HfConfig, width: int) -> int:
    """The width of an MLP, which follows from `intermediate_size`."""
    if not get_bool(hf, "block_auto_adjust_ff_dim", True):
        return width
    width = int(get_float(hf, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = get_int(hf, "block_multiple_of", 256)
    return multiple * ceil_div(width, multiple)


def _mixers(hf: HfConfig, kinds: Sequence[str], *, width: int) -> dict[str, Any]:
    """The fields for the mixers of `kinds`; `width` is the default of the convolutions."""
    conv = ShortConvConfig(
        get_conv_width(hf, "conv_L_cache", width), get_bool(hf, "conv_bias", False)
    )
    fields: dict[str, Any] = {"mixer_pattern": tuple(_MIXERS[kind] for kind in kinds)}
    if _CONV in kinds:
        fields["short_conv"] = conv
    return fields


def _lfm3(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    _check_activation(config, hf)
    local, _ = rope.read_rope(hf, config.head_dim, config.max_positions, _ROPES[_SLIDING])
    kinds = read_layer_types(hf, config.num_layers, _TYPES) or [
        _default_kind(i) for i in range(config.num_layers)
    ]
    parts = hf.get("rope_parameters")
    if parts and (missing := sorted({*kinds} - {_CONV} - parts.keys())):
        raise refusal(
            "rope_parameters", f"must have {missing[0]}, the kind of some layers", sorted(parts)
        )
    if _SLIDING in kinds and hf.get("sliding_window", 256) is None:
        raise refusal(
            "sliding_window", f"must be a positive integer for layers with {_SLIDING}", None
        )
    return {
        **_mixers(hf, kinds, width=7),
        **llama.attention_biases(hf),
        "qk_norm": "head",
        "attention_gate": "head" if get_bool(hf, "use_attention_gate", True) else None,
        "residual": "both_norms" if get_bool(hf, "use_sandwich_norm", True) else "pre_norm",
        "sliding_window": window_of_all(hf, 256, config.max_positions),
        "window_pattern": tuple(kind == _SLIDING for kind in kinds),
        "windowed_rope": local,
    }


def _default_kind(layer: int) -> str:
    """The kind of a layer without `layer_types`."""
    if layer % 4 == 2:
        return _FULL
    if layer % 4 == 0 and layer > 0:
        return _SLIDING
    return _CONV


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    names = {"operator_norm": "attention_norm", "ffn_norm": "mlp_norm"}
    if config.residual == "both_norms":
        names |= {"post_operator_norm": "attention_out_norm", "post_ffn_norm": "mlp_out_norm"}
    norms = [
        Weight(f"layers.{{layer}}.{theirs}.weight", f"blocks.{ours}.scale")
        for theirs, ours in names.items()
    ]
    return (
        Weight("embed_tokens.weight", "embedding.table"),
        *norms,
        Weight("embedding_norm.weight", "final_norm.scale"),
        *head(config),
        *rows_if("attention" in config.mixers, *_attention(config)),
        *_conv(config),
        *_mlps("layers.{layer}.feed_forward", config.experts),
    )


def _mlp(key: str, path: str) -> tuple[Weight, ...]:
    return linears({"w1": "gate", "w3": "up", "w2": "down"}, key, path)


def _mlps(key: str, experts: ExpertsConfig | None) -> tuple[Weight, ...]:
    if experts is None:
        return _mlp(key, "blocks.mlp")
    bias = Weight(f"{key}.expert_bias", "blocks.mlp.choice_bias")
    return (
        *expert_weights(key, ("w1", "w3", "w2")),
        *rows_if(experts.router.has_bias, bias),
        *rows_if(experts.dense_layers, *_mlp(key, "blocks.dense_mlp")),
    )


def _attention(config: ModelConfig) -> list[Weight]:
    rows = [*llama.attention_weights(config)]
    if config.family != "lfm3":
        for theirs, ours in _LFM2_NAMES.items():
            rows = [replace(row, key=row.key.replace(f".{theirs}.", f".{ours}.")) for row in rows]
    if config.attention_gate:
        rows += linear("layers.{layer}.self_attn.gate_proj", "blocks.attention.gate", bias=False)
    return rows


def _conv(config: ModelConfig) -> tuple[Weight, ...]:
    if config.short_conv is None:
        return ()
    has_bias = config.short_conv.has_bias
    conv = "layers.{layer}.conv"
    sizes = (config.embed_dim,) * 3
    rows = [Weight(f"{conv}.conv.weight", "blocks.short_conv.kernel", transpose=True, is_conv=True)]
    if has_bias:
        rows.append(Weight(f"{conv}.conv.bias", "blocks.short_conv.bias"))
    for index, name in enumerate(_CONV_PARTS):
        joined = linear(f"{conv}.in_proj", f"blocks.short_conv.{name}", bias=has_bias)
        rows += [replace(row, part=JoinedPart(index, sizes)) for row in joined]
    return *rows, *linear(f"{conv}.out_proj", "blocks.short_conv.out", bias=has_bias)


_SHAPE = LlamaShape(1e-5, rules=rope.RopeRules(theta=1e6), is_tied=True)
_OF_LFM2 = {
    "norm_eps": "rms_norm_eps",
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
}
LFM2 = near_llama(
    "lfm2",
    "LFM2",
    "Lfm2",
    _SHAPE,
    _lfm2,
    words(
        "block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of conv_L_cache conv_bias full_attn_idxs "
        "layer_types"
    ),
    weights,
    aliases=_OF_LFM2,
    harmless=words(
        "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
        "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc"
    ),  # in published files; transformers reads none of them
)
LFM2_MOE = near_llama(
    "lfm2_moe",
    "LFM2 with experts",
    "Lfm2Moe",
    _SHAPE,
    _lfm2_moe,
    words(
        "conv_L_cache conv_bias layer_types moe_intermediate_size norm_topk_prob num_dense_layers num_experts "
        "num_experts_per_tok routed_scaling_factor use_expert_bias"
    ),
    weights,
    aliases=_OF_LFM2,
    harmless=HARMLESS,
)
_LFM3 = near_llama(
    "lfm3",
    "LFM3",
    "Lfm3",
    _SHAPE._replace(rules=_ROPES[_FULL]),
    _lfm3,
    words(
        "attention_bias conv_L_cache conv_bias layer_types sliding_window use_attention_gate use_sandwich_norm"
    ),
    weights,
    aliases={"norm_eps": "rms_norm_eps"},
)


def _lfm3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of LFM3; raises `ConfigError` as `llama.config_from_hf` does."""
    for key in _ELSEWHERE:
        if hf.get(key) is not None:
            raise refusal(
                key,
                "is not supported for lfm3: rope_parameters has an object for each kind of layer",
                hf[key],
            )
    return _LFM3.config_from_hf(hf)


LFM3: Family = replace(_LFM3, config_from_hf=_lfm3_from_hf)
