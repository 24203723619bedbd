"""Qwen3-Next and Qwen3.5: three of four layers have the gated delta rule, the others attention with gates.

Both have experts, and Qwen3.5 also models without. Columns of the delta rule are joined in Qwen3-Next by key head.
"""

import re
from dataclasses import replace
from typing import Any

from orca_jax.model.families import experts, llama, rope
from orca_jax.model.families.base import JoinedPart, Weight, linear, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.mixtures.qwen_moe import moe_weights
from orca_jax.model.families.values import HfConfig, get_bool, get_conv_width, get_int, refusal
from orca_jax.model.families.windows import read_layer_types
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import DeltaRuleConfig, MixerName

_FULL, _LINEAR = _TYPES = "full_attention", "linear_attention"
_MIXERS: dict[str, MixerName] = {_FULL: "attention", _LINEAR: "delta_rule"}
_ROPE = rope.RopeRules(share=0.25)
_ROPE_OF_IMAGES = rope.RopeRules(share=0.25, renamed={"mrope": "default"}, notes=rope.SECTIONS)
_UNREAD = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_KEYS = words(
    "attention_bias full_attention_interval layer_types linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim"
)


def _qwen3_next(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    is_normalised = get_bool(hf, "norm_topk_prob", True)
    return {**_mixers(hf, config), **_mixture(hf, (512, 10), is_normalised=is_normalised)}


def _qwen3_5_moe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**_mixers(hf, config), **_mixture(hf, (256, 8), is_normalised=True)}


def _mixture(hf: HfConfig, defaults: tuple[int, int], *, is_normalised: bool) -> dict[str, Any]:
    shared = get_int(hf, "shared_expert_intermediate_size", 512)
    mixture = experts.read_experts(
        hf, "num_experts", defaults, is_normalised=is_normalised, shared_dim=shared
    )
    return {"mlp_dim": get_int(hf, "moe_intermediate_size", 512), "experts": mixture}


def _mixers(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """The fields of layers with attention and with the gated delta rule, beside those of their MLPs."""
    if config.activation != "silu":
        raise refusal("hidden_act", f"must be silu for {config.family}", hf.get("hidden_act"))
    interval = get_int(hf, "full_attention_interval", 4)
    kinds = read_layer_types(hf, config.num_layers, _TYPES)
    kinds = kinds or [
        _LINEAR if (layer + 1) % interval else _FULL for layer in range(config.num_layers)
    ]
    fields = llama.attention_biases(hf)
    if _LINEAR in kinds:
        fields["delta_rule"] = _delta_rule(hf)
    return {
        **fields,
        "qk_norm": "head",
        "norm_offset": 1.0,
        "attention_gate": "all",
        "mixer_pattern": tuple(_MIXERS[kind] for kind in kinds),
    }


def _delta_rule(hf: HfConfig) -> DeltaRuleConfig:
    heads = get_int(hf, "linear_num_value_heads", 32)
    keys = get_int(hf, "linear_num_key_heads", 16)
    if heads % keys:
        raise refusal(
            "linear_num_value_heads", f"must be a multiple of linear_num_key_heads {keys}", heads
        )
    width = get_conv_width(hf, "linear_conv_kernel_dim", 4)
    dims = get_int(hf, "linear_key_head_dim", 128), get_int(hf, "linear_value_head_dim", 128)
    return DeltaRuleConfig(heads, keys, *dims, width)


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    sizes = config.delta_rule
    rows = []
    if sizes is not None:
        share = sizes.num_heads // sizes.num_key_heads
        joined = (sizes.key_dim, sizes.key_dim, share * sizes.value_dim, share * sizes.value_dim)
        rows += _parts(
            "in_proj_qkvz", ("query", "key", "value", "gate"), joined, sizes.num_key_heads
        )
        rows += _parts("in_proj_ba", ("beta", "step"), (share, share), sizes.num_key_heads)
    return *_shared_weights(config), *rows, *moe_weights()


def qwen3_5_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters of texts of Qwen3.5, with experts or without."""
    sizes = config.delta_rule
    rows = []
    if sizes is not None:
        rows += _parts(
            "in_proj_qkv", ("query", "key", "value"), (sizes.keys, sizes.keys, sizes.values), 1
        )
        for key, name, size in (
            ("z", "gate", sizes.values),
            ("b", "beta", sizes.num_heads),
            ("a", "step", sizes.num_heads),
        ):
            rows += _parts(f"in_proj_{key}", (name,), (size,), 1)
    if config.experts is None:
        mlp = llama.mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=False)
    else:
        mlp = moe_weights(config.mlp_dim)
    return *_shared_weights(config), *rows, *mlp


def _parts(key: str, names: tuple[str, ...], sizes: tuple[int, ...], groups: int) -> list[Weight]:
    """Rows for layers of the delta rule whose columns are in one tensor, side by side for each key head."""
    ours = "blocks.delta_rule"
    theirs = f"layers.{{layer}}.linear_attn.{key}.weight"
    parts = [JoinedPart(index, sizes, groups) for index in range(len(names))]
    return [
        Weight(theirs, f"{ours}.{name}.kernel", transpose=True, part=part)
        for name, part in zip(names, parts, strict=True)
    ]


def _shared_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """The weights outside MLPs, without the projections before the delta rule."""
    rows = [*llama.outer_weights(config)]
    if "attention" in config.mixers:
        query = "blocks.attention.query."
        for row in llama.attention_weights(config):
            if not row.path.startswith(query):
                rows.append(row)
                continue
            both = (config.head_dim,) * 2
            rows.append(replace(row, part=JoinedPart(0, both, config.num_heads)))
            gate = row.path.replace("query", "gate")
            rows.append(replace(row, path=gate, part=JoinedPart(1, both, config.num_heads)))
    sizes = config.delta_rule
    theirs = "layers.{layer}.linear_attn"
    ours = "blocks.delta_rule"
    if sizes is None:
        return tuple(rows)
    channels = (sizes.keys, sizes.keys, sizes.values)
    for index, name in enumerate(("query", "key", "value")):
        path = f"{ours}.{name}_taps"
        part = JoinedPart(index, channels)
        rows.append(
            Weight(f"{theirs}.conv1d.weight", path, transpose=True, part=part, is_conv=True)
        )
    rows.append(Weight(f"{theirs}.A_log", f"{ours}.rate"))
    rows.append(Weight(f"{theirs}.dt_bias", f"{ours}.step_bias"))
    rows.append(Weight(f"{theirs}.norm.weight", f"{ours}.norm.scale"))
    return *rows, *linear(f"{theirs}.out_proj", f"{ours}.out", bias=False)


_OF_EXPERTS = words(
    "moe_intermediate_size num_experts num_experts_per_tok shared_expert_intermediate_size"
)
_IGNORED = re.compile(rf"{llama.IGNORED.pattern}|mtp\..*")
QWEN3_NEXT = near_llama(
    "qwen3_next",
    "Qwen3-Next",
    "Qwen3Next",
    LlamaShape(rules=_ROPE),
    _qwen3_next,
    _KEYS | _OF_EXPERTS | {"norm_topk_prob"},
    weights,
    ignored=_IGNORED,
    fixed=experts.EVERY_LAYER,
    harmless=experts.HARMLESS,
)
_OF_TEXTS: dict[str, Any] = {
    "prefixes": ("model.language_model.", *llama.PREFIXES),
    "ignored": _IGNORED,
    # the second one is of the delta rule, in Qwen3.6
    "fixed": {"attn_output_gate": (True, None), "output_gate_type": ("swish", "silu", None)},
}
QWEN3_5_TEXT = near_llama(
    "qwen3_5_text",
    "Qwen3.5 and Qwen3.6, for texts alone",
    "Qwen3_5",
    LlamaShape(rules=_ROPE_OF_IMAGES),
    _mixers,
    _KEYS,
    qwen3_5_weights,
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    harmless=_UNREAD,
    **_OF_TEXTS,
)
QWEN3_5_MOE_TEXT = near_llama(
    "qwen3_5_moe_text",
    "Qwen3.5 and Qwen3.6 with experts, for texts alone",
    "Qwen3_5Moe",
    LlamaShape(rules=_ROPE_OF_IMAGES),
    _qwen3_5_moe,
    _KEYS | _OF_EXPERTS,
    qwen3_5_weights,
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
    harmless=experts.HARMLESS | _UNREAD,
    **_OF_TEXTS,
)
