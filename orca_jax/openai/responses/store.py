"""Responses kept in memory for later calls: a bounded number of bytes, the least recently used ones leave first."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from orca_jax.openai.schema.responses import InputItem

RESPONSE_BYTES, ITEM_BYTES = 1024, 256  # for the objects of Python around a response and around the id of an item
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[InputItem]).decode

type Caller = str | None
"""The key of a call, None on a server without keys."""


class StoredResponse(NamedTuple):
    """A response, with its own input and output as items of JSON."""

    answer: bytes
    inputs: bytes
    outputs: bytes
    previous: str | None  # the response before it
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """The memory that it counts for."""
        texts = len(self.answer) + len(self.inputs) + len(self.outputs)
        return RESPONSE_BYTES + texts + sum(ITEM_BYTES + len(name) for name in self.item_ids)

    def input_items(self) -> list[InputItem]:
        """The items of its own input."""
        return _decode(self.inputs)

    def items(self) -> list[InputItem]:
        """The items of its own input and output."""
        return _decode(self.inputs) + _decode(self.outputs)


def stored_response(
    answer: bytes, inputs: Sequence[InputItem], outputs: Sequence[InputItem], previous: str | None
) -> StoredResponse:
    """A response to store; all items have ids."""
    ids = tuple(item.id for item in (*inputs, *outputs) if item.id)
    return StoredResponse(answer, _encode(inputs), _encode(outputs), previous, ids)


class ResponseStore:
    """The stored responses. A caller finds its own ones only.

    Args:
        max_bytes: the most memory for all responses together; with 0, none is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: dict[tuple[Caller, str], StoredResponse] = {}  # the least recently used one first
        self._places: dict[tuple[Caller, str], str] = {}  # of an item -> its response

    def put(self, caller: Caller, name: str, stored: StoredResponse) -> None:
        """Add a response. Others leave for it; one that is larger than the whole store is not added."""
        if stored.num_bytes > self.max_bytes:
            return
        self._responses[caller, name] = stored
        self.num_bytes += stored.num_bytes
        self._places.update(((caller, item), name) for item in stored.item_ids)
        while self.num_bytes > self.max_bytes:
            self.delete(*next(iter(self._responses)))

    def get(self, caller: Caller, name: str) -> StoredResponse | None:
        """A response, or None if it is not there."""
        found = self._responses.pop((caller, name), None)
        if found is not None:
            self._responses[caller, name] = found
        return found

    def delete(self, caller: Caller, name: str) -> bool:
        """Remove a response. False if it is not there."""
        found = self._responses.pop((caller, name), None)
        if found is None:
            return False
        self.num_bytes -= found.num_bytes
        for item in found.item_ids:
            if self._places.get((caller, item)) == name:
                del self._places[caller, item]
        return True

    def history(self, caller: Caller, name: str) -> list[InputItem] | None:
        """The conversation up to a response, or None if a response of it is not there."""
        found: list[StoredResponse] = []
        previous: str | None = name
        while previous is not None:
            stored = self.get(caller, previous)
            if stored is None:
                return None
            found.append(stored)
            previous = stored.previous
        return [item for stored in reversed(found) for item in stored.items()]

    def items(self, caller: Caller, names: Iterable[str]) -> dict[str, InputItem]:
        """The items with these ids, without those that are not there. Each response of them is read once."""
        wanted: dict[str, set[str]] = {}
        for name in names:
            if (place := self._places.get((caller, name))) is not None:
                wanted.setdefault(place, set()).add(name)
        found: dict[str, InputItem] = {}
        for place, ids in wanted.items():
            stored = self.get(caller, place)
            assert stored is not None, f"{place} left without its items"
            found |= {item.id: item for item in stored.items() if item.id in ids}
        return found
