"""MiniMax: Mixtral with lightning attention in place of most layers' attention, and factors in residual connections."""

import re
from dataclasses import replace

from orca_jax.model.families import experts, llama
from orca_jax.model.families.base import Family, JoinedPart, Weight, linear, rows_if
from orca_jax.model.families.mixtures import mixtral
from orca_jax.model.families.values import HfConfig, get_float
from orca_jax.model.families.windows import read_layer_types
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MixerName, ResidualFactors, SumFactors

_FULL, _LINEAR = _TYPES = "full_attention", "linear_attention"
_MIXERS: dict[str, MixerName] = {_FULL: "attention", _LINEAR: "linear_attention"}
_FACTORS = {"full_attn": "attention", "linear_attn": "linear_attention", "mlp": "mlp"}
_QKV = ("query", "key", "value")  # the order of the rows of each head in one tensor


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of MiniMax; raises `ConfigError` as `llama.config_from_hf` does."""
    config = mixtral.MIXTRAL.config_from_hf(hf)
    kinds = read_layer_types(hf, config.num_layers, _TYPES)
    kinds = kinds or [_TYPES[layer % 2] for layer in range(config.num_layers)]
    return replace(
        config,
        family="minimax",
        mixer_pattern=tuple(_MIXERS[kind] for kind in kinds),
        residual="normed",
        residual_factors=ResidualFactors(
            **{ours: _factors(hf, theirs) for theirs, ours in _FACTORS.items()}
        ),
    )


def _factors(hf: HfConfig, name: str) -> SumFactors:
    return SumFactors(*(get_float(hf, f"{name}_{part}_factor", 1.0) for part in ("alpha", "beta")))


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    attention = "layers.{layer}.self_attn"
    heads = config.num_heads, (config.head_dim,) * 3
    linear_attention = (
        *(
            Weight(
                f"{attention}.qkv_proj.weight",
                f"blocks.linear_attention.{name}.kernel",
                transpose=True,
                part=JoinedPart(index, heads[1], groups=heads[0]),
            )
            for index, name in enumerate(_QKV)
        ),
        *linear(f"{attention}.output_gate", "blocks.linear_attention.gate", bias=False),
        Weight(f"{attention}.norm.weight", "blocks.linear_attention.norm.scale"),
        *linear(f"{attention}.out_proj", "blocks.linear_attention.out", bias=False),
    )
    return (
        *llama.outer_weights(config),
        *rows_if("attention" in config.mixers, *llama.attention_weights(config)),
        *rows_if("linear_attention" in config.mixers, *linear_attention),
        *mixtral.expert_weights(),
    )


MINIMAX = Family(
    name="minimax",
    models="MiniMax-Text-01 in the form of transformers",
    config_from_hf=config_from_hf,
    keys=mixtral.MIXTRAL.keys
    | {"layer_types"}
    | {f"{name}_alpha_factor" for name in _FACTORS}
    | {f"{name}_beta_factor" for name in _FACTORS},
    architectures=("MiniMaxForCausalLM", "MiniMaxModel"),
    weights=weights,
    prefixes=llama.PREFIXES,
    # Constants, computed here from the number of the layer.
    ignored=re.compile(
        rf"{llama.IGNORED.pattern}|(model\.)?layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"
    ),
    aliases=mixtral.MIXTRAL.aliases,
    harmless=experts.HARMLESS | {"block_size"},  # the number of tokens in one product
)
