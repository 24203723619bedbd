"""The threads of a store, and pages in memory."""

import threading
from collections.abc import Iterable

import pytest

from orca_jax.exec.tiers import store as store_module
from orca_jax.exec.tiers.base import PageName, StoredPage
from orca_jax.exec.tiers.memory import MemoryTier
from orca_jax.exec.tiers.store import PageStore

NAMES: list[PageName] = [(0, b"%d" % number) for number in range(6)]


class BrokenTier(MemoryTier):
    """Lists everything and reads nothing."""

    def __contains__(self, name: object) -> bool:
        return True

    def write(self, page: StoredPage) -> None:
        raise OSError("broken")

    def read(self, name: PageName) -> bytes:
        raise ValueError("broken")


def upper(name: PageName, payload: bytes) -> str:
    if payload == b"bad":
        raise ValueError("a payload of another size")
    return payload.decode().upper()


def store_of(*tiers: MemoryTier) -> PageStore[str]:
    return PageStore(tiers, 4, upper)


def saved(store: PageStore[str], payloads: Iterable[bytes | None]) -> None:
    each = [None if payload is None else (payload,) for payload in payloads]
    store.save([(name, 0) for name in NAMES[: len(each)]], lambda: each)
    store.close()


def test_pages_come_back_in_their_form() -> None:
    memory = MemoryTier(100)
    saved(store_of(memory), [b"one", None, b"two"])
    store = store_of(memory)
    assert NAMES[0] in store and NAMES[1] not in store
    reading = store.fetch(NAMES[:3])
    store.wait(reading, 60)
    assert reading.is_done and reading.pages == {NAMES[0]: "ONE", NAMES[2]: "TWO"}
    assert store.num_read == 2
    store.close()


def test_a_broken_tier_costs_its_pages_alone(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryTier(100)
    saved(store_of(BrokenTier(100), memory), [b"one", b"bad"])
    store = store_of(BrokenTier(100), memory)
    reading = store.fetch(NAMES[:2])
    store.wait(reading, 60)
    assert reading.pages == {NAMES[0]: "ONE"}
    assert store.num_failed == 3  # twice broken, once of another size
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 2, "one of each store"
    store.close()


def test_a_failure_of_the_devices_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryTier(100)
    store = store_of(memory)

    def lost() -> Iterable[tuple[bytes]]:
        raise RuntimeError("the device is lost")

    store.save([(NAMES[0], 0)], lost)
    store.save([(NAMES[1], 0)], lambda: [(b"one",)])
    store.close()
    assert NAMES[1] in memory and NAMES[0] not in memory
    assert "were not saved" in caplog.text


def test_what_waits_for_being_saved_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "QUEUED_BYTES", 12)
    gate = threading.Event()
    store = store_of(MemoryTier(100))
    assert store.room == 3

    def late() -> Iterable[tuple[bytes]]:
        gate.wait(60)
        return [(b"one",), (b"two",)]

    store.save([(NAMES[0], 0), (NAMES[1], 0)], late)
    assert store.room == 1
    gate.set()
    store.close()
    assert store.room == 3


def test_the_expected_time_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryTier(100)
    saved(store_of(memory), [b"one"])
    store = store_of(memory)
    before = store.seconds(10)
    times = iter([0.0, 100.0])
    monkeypatch.setattr(store_module.time, "perf_counter", lambda: next(times))
    store.wait(store.fetch(NAMES[:1]), 60)
    monkeypatch.undo()
    assert store.seconds(10) > 100 > before
    store.close()


def test_memory_is_bounded_and_keeps_what_was_used() -> None:
    memory = MemoryTier(9)
    for name in NAMES[:3]:
        memory.write(StoredPage(name, 0, (b"abc",)))
    memory.touch([NAMES[0]])
    memory.write(StoredPage(NAMES[3], 0, (b"abc",)))
    memory.write(StoredPage(NAMES[4], 0, (bytes(10),)))
    assert [name in memory for name in NAMES[:5]] == [True, False, True, True, False]
    assert memory.num_bytes == 9
    with pytest.raises(ValueError, match="gone"):
        memory.read(NAMES[1])
    memory.clear()
    assert not memory.num_bytes and NAMES[0] not in memory


def test_a_page_larger_than_the_queue_is_saved_alone() -> None:
    """Else `close` would wait for room for ever."""
    memory = MemoryTier(100)
    store = PageStore((memory,), 2 * store_module.QUEUED_BYTES, upper)
    assert store.room == 1
    saved(store, [b"one"])
    assert NAMES[0] in memory
