"""Granite with experts, with a shared one beside them, with sinks, and Granite 4, whose layers mostly have Mamba-2.

The matrices of all experts of a layer are in one tensor, those to the gate before those beside it. Without experts the
shared one is the MLP.
"""

from dataclasses import replace

from orca_jax.model.families.experts import OF_ROUTERS, Mixture
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, BIASES, FACTORS, Fields
from orca_jax.model.families.names import mamba
from orca_jax.model.families.states.bamba import with_mamba
from orca_jax.model.families.values import HfConfig, get_count, get_int, is_number, refusal
from orca_jax.model.families.windows import has_windows, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MixerName

_MIXERS: dict[str, MixerName] = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "mamba",
    "mamba": "mamba",
}  # by the kind of a layer; two names are of older files
_POSITIONS = (None, "nope", "rope")
_EXPERTS = Mixture("num_local_experts", (8, 2), options={"shared_gate": False})


def _shared(hf: HfConfig, width: int) -> int:
    return get_count(hf, "shared_intermediate_size", 0)


def _mlps(hf: HfConfig, config: ModelConfig) -> Fields:
    """The experts of Granite 4 and the shared one, or this one alone."""
    width = get_int(hf, "shared_intermediate_size", 1024)
    found = replace(_EXPERTS, shared=lambda hf, _: width)
    if get_count(hf, "num_local_experts", 8) > 0:
        return found(hf, config)
    return {"mlp_dim": width}


def _mixers(hf: HfConfig, config: ModelConfig) -> Fields:
    name = "layer_types"
    if hf.get(name) is None and hf.get("layers_block_type") is not None:
        name = "layers_block_type"
    kinds = hf.get(name)
    if kinds is None:
        kinds = ["linear_attention"] * config.num_layers
    if (
        not isinstance(kinds, list)
        or len(kinds) != config.num_layers
        or not all(kind in _MIXERS for kind in kinds)
    ):
        raise refusal(name, f"must have {config.num_layers} of {', '.join(_MIXERS)}", kinds)
    if hf.get("position_embedding_type") not in _POSITIONS:
        raise refusal(
            "position_embedding_type", "must be rope, nope or null", hf["position_embedding_type"]
        )
    is_rotated = hf.get("position_embedding_type") == "rope"
    mixers = tuple(_MIXERS[kind] for kind in kinds)
    positions = config.rope if is_rotated else None
    return {**with_mamba(hf, config, mixers), "rope": positions}


def _bases(hf: HfConfig, config: ModelConfig) -> Fields:
    """The fields for the positions of each layer: one base with a window, and one without."""
    bases = hf.get("layer_rope_theta")
    if bases is None or config.rope is None:
        return {}
    if (
        not isinstance(bases, list)
        or len(bases) != config.num_layers
        or not all(map(_is_base, bases))
    ):
        raise refusal(
            "layer_rope_theta",
            f"must be a list of {config.num_layers} numbers, 0 or from 1 on",
            bases,
        )
    of_types = {pair for pair in zip(has_windows(config), bases, strict=True) if pair[1]}
    if len(of_types) > len({has_window for has_window, _ in of_types}):
        raise refusal(
            "layer_rope_theta", "must have one number for all layers of a type beside 0", bases
        )
    ropes = [replace(config.rope, theta=float(base)) if base else None for base in bases]
    return {"rope": tuple(ropes)}


def _is_base(value: object) -> bool:
    return is_number(value) and (value == 0 or 1 <= value <= 1e12)


_NAMES = f"""
    {mamba("mamba")}
    shared_mlp.input_linear                             mlp.{{gate,up}}
    shared_mlp.output_linear                            mlp.down
    shared_mlp.input_linear                             shared.{{gate,up}}
    shared_mlp.output_linear                            shared.down
    block_sparse_moe.router.layer                       experts.router
    block_sparse_moe.input_linear.weight[{{expert}}]    experts.{{gate,up}}
    block_sparse_moe.output_linear.weight[{{expert}}]   experts.down
"""
GRANITES = (
    Family(
        "granitemoe",
        (ATTENTION_BIASES, FACTORS, Mixture("num_local_experts", (8, 2))),
        _NAMES,
        unread=OF_ROUTERS,
    ),
    Family(
        "granitemoeshared",
        (ATTENTION_BIASES, FACTORS, replace(_EXPERTS, shared=_shared)),
        _NAMES,
        unread=OF_ROUTERS,
    ),
    Family(
        "granitemoehybrid",
        (ATTENTION_BIASES, FACTORS, _mixers, _mlps),
        _NAMES,
        unread=OF_ROUTERS + "mamba_chunk_size",
    ),
    Family(
        "granite_swa",
        (
            BIASES,
            FACTORS,
            windows((False, True, True, True), 128),
            _bases,
            {"attention_sinks": True},
        ),
        "self_attn.sinks attention.sinks",
    ),
)
