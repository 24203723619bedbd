"""Mamba-2 as published: each layer is Mamba-2 alone, and there is no attention."""

from typing import NamedTuple

from orca_jax.model.families.family import Family
from orca_jax.model.families.names import mamba
from orca_jax.model.families.states.bamba import read_heads, read_step_limits
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_float,
    get_int,
    get_layers,
    refusal,
    token_ids,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LayerKind

_LONGEST = 262_144  # without a key, since transformers has none: the context of Codestral Mamba


class _Mamba2Shape(NamedTuple):
    """Layers of Mamba-2 alone."""

    def read(self, hf: HfConfig, family: str) -> ModelConfig:
        """Read the shape; raises as `FamilyShape.read`."""
        sizes = read_heads(hf, "", "state_size", read_step_limits(hf))
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
        number = get_layers(hf, "num_hidden_layers", 64)
        return ModelConfig(
            family=family,
            vocab_size=get_int(hf, "vocab_size", 32768),
            layers=(LayerKind(mixer="mamba", mlp="no_mlp"),) * number,
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
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            bos_token_id=first_token_id(hf, "bos_token_id"),
            residual="single",
            mamba=sizes,
        )


MAMBA2 = Family(
    "mamba2",
    names=f"""
    {mamba("mixer")}
    embeddings          embedding
    embedding           embedding       or
    norm_f              final_norm
    lm_head             head
    layers.{{layer}}    blocks
    norm                attention_norm
    """,
    shape=_Mamba2Shape(),
    prefixes=("backbone.", ""),
    unread=(
        "chunk_size rescale_prenorm_residual residual_in_fp32 rms_norm time_step_floor time_step_max time_step_min "
        "time_step_rank"
    ),
)
