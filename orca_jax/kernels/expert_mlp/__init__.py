"""The MLPs of experts: each token of a batch goes through a few of them."""

from orca_jax.kernels.expert_mlp.api import BACKENDS, expert_mlp
from orca_jax.kernels.expert_mlp.parts import ExpertBiases, ExpertKernels, KernelForm

__all__ = ["BACKENDS", "ExpertBiases", "ExpertKernels", "KernelForm", "expert_mlp"]
