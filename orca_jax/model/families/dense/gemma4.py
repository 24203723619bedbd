"""Gemma 4 for texts: layers without a window have wide heads of their own.

The last layers may read the pages of earlier ones, layers may have inputs by token beside the stream, and there may be
experts beside each MLP.
"""

import re
from dataclasses import replace
from typing import Any

from orca_jax.model.families.experts import dense_layers
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, Fields, number_or_none, root_of_width
from orca_jax.model.families.names import BOTH_NORMS
from orca_jax.model.families.rope import RopeRules, no_scaling, read_rope
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal
from orca_jax.model.families.windows import has_windows, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import (
    SHARED_MIXERS,
    ExpertsConfig,
    LayerInputs,
    MixerName,
    WideConfig,
)

_LOCAL = RopeRules(
    theta_key=None,
    part="sliding_attention",
    default={"rope_theta": 10_000.0},
    kinds=("default", "linear"),
)
_WIDE = RopeRules(
    theta_key=None,
    part="full_attention",
    default={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    kinds=("default", "proportional"),
)
_MIXERS: dict[bool, MixerName] = {True: "attention", False: "wide_attention"}
"""By whether a layer has a window."""
_SHARED_BY: dict[MixerName, MixerName] = {own: shared for shared, own in SHARED_MIXERS.items()}


def _attention(hf: HfConfig, config: ModelConfig) -> Fields:
    """The fields of a model without inputs of layers and experts."""
    layers = config.num_layers
    # the last one never has it
    has_window = (*has_windows(config)[:-1], False)
    sizes = _wide_sizes(hf, config, [layer for layer in range(layers) if not has_window[layer]])
    positions, _ = read_rope(hf, sizes.head_dim, config.max_positions, _WIDE)
    mixers = [_MIXERS[windowed] for windowed in has_window]
    num_shared = get_count(hf, "num_kv_shared_layers", 0)
    own = mixers[: max(0, layers - num_shared)]
    if not set(mixers) <= set(own):
        raise refusal(
            "num_kv_shared_layers",
            "must leave a layer of each kind with keys of its own",
            num_shared,
        )
    is_double = get_bool(hf, "use_double_wide_mlp", False)
    mlps: Fields = {}
    if is_double:
        mlps = dense_layers(config, range(len(own), layers), 2 * config.mlp_dim)
    ropes = {True: config.rope, False: replace(positions, rotated_dim=sizes.head_dim)}
    return {
        **mlps,
        "window": (*(kind.window for kind in config.layers[:-1]), None),
        "rope": tuple(ropes[windowed] for windowed in has_window),
        "mixer": (*own, *(_SHARED_BY[mixer] for mixer in mixers[len(own) :])),
        "wide": sizes,
    }


def _inputs(hf: HfConfig, config: ModelConfig) -> Fields:
    """The field for inputs of layers beside the stream, if there are some."""
    width = get_count(hf, "hidden_size_per_layer_input", 256)
    rows = get_int(hf, "vocab_size_per_layer_input", 262144)
    if not width:
        return {}
    if rows < config.vocab_size:
        raise refusal(
            "vocab_size_per_layer_input", f"must be at least vocab_size {config.vocab_size}", rows
        )
    return {"layer_inputs": LayerInputs(width, rows)}


def _mixture(hf: HfConfig, config: ModelConfig) -> Fields:
    """The fields for experts beside the MLPs, if there are some."""
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    given = [get_int(hf, key) for key in keys if hf.get(key) is not None]
    if not get_bool(hf, "enable_moe_block", False):
        return {}
    if len(given) < len(keys):
        raise refusal("enable_moe_block", f"needs {', '.join(keys)}", True)
    count, per_token, width = given
    if per_token > count:
        raise refusal("top_k_experts", f"must be at most num_experts {count}", per_token)
    if config.dense_mlp_dim:
        raise refusal("use_double_wide_mlp", "must be false in a model with experts", True)
    return {"mlp_dim": width, "experts": ExpertsConfig(count, per_token, beside_dim=config.mlp_dim)}


def _wide_sizes(hf: HfConfig, config: ModelConfig, wide_layers: list[int]) -> WideConfig:
    """The heads of layers without a window, by keys of their own or by those of each layer."""
    keys_are_values = get_bool(hf, "attention_k_eq_v", False)
    kv_heads = get_int(hf, "num_global_key_value_heads", config.num_kv_heads)
    if not keys_are_values:
        kv_heads = config.num_kv_heads  # as in transformers
    by_layer = hf.get("per_layer_config")
    sizes = {"head_dim": get_int(hf, "global_head_dim", 512)}
    if by_layer is not None:
        first = _same_sizes(by_layer, wide_layers)
        if first is None:
            problem = f"must have the same sizes for the layers {wide_layers} alone"
            raise refusal("per_layer_config", problem, by_layer)
        sizes = {"head_dim": get_int(first, "head_dim", config.head_dim)}
        kv_heads = get_int(first, "num_key_value_heads", config.num_kv_heads)
    if config.num_heads % kv_heads:
        raise refusal(
            "num_global_key_value_heads",
            f"must divide num_attention_heads {config.num_heads}",
            kv_heads,
        )
    return WideConfig(sizes["head_dim"], kv_heads, keys_are_values)


def _same_sizes(by_layer: Any, wide_layers: list[int]) -> dict[str, Any] | None:
    """The sizes that each of the layers has, none of others; None if `by_layer` is something else."""
    if by_layer == {}:
        return {}
    if not isinstance(by_layer, dict):
        return None
    # transformers 5.24 writes numbers of as many digits
    layers = {str(key).lstrip("0") or "0" for key in by_layer}
    if layers != {*map(str, wide_layers)}:
        return None
    first, *others = by_layer.values()
    if not isinstance(first, dict) or not first.keys() <= {"head_dim", "num_key_value_heads"}:
        return None
    if any(own != first for own in others):
        return None
    return first


_SHAPE = LlamaShape(
    activation="gelu_pytorch_tanh", rules=_LOCAL, activation_key="hidden_activation"
)
_COMMON: Fields = {
    "layer_scale": True,
    "qk_norm": "head",
    "value_norm": True,
    "residual": "both_norms",
    "attention_scale": 1.0,
    "logit_soft_cap": number_or_none("final_logit_softcapping"),
}
_PATTERN = (*(True,) * 5, False)
_NAMES = (
    BOTH_NORMS
    + """
    embed_tokens_per_layer              layer_inputs.table
    per_layer_model_projection          layer_inputs.projection
    per_layer_projection_norm           layer_inputs.norm
    per_layer_input_gate                layer_input.gate
    per_layer_projection                layer_input.projection
    post_per_layer_input_norm           layer_input.norm
    layer_scalar                        layer_scale
    post_feedforward_layernorm_1        beside.dense_norm
    {pre,post}_feedforward_layernorm_2  beside.{in,out}_norm
    router.scale                        beside.router_norm.scale
    router.per_expert_scale             beside.factors
    router.proj                         experts.router
    experts.gate_up_proj[{expert}]      experts.{gate,up}
    experts.down_proj[{expert}]         experts.down
"""
)
_CAUSAL = {"use_bidirectional_attention": (None, "vision")}
GEMMA4_TEXT = Family(
    "gemma4_text",
    (
        ATTENTION_BIASES,
        windows(_PATTERN, 512),
        no_scaling,
        _attention,
        root_of_width(),
        _COMMON,
        _mixture,
        _inputs,
    ),
    _NAMES,
    shape=_SHAPE,
    prefixes=("model.", "model.language_model.", "language_model.model.", ""),
    # Published files repeat the keys and values of layers that read those of others.
    ignored=re.compile(
        r"(model\.)?(language_model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight"
    ),
    fixed=_CAUSAL,
    unread="hidden_act",
)
GEMMAS4 = (
    GEMMA4_TEXT,
    replace(
        GEMMA4_TEXT,
        name="gemma4_unified_text",
        fields=(
            ATTENTION_BIASES,
            windows(_PATTERN, 1024),
            no_scaling,
            _attention,
            root_of_width(),
            _COMMON,
        ),
        fixed={
            **_CAUSAL,
            "enable_moe_block": (False, None),
            "hidden_size_per_layer_input": (0, None),
        },
    ),
)
