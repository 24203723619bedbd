"""What the front end and the engine process say to each other: typed messages in frames, over one socket pair.

A frame is four bytes of length, big-endian, and one MessagePack value. Nothing here can run code when it is read.
"""

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

from orca_jax.config import EngineConfig
from orca_jax.engine import EngineStats
from orca_jax.request import DEFAULT_URGENCY, RequestUpdate, SamplingParams, Urgency
from orca_jax.step import ExecutorStats

MAX_FRAME_BYTES = 256 * 2**20
_LENGTH = struct.Struct(">I")

Phase = Literal["loading", "compiling", "serving"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base: its name travels with it, its fields in order."""


class Start(Message, frozen=True):
    """Front end, once and first: build this engine."""

    config: EngineConfig


class Submit(Message, frozen=True):
    """Front end: queue a request."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    urgency: Urgency = DEFAULT_URGENCY


class Abort(Message, frozen=True):
    """Front end: end a request, whose further updates nobody reads."""

    request_id: str


class Ready(Message, frozen=True):
    """Engine, once: it serves. All that the front end has to know of the model."""

    source: str  # the model's directory; empty for a preset
    tokenizer: str  # for `load_tokenizer`
    vocab_size: int
    max_model_len: int  # prompt and generated tokens of one request
    n_slots: int  # tokens of K and V that may be reserved at once, so also by one request
    num_rows: int  # requests that can run at once


class Rejected(Message, frozen=True):
    """Engine: a request could never run."""

    request_id: str
    message: str
    param: str | None


class Updates(Message, frozen=True):
    """Engine, after an iteration: what it brought, and how many requests are left."""

    updates: list[RequestUpdate]
    running: int
    waiting: int


class Heartbeat(Message, frozen=True):
    """Engine, twice a second from a thread of its own, from the start on: it lives."""

    phase: Phase
    busy_seconds: float  # for which the main thread has been in its current step; 0 where it waits for work
    engine: EngineStats | None = None  # None before it serves
    executor: ExecutorStats | None = None


class Failed(Message, frozen=True):
    """Engine, at last: it cannot go on. `is_config` says that a setting is to blame, which `param` names."""

    message: str
    param: str | None = None
    is_config: bool = False


ToEngine = Start | Submit | Abort
FromEngine = Ready | Rejected | Updates | Heartbeat | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Message) -> bytes:
    """A message as a frame.

    Raises:
        ValueError: it exceeds `MAX_FRAME_BYTES`.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is too long for the engine's socket")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that are complete now.

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
    """Read what a front end sent; `msgspec.ValidationError` if it is nothing of that kind."""
    return _to_engine.decode(payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Read what an engine sent; `msgspec.ValidationError` if it is nothing of that kind."""
    return _from_engine.decode(payload)
