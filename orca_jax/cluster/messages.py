"""The messages between the leader and the workers of a cluster. Decoding a message never runs code from it.

Two sockets carry them. The control socket has everything but plans, from the first `Hello` on. The plan socket has the
calls of the executor in the leader's order: `Iteration`, `Allowed` and `Rest`.
"""

from collections.abc import Sequence

import msgspec

from orca_jax.cluster.digest import Digests
from orca_jax.values.checks import escaped
from orca_jax.values.config import ExecutorConfig, LoadFormat, ModelConfig
from orca_jax.values.errors import UNREADABLE, described
from orca_jax.values.request import TokenSet
from orca_jax.values.step import StepPlan

PROTOCOL = 10  # raise it with every change of a message


class InvalidMessageError(ValueError):
    """Bytes that are not a message of the cluster."""


class ClusterMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class: encoded as an array of the class name and the fields in order."""


class Hello(ClusterMessage, frozen=True):
    """Worker, the first message."""

    protocol: int
    version: str  # of the package
    code: str  # digest of the package's source; empty if there is none
    rank: int
    nnodes: int
    host: str
    machine: str  # equal for all processes of one machine
    pid: int
    cores: int
    has_devices: bool  # False for the toy


class Refused(ClusterMessage, frozen=True):
    """Leader: the process cannot join. `param` names the setting to change."""

    reason: str
    param: str | None = None


class DataPlane(ClusterMessage, frozen=True):
    """The settings of `jax.distributed`."""

    coordinator: str  # host:port
    num_cpu_devices: int  # of each process, on CPUs


class Welcome(ClusterMessage, frozen=True):
    """Leader, after all workers have arrived."""

    identity: bytes  # of the worker on the plan socket
    data_plane: DataPlane | None  # None for the toy


class HostDevices(ClusterMessage, frozen=True):
    """Worker, after JAX has found the devices of all processes."""

    kind: str
    free_bytes: int  # of each device, or of the host for each of its devices on a CPU


class ToyJob(ClusterMessage, frozen=True):
    """The sizes of a toy executor."""

    vocab_size: int
    num_pages: int
    page_size: int
    num_rows: int
    latency: float
    num_stages: int = 1


class ModelJob(ClusterMessage, frozen=True):
    """A model and the resolved settings of its executor. The place of its files is a setting of each process."""

    model: ModelConfig
    config: ExecutorConfig
    load_format: LoadFormat
    seed: int
    revision: str | None = None  # the commit of a model of the Hub


class Build(ClusterMessage, frozen=True):
    """Leader: build this executor."""

    job: ToyJob | ModelJob


class ExecutorBuilt(ClusterMessage, frozen=True):
    """Worker: weights and programs are there. The first runs, which all processes do together, may begin."""


class Go(ClusterMessage, frozen=True):
    """Leader: all processes have built their executors; run them."""


class Serving(ClusterMessage, frozen=True):
    """Worker: it waits for plans."""


class Report(ClusterMessage, frozen=True):
    """Worker, after an iteration: the digests of all calls and results so far, the newest included."""

    iteration: int
    digests: Digests


class WorkerBeat(ClusterMessage, frozen=True):
    """Worker, twice a second from its own thread."""

    num_begun: int  # iterations submitted to the devices
    num_done: int  # iterations with a read result
    still_seconds: float  # since the last progress, if there is work
    limit_seconds: float  # `still_seconds` of a worker that is stuck
    place: str  # the function in which its main thread is, if it has been there for long


class LeaderBeat(ClusterMessage, frozen=True):
    """Leader, twice a second from its own thread."""


class WorkerFailed(ClusterMessage, frozen=True):
    """Worker, the last message. With `is_config` a setting is wrong, and `param` names it."""

    reason: str
    param: str | None = None
    is_config: bool = False


class Stop(ClusterMessage, frozen=True):
    """Leader, the last message: end with this exit status."""

    status: int
    reason: str


class Iteration(ClusterMessage, frozen=True):
    """A plan, and the number of iterations whose results the leader had read before it."""

    plan: StepPlan
    num_collected: int


class Allowed(ClusterMessage, frozen=True):
    """The sets of allowed ids of the newest iteration: the bits of each, little-endian."""

    sets: list[bytes]


class Rest(ClusterMessage, frozen=True):
    """All iterations are collected, and there is no work."""


ToLeader = Hello | HostDevices | ExecutorBuilt | Serving | Report | WorkerBeat | WorkerFailed
ToWorker = Refused | Welcome | Build | Go | LeaderBeat | Stop
Call = Iteration | Allowed | Rest

_encoder = msgspec.msgpack.Encoder()
_to_leader = msgspec.msgpack.Decoder(ToLeader)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_call = msgspec.msgpack.Decoder(Call)


def encode(message: ClusterMessage) -> bytes:
    """Encode a message. Halves of surrogate pairs, as in the reason of a failure, are sent as their escapes."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))


def decode_to_leader(payload: bytes) -> ToLeader:
    """Decode a message of a worker. Raises InvalidMessageError for anything else."""
    return _decoded(_to_leader, payload)


def decode_to_worker(payload: bytes) -> ToWorker:
    """Decode a message of the leader on the control socket. Raises InvalidMessageError for anything else."""
    return _decoded(_to_worker, payload)


def decode_call(payload: bytes) -> Call:
    """Decode a message of the plan socket. Raises InvalidMessageError for anything else."""
    return _decoded(_call, payload)


def _decoded[T](decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except UNREADABLE as error:
        raise InvalidMessageError(described(error)) from None


def pack_sets(allowed: Sequence[TokenSet]) -> Allowed:
    """The message of sets of allowed ids, which are integers with a bit for each id."""
    return Allowed(
        [tokens.to_bytes((tokens.bit_length() + 7) // 8, "little") for tokens in allowed]
    )


def read_sets(message: Allowed) -> list[TokenSet]:
    """The sets of a message."""
    return [int.from_bytes(each, "little") for each in message.sets]
