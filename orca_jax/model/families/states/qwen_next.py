"""Qwen3-Next: three of four layers have the gated delta rule, the others attention with a gate for each number."""

import re
from collections.abc import Mapping
from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.layer_config import DeltaRuleConfig, MixerName
from orca_jax.model.families import experts, llama, rope
from orca_jax.model.families.base import Family, JoinedPart, Weight, linear
from orca_jax.model.families.qwen_moe import moe_weights
from orca_jax.model.families.values import HfConfig, get_bool, get_int, refusal
from orca_jax.model.families.windows import read_layer_types

_FULL, _LINEAR = _TYPES = "full_attention", "linear_attention"
_ROPE = rope.RopeRules(share=0.25)
_DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}
_KEYS = llama.KEYS | {
    "attention_bias",
    "full_attention_interval",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
}


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Qwen3-Next; raises `ConfigError` as `llama.config_from_hf` does."""
    config = read_hybrid(hf, "qwen3_next", _DEFAULTS, num_heads=32)
    shared = get_int(hf, "shared_expert_intermediate_size", 512)
    is_normalised = get_bool(hf, "norm_topk_prob", True)
    mixture = experts.read_experts(hf, "num_experts", (512, 10), is_normalised=is_normalised, shared_dim=shared)
    return replace(config, mlp_dim=get_int(hf, "moe_intermediate_size", 512), experts=mixture)


def read_hybrid(hf: HfConfig, family: str, defaults: Mapping[str, int], *, num_heads: int) -> ModelConfig:
    """Read the keys of layers with attention and with the gated delta rule, beside those of their MLPs.

    Args:
        hf: the configuration.
        family: name of the family.
        defaults: those of `llama.read_shape`.
        num_heads: default number of heads of the delta rule.

    Raises:
        ConfigError: as in `llama.config_from_hf`.
    """
    config = llama.read_shape(hf, family, defaults, rules=_ROPE)
    if config.activation != "silu":
        raise refusal("hidden_act", f"must be silu for {family}", hf.get("hidden_act"))
    interval = get_int(hf, "full_attention_interval", 4)
    kinds = read_layer_types(hf, config.num_layers, _TYPES)
    kinds = kinds or [_LINEAR if (layer + 1) % interval else _FULL for layer in range(config.num_layers)]
    mixers: list[MixerName] = ["delta_rule" if kind == _LINEAR else "attention" for kind in kinds]
    return replace(
        config,
        **llama.attention_biases(hf),
        qk_norm="head",
        norm_offset=1.0,
        attention_gate="all",
        mixer_pattern=tuple(mixers),
        delta_rule=_delta_rule(hf, num_heads) if "delta_rule" in mixers else None,
    )


def _delta_rule(hf: HfConfig, num_heads: int) -> DeltaRuleConfig:
    heads, keys = get_int(hf, "linear_num_value_heads", num_heads), get_int(hf, "linear_num_key_heads", 16)
    if heads % keys:
        raise refusal("linear_num_value_heads", f"must be a multiple of linear_num_key_heads {keys}", heads)
    width = get_int(hf, "linear_conv_kernel_dim", 4)
    if width < 2:
        raise refusal("linear_conv_kernel_dim", "must be at least 2", width)
    dims = get_int(hf, "linear_key_head_dim", 128), get_int(hf, "linear_value_head_dim", 128)
    return DeltaRuleConfig(heads, keys, *dims, width)


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    sizes, rows = config.delta_rule, []
    if sizes is not None:
        share = sizes.num_heads // sizes.num_key_heads
        joined = (sizes.key_dim, sizes.key_dim, share * sizes.value_dim, share * sizes.value_dim)
        rows += _parts("in_proj_qkvz", ("query", "key", "value", "gate"), joined, sizes.num_key_heads)
        rows += _parts("in_proj_ba", ("beta", "step"), (share, share), sizes.num_key_heads)
    return *shared_weights(config), *rows, *moe_weights()


def _parts(key: str, names: tuple[str, ...], sizes: tuple[int, ...], groups: int) -> list[Weight]:
    """Rows for layers of the delta rule whose columns are in one tensor, side by side for each key head."""
    ours, theirs = "blocks.delta_rule", f"layers.{{layer}}.linear_attn.{key}.weight"
    parts = [JoinedPart(index, sizes, groups) for index in range(len(names))]
    return [
        Weight(theirs, f"{ours}.{name}.kernel", transpose=True, part=part)
        for name, part in zip(names, parts, strict=True)
    ]


def shared_weights(config: ModelConfig) -> tuple[Weight, ...]:
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
    sizes, theirs, ours = config.delta_rule, "layers.{layer}.linear_attn", "blocks.delta_rule"
    if sizes is None:
        return tuple(rows)
    channels = (sizes.keys, sizes.keys, sizes.values)
    for index, name in enumerate(("query", "key", "value")):
        path, part = f"{ours}.{name}_taps", JoinedPart(index, channels)
        rows.append(Weight(f"{theirs}.conv1d.weight", path, transpose=True, part=part, is_conv=True))
    rows.append(Weight(f"{theirs}.A_log", f"{ours}.rate"))
    rows.append(Weight(f"{theirs}.dt_bias", f"{ours}.step_bias"))
    rows.append(Weight(f"{theirs}.norm.weight", f"{ours}.norm.scale"))
    return *rows, *linear(f"{theirs}.out_proj", f"{ours}.out", bias=False)


QWEN3_NEXT = Family(
    name="qwen3_next",
    models="Qwen3-Next",
    config_from_hf=config_from_hf,
    keys=_KEYS
    | {
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "shared_expert_intermediate_size",
    },
    architectures=("Qwen3NextForCausalLM", "Qwen3NextModel"),
    weights=weights,
    prefixes=llama.PREFIXES,
    ignored=re.compile(rf"{llama.IGNORED.pattern}|mtp\..*"),
    fixed=experts.EVERY_LAYER,
    harmless=experts.HARMLESS,
)
