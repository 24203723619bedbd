"""The roll of a cluster: the processes that have joined, and the reasons for refusing others."""

import threading
from dataclasses import dataclass

from orca_jax.cluster.messages import PROTOCOL, Hello, Refused
from orca_jax.cluster.version import own_code, own_version


@dataclass(frozen=True)
class _Joined:
    """A worker, its name on the control socket, and the descriptor of its connection."""

    identity: bytes
    descriptor: int
    hello: Hello


class Roll:
    """The workers that have joined. The watching thread changes it, and the main thread reads it.

    Args:
        nnodes: processes of the cluster, the leader included.
        has_devices: False for the toy.

    Attributes:
        changed: set when a worker has joined.
    """

    def __init__(self, nnodes: int, *, has_devices: bool) -> None:
        self.changed = threading.Event()
        self._nnodes = nnodes
        self._has_devices = has_devices
        self._joined: dict[int, _Joined] = {}  # by rank
        self._is_closed = False
        self._lock = threading.Lock()

    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        with self._lock:
            return [rank for rank in range(1, self._nnodes) if rank not in self._joined]

    def close(self) -> list[Hello] | None:
        """Admit no more processes. Return the first messages by rank; None if a worker has left meanwhile."""
        with self._lock:
            self._is_closed = len(self._joined) == self._nnodes - 1
            if not self._is_closed:
                return None
            return [self._joined[rank].hello for rank in sorted(self._joined)]

    def join(self, identity: bytes, descriptor: int, hello: Hello) -> Refused | None:
        """Add a worker, or return the reason for refusing it."""
        with self._lock:
            refusal = self._refusal(hello)
            if refusal is None:
                self._joined[hello.rank] = _Joined(identity, descriptor, hello)
                self.changed.set()
            return refusal

    def leave(self, descriptor: int) -> int | None:
        """Note the end of a connection; return the rank of a lost worker. Before `close`, another one may come."""
        with self._lock:
            ranks = [rank for rank, each in self._joined.items() if each.descriptor == descriptor]
            if ranks and not self._is_closed:
                del self._joined[ranks[0]]
            if ranks and self._is_closed:
                return ranks[0]
            return None

    def name(self, rank: int) -> str:
        """The name of a worker for messages."""
        hello = self._joined[rank].hello
        return f"worker {rank} ({hello.host}, process {hello.pid})"

    def rank_of(self, identity: bytes) -> int | None:
        """The rank of a worker by its name on the control socket."""
        return next(
            (rank for rank, each in self._joined.items() if each.identity == identity), None
        )

    def identity(self, rank: int) -> bytes:
        """The name of a worker on the control socket."""
        return self._joined[rank].identity

    def identities(self) -> list[bytes]:
        """The names of all workers on the control socket."""
        return [each.identity for each in tuple(self._joined.values())]

    def _refusal(self, hello: Hello) -> Refused | None:
        rank = hello.rank
        if hello.protocol != PROTOCOL or hello.version != own_version():
            theirs = f"{hello.version} (protocol {hello.protocol})"
            ours = f"{own_version()} (protocol {PROTOCOL})"
            return Refused(
                f"worker {rank} has version {theirs}, and the leader {ours}; install the same on all hosts"
            )
        if hello.code != own_code():
            return Refused(
                f"the code of worker {rank} differs from the leader's; install the same on all hosts"
            )
        if hello.nnodes != self._nnodes:
            return Refused(
                f"worker {rank} has {hello.nnodes} nodes, and the leader {self._nnodes}", "nnodes"
            )
        if not 1 <= rank < self._nnodes:
            return Refused(f"rank {rank} is not in 1..{self._nnodes - 1}", "node_rank")
        if hello.has_devices != self._has_devices:
            return Refused(f"worker {rank} and the leader have different models", "model")
        other = self._joined.get(rank)
        if other is not None:
            end = "; it is complete, so start all processes again" if self._is_closed else ""
            where = f"{other.hello.host}, process {other.hello.pid}"
            return Refused(
                f"rank {rank} has joined the cluster already ({where}){end}", "node_rank"
            )
        return None
