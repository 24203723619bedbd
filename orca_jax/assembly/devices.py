"""The processes of an engine, as its build sees them, and their devices."""

import logging
from typing import TYPE_CHECKING, Protocol

from orca_jax.assembly.support import Facts, check_support
from orca_jax.cluster.messages import ModelJob, ToyJob
from orca_jax.config import GPU_MEMORY_UTILIZATION, EngineConfig, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.step import Executor

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)


class Host(Protocol):
    """The steps of a build that differ between one process and several, in the order of their calls.

    Attributes:
        num_hosts: number of processes.
        free: bytes free on each device; None if nothing needs them, or if they are measured in this process.
    """

    num_hosts: int
    free: int | None

    def gather(self) -> None:
        """Wait for the other processes."""
        ...

    def devices(self, config: EngineConfig, model: ModelConfig) -> "list[jax.Device]":
        """Return the devices of all stages. Raises ConfigError if the settings of parallelism do not fit them."""
        ...

    def share(self, job: ToyJob | ModelJob) -> None:
        """Make the other processes build their parts."""
        ...

    def meet(self) -> None:
        """Wait until all processes may run programs together."""
        ...

    def lead(self, executor: Executor) -> Executor:
        """Return the executor of all processes, when they serve."""
        ...


class OneHost:
    """A process that builds the whole engine."""

    num_hosts = 1
    free: int | None = None

    def gather(self) -> None:
        """Do nothing: there is no other process."""

    def devices(self, config: EngineConfig, model: ModelConfig) -> "list[jax.Device]":
        """Return devices of this process, with their memory claimed. Raises ConfigError if there are too few."""
        return claim_devices(config, model)

    def share(self, job: ToyJob | ModelJob) -> None:
        """Do nothing: there is no other process."""

    def meet(self) -> None:
        """Do nothing: there is no other process."""

    def lead(self, executor: Executor) -> Executor:
        """Return the executor itself."""
        return executor


ONE_HOST = OneHost()


def claim_devices(config: EngineConfig, model: ModelConfig) -> "list[jax.Device]":
    """Return the devices of the mesh, and claim their memory.

    A CPU has one JAX device per core, since a loop of attention uses one core.

    Raises:
        ConfigError: there are fewer devices than wanted.
    """
    import jax

    from orca_jax.exec.host import num_processors
    from orca_jax.exec.memory import claim_memory, limit_threads
    from orca_jax.model.sharding import most_shards

    claim_memory(config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION)
    wanted, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    cores = num_processors()
    try:
        most = max(cores, (wanted or 1) * stages, jax.config.jax_num_cpu_devices)  # the program may have set more
        jax.config.update("jax_num_cpu_devices", most)
        limit_threads(most)
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
    platform, number = devices[0].platform, len(devices)
    check_support(Facts(config, model=model, platform=platform, shards=size, num_devices=number), "devices")
    return devices[: size * stages]


def devices_each(config: EngineConfig, model: ModelConfig, most: int, nnodes: int) -> int:
    """Return the number of devices of each process: at most `most`, as many as can share the model.

    Raises:
        ConfigError: the settings do not give equal numbers to all processes.
    """
    from orca_jax.model.sharding import can_share

    stages, wanted = config.pipeline_parallel_size, config.tensor_parallel_size
    if wanted is None:
        sizes = range(1, max(1, most * nnodes // stages) + 1)
        fitting = [size for size in sizes if size * stages % nnodes == 0 and can_share(model, size)]
        if fitting:
            return max(fitting) * stages // nnodes
        wanted = -(-nnodes // stages)
    check_support(Facts(config, nnodes, model, shards=wanted), "devices")
    return wanted * stages // nnodes


def claim_shared_devices(config: EngineConfig, model: ModelConfig, nnodes: int) -> "list[jax.Device]":
    """Return the devices of a mesh over all processes, and claim the memory of this process's devices.

    Raises:
        ConfigError: a process has fewer devices than wanted.
    """
    import jax

    from orca_jax.exec.memory import claim_memory

    claim_memory(config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION)
    local = len(jax.local_devices())
    return mesh_devices(nnodes * devices_each(config, model, local, nnodes), nnodes)


def mesh_devices(size: int, nnodes: int) -> "list[jax.Device]":
    """Return the first devices of each process: equal numbers, `size` in all.

    Those of process 0, which leads, are the last: the last stage of a pipeline has the tokens.

    Raises:
        ConfigError: a process has fewer devices.
    """
    import jax

    found: list[jax.Device] = []
    for rank in (*range(1, nnodes), 0):
        devices = sorted((one for one in jax.devices() if one.process_index == rank), key=lambda one: one.id)
        if len(devices) < size // nnodes:
            raise ConfigError(
                f"{size} devices are wanted in all, so each of {nnodes} processes needs {size // nnodes}, and process "
                f"{rank} has {len(devices)}",
                param="tensor_parallel_size",
            )
        found += devices[: size // nnodes]
    return found
