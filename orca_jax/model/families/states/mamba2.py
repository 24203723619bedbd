"""Mamba-2 as published: each layer is Mamba-2 alone, and there is no attention."""

from typing import NamedTuple

from orca_jax.model.families.family import Family
from orca_jax.model.families.names import mamba
from orca_jax.model.families.states.bamba import read_step_limits
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_conv_width,
    get_float,
    get_int,
    get_layers,
    refusal,
    token_ids,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MambaConfig, RopeConfig

_LONGEST = 262_144  # without a key, since transformers has none: the context of Codestral Mamba


class _Mamba2Shape(NamedTuple):
    """Layers of Mamba-2 alone."""

    def read(self, hf: HfConfig, family: str) -> ModelConfig:
        """Read the shape; raises as `FamilyShape.read`."""
        sizes = _sizes(hf)
        embed = get_int(hf, "hidden_size", 4096)
        inner = get_int(hf, "expand", 2) * embed
        if sizes.values != inner:
            raise refusal(
                "num_heads",
                f"must have {inner} numbers in heads of {sizes.head_dim}",
                sizes.num_heads,
            )
        activation = get_activation(hf, "hidden_act", "silu")
        if activation != "silu":
            raise refusal("hidden_act", "must be silu for mamba2", hf.get("hidden_act"))
        return ModelConfig(
            family=family,
            vocab_size=get_int(hf, "vocab_size", 32768),
            num_layers=get_layers(hf, "num_hidden_layers", 64),
            embed_dim=embed,
            num_heads=sizes.num_heads,
            num_kv_heads=1,
            head_dim=1,  # see `only_counts_tokens`
            mlp_dim=0,
            max_positions=get_int(hf, "max_position_embeddings", _LONGEST),
            norm="rmsnorm",
            norm_eps=get_float(hf, "layer_norm_epsilon", 1e-5),
            activation=activation,
            gated_mlp=False,
            attention_bias=False,
            mlp_bias=False,
            tied_embeddings=get_bool(hf, "tie_word_embeddings", False),
            rope=RopeConfig(),
            rope_pattern=(False,),
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            bos_token_id=first_token_id(hf, "bos_token_id"),
            residual="single",
            mixer_pattern=("mamba",),
            mamba=sizes,
        )


def _sizes(hf: HfConfig) -> MambaConfig:
    heads = get_int(hf, "num_heads", 128)
    groups = get_int(hf, "n_groups", 8)
    if heads % groups:
        raise refusal("num_heads", f"must be a multiple of n_groups {groups}", heads)
    return MambaConfig(
        num_heads=heads,
        head_dim=get_int(hf, "head_dim", 64),
        num_groups=groups,
        state_dim=get_int(hf, "state_size", 128),
        width=get_conv_width(hf, "conv_kernel", 4),
        has_bias=get_bool(hf, "use_bias", False),
        has_conv_bias=get_bool(hf, "use_conv_bias", True),
        step_limits=read_step_limits(hf),
    )


MAMBA2 = Family(
    "mamba2",
    _Mamba2Shape(),
    names=f"""
    {mamba("mixer")}
    embeddings          embedding
    embedding           embedding       or
    norm_f              final_norm
    lm_head             head
    layers.{{layer}}    blocks
    norm                attention_norm
    """,
    prefixes=("backbone.", ""),
    unread=(
        "chunk_size rescale_prenorm_residual residual_in_fp32 rms_norm time_step_floor time_step_max time_step_min "
        "time_step_rank"
    ),
)
