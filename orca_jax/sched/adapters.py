"""Ownership of the slots of adapters: the adapter in each slot, and the requests that need it."""

from collections import Counter, OrderedDict
from collections.abc import Mapping

from orca_jax.values.errors import RequestError
from orca_jax.values.lora_request import Adapter
from orca_jax.values.step import SlotWrite


class AdapterSlots:
    """Adapters by name, and their slots on the devices.

    A request is counted as a user from its arrival to its end. While it has a row, it pins the slot of its adapter:
    `pin` and `unpin` come in pairs. A slot without pins keeps its adapter until another one needs the slot; the least
    recently used one is taken first. So the requests with rows have at most `num_slots` different adapters.

    Equal adapters with different names share a slot, since a slot belongs to the content.

    Args:
        num_slots: slots on the devices, numbered from 1; 0 if there are no adapters.
        most: adapters that may have names at once.
    """

    def __init__(self, num_slots: int = 0, most: int = 0) -> None:
        self.num_slots = num_slots
        self.most = most
        self._named: dict[str, Adapter] = {}
        self._free = list(range(num_slots, 0, -1))
        self._slot_of: dict[str, int] = {}  # by the adapter's key
        # keys in slots without pins, oldest first
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._pins: Counter[str] = Counter()
        self._users: Counter[str] = Counter()  # live requests by key
        self._live: Counter[str] = Counter()  # live requests by name
        self._running: Counter[str] = Counter()  # those with rows
        self.writes: list[SlotWrite] = []  # not taken yet
        self.unused: set[str] = set()  # keys without names and requests, not taken yet

    @property
    def named(self) -> Mapping[str, Adapter]:
        """The adapters that new requests may name."""
        return self._named

    @property
    def running(self) -> list[str]:
        """Names of the adapters of requests with rows."""
        return sorted(self._running)

    @property
    def waiting(self) -> list[str]:
        """Names of the adapters of requests without a row."""
        return sorted(name for name, number in self._live.items() if number > self._running[name])

    def add_adapter(self, adapter: Adapter) -> None:
        """Give an adapter its name.

        Raises:
            RequestError: the name is taken, or there are too many adapters.
        """
        if not self.num_slots:
            raise RequestError(
                "this engine has no adapters; start it with enable_lora", param="lora_name"
            )
        if adapter.name in self._named:
            message = f"the adapter {adapter.name!r} is loaded already; unload it first, or choose another name"
            raise RequestError(message, param="lora_name")
        if len(self._named) == self.most:
            message = (
                f"{self.most} adapters are loaded; unload one, or start with a larger max_cpu_loras"
            )
            raise RequestError(message, param="lora_name")
        self._named[adapter.name] = adapter
        self.unused.discard(adapter.key)

    def remove(self, name: str) -> None:
        """Take the name away from new requests; those that have arrived keep the adapter.

        Raises:
            RequestError: no adapter has this name.
        """
        key = self.get(name, "lora_name").key
        del self._named[name]
        self._drop_if_unused(key)

    def get(self, name: str, param: str = "model") -> Adapter:
        """The adapter of a name. Raises RequestError with `param`."""
        if name not in self._named:
            raise RequestError(f"the adapter {name!r} is not loaded", param=param)
        return self._named[name]

    def enter(self, adapter: Adapter) -> None:
        """Count a request that has arrived."""
        self._users[adapter.key] += 1
        self._live[adapter.name] += 1

    def leave(self, adapter: Adapter) -> None:
        """Forget a request that has ended."""
        _decrease(self._users, adapter.key)
        _decrease(self._live, adapter.name)
        self._drop_if_unused(adapter.key)

    def pin(self, adapter: Adapter) -> int:
        """The slot of an adapter for a request that gets a row; `room` has said that there is one."""
        key = adapter.key
        slot = self._slot_of.get(key)
        if slot is None:
            slot = self._take()
            self._slot_of[key] = slot
            self.writes.append(SlotWrite(slot, key))
        self._idle.pop(key, None)
        self._pins[key] += 1
        self._running[adapter.name] += 1
        return slot

    def unpin(self, adapter: Adapter) -> None:
        """Release the slot of a request that loses its row."""
        key = adapter.key
        assert self._pins[key] > 0, f"the slot of {adapter.name} is not pinned"
        _decrease(self._pins, key)
        _decrease(self._running, adapter.name)
        if key not in self._pins:
            self._idle[key] = None

    def room(self) -> "AdapterRoom":
        """The slots left for newcomers, for the selection of one iteration."""
        return AdapterRoom(self._pins, self.num_slots)

    def take_writes(self) -> tuple[SlotWrite, ...]:
        """The slots to be written before the next iteration."""
        writes = self.writes
        self.writes = []
        return tuple(writes)

    def take_unused(self) -> set[str]:
        """Keys of adapters that no plan will name any more."""
        unused = self.unused
        self.unused = set()
        return unused

    def check_integrity(self) -> None:
        """Assert that no slot is lost or held twice. Raises AssertionError."""
        held = [*self._slot_of.values(), *self._free]
        assert sorted(held) == list(range(1, self.num_slots + 1)), (
            f"slots are lost or held twice: {held}"
        )
        assert set(self._idle) | set(self._pins) == set(self._slot_of), "pins and slots differ"
        assert not set(self._idle) & set(self._pins), "an adapter is pinned and idle"
        assert all(self._users[key] >= number for key, number in self._pins.items()), (
            "a pin without a request"
        )

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        assert self._idle, (
            f"all {self.num_slots} slots are pinned: the scheduler admitted too many adapters"
        )
        key, _ = self._idle.popitem(last=False)
        return self._slot_of.pop(key)

    def _drop_if_unused(self, key: str) -> None:
        if key not in self._users and all(adapter.key != key for adapter in self._named.values()):
            self.unused.add(key)


class AdapterRoom:
    """Counts the adapters of the requests with rows, and of the newcomers of a selection."""

    def __init__(self, pinned: Mapping[str, int], num_slots: int) -> None:
        self._pinned = pinned
        self._chosen: set[str] = set()
        self._left = num_slots - len(pinned)

    def takes(self, adapter: Adapter) -> bool:
        """True if a newcomer with this adapter can have a slot; it is then counted."""
        if adapter.key in self._pinned or adapter.key in self._chosen:
            return True
        if not self._left:
            return False
        self._left -= 1
        self._chosen.add(adapter.key)
        return True


def _decrease(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
