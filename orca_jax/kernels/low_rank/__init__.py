"""Low-rank additions to linear layers: each token has one of several adapters, or none."""

from orca_jax.kernels.low_rank.api import BACKENDS, low_rank
from orca_jax.kernels.low_rank.parts import SlotPlan, plan_slots

__all__ = ["BACKENDS", "SlotPlan", "low_rank", "plan_slots"]
