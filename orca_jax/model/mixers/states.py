"""The table of mixers with states."""

from collections.abc import Mapping

from orca_jax.model.mixers import delta_rule, linear_attention, mamba, short_conv
from orca_jax.model.mixers.base import StateKind
from orca_jax.values.layer_config import MixerName

STATES: Mapping[MixerName, StateKind] = {
    "short_conv": short_conv.STATE,
    "linear_attention": linear_attention.STATE,
    "delta_rule": delta_rule.STATE,
    "mamba": mamba.STATE,
    "attention_mamba": mamba.STATE,
}
"""By mixer. The layers of a mixer are one group, since their states have the same shapes."""
