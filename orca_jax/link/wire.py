"""The messages between the front end and the engine process, and their frames on one socket pair.

A frame is four bytes of length, big-endian, and one MessagePack value. Decoding a frame never runs code from it.
Text from a file may have halves of surrogate pairs, which UTF-8 does not have; `encode` writes their escapes instead.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from orca_jax.engine import EngineStats
from orca_jax.server_config import KvEvents
from orca_jax.values.checks import escaped
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import DEFAULT_URGENCY, RequestUpdate, SamplingParams, Urgency
from orca_jax.values.resumed import Resumed
from orca_jax.values.startup import ClusterConfig, EngineSummary
from orca_jax.values.step import ExecutorStats, SpannedPrompt

MAX_FRAME_BYTES = 256 * 2**20
_LENGTH = struct.Struct(">I")

Phase = Literal["loading", "compiling", "serving"]
PauseMode = Literal["abort", "wait", "keep"]
SleepTag = Literal["weights", "kv_cache"]
"""The open requests of a pause end with the reason "abort", finish, or are kept until it ends."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class: encoded as an array of the class name and the fields in order."""


class Start(Message, frozen=True):
    """Front end, the first message: build this engine."""

    config: EngineConfig
    # begin of the start on the system's monotonic clock; None: when the engine reads this
    begun: float | None = None
    kv_events: KvEvents | None = None  # None: the engine publishes no events of its prefix cache
    # of an engine over several processes, which this one leads
    cluster: ClusterConfig | None = None
    explains: bool = False  # keep in mind which pages the prefix cache gives up


class Submit(Message, frozen=True):
    """Front end: queue a request."""

    request_id: str
    prompt_ids: list[int] | SpannedPrompt  # an array of ids; or a map, with the vector spans
    params: SamplingParams
    urgency: Urgency = DEFAULT_URGENCY
    adapter: str | None = None  # name of a loaded adapter
    # another request of the same call follows; no iteration is planned before it has come
    has_more: bool = False
    resumed: Resumed | None = None  # what the engine before this one has delivered


class Abort(Message, frozen=True):
    """Front end: end a request; its further updates are ignored."""

    request_id: str


class Watch(Message, frozen=True):
    """Front end: send `Iterations` from now on, or no more of them. Each `Watch(True)` also sends a `LiveStart`."""

    is_on: bool


class LoadAdapter(Message, frozen=True):
    """Read an adapter and make it available to requests."""

    name: str
    path: str


class UnloadAdapter(Message, frozen=True):
    """Refuse an adapter to new requests."""

    name: str


class ReadWeights(Message, frozen=True):
    """Check and read new weights, after those of the calls before."""

    source: str  # path of a checkpoint
    version: int | None = None  # of the new weights; None: the next number


class ReplaceWeights(Message, frozen=True):
    """Use the weights that were read, and answer then. Requests sent before it end with the old ones."""

    aborts: bool = False  # abort the requests sent before, instead of waiting for their end


class ForgetPrefixes(Message, frozen=True):
    """Empty the prefix cache of the devices."""


class Pause(Message, frozen=True):
    """Let new requests wait, and answer when the pause has begun; see `link/changes/pauses.py`."""

    mode: PauseMode
    clear_cache: bool = True  # empty the prefix cache when no request is left


class Resume(Message, frozen=True):
    """End the pause."""


class Sleep(Message, frozen=True):
    """Free the devices, after a pause; see `link/changes/sleep.py`."""

    level: int


class WakeUp(Message, frozen=True):
    """Put back what these tags name; the pause ends when nothing sleeps."""

    tags: tuple[SleepTag, ...]


EngineChange = (
    LoadAdapter
    | UnloadAdapter
    | ReadWeights
    | ReplaceWeights
    | ForgetPrefixes
    | Pause
    | Resume
    | Sleep
    | WakeUp
)


class EngineCall(Message, frozen=True):
    """Front end: make a change, and send an `EngineAnswer` with this number."""

    number: int
    change: EngineChange


class Leave(Message, frozen=True):
    """Front end: the server ends in order. A closed socket without it means that the front end was killed."""


class Ready(Message, frozen=True):
    """Engine, once: it serves. The fields describe the model to the front end."""

    source: str  # the model's directory; empty for a preset
    tokenizer: str  # for `load_tokenizer`
    vocab_size: int
    max_model_len: int  # prompt and generated tokens of one request
    n_slots: int  # tokens in the KV cache that may be reserved at once, also by one request
    num_rows: int  # requests that can run at once
    # results of the attention kernels by implementation; empty if none were tested
    self_tests: dict[str, str] = {}
    summary: EngineSummary | None = None
    adapters: tuple[str, ...] = ()  # names of those loaded at the start
    # fields of `Urgency`, and "predicted", that scheduler and order may read
    reads: frozenset[str] = frozenset()


class EngineAnswer(Message, frozen=True):
    """Engine: the change of an `EngineCall` is made, or was refused."""

    number: int
    error: str | None = None  # the reason for refusing
    param: str | None = None
    note: str = ""  # on an adapter that was loaded in part
    version: int = 0  # of the weights in use, after `ReplaceWeights`


class Rejected(Message, frozen=True):
    """Engine: a request is refused, since it could never run."""

    request_id: str
    message: str
    param: str | None


class Updates(Message, frozen=True):
    """Engine, after an iteration: its updates, and the numbers of requests left."""

    updates: list[RequestUpdate]
    running: int
    waiting: int
    weight_version: int = 0  # of the weights that made all of these updates


class Iterations(Message, frozen=True):
    """Engine, while it is watched: lines of JSON of a `LiveTimeline`, each ended by a line feed."""

    lines: bytes


class Heartbeat(Message, frozen=True):
    """Engine, twice a second from its own thread, from the start on: it is alive."""

    phase: Phase
    busy_seconds: float  # since the main thread last made progress; 0 while it waits for work
    engine: EngineStats | None = None  # None before the engine serves
    executor: ExecutorStats | None = None
    limit_seconds: float = 0.0  # `busy_seconds` of a serving engine that hangs
    place: str = ""  # the function in which the main thread is, if it has been there for long


class Failed(Message, frozen=True):
    """Engine, the last message: it cannot continue. With `is_config` a setting is wrong, and `param` names it."""

    message: str
    param: str | None = None
    is_config: bool = False
    is_cluster: bool = False  # another process of the cluster was lost


FromFrontEnd = Submit | Abort | Watch | EngineCall
ToEngine = Start | Leave | FromFrontEnd
FromEngine = Ready | EngineAnswer | Rejected | Updates | Iterations | Heartbeat | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Message) -> bytes:
    """Encode a message as a frame.

    Raises:
        ValueError: the message exceeds `MAX_FRAME_BYTES`.
    """
    try:
        payload = _encoder.encode(message)
    except UnicodeEncodeError:
        payload = _encoder.encode(escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is too long for the engine's socket")
    return _LENGTH.pack(len(payload)) + payload


def sender(connection: socket.socket) -> Callable[[Message], None]:
    """A function that sends a message. Several threads may call it."""
    lock = threading.Lock()  # keeps the frames of two threads apart

    def send(message: Message) -> None:
        frame = encode(message)
        with lock:
            connection.sendall(frame)

    return send


def received(connection: socket.socket) -> Iterator[ToEngine]:
    """The messages to the engine, until the connection closes.

    Raises:
        ValueError: a message is wrong or too long.
    """
    frames = FrameReader()
    while data := connection.recv(1 << 18):
        yield from map(decode_to_engine, frames.feed(data))


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads of the frames completed by `data`.

        Raises:
            ValueError: a frame announces more than `MAX_FRAME_BYTES`.
        """
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes is too long")
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[at + _LENGTH.size : end])
            at = end
        del buffer[:at]


def decode_to_engine(payload: bytes) -> ToEngine:
    """Decode a message of the front end. Raises `msgspec.ValidationError` for anything else."""
    return _to_engine.decode(payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Decode a message of an engine. Raises `msgspec.ValidationError` for anything else."""
    return _from_engine.decode(payload)
