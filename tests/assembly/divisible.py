"""The refusal of devices that cannot share a model."""

from orca_jax.assembly.support import Facts, check_support
from orca_jax.values.config import EngineConfig, ModelConfig


def check_divisible(model: ModelConfig, shards: int) -> None:
    """Refuse numbers of devices that cannot share a model, as an engine does."""
    check_support(Facts(EngineConfig(), model=model, shards=shards, num_devices=shards), "devices")
