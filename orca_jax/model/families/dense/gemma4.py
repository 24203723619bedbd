"""Gemma 4 for texts: layers without a window have wide heads of their own.

The last layers may read the pages of earlier ones, layers may have inputs by token beside the stream, and there may be
experts beside each MLP.
"""

import re
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import Family, JoinedPart, Weight, rows_if, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_count,
    get_int,
    get_optional_float,
    refusal,
)
from orca_jax.model.families.windows import windows_of_pattern
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import (
    SHARED_MIXERS,
    ExpertsConfig,
    KeySharing,
    LayerInputs,
    MixerName,
    WideConfig,
)

_LOCAL = rope.RopeRules(
    theta_key=None,
    part="sliding_attention",
    default={"rope_theta": 10_000.0},
    kinds=("default", "linear"),
)
_WIDE = rope.RopeRules(
    theta_key=None,
    part="full_attention",
    default={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    kinds=("default", "proportional"),
)
_MIXERS: dict[bool, MixerName] = {True: "attention", False: "wide_attention"}
"""By whether a layer has a window."""
_SHARED_BY: dict[MixerName, MixerName] = {own: shared for shared, own in SHARED_MIXERS.items()}


def _fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    fields = {**_attention(hf, config, 512), **_mixture(hf, config), **_inputs(hf, config)}
    sharing = fields.get("key_sharing")
    if "experts" in fields and sharing is not None and sharing.mlp_dim != config.mlp_dim:
        raise refusal("use_double_wide_mlp", "must be false in a model with experts", True)
    return fields


def _unified(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return _attention(hf, config, 1024)


def _attention(hf: HfConfig, config: ModelConfig, window: int) -> dict[str, Any]:
    """The fields of a model without inputs of layers and experts; `window` is the default of `sliding_window`."""
    layers = config.num_layers
    rope.check_no_scaling(hf)
    windows = windows_of_pattern(hf, layers, config.max_positions, (*(True,) * 5, False), window)
    found = windows.window_pattern
    # the last one never has it
    has_window = (*(found[layer % len(found)] for layer in range(layers - 1)), False)
    sizes = _wide_sizes(hf, config, [layer for layer in range(layers) if not has_window[layer]])
    positions, _ = rope.read_rope(hf, sizes.head_dim, config.max_positions, _WIDE)
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
    sharing = KeySharing(num_shared, (1 + is_double) * config.mlp_dim)
    return {
        **llama.attention_biases(hf),
        "sliding_window": windows.sliding_window,
        "window_pattern": has_window,
        "rope": replace(positions, rotated_dim=sizes.head_dim),
        "windowed_rope": config.rope,
        "mixer_pattern": (*own, *(_SHARED_BY[mixer] for mixer in mixers[len(own) :])),
        "key_sharing": sharing if num_shared else None,
        "wide": sizes,
        "layer_scale": True,
        "qk_norm": "head",
        "value_norm": True,
        "residual": "both_norms",
        "attention_scale": 1.0,
        "embedding_scale": config.embed_dim**0.5,
        "logit_soft_cap": get_optional_float(hf, "final_logit_softcapping"),
    }


def _inputs(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
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


def _mixture(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
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


def _of_attention(config: ModelConfig, mixer: MixerName) -> tuple[Weight, ...]:
    """The weights of the layers with a mixer. Some have no values, or neither keys nor values."""
    missing: tuple[str, ...] = ()
    if mixer in SHARED_MIXERS:
        missing = ("blocks.attention.key", "blocks.attention.value")
    elif config.wide is not None and config.wide.keys_are_values and mixer == "wide_attention":
        missing = ("blocks.attention.value",)
    rows = llama.attention_weights(config)
    return tuple(
        replace(row, path=row.path.replace("attention", mixer))
        for row in rows
        if not row.path.startswith(missing)
    )


def _of_mixture(config: ModelConfig, mlp: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The weights of an MLP and of the experts beside it."""
    layer = "layers.{layer}"
    ours = "blocks.mlp"
    halves = (config.mlp_dim,) * 2
    norms = {
        "post_feedforward_layernorm_1.weight": "dense_norm",
        "pre_feedforward_layernorm_2.weight": "in_norm",
        "post_feedforward_layernorm_2.weight": "out_norm",
        "router.scale": "router_norm",
    }
    return (
        *(replace(row, path=row.path.replace("mlp", "mlp.dense")) for row in mlp),
        *(Weight(f"{layer}.{theirs}", f"{ours}.{name}.scale") for theirs, name in norms.items()),
        Weight(f"{layer}.router.proj.weight", f"{ours}.mlp.router", transpose=True),
        Weight(f"{layer}.router.per_expert_scale", f"{ours}.mlp.factors"),
        *(
            Weight(
                f"{layer}.experts.gate_up_proj[{{expert}}]",
                f"{ours}.mlp.{name}",
                transpose=True,
                part=JoinedPart(index, halves),
            )
            for index, name in enumerate(("gate", "up"))
        ),
        Weight(f"{layer}.experts.down_proj[{{expert}}]", f"{ours}.mlp.down", transpose=True),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    layer = "layers.{layer}"
    mlp = llama.mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=False)
    others = [replace(row, path=row.path.replace("mlp", "dense_mlp")) for row in mlp]
    if config.experts is not None:
        mlp = _of_mixture(config, mlp)
    attention: list[Weight] = []
    for mixer in config.mixers:
        attention += _of_attention(config, mixer)
    inputs = (
        Weight("embed_tokens_per_layer.weight", "layer_inputs.table.table"),
        Weight(
            "per_layer_model_projection.weight", "layer_inputs.projection.kernel", transpose=True
        ),
        Weight("per_layer_projection_norm.weight", "layer_inputs.norm.scale"),
        Weight(
            f"{layer}.per_layer_input_gate.weight", "blocks.layer_input.gate.kernel", transpose=True
        ),
        Weight(
            f"{layer}.per_layer_projection.weight",
            "blocks.layer_input.projection.kernel",
            transpose=True,
        ),
        Weight(f"{layer}.post_per_layer_input_norm.weight", "blocks.layer_input.norm.scale"),
    )
    return (
        *llama.outer_weights(config),
        *attention,
        *mlp,
        *rows_if(config.other_mlps[0], *others),
        *rows_if(config.layer_inputs, *inputs),
        Weight(f"{layer}.layer_scalar", "blocks.layer_scale"),
    )


_NEAR: dict[str, Any] = {
    "prefixes": ("model.", "model.language_model.", "language_model.model.", ""),
    # Published files repeat the keys and values of layers that read those of others.
    "ignored": re.compile(
        r"(model\.)?(language_model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight"
    ),
}
_SHAPE = LlamaShape(
    activation="gelu_pytorch_tanh",
    rules=_LOCAL,
    is_tied=True,
    activation_key="hidden_activation",
)
_KEYS = words(
    "attention_bias attention_k_eq_v final_logit_softcapping global_head_dim layer_types num_global_key_value_heads "
    "num_kv_shared_layers per_layer_config sliding_window use_double_wide_mlp"
)
_CAUSAL = {"use_bidirectional_attention": (None, "vision")}


def _gemma4(family: Family) -> Family:
    """The family without `rope_theta`, which transformers does not read."""
    return replace(family, keys=family.keys - {"rope_theta"})


GEMMA4_TEXT = _gemma4(
    near_llama(
        "gemma4_text",
        "Gemma 4, for texts alone",
        "Gemma4",
        _SHAPE,
        _fields,
        _KEYS
        | words(
            "enable_moe_block hidden_size_per_layer_input moe_intermediate_size num_experts top_k_experts "
            "vocab_size_per_layer_input"
        ),
        weights,
        fixed=_CAUSAL,
        harmless=frozenset({"hidden_act"}),
        architectures=("Gemma4ForCausalLM", "Gemma4TextModel"),
        **_NEAR,
    )
)
GEMMA4_UNIFIED_TEXT = _gemma4(
    near_llama(
        "gemma4_unified_text",
        "Gemma 4 12B, for texts alone",
        "Gemma4Unified",
        _SHAPE,
        _unified,
        _KEYS,
        weights,
        fixed={
            **_CAUSAL,
            "enable_moe_block": (False, None),
            "hidden_size_per_layer_input": (0, None),
        },
        harmless=frozenset({"hidden_act"}),
        architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"),
        **_NEAR,
    )
)
