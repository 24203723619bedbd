"""Events of the prefix cache, decoded as vLLM's subscribers decode them."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from orca_jax.link import kv_events
from orca_jax.link.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventPublisher,
    joined,
)
from orca_jax.server_config import KvEvents
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams
from tests.sched.lab import Lab, Shape
from tests.serve.running import running, spawn

TOPIC = "kv@pod@model"


# The layouts of vLLM 0.11 and of later versions with array_like; its subscribers skip fields that they do not have.


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class Stored(Event, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class KVEventBatch(Batch):
    events: list[Stored | Removed | Cleared]


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Index:
    """The cached prefixes of one server, as a router knows them."""

    def __init__(self) -> None:
        self.prefix_of: dict[int | bytes, tuple[int, ...]] = {}
        self.salts: list[Any] = []
        self.was_cleared = False

    def take(self, payload: bytes) -> None:
        batch = decode(payload)
        assert batch.ts > 1e9 and batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    for block in event.block_hashes:
                        del self.prefix_of[block]
                case Cleared():
                    self.prefix_of.clear()
                    self.was_cleared = True

    def _store(self, event: Stored) -> None:
        prefix = () if event.parent_block_hash is None else self.prefix_of[event.parent_block_hash]
        assert (
            len(event.token_ids) == event.block_size * len(event.block_hashes)
            and event.medium == "GPU"
        )
        if event.extra_keys is not None:
            assert (
                len(event.extra_keys) == len(event.block_hashes) and event.parent_block_hash is None
            )
            self.salts += [key for keys in event.extra_keys if keys is not None for key in keys]
        for number, block in enumerate(event.block_hashes, 1):
            self.prefix_of[block] = prefix + tuple(event.token_ids[: number * event.block_size])


@pytest.fixture
def settings(tmp_path: Path) -> KvEvents:
    return KvEvents(f"ipc://{tmp_path}/events", TOPIC, f"ipc://{tmp_path}/replay")


@contextlib.contextmanager
def connected(
    context: "zmq.Context[Any]", kind: int, endpoint: str
) -> Iterator["zmq.Socket[bytes]"]:
    with context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 10_000)
        if kind == zmq.SUB:
            sock.subscribe("kv@")
        sock.connect(endpoint)
        yield sock


def replay(sock: "zmq.Socket[bytes]", start: int) -> Iterator[tuple[int, bytes]]:
    """The messages from `start` on, requested as llm-d's router does."""
    sock.send_multipart((b"", start.to_bytes(8, "big")))
    while True:
        delimiter, topic, number, payload = sock.recv_multipart()
        assert delimiter == b""
        if not payload:
            assert int.from_bytes(number, "big", signed=True) == -1
            return
        assert topic.decode() == TOPIC
        yield int.from_bytes(number, "big"), payload


def cached_prefixes(lab: Lab) -> set[int]:
    """The hashes of the pages in the prefix cache."""
    return {
        int.from_bytes(digest[-8:], "big")
        for digest, page in lab.kv.prefixes._pages.items()
        if page.is_full
    }


def test_a_subscriber_knows_the_prefix_cache(settings: KvEvents) -> None:
    """Few pages, so that prompts displace each other; a subscriber from the start and a late one agree."""
    lab = Lab(max_bs=2, page_size=4, shape=Shape(num_pages=12))
    live, late = Index(), Index()
    with zmq.Context() as context, KvEventPublisher(settings) as publisher:
        assert settings.replay_endpoint is not None
        with (
            connected(context, zmq.SUB, settings.endpoint) as events,
            connected(context, zmq.DEALER, settings.replay_endpoint) as request,
        ):
            lab.kv.prefixes.watcher = publisher
            last = -1
            for number in range(12):
                prompt = [1 + number % 3] * 9 + [number % 5] * 6
                params = SamplingParams(
                    max_tokens=6, temperature=0, cache_salt="tenant" if number == 11 else ""
                )
                lab.engine.add_request(f"r{number}", prompt, params)
                lab.run()
                if last < 0:  # its connection may have come after these messages
                    for index, payload in replay(request, 0):
                        live.take(payload)
                        last = index
            # the receive timeout ends a wait in vain
            while set(live.prefix_of) != cached_prefixes(lab):
                topic, frame, payload = events.recv_multipart()
                index = int.from_bytes(frame, "big")
                if index > last:
                    assert topic.decode() == TOPIC and index == last + 1, "a message is lost"
                    live.take(payload)
                    last = index
            assert live.salts and "tenant" not in live.salts
            assert live.was_cleared and len(live.prefix_of) > 2
            for _, payload in replay(request, 0):
                late.take(payload)
            assert late.prefix_of == live.prefix_of
            assert [number for number, _ in replay(request, last)] == [last]
            request.send(b"nonsense that is not a number")
            assert not list(replay(request, last + 1)), "a wrong request was answered"


def test_prefixes_are_those_of_the_prompts(settings: KvEvents) -> None:
    lab = Lab(max_bs=2, page_size=4, shape=Shape())
    index = Index()
    with zmq.Context() as context, KvEventPublisher(settings) as publisher:
        lab.kv.prefixes.watcher = publisher
        lab.add("a", 9, 1)
        lab.add("b", 9, 1)
        lab.run()
        with connected(context, zmq.DEALER, settings.replay_endpoint or "") as request:
            while len(index.prefix_of) < 2:
                index = Index()
                for _, payload in replay(request, 0):
                    index.take(payload)
    assert sorted(index.prefix_of.values()) == [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8)]


def test_neighbours_are_joined() -> None:
    def stored(
        block: int, parent: int | None, salt: list[list[str] | None] | None = None
    ) -> BlockStored:
        return BlockStored([block], parent, [block, block], 2, extra_keys=salt)

    chain = joined(
        [
            stored(1, None, [["s"]]),
            stored(2, 1),
            stored(3, 2),
            stored(9, 1),
            BlockRemoved([4]),
            BlockRemoved([5]),
        ]
    )
    assert chain == [
        BlockStored([1, 2, 3], None, [1, 1, 2, 2, 3, 3], 2, extra_keys=[["s"], None, None]),
        BlockStored([9], 1, [9, 9], 2),
        BlockRemoved([4, 5]),
    ]


def test_groups_are_not_joined() -> None:
    first, other = BlockStored([1], None, [1, 1], 2), BlockStored([2], 1, [2, 2], 2, group_idx=1)
    events = joined([first, other, BlockRemoved([4]), BlockRemoved([5], group_idx=1)])
    assert [each.group_idx for each in events if not isinstance(each, AllBlocksCleared)] == [
        0,
        1,
        0,
        1,
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(other))[9] == 1, "vLLM's tenth field"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(BlockRemoved([5], group_idx=1))) == [
        "BlockRemoved", [5], "GPU", 1
    ]  # fmt: skip


def test_old_batches_are_dropped(settings: KvEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "KEPT_BATCHES", 3)
    monkeypatch.setattr(kv_events, "MAX_EVENTS", 1)
    with zmq.Context() as context, KvEventPublisher(settings) as publisher:
        for number in range(8):
            publisher.removed(bytes([number]), 0)
        with connected(context, zmq.DEALER, settings.replay_endpoint or "") as request:
            while (numbers := [number for number, _ in replay(request, 0)])[-1] < 8:
                pass
    assert numbers == [6, 7, 8]


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen on") as caught:
            KvEventPublisher(KvEvents(address, TOPIC))
        assert caught.value.param == "kv_events_endpoint"
        with pytest.raises(ConfigError, match="in use") as caught:
            KvEventPublisher(KvEvents("tcp://127.0.0.1:*", TOPIC, address))
        assert caught.value.param == "kv_events_replay_endpoint"


def test_a_server_publishes_what_it_caches(tmp_path: Path) -> None:
    replay_endpoint = f"ipc://{tmp_path}/replay"
    flags = (
        "--kv-events-endpoint",
        f"ipc://{tmp_path}/events",
        "--kv-events-replay-endpoint",
        replay_endpoint,
    )
    with (
        running(*flags, "--kv-events-topic", TOPIC, "--page-size", "4") as server,
        zmq.Context() as context,
    ):
        index = Index()
        assert server.complete("abcdefgh", max_tokens=2).status_code == 200
        with connected(context, zmq.DEALER, replay_endpoint) as request:
            while len(index.prefix_of) < 2:
                index = Index()
                for _, payload in replay(request, 0):
                    index.take(payload)
    assert sorted(index.prefix_of.values()) == [tuple(b"abcd"), tuple(b"abcdefgh")]


def test_a_server_without_a_prefix_cache_has_no_events() -> None:
    process = spawn(
        "--model", "preset:toy", "--kv-events-endpoint", "tcp://127.0.0.1:0", "--scheduler", "orca"
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--kv-events-endpoint: needs the prefix cache; use the scheduler chunked" in errors
