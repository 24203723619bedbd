"""Changes of the prefix cache for routers: a ZeroMQ publisher in vLLM's format.

A message has three frames: the topic, a sequence number of eight bytes (big-endian, from 0), and a batch in
MessagePack, `[time, events, data_parallel_rank]`. An event is an array of its name and its fields in order. The first
event of an engine is `AllBlocksCleared`. A PUB socket drops messages of slow or late subscribers, so the last batches
can be requested again at a second address. The request is a sequence number. The answer has all messages from there on
and an empty one.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Self

import msgspec
import zmq
from msgspec.structs import replace

from orca_jax.server_config import KvEvents
from orca_jax.values.errors import ConfigError
from orca_jax.values.lora_request import Adapter

MEDIUM = "GPU"  # the name of vLLM and its routers for the memory of the engine's own device
DATA_PARALLEL_RANK = 0
MAX_EVENTS = 256  # of one batch
KEPT_BATCHES = 10_000  # for subscribers that have lost some
QUEUED_MESSAGES = 100_000  # for each subscriber; more are dropped
MAX_REQUEST_BYTES = 1024
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_encode = msgspec.msgpack.Encoder().encode


class CacheEvent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class: an array of the class name and the fields in order."""


class BlockStored(CacheEvent, frozen=True):
    """Consecutive pages of one prompt have been added to the prefix cache. Fields without a meaning here are None."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the page before them; None at the beginning of a prompt
    token_ids: list[int]  # of all these pages
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: str | None = None  # of the adapter of the request that wrote the pages
    extra_keys: list[list[str] | None] | None = None  # of each page: for the first one of a prompt
    # a digest of its salt, and that of its adapter
    group_idx: int = 0  # of the layers whose keys and values are in the block


class BlockRemoved(CacheEvent, frozen=True):
    """Pages have left the prefix cache."""

    block_hashes: list[int]
    medium: str = MEDIUM
    group_idx: int = 0


class AllBlocksCleared(CacheEvent, frozen=True):
    """The prefix cache is empty."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events in their order, and the time of sending in seconds since 1970."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int = DATA_PARALLEL_RANK


class KvEventPublisher:
    """Publishes changes of a prefix cache: a `CacheWatcher`, and a context manager that closes its sockets.

    The engine's thread only enqueues. One thread sends, another one answers requests for earlier batches.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, settings: KvEvents) -> None:
        self._topic = settings.topic.encode()
        self._queue = queue.SimpleQueue[CacheEvent | None]()
        self._kept = deque[tuple[int, bytes]](maxlen=KEPT_BATCHES)
        self._lock = threading.Lock()  # for `_kept`
        self._context = zmq.Context()
        self._context.linger = 0
        socket = self._bound(zmq.PUB, settings.endpoint, "kv_events_endpoint", QUEUED_MESSAGES)
        self._sender = threading.Thread(
            target=self._send_all, args=(socket,), daemon=True, name="kv-events"
        )
        self._replayer: threading.Thread | None = None
        if settings.replay_endpoint is not None:
            router = self._bound(
                zmq.ROUTER,
                settings.replay_endpoint,
                "kv_events_replay_endpoint",
                2 * KEPT_BATCHES,
                beside=socket,
            )
            self._replayer = threading.Thread(
                target=self._replay_all, args=(router,), daemon=True, name="kv-replay"
            )
            self._replayer.start()
        self._sender.start()

    def stored(
        self,
        digest: bytes,
        parent: bytes | None,
        ids: Sequence[int],
        salt: str,
        adapter: Adapter | None,
        group: int,
    ) -> None:
        event = BlockStored([_hash_of(digest)], None, list(ids), len(ids), group_idx=group)
        keys: list[str] = []
        if salt:
            keys.append(sha256(salt.encode()).hexdigest())
        if adapter is not None:
            event = replace(event, lora_name=adapter.name)
            keys.append(adapter.key)
        if parent is not None:
            event = replace(event, parent_block_hash=_hash_of(parent))
        elif keys:
            event = replace(event, extra_keys=[keys])
        self._queue.put(event)

    def removed(self, digest: bytes, group: int) -> None:
        self._queue.put(BlockRemoved([_hash_of(digest)], group_idx=group))

    def close(self) -> None:
        """Send the events so far, and close the sockets."""
        self._queue.put(None)
        self._sender.join()
        self._context.term()  # ends the wait of the other thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _bound(
        self,
        kind: int,
        endpoint: str,
        param: str,
        limit: int,
        beside: "zmq.Socket[bytes] | None" = None,
    ) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(limit)
        socket.maxmsgsize = MAX_REQUEST_BYTES
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            for opened in (socket, beside):
                if opened is not None:
                    opened.close()
            self._context.term()
            message = f"cannot listen on {endpoint}: {error.strerror}; give another address"
            raise ConfigError(message, param=param) from None
        return socket

    def _send_all(self, socket: "zmq.Socket[bytes]") -> None:
        number = 0
        # those of an earlier engine at this address
        events: list[CacheEvent] = [AllBlocksCleared()]
        is_last = False
        with socket:
            while events:
                payload = _encode(EventBatch(time.time(), joined(events)))
                with self._lock:
                    self._kept.append((number, payload))
                socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
                number += 1
                if is_last:
                    return
                events, is_last = self._next()

    def _next(self) -> tuple[list[CacheEvent], bool]:
        """Wait for events; return them, and True if none will follow."""
        events: list[CacheEvent] = []
        with contextlib.suppress(queue.Empty):
            while len(events) < MAX_EVENTS:
                event = self._queue.get(block=not events)
                if event is None:
                    return events, True
                events.append(event)
        return events, False

    def _replay_all(self, router: "zmq.Socket[bytes]") -> None:
        with router, contextlib.suppress(zmq.ContextTerminated):
            while True:
                *address, start = router.recv_multipart()
                if not address or len(start) != 8:
                    continue
                first = int.from_bytes(start, "big")
                with self._lock:
                    wanted = [kept for kept in self._kept if kept[0] >= first]
                for number, payload in wanted:
                    parts = self._topic, number.to_bytes(8, "big"), payload
                    router.send_multipart((*address, *parts))
                router.send_multipart((*address, b"", END_OF_REPLAY, b""))


def joined(events: Iterable[CacheEvent]) -> list[CacheEvent]:
    """Join neighbours: pages that follow each other in one prompt, and removed pages. Changes lists of the events."""
    result: list[CacheEvent] = []
    for event in events:
        match result[-1:], event:
            case [BlockStored() as last], BlockStored() as new if _follows(new, last):
                last.block_hashes.extend(new.block_hashes)
                last.token_ids.extend(new.token_ids)
                if last.extra_keys is not None:
                    last.extra_keys.append(None)
            case [BlockRemoved() as last], BlockRemoved() as new if new.group_idx == last.group_idx:
                last.block_hashes.extend(new.block_hashes)
            case _:
                result.append(event)
    return result


def _follows(new: BlockStored, last: BlockStored) -> bool:
    return new.parent_block_hash == last.block_hashes[-1] and new.group_idx == last.group_idx


def _hash_of(digest: bytes) -> int:
    """The last eight bytes of a digest as an unsigned integer, the form that all routers read."""
    return int.from_bytes(digest[-8:], "big")
