"""A causal convolution of a few taps along the tokens of each request, each channel by itself."""

from orca_jax.kernels.short_conv.api import BACKENDS, short_conv

__all__ = ["BACKENDS", "short_conv"]
