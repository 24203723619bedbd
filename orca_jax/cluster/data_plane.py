"""The data plane: the processes of `jax.distributed`, whose devices form one mesh.

Its connections are JAX's own. Only those of its coordinator can be authenticated, by mutual TLS.
"""

import ctypes
import os
import signal
from typing import Any

import jax

from orca_jax.cluster.messages import DataPlane
from orca_jax.cluster.sockets import place, resolve
from orca_jax.values.errors import ConfigError
from orca_jax.values.startup import ClusterConfig

# The leader's watch is quicker. These limits hold if its thread cannot run.
_HEARTBEAT_SECONDS = 10
_SHUTDOWN_SECONDS = 5
_START_SECONDS = 120


def join_data_plane(plane: DataPlane, config: ClusterConfig) -> None:
    """Join the other processes; all of them call this at the same time, before JAX opens its devices."""
    jax.config.update("jax_num_cpu_devices", plane.num_cpu_devices)
    # it would take the handler of SIGTERM
    jax.config.update("jax_enable_preemption_service", False)
    _end_with_a_status_of_its_own()
    jax.distributed.initialize(
        plane.coordinator,
        config.nnodes,
        config.node_rank,
        cluster_detection_method="deactivate",
        initialization_timeout=_START_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        coordinator_bind_address=place(resolve(config.master_addr), config.master_port + 2),
        **_mtls(config),
    )


def check_rank(config: ClusterConfig) -> None:
    """Refuse a rank or a number of hosts that the runtime of the devices does not share.

    On a TPU slice the runtime numbers the hosts itself. Stages and the leader use its numbers.

    Raises:
        ConfigError: they differ; `param` is "node_rank" or "nnodes".
    """
    if jax.process_count() != config.nnodes:
        message = (
            f"nnodes is {config.nnodes}, and the runtime of the devices has {jax.process_count()} hosts: "
            "start a process on each host of the slice, and give their number"
        )
        raise ConfigError(message, param="nnodes")
    if jax.process_index() != config.node_rank:
        message = (
            f"node_rank is {config.node_rank}, and the runtime of the devices calls this host "
            f"{jax.process_index()}: give each host its own number, on a TPU slice TPU_WORKER_ID"
        )
        raise ConfigError(message, param="node_rank")


def _mtls(config: ClusterConfig) -> dict[str, Any]:
    if config.mtls is None:
        return {}
    certificate, key, authorities = config.mtls
    return {
        "mtls_cert_file": certificate,
        "mtls_key_file": key,
        "mtls_ca_file": authorities,
        "verify_secure_credentials": True,
    }


def _end_with_a_status_of_its_own() -> None:
    """Make `abort` end the process with status 6, the number of its signal.

    JAX aborts a process that has lost the coordinator, often before this package's own watch has ended it. A shell or
    an engine around it would take the signal for a crash.
    """
    if os.name == "posix":
        library = ctypes.CDLL(None)
        library.signal(signal.SIGABRT, library._exit)
