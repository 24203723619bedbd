"""Laguna: windows in most layers, with more query heads, gates by softplus, and experts chosen by sigmoid scores."""

import re
from collections.abc import Collection

from orca_jax.model.families.experts import OF_ROUTERS, Mixture, dense_of_types, shared_expert
from orca_jax.model.families.family import IGNORED, Family
from orca_jax.model.families.fields import Fields, off
from orca_jax.model.families.names import STACKED_EXPERTS
from orca_jax.model.families.rope import RopeRules, no_scaling
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_cap, get_float, refusal
from orca_jax.model.families.windows import by_window, has_windows, windowed_rope, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RouterConfig, WideConfig

_SHARE = "partial_rotary_factor"
_HEADS = "num_attention_heads_per_layer"
_LENGTH = frozenset({"original_max_position_embeddings"})
_FULL = RopeRules(
    theta_key=None,
    part="full_attention",
    share=1.0,
    default={"rope_theta": 500_000.0, _SHARE: 0.5},
    notes_beside=_LENGTH,
)
_SLIDING = _FULL._replace(part="sliding_attention", default={"rope_theta": 10_000.0})


def _check_positions(hf: HfConfig, config: ModelConfig) -> Fields:
    """No fields; a share outside the objects, which transformers does not read, is refused if it would count."""
    share = hf.get(_SHARE)
    parts = hf.get("rope_parameters")
    if share is None or not isinstance(parts, dict):
        return {}
    if not all(_SHARE in part for part in parts.values() if isinstance(part, dict)):
        raise refusal(_SHARE, "must be in each object of rope_parameters", share)
    return {}


def _heads(hf: HfConfig, config: ModelConfig) -> Fields:
    """The fields of query heads, whose number may differ between layers with a window and without."""
    heads = hf.get(_HEADS)
    if heads is None:
        return {}
    layers = config.num_layers
    has_window = has_windows(config)
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
        "mixer": by_window(config, "attention", "wide_attention"),
    }


def _of_kind(heads: list[int], has_window: Collection[bool], kind: bool) -> set[int]:
    """The numbers of heads of the layers with a window, or without."""
    return {each for each, windowed in zip(heads, has_window, strict=True) if windowed == kind}


def _gate(hf: HfConfig, config: ModelConfig) -> Fields:
    """The weights of results, of each head or of each number; `gating_types` may repeat it for each layer."""
    layers = config.num_layers
    gating = hf.get("gating", True)
    names = {True: "head", "per-head": "head", "per-element": "all"}
    if not isinstance(gating, bool | str) or gating not in names:
        raise refusal("gating", "must be true, per-head or per-element", gating)
    name = names[gating]
    kinds = hf.get("gating_types")
    expected = {"head": "per_head", "all": "per_element"}[name]
    if kinds is not None and kinds != [expected] * layers:
        raise refusal("gating_types", f"must be {expected} for each of {layers} layers", kinds)
    return {"attention_gate": name, "attention_gate_activation": "softplus"}


def _router(hf: HfConfig) -> RouterConfig:
    return RouterConfig(
        "sigmoid",
        soft_cap=get_cap(hf, "moe_router_logit_softcapping"),
        has_bias=True,
        scale=get_float(hf, "moe_routed_scaling_factor", 1.0),
    )


def _dense(hf: HfConfig, config: ModelConfig) -> tuple[int, ...]:
    """The first layers, which have no experts. `mlp_only_layers` may name them again."""
    layers = [*range(dense_of_types(hf, config, 1))]
    others = hf.get("mlp_only_layers")
    if others is not None and others != layers:
        raise refusal("mlp_only_layers", f"must be {layers}", others)
    return tuple(layers)


LAGUNA = Family(
    "laguna",
    (
        no_scaling,
        _check_positions,
        windows((False,), 512),
        windowed_rope(_SLIDING),
        _heads,
        {"qk_norm": "head"},
        _gate,
        Mixture(
            "num_experts",
            (256, 8),
            512,
            shared=shared_expert(512),
            router=_router,
            dense=_dense,
            options={"shared_gate": False},
        ),
    ),
    f"""
    {STACKED_EXPERTS}
    self_attn.g_proj                            attention.gate
    mlp.experts.e_score_correction_bias         experts.choice_bias
    mlp.gate.e_score_correction_bias            experts.choice_bias     or
    mlp.shared_expert.{{gate,up,down}}_proj     shared.{{gate,up,down}}
    """,
    shape=LlamaShape(rules=_FULL),
    ignored=re.compile(rf"{IGNORED}|mtp\..*"),
    fixed={
        **off("attention_bias moe_apply_router_weight_on_input"),
        "decoder_sparse_step": (1, None),
        "norm_topk_prob": (True, None),
    },
    unread=OF_ROUTERS,
)
