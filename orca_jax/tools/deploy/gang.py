"""A replica of several ranks: the replica is the leader, and each worker is an actor in its placement group.

Ray ends the actors with the replica. The replica ends when it has lost one of them (docs/deployment.md, "Failures").
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.launch import free_ports
from orca_jax.link.worker import run_worker
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import EngineDeadError

CAUSE_SECONDS = 5.0  # for the leader's engine to report the reason, after the end of a rank


class Rank:
    """The actor of one worker. The worker runs in the process of the actor, and both end together."""

    def follow_leader(self, config: ServerConfig, keys: bytes) -> None:
        """Follow the leader until the end of this process.

        Raises:
            ConfigError: a setting is wrong, or the leader refuses this rank.
        """
        with tempfile.TemporaryFile() as file:  # has no name, so that nothing is left of it
            file.write(keys)
            file.seek(0)
            run_worker(dataclasses.replace(config, cluster_key_file=f"/dev/fd/{file.fileno()}"))


class Gang:
    """The workers of the replica in this process. Their actors live as long as this object.

    Attributes:
        config: the settings of the leader: an address of this host, free ports, and a file with new keys.
    """

    def __init__(self, config: ServerConfig) -> None:
        import ray

        self._directory = tempfile.TemporaryDirectory(prefix="orca-jax-")
        path = Path(self._directory.name, "cluster.key")
        make_key_file(path)
        address = ray.util.get_node_ip_address()
        self.config = dataclasses.replace(
            config,
            master_addr=address,
            master_port=free_ports(host=address),
            cluster_key_file=str(path),
        )
        self._actors = [_new_actor(rank) for rank in range(1, config.nnodes)]
        keys = path.read_bytes()
        self._ends = [
            actor.follow_leader.remote(dataclasses.replace(self.config, node_rank=rank), keys)
            for rank, actor in enumerate(self._actors, start=1)
        ]

    async def join[T](self, start: Awaitable[T]) -> T:
        """Await the leader's start, during which all ranks join. Raises as `started`."""
        try:
            return await started(start, self._ends)
        finally:
            self._directory.cleanup()  # each process has read the keys, or has ended


async def started[T](start: Awaitable[T], ends: Sequence[Awaitable[None]]) -> T:
    """Return the result of the leader's start.

    Args:
        start: the start of the leader; alone it waits for an ended rank until `load_timeout`.
        ends: the ends of the other ranks.

    Raises:
        EngineDeadError: a rank has ended before.
    """
    leader = asyncio.ensure_future(start)
    ranks = [asyncio.ensure_future(_reason(rank, end)) for rank, end in enumerate(ends, start=1)]
    try:
        await asyncio.wait((leader, *ranks), return_when=asyncio.FIRST_COMPLETED)
        if not leader.done():
            await asyncio.wait((leader,), timeout=CAUSE_SECONDS)
        if not leader.done():
            raise EngineDeadError(next(rank.result() for rank in ranks if rank.done()))
        return leader.result()
    finally:
        for each in (leader, *ranks):
            each.cancel()


async def _reason(rank: int, end: Awaitable[None]) -> str:
    """Wait for the end of a rank; return its reason."""
    try:
        await end
    except Exception as error:
        return f"rank {rank} of the replica has ended: {error}"
    return f"rank {rank} of the replica has ended"


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options of an actor for a whole bundle of a placement group."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": others}


def _new_actor(rank: int) -> Any:
    """An actor with the resources of its bundle of this replica's placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return (
        ray.remote(Rank)
        .options(**actor_options(group.bundle_specs[rank]), scheduling_strategy=place)
        .remote()
    )
