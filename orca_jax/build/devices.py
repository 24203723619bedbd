"""The devices of an engine, and the settings that they can honour."""

import logging
from typing import TYPE_CHECKING

from orca_jax.checks import did_you_mean
from orca_jax.config import GPU_MEMORY_UTILIZATION, EngineConfig, ModelConfig
from orca_jax.errors import ConfigError

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)


def claim_devices(config: EngineConfig, model: ModelConfig) -> "list[jax.Device]":
    """Return the devices of the mesh, and claim their memory.

    A CPU has one JAX device per core, since a loop of attention uses one core.

    Raises:
        ConfigError: there are fewer devices than wanted.
    """
    import jax

    from orca_jax.exec.host import num_processors
    from orca_jax.exec.memory import claim_memory
    from orca_jax.model.sharding import most_shards

    claim_memory(config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION)
    wanted, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    cores = num_processors()
    try:
        most = max(cores, (wanted or 1) * stages, jax.config.jax_num_cpu_devices)  # the program may have set more
        jax.config.update("jax_num_cpu_devices", most)
    except RuntimeError:  # a backend runs already, so the number of devices is fixed
        cores = min(cores, len(jax.devices("cpu")))
    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    if on_cpu and wanted is not None and wanted > cores:
        logger.warning(
            "tensor_parallel_size %d is more than the %d cores of this CPU: shards wait for each other; lower it or "
            "leave it out",
            wanted,
            cores,
        )
    size = wanted or (most_shards(model, max(1, min(cores, len(devices)) // stages)) if on_cpu else 1)
    if size * stages > len(devices):
        by_stages = f" and pipeline_parallel_size is {stages}" if stages > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size is {size}{by_stages}, but this process sees {len(devices)} {devices[0].platform} "
            f"devices; {'their product' if stages > 1 else 'it'} must not be more",
            param="tensor_parallel_size" if stages == 1 else "pipeline_parallel_size",
        )
    return devices[: size * stages]


def check_platform(config: EngineConfig, platform: str) -> None:
    """Refuse settings that the devices cannot honour. Raises ConfigError."""
    from orca_jax.kernels.ragged_attention import implementations

    known, chosen = implementations(platform), config.attention_implementation
    if chosen not in (None, *known):
        message = f"attention_implementation must be one of {', '.join(known)} on {platform} devices, got {chosen!r}"
        raise ConfigError(message + did_you_mean(chosen, known), param="attention_implementation")
    if platform == "cpu" and config.gpu_memory_utilization is not None:
        message = (
            "gpu_memory_utilization has no effect on a CPU, where the KV cache takes a fixed share of the free memory; "
            "leave it out, or give num_pages"
        )
        raise ConfigError(message, param="gpu_memory_utilization")
