"""An engine over several processes: the steps of its build on the leader, and those of a worker.

| leader | worker |
|---|---|
| wait for all workers, and welcome them | join |
| join the data plane | join the data plane |
| resolve the settings, from the least memory of all | report devices and memory |
| send the job, and build the own executor | build the executor of the job |
| wait until all have been built, and run the programs | run the programs |
| serve | follow |
"""

import os
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orca_jax.assembly.choices import DeviceChoices, choices_of, is_toy
from orca_jax.assembly.devices import Host, claim_shared_devices, devices_each, mesh_devices
from orca_jax.assembly.resolve import cache_directory
from orca_jax.assembly.support import Facts, check_support
from orca_jax.assembly.toy import toy_executor
from orca_jax.cluster.control import Lost
from orca_jax.cluster.executor import ClusterExecutor
from orca_jax.cluster.leader import Leader
from orca_jax.cluster.messages import (
    PROTOCOL,
    Build,
    DataPlane,
    ExecutorBuilt,
    Go,
    Hello,
    HostDevices,
    ModelJob,
    Serving,
    ToyJob,
    Welcome,
)
from orca_jax.cluster.version import own_code, own_version
from orca_jax.cluster.worker_link import WorkerLink
from orca_jax.exec.host import num_processors
from orca_jax.helpers.bundled import directory_of, with_commit
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_of
from orca_jax.values.startup import ClusterConfig, StartTimes
from orca_jax.values.step import Executor

if TYPE_CHECKING:
    import jax

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def hello_of(rank: int, nnodes: int, model: str) -> Hello:
    """The first message of this process."""
    return Hello(
        protocol=PROTOCOL,
        version=own_version(),
        code=own_code(),
        rank=rank,
        nnodes=nnodes,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        cores=num_processors(),
        has_devices=not is_toy(model),
    )


class LeaderBuild(Host):
    """The leader's steps of a build.

    Args:
        config: the configuration of the cluster.
        model: a setting of the engine.
        lost: called if a worker is lost.

    Raises:
        ConfigError: the address or the key file is wrong, or the model cannot be run by several processes.
    """

    def __init__(self, config: ClusterConfig, model: str, lost: Lost) -> None:
        check_support(Facts(EngineConfig(model), config.nnodes), "hosts")
        self._own = hello_of(config.node_rank, config.nnodes, model)
        self._leader = Leader(config, lost, has_devices=self._own.has_devices)
        self._hellos: list[Hello] = []
        self.num_hosts = config.nnodes

    def gather(self) -> None:
        """Wait for all workers."""
        self._hellos = self._leader.gather()
        if not self._own.has_devices:
            self._leader.welcome(self._hellos, None)

    def devices(self, facts: Facts) -> "list[jax.Device]":
        """Join the data plane; return the devices of all stages, those of each process together.

        Raises:
            ConfigError: the settings of parallelism do not fit the processes.
        """
        from orca_jax.cluster.data_plane import check_rank, join_data_plane
        from orca_jax.exec.memory import limit_threads

        all_hellos = [self._own, *self._hellos]
        sharing = Counter(hello.machine for hello in all_hellos)
        cores = min(max(1, hello.cores // sharing[hello.machine]) for hello in all_hellos)
        plane = DataPlane(self._leader.coordinator, devices_each(facts, cores))
        self._leader.welcome(self._hellos, plane)
        limit_threads(plane.num_cpu_devices)
        join_data_plane(plane, self._leader.config)
        devices = claim_shared_devices(facts)
        check_rank(self._leader.config)
        reports = self._leader.expect(HostDevices)
        _check_alike(reports, devices)
        self.free = _least_free(
            reports, [sharing[hello.machine] for hello in all_hellos], devices, facts.chosen.devices
        )
        return devices

    def share(self, job: ToyJob | ModelJob) -> None:
        """Make the workers build their executors."""
        self._leader.send_all(Build(job))

    def meet(self) -> None:
        """Wait until all processes may run programs together."""
        self._leader.expect(ExecutorBuilt)
        self._leader.send_all(Go())

    def close(self, status: int) -> None:
        """End the workers, since this process ends with a status."""
        self._leader.close(status)

    def lead(self, executor: Executor) -> ClusterExecutor:
        """Wait until all workers serve; return the executor of all processes."""
        self._leader.expect(Serving)
        self._leader.expect_plan_sockets()
        self._leader.serve()
        return ClusterExecutor(executor, self._leader)


def build_worker(
    link: WorkerLink, welcome: Welcome, config: EngineConfig, times: StartTimes
) -> Executor:
    """A worker's steps of a build: the executor of the leader's job.

    Raises:
        ConfigError: the model cannot be loaded here.
    """
    if welcome.data_plane is None:
        job = link.expect(Build).job
        assert isinstance(job, ToyJob), "a job without a data plane is a toy"
        link.send(ExecutorBuilt())
        link.expect(Go)
        return toy_executor(job)
    from orca_jax.assembly.executor import place_model, start_executor
    from orca_jax.cluster.data_plane import check_rank, join_data_plane
    from orca_jax.exec.memory import limit_threads

    def meet() -> None:
        link.send(ExecutorBuilt())
        link.expect(Go)

    limit_threads(welcome.data_plane.num_cpu_devices)
    join_data_plane(welcome.data_plane, link.config)
    own = _own_devices(choices_of(config).devices)
    check_rank(link.config)
    link.send(own)
    job = link.expect(Build).job
    assert isinstance(job, ModelJob), "a job with a data plane is a model"
    resolved = replace(job.config, compile_cache=cache_directory(config.compile_cache))
    placed = place_model(
        directory_of(with_commit(config, job.revision)) or config.model,
        job.model,
        dtype=resolved.dtype,
        load_format=job.load_format,
        seed=job.seed,
        devices=mesh_devices(
            resolved.tensor_parallel_size * resolved.pipeline_parallel_size, link.config.nnodes
        ),
        num_stages=resolved.pipeline_parallel_size,
    )
    return start_executor(placed, resolved, times, before_run=meet, has_bars=config.progress)


def _own_devices(wanted: DeviceChoices) -> HostDevices:
    import jax

    from orca_jax.exec.cache import free_bytes
    from orca_jax.exec.memory import claim_memory

    claim_memory(wanted.utilization)
    devices = jax.local_devices()
    free = free_bytes(devices, wanted.utilization) if wanted.needs_memory else 0
    return HostDevices(devices[0].device_kind, free)


def _check_alike(reports: list[HostDevices], devices: "list[jax.Device]") -> None:
    kinds = {each.kind for each in reports} | {one.device_kind for one in devices}
    if len(kinds) > 1:
        message = f"the processes have different devices ({', '.join(sorted(kinds))}); use hosts of one kind"
        raise ConfigError(message, param="nnodes")


def _least_free(
    reports: list[HostDevices],
    sharing: list[int],
    devices: "list[jax.Device]",
    wanted: DeviceChoices,
) -> int | None:
    """Bytes free on each device: the least of all processes. Those of one machine share the memory of a CPU."""
    if not wanted.needs_memory:
        return None
    on_cpu = platform_of(devices[0]).is_host
    found = zip([_own_devices(wanted), *reports], sharing, strict=True)
    return min(each.free_bytes // (number if on_cpu else 1) for each, number in found)


def _machine() -> str:
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
