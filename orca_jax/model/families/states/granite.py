"""Granite with experts, with a shared one beside them, with sinks, and Granite 4, whose layers mostly have Mamba-2.

The matrices of all experts of a layer are in one tensor, those to the gate before those beside it. Without experts the
shared one is the MLP.
"""

from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import JoinedPart, Weight, rows_if
from orca_jax.model.families.dense.near import BIASES, LlamaShape, biases, near_llama
from orca_jax.model.families.dense.scaled import FACTORS, granite_factors
from orca_jax.model.families.experts import HARMLESS, joined_experts, read_experts
from orca_jax.model.families.states.bamba import MAMBA_KEYS, mamba_weights, read_mamba
from orca_jax.model.families.values import HfConfig, get_count, get_int, is_number, refusal
from orca_jax.model.families.windows import windows_of_pattern
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MixerName

_MIXERS: dict[str, MixerName] = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "mamba",
    "mamba": "mamba",
}  # by the kind of a layer; two names are those of older files
_POSITIONS = (None, "nope", "rope")
_SINKS = Weight("layers.{layer}.self_attn.sinks", "blocks.attention.sinks")
_KEYS = FACTORS | {"attention_bias", "num_experts_per_tok", "num_local_experts"}


def _moe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    experts = read_experts(hf, "num_local_experts", (8, 2), is_normalised=True)
    return {**llama.attention_biases(hf), **granite_factors(hf), "experts": experts}


def _shared(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return _with_shared(_moe(hf, config), get_count(hf, "shared_intermediate_size", 0))


def _with_shared(fields: dict[str, Any], width: int) -> dict[str, Any]:
    return {**fields, "experts": replace(fields["experts"], shared_dim=width, shared_gate=False)}


def _hybrid(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    width = get_int(hf, "shared_intermediate_size", 1024)
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
    if get_count(hf, "num_local_experts", 8) > 0:
        fields = _with_shared(_moe(hf, config), width)
    else:
        fields = {**llama.attention_biases(hf), **granite_factors(hf), "mlp_dim": width}
    mixers = tuple(_MIXERS[kind] for kind in kinds)
    if "mamba" in mixers:
        fields["mamba"] = read_mamba(hf, config)
    return {
        **fields,
        "mixer_pattern": mixers,
        "rope_pattern": (hf.get("position_embedding_type") == "rope",),
    }


def _with_sinks(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """The fields for sinks, windows and the positions of each layer; those of a kind have one base."""
    windows = windows_of_pattern(
        hf, config.num_layers, config.max_positions, (False, True, True, True), 128
    )
    fields = {**windows._asdict(), "attention_sinks": True}
    bases = hf.get("layer_rope_theta")
    if bases is None or config.rope is None:
        return fields
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
    pattern = windows.window_pattern
    of_kinds = []
    for kind in (False, True):
        found = {
            base
            for layer, base in enumerate(bases)
            if base and pattern[layer % len(pattern)] is kind
        }
        if len(found) > 1:
            raise refusal(
                "layer_rope_theta", "must have one number for all layers of a type beside 0", bases
            )
        rope = config.rope
        if found:
            rope = replace(rope, theta=float(*found))
        of_kinds.append(rope)
    return {
        **fields,
        "rope": of_kinds[0],
        "windowed_rope": of_kinds[1],
        "rope_pattern": tuple(base != 0 for base in bases),
    }


def _is_base(value: object) -> bool:
    return is_number(value) and (value == 0 or 1 <= value <= 1e12)


def _mlp_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """The weights of experts and of the shared one."""
    experts = config.experts
    moe = "layers.{layer}.block_sparse_moe"
    if experts is None:
        return _joined_mlp("blocks.mlp", config.mlp_dim)
    return (
        Weight(f"{moe}.router.layer.weight", "blocks.mlp.router", transpose=True),
        *joined_experts(
            f"{moe}.input_linear.weight", f"{moe}.output_linear.weight", config.mlp_dim
        ),
        *rows_if(experts.shared_dim, *_joined_mlp("blocks.mlp.shared.mlp", experts.shared_dim)),
    )


def _joined_mlp(path: str, width: int) -> tuple[Weight, ...]:
    key = "layers.{layer}.shared_mlp"
    parts = [JoinedPart(index, (width, width)) for index in range(2)]
    return (
        Weight(f"{key}.input_linear.weight", f"{path}.gate.kernel", transpose=True, part=parts[0]),
        Weight(f"{key}.input_linear.weight", f"{path}.up.kernel", transpose=True, part=parts[1]),
        Weight(f"{key}.output_linear.weight", f"{path}.down.kernel", transpose=True),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    return (
        *llama.outer_weights(config),
        *rows_if("attention" in config.mixers, *llama.attention_weights(config)),
        *mamba_weights(config.mamba, "layers.{layer}.mamba"),
        *_mlp_weights(config),
    )


GRANITEMOE = near_llama(
    "granitemoe",
    "Granite 3 with experts",
    "GraniteMoe",
    LlamaShape(),
    _moe,
    _KEYS,
    weights,
    harmless=HARMLESS,
)
GRANITEMOESHARED = near_llama(
    "granitemoeshared",
    "Granite 3 with a shared expert",
    "GraniteMoeShared",
    LlamaShape(),
    _shared,
    _KEYS | {"shared_intermediate_size"},
    weights,
    harmless=HARMLESS,
)
GRANITEMOEHYBRID = near_llama(
    "granitemoehybrid",
    "Granite 4.0",
    "GraniteMoeHybrid",
    LlamaShape(),
    _hybrid,
    _KEYS
    | MAMBA_KEYS
    | {"layer_types", "layers_block_type", "position_embedding_type", "shared_intermediate_size"},
    weights,
    harmless=HARMLESS | {"mamba_chunk_size"},
)
_OF_WINDOWS = frozenset({"layer_rope_theta", "layer_types", "sliding_window"})
GRANITE_SWA = near_llama(
    "granite_swa",
    "Granite with windows",
    "GraniteSWA",
    LlamaShape(1e-5, is_tied=True),
    lambda hf, config: {**biases(hf), **granite_factors(hf), **_with_sinks(hf, config)},
    BIASES | FACTORS | _OF_WINDOWS,
    lambda config: (*llama.weights(config), _SINKS),
)
GRANITES = (GRANITEMOE, GRANITEMOESHARED, GRANITEMOEHYBRID, GRANITE_SWA)
