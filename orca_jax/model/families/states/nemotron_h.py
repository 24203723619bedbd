"""Nemotron-H: each layer is one part alone, Mamba-2, attention without positions, an MLP or experts."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from orca_jax.model.families import llama
from orca_jax.model.families.base import Family, Weight, head, linear, rows_if, words
from orca_jax.model.families.experts import HARMLESS
from orca_jax.model.families.mixtures.sigmoid import GROUPED_KEYS, grouped_experts
from orca_jax.model.families.sizes import SIZES
from orca_jax.model.families.states.bamba import mamba_weights
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_conv_width,
    get_float,
    get_int,
    refusal,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MambaConfig, MixerName

_MLP, _MOE = "mlp", "moe"
_MIXERS: dict[str, MixerName] = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "mamba",
    "mamba": "mamba",
    _MLP: "no_mixer",
    _MOE: "no_mixer",
}  # by the kind of a layer; some names are those of older files
_LETTERS = {"M": "mamba", "*": "attention", "-": _MLP, "E": _MOE}


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Nemotron-H; raises `ConfigError` as `llama.config_from_hf` does."""
    kinds = _layer_kinds(hf)
    config = llama.read_shape(
        hf,
        "nemotron_h",
        defaults={**SIZES["nemotron_h"], "num_hidden_layers": len(kinds)},
        norm_eps=1e-5,
        norm_key="layer_norm_epsilon",
        activation=("mlp_hidden_act", "relu2"),
    )
    if config.tied_embeddings:
        raise refusal(
            "tie_word_embeddings", "must be false for nemotron_h, as transformers reads it", True
        )
    mixers = tuple(_MIXERS[kind] for kind in kinds)
    config = replace(
        config,
        gated_mlp=False,
        mlp_bias=get_bool(hf, "mlp_bias", False),
        residual="single",
        rope_pattern=(False,),
        mixer_pattern=mixers,
    )
    if "mamba" in mixers:
        config = replace(config, mamba=_read_mamba(hf))
    if _MOE not in kinds:
        return config
    fields = grouped_experts(hf, config, (8, 2, 7688))
    shared = get_int(hf, "moe_shared_expert_intermediate_size", 7688)
    experts = replace(fields["experts"], shared_dim=shared)
    if _MLP in kinds:
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _MLP)
        experts = replace(experts, dense_layers=layers, dense_dim=config.mlp_dim)
    return replace(config, **{**fields, "experts": experts})


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


def _read_mamba(hf: HfConfig) -> MambaConfig:
    heads = get_int(hf, "mamba_num_heads", 128)
    groups = get_int(hf, "n_groups", 8)
    if heads % groups:
        raise refusal("mamba_num_heads", f"must be a multiple of n_groups {groups}", heads)
    width = get_conv_width(hf, "conv_kernel", 4)
    return MambaConfig(
        num_heads=heads,
        head_dim=get_int(hf, "mamba_head_dim", 64),
        num_groups=groups,
        state_dim=get_int(hf, "ssm_state_size", 128),
        width=width,
        has_bias=get_bool(hf, "use_bias", False),
        has_conv_bias=get_bool(hf, "use_conv_bias", True),
        step_limits=(get_float(hf, "time_step_min", 0.001), math.inf),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. The layers of a parameter are those with its part."""
    mixer = "layers.{layer}.mixer"
    parts = {kind.mlp for kind in config.layer_kinds}
    attention = [
        replace(row, key=row.key.replace("self_attn", "mixer"))
        for row in llama.attention_weights(config)
    ]
    mlp = "mlp" if config.experts is None else "dense_mlp"
    return (
        Weight("embeddings.weight", "embedding.table"),
        Weight("layers.{layer}.norm.weight", "blocks.attention_norm.scale"),
        Weight("norm_f.weight", "final_norm.scale"),
        *head(config),
        *rows_if("attention" in config.mixers, *attention),
        *mamba_weights(config.mamba, mixer),
        *rows_if(mlp in parts, *_mlp_weights(mixer, f"blocks.{mlp}", config)),
        *rows_if(config.experts, *_expert_weights(mixer, config)),
    )


def _mlp_weights(key: str, path: str, config: ModelConfig) -> tuple[Weight, ...]:
    up = linear(f"{key}.up_proj", f"{path}.up", bias=config.mlp_bias)
    return *up, *linear(f"{key}.down_proj", f"{path}.down", bias=config.mlp_bias)


def _expert_weights(key: str, config: ModelConfig) -> tuple[Weight, ...]:
    expert = f"{key}.experts.{{expert}}"
    return (
        Weight(f"{key}.gate.weight", "blocks.mlp.router", transpose=True),
        Weight(f"{key}.gate.e_score_correction_bias", "blocks.mlp.choice_bias"),
        Weight(f"{expert}.up_proj.weight", "blocks.mlp.up", transpose=True),
        Weight(f"{expert}.down_proj.weight", "blocks.mlp.down", transpose=True),
        *_mlp_weights(f"{key}.shared_experts", "blocks.mlp.shared.mlp", config),
    )


NEMOTRON_H = Family(
    name="nemotron_h",
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
    config_from_hf=config_from_hf,
    keys=llama.KEYS - {"hidden_act", "rms_norm_eps"}
    | GROUPED_KEYS
    | words(
        "conv_kernel hybrid_override_pattern layer_norm_epsilon layers_block_type mamba_head_dim mamba_num_heads "
        "mlp_bias mlp_hidden_act moe_shared_expert_intermediate_size n_groups ssm_state_size time_step_min use_bias "
        "use_conv_bias"
    ),
    architectures=("NemotronHForCausalLM", "NemotronHModel"),
    weights=weights,
    prefixes=("backbone.", *llama.PREFIXES),
    ignored=re.compile(r"mtp\..*"),
    fixed={
        "attention_bias": (False, None),  # the projections have none, whatever it says
        "mamba_hidden_act": ("silu", None),
        "moe_latent_size": (None,),
        "sliding_window": (None,),
    },
    aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    harmless=HARMLESS
    | words(
        "chunk_size expand hidden_dropout mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap "
        "mtp_hybrid_override_pattern mtp_layers_block_type num_logits_to_keep num_nextn_predict_layers "
        "rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_limit time_step_max time_step_rank "
        "use_mamba_kernels"
    ),
)
