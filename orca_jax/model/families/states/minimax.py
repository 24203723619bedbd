"""MiniMax: Mixtral with lightning attention in place of most layers' attention, and factors in residual connections."""

import re

from orca_jax.model.families.experts import OF_ROUTERS, Mixture
from orca_jax.model.families.family import IGNORED, Family
from orca_jax.model.families.fields import Fields
from orca_jax.model.families.names import MIXTRAL
from orca_jax.model.families.values import HfConfig, get_float
from orca_jax.model.families.windows import read_layer_types, window
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MixerName, ResidualFactors, SumFactors

_FULL, _LINEAR = _TYPES = "full_attention", "linear_attention"
_MIXERS: dict[str, MixerName] = {_FULL: "attention", _LINEAR: "linear_attention"}
_FACTORS = {"full_attn": "attention", "linear_attn": "linear_attention", "mlp": "mlp"}


def _mixers(hf: HfConfig, config: ModelConfig) -> Fields:
    kinds = read_layer_types(hf, config.num_layers, _TYPES)
    kinds = kinds or [_TYPES[layer % 2] for layer in range(config.num_layers)]
    return {"mixer": tuple(_MIXERS[kind] for kind in kinds)}


def _residuals(hf: HfConfig, config: ModelConfig) -> Fields:
    factors = {ours: _factors(hf, theirs) for theirs, ours in _FACTORS.items()}
    return {"residual": "normed", "residual_factors": ResidualFactors(**factors)}


def _factors(hf: HfConfig, name: str) -> SumFactors:
    return SumFactors(*(get_float(hf, f"{name}_{part}_factor", 1.0) for part in ("alpha", "beta")))


MINIMAX = Family(
    "minimax",
    (window(None), Mixture("num_local_experts", (8, 2)), _mixers, _residuals),
    MIXTRAL
    + """
    self_attn.qkv_proj      linear.{query,key,value}    by=heads
    self_attn.output_gate   linear.gate
    self_attn.norm          linear.norm
    self_attn.out_proj      linear.out
    """,
    # Constants, computed here from the number of the layer.
    ignored=re.compile(
        rf"{IGNORED}|(model\.)?layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"
    ),
    aliases={"num_experts": "num_local_experts"},
    unread=OF_ROUTERS + "block_size",  # the number of tokens in one product
)
