"""Nemotron-H: each layer is one part alone, Mamba-2, attention without positions, an MLP or experts."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from orca_jax.model.families.experts import OF_ROUTERS, grouped_experts
from orca_jax.model.families.family import PREFIXES, Family
from orca_jax.model.families.fields import Fields, flag
from orca_jax.model.families.names import mamba
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.states.bamba import read_heads
from orca_jax.model.families.values import HfConfig, get_float, get_int, refusal
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MixerName

_MLP, _MOE = "mlp", "moe"
_MIXERS: dict[str, MixerName] = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "mamba",
    "mamba": "mamba",
    _MLP: "no_mixer",
    _MOE: "no_mixer",
}  # by the kind of a layer; some names are of older files
_LETTERS = {"M": "mamba", "*": "attention", "-": _MLP, "E": _MOE}


class _NemotronShape(NamedTuple):
    """The shape of Nemotron-H, with as many layers as kinds."""

    sizes: LlamaShape = LlamaShape("layer_norm_epsilon", "relu2", activation_key="mlp_hidden_act")

    def read(self, hf: HfConfig, family: str) -> ModelConfig:
        """Read the shape; raises as `FamilyShape.read`."""
        config = self.sizes.read(hf, family, num_hidden_layers=len(_layer_kinds(hf)))
        if config.tied_embeddings:
            raise refusal(
                "tie_word_embeddings",
                "must be false for nemotron_h, as transformers reads it",
                True,
            )
        return config


def _mixers(hf: HfConfig, config: ModelConfig) -> Fields:
    mixers = tuple(_MIXERS[kind] for kind in _layer_kinds(hf))
    mlps = tuple("mlp" if mixer == "no_mixer" else "no_mlp" for mixer in mixers)
    if "mamba" not in mixers:
        return {"mixer": mixers, "mlp": mlps}
    limits = (get_float(hf, "time_step_min", 0.001), math.inf)
    sizes = read_heads(hf, "mamba_", "ssm_state_size", limits)
    return {"mixer": mixers, "mlp": mlps, "mamba": sizes}


def _dense(hf: HfConfig, config: ModelConfig) -> tuple[int, ...]:
    """The layers with an MLP."""
    return tuple(layer for layer, kind in enumerate(_layer_kinds(hf)) if kind == _MLP)


def _experts(hf: HfConfig, config: ModelConfig) -> Fields:
    """The experts, if some layers have them; the width of the shared one has a key of its own."""
    if _MOE not in _layer_kinds(hf):
        return {}
    found = grouped_experts((8, 2, 7688), _dense)(hf, config)
    shared = get_int(hf, "moe_shared_expert_intermediate_size", 7688)
    return {**found, "experts": replace(found["experts"], shared_dim=shared)}


def _layer_kinds(hf: HfConfig) -> Sequence[str]:
    """The kind of each layer: from a list of names, or from a text of letters in older files."""
    letters = hf.get("hybrid_override_pattern")
    kinds = hf.get("layers_block_type")
    if kinds is None and letters is not None:
        if not isinstance(letters, str) or not letters or not _LETTERS.keys() >= {*letters}:
            raise refusal(
                "hybrid_override_pattern", f"must have the letters {' '.join(_LETTERS)}", letters
            )
        kinds = [_LETTERS[letter] for letter in letters]
    if kinds is None:
        kinds = ["linear_attention", _MOE, "full_attention", _MLP]
    if not isinstance(kinds, list) or not kinds or not all(kind in _MIXERS for kind in kinds):
        raise refusal("layers_block_type", f"must be a list of {', '.join(_MIXERS)}", kinds)
    if hf.get("num_hidden_layers") not in (None, len(kinds)):
        raise refusal(
            "num_hidden_layers",
            f"must be {len(kinds)}, the number of kinds",
            hf["num_hidden_layers"],
        )
    return kinds


NEMOTRON_H = Family(
    "nemotron_h",
    (
        {
            "gated_mlp": False,
            "mlp_bias": flag("mlp_bias"),
            "residual": "single",
            "rope": None,
        },
        _mixers,
        _experts,
    ),
    f"""
    {mamba("mixer")}
    embeddings                                      embedding
    norm_f                                          final_norm
    lm_head                                         head
    layers.{{layer}}                                blocks
    norm                                            attention_norm
    mixer.{{q,k,v,o}}_proj                          attention.{{query,key,value,out}}
    mixer.{{up,down}}_proj                          mlp.{{up,down}}
    mixer.gate                                      experts.router
    mixer.gate.e_score_correction_bias              experts.choice_bias
    mixer.experts.{{expert}}.{{up,down}}_proj       experts.{{up,down}}
    mixer.shared_experts.{{up,down}}_proj           shared.{{up,down}}
    """,
    shape=_NemotronShape(),
    prefixes=("backbone.", *PREFIXES),
    ignored=re.compile(r"mtp\..*"),
    fixed={
        "attention_bias": (False, None),  # the projections have none, whatever it says
        "mamba_hidden_act": ("silu", None),
        "moe_latent_size": (None,),
        "sliding_window": (None,),
    },
    aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    unread=OF_ROUTERS
    + (
        "chunk_size expand hidden_dropout mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap "
        "mtp_hybrid_override_pattern mtp_layers_block_type num_logits_to_keep num_nextn_predict_layers "
        "rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_limit time_step_max time_step_rank "
        "use_mamba_kernels"
    ),
)
