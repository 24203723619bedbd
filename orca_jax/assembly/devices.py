"""The processes of an engine, as its build sees them, and their devices."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from orca_jax.assembly.support import Facts, check_support
from orca_jax.cluster.messages import ModelJob, ToyJob
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_of
from orca_jax.values.step import Executor

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)


class Host:
    """The steps of a build that differ between one process, as here, and several, in the order of their calls.

    Attributes:
        num_hosts: number of processes.
        free: bytes free on each device; None if nothing needs them, or if they are measured in this process.
    """

    num_hosts = 1
    free: int | None = None

    def gather(self) -> None:
        """Wait for the other processes."""

    def devices(self, facts: Facts) -> "list[jax.Device]":
        """Return the devices of all stages, with their memory claimed. Raises ConfigError if there are too few."""
        return claim_devices(facts)

    def share(self, job: ToyJob | ModelJob) -> None:
        """Make the other processes build their parts."""

    def meet(self) -> None:
        """Wait until all processes may run programs together."""

    def lead(self, executor: Executor) -> Executor:
        """Return the executor of all processes, when they serve."""
        return executor


ONE_HOST = Host()


def claim_devices(facts: Facts) -> "list[jax.Device]":
    """Return the devices of the mesh, and claim their memory.

    A CPU has one JAX device per core, since a loop of attention by XLA uses one core.

    Raises:
        ConfigError: there are fewer devices than wanted.
    """
    import jax

    from orca_jax.exec.host import num_processors
    from orca_jax.exec.memory import claim_memory, limit_threads
    from orca_jax.model.sharding import most_shards

    wanted = facts.chosen.devices
    claim_memory(wanted.utilization)
    tensor = wanted.tensor
    stages = wanted.stages
    cores = num_processors()
    try:
        # the program may have set more
        most = max(cores, (tensor or 1) * stages, jax.config.jax_num_cpu_devices)
        jax.config.update("jax_num_cpu_devices", most)
        limit_threads(most)
    except RuntimeError:  # a backend runs already, so the number of devices is fixed
        cores = min(cores, len(jax.devices("cpu")))
    devices = jax.local_devices()
    on_cpu = platform_of(devices[0]).is_host
    if on_cpu and tensor is not None and tensor > cores:
        logger.warning(
            "tensor_parallel_size %d is more than the %d cores of this CPU: shards wait for each other; lower it or "
            "leave it out",
            tensor,
            cores,
        )
    size = tensor or (
        most_shards(facts.known, max(1, min(cores, len(devices)) // stages)) if on_cpu else 1
    )
    platform = devices[0].platform
    number = len(devices)
    check_support(replace(facts, platform=platform, shards=size, num_devices=number), "devices")
    return devices[: size * stages]


def devices_of_library(
    devices: "list[jax.Device]", model: ModelConfig, stages: int
) -> "list[jax.Device]":
    """Return those of the devices of one process that share a model multiplied by the library in C.

    It is one for each socket in each stage: threads that take blocks as they come do not wait for each other as devices
    with equal parts do (docs/decisions.md).
    """
    from orca_jax.exec.host import num_sockets
    from orca_jax.model.sharding import most_shards

    return devices[: most_shards(model, min(num_sockets(), len(devices) // stages)) * stages]


def devices_each(facts: Facts, most: int) -> int:
    """Return the number of devices of each process: at most `most`, as many as can share the model.

    Raises:
        ConfigError: the settings do not give equal numbers to all processes.
    """
    from orca_jax.model.sharding import can_share

    nnodes = facts.num_hosts
    stages = facts.stages
    tensor = facts.chosen.devices.tensor
    if tensor is None:
        sizes = range(1, max(1, most * nnodes // stages) + 1)
        fitting = [
            size for size in sizes if size * stages % nnodes == 0 and can_share(facts.known, size)
        ]
        tensor = max(fitting, default=ceil_div(nnodes, stages))
    check_support(replace(facts, shards=tensor), "devices")
    return tensor * stages // nnodes


def claim_shared_devices(facts: Facts) -> "list[jax.Device]":
    """Return the devices of a mesh over all processes, and claim the memory of this process's devices.

    Raises:
        ConfigError: a process has fewer devices than wanted.
    """
    import jax

    from orca_jax.exec.memory import claim_memory

    claim_memory(facts.chosen.devices.utilization)
    own = jax.local_devices()
    known = replace(facts, device_kind=own[0].device_kind, num_devices=len(own))
    return mesh_devices(facts.num_hosts * devices_each(known, len(own)), facts.num_hosts)


def mesh_devices(size: int, nnodes: int) -> "list[jax.Device]":
    """Return the first devices of each process: equal numbers, `size` in all.

    Those of process 0, which leads, are the last: the last stage of a pipeline has the tokens.

    Raises:
        ConfigError: a process has fewer devices.
    """
    import jax

    found: list[jax.Device] = []
    for rank in (*range(1, nnodes), 0):
        devices = sorted(
            (one for one in jax.devices() if one.process_index == rank), key=lambda one: one.id
        )
        if len(devices) < size // nnodes:
            raise ConfigError(
                f"{size} devices are wanted in all, so each of {nnodes} processes needs {size // nnodes}, and process "
                f"{rank} has {len(devices)}",
                param="tensor_parallel_size",
            )
        found += devices[: size // nnodes]
    return found
