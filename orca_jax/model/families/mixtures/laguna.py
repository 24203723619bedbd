"""Laguna: windows in most layers, with more query heads, gates by softplus, and experts chosen by sigmoid scores."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import Family, Weight, linear, rows_if, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.experts import HARMLESS, expert_weights, read_experts
from orca_jax.model.families.mixtures.sigmoid import dense_layers_first
from orca_jax.model.families.values import HfConfig, get_cap, get_float, get_int, refusal
from orca_jax.model.families.windows import windows_of_pattern
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, MixerName, RouterConfig, WideConfig

_SHARE = "partial_rotary_factor"
_HEADS = "num_attention_heads_per_layer"
_LENGTH = frozenset({"original_max_position_embeddings"})
_FULL = rope.RopeRules(
    theta_key=None,
    part="full_attention",
    share=1.0,
    default={"rope_theta": 500_000.0, _SHARE: 0.5},
    notes_beside=_LENGTH,
)
_SLIDING = _FULL._replace(part="sliding_attention", default={"rope_theta": 10_000.0})
_MIXERS: dict[bool, MixerName] = {True: "attention", False: "wide_attention"}
"""By whether a layer has a window, if heads differ by it."""


def _fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    layers = config.num_layers
    rope.check_no_scaling(hf)
    _check_shares(hf)
    windows = windows_of_pattern(hf, layers, config.max_positions, (False,), 512)
    pattern = windows.window_pattern
    has_window = tuple(pattern[layer % len(pattern)] for layer in range(layers))
    windowed, _ = rope.read_rope(hf, config.head_dim, config.max_positions, _SLIDING)
    return {
        **windows._asdict(),
        **_heads(hf, config, has_window),
        "windowed_rope": windowed,
        "qk_norm": "head",
        "attention_gate": _gate(hf, layers),
        "attention_gate_activation": "softplus",
        "mlp_dim": get_int(hf, "moe_intermediate_size", 512),
        "experts": _experts(hf, config),
    }


def _check_shares(hf: HfConfig) -> None:
    """Raise ConfigError if a share outside the objects would count: transformers does not read it."""
    share = hf.get(_SHARE)
    parts = hf.get("rope_parameters")
    if share is None or not isinstance(parts, dict):
        return
    if not all(_SHARE in part for part in parts.values() if isinstance(part, dict)):
        raise refusal(_SHARE, "must be in each object of rope_parameters", share)


def _heads(hf: HfConfig, config: ModelConfig, has_window: tuple[bool, ...]) -> dict[str, Any]:
    """The fields of query heads, whose number may differ between layers with a window and without."""
    heads = hf.get(_HEADS)
    if heads is None:
        return {}
    layers = config.num_layers
    groups = config.num_kv_heads
    if (
        not isinstance(heads, list)
        or len(heads) != layers
        or not all(type(each) is int and each > 0 and each % groups == 0 for each in heads)
    ):
        raise refusal(_HEADS, f"must be a list of {layers} multiples of {groups}", heads)
    by_kind = {kind: _of_kind(heads, has_window, kind) for kind in sorted({*has_window})}
    if any(len(numbers) > 1 for numbers in by_kind.values()):
        raise refusal(
            _HEADS, "must have one number for layers with a window and one without", heads
        )
    numbers = {kind: min(found) for kind, found in by_kind.items()}
    own = numbers.get(True, numbers.get(False, config.num_heads))
    full = numbers.get(False, own)
    if full == own:
        return {"num_heads": own}
    return {
        "num_heads": own,
        "wide": WideConfig(config.head_dim, groups, num_heads=full),
        "mixer_pattern": tuple(_MIXERS[windowed] for windowed in has_window),
    }


def _of_kind(heads: list[int], has_window: Collection[bool], kind: bool) -> set[int]:
    """The numbers of heads of the layers with a window, or of those without."""
    return {each for each, windowed in zip(heads, has_window, strict=True) if windowed == kind}


def _gate(hf: HfConfig, layers: int) -> str:
    """The weights of results, of each head or of each number; `gating_types` may repeat it for each layer."""
    gating = hf.get("gating", True)
    names = {True: "head", "per-head": "head", "per-element": "all"}
    if not isinstance(gating, bool | str) or gating not in names:
        raise refusal("gating", "must be true, per-head or per-element", gating)
    name = names[gating]
    kinds = hf.get("gating_types")
    expected = {"head": "per_head", "all": "per_element"}[name]
    if kinds is not None and kinds != [expected] * layers:
        raise refusal("gating_types", f"must be {expected} for each of {layers} layers", kinds)
    return name


def _experts(hf: HfConfig, config: ModelConfig) -> ExpertsConfig:
    """The experts, of which first layers have none. `mlp_only_layers` may name these again."""
    experts = read_experts(
        hf,
        "num_experts",
        (256, 8),
        is_normalised=True,
        shared_dim=get_int(hf, "shared_expert_intermediate_size", 512),
    )
    num_dense = dense_layers_first(hf, config.num_layers, 1)
    others = hf.get("mlp_only_layers")
    if others is not None and others != [*range(num_dense)]:
        raise refusal("mlp_only_layers", f"must be {[*range(num_dense)]}", others)
    router = RouterConfig(
        "sigmoid",
        soft_cap=get_cap(hf, "moe_router_logit_softcapping"),
        has_bias=True,
        scale=get_float(hf, "moe_routed_scaling_factor", 1.0),
    )
    return replace(
        experts,
        router=router,
        shared_gate=False,
        dense_layers=tuple(range(num_dense)),
        dense_dim=config.mlp_dim if num_dense else 0,
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    mlp = "layers.{layer}.mlp"
    assert config.experts is not None, "the family has experts"
    dense = llama.mlp_weights(mlp, "blocks.dense_mlp", bias=False)
    attention: list[Weight] = []
    rows = (
        *llama.attention_weights(config),
        *linear("layers.{layer}.self_attn.g_proj", "blocks.attention.gate", bias=False),
    )
    for mixer in config.mixers:
        attention += [replace(row, path=row.path.replace("attention", mixer)) for row in rows]
    return (
        *llama.outer_weights(config),
        *attention,
        *expert_weights(mlp, width=config.mlp_dim),
        Weight(
            f"{mlp}.experts.e_score_correction_bias",
            "blocks.mlp.choice_bias",
            others=(f"{mlp}.gate.e_score_correction_bias",),
        ),
        *llama.mlp_weights(f"{mlp}.shared_expert", "blocks.mlp.shared.mlp", bias=False),
        *rows_if(config.experts.dense_layers, *dense),
    )


_NEAR: Family = near_llama(
    "laguna",
    "Laguna XS and S",
    "Laguna",
    LlamaShape(rules=_FULL),
    _fields,
    words(
        "gating gating_types layer_types mlp_layer_types mlp_only_layers moe_intermediate_size "
        "moe_routed_scaling_factor moe_router_logit_softcapping num_attention_heads_per_layer num_experts "
        "num_experts_per_tok shared_expert_intermediate_size sliding_window"
    ),
    weights,
    fixed={
        "attention_bias": (False, None),
        "decoder_sparse_step": (1, None),
        "moe_apply_router_weight_on_input": (False, None),
        "norm_topk_prob": (True, None),
    },
    harmless=HARMLESS,
    ignored=re.compile(rf"{llama.IGNORED.pattern}|mtp\..*"),
)
LAGUNA: Family = replace(_NEAR, keys=_NEAR.keys - {"rope_theta"})
