"""The store of responses: earlier ones, for calls that continue them."""

import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, dropwhile
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from orca_jax.serve.openai.errors import TOO_LONG, ApiError
from orca_jax.serve.openai.responses.items import (
    CallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from orca_jax.serve.openai.schema.hosted import RESULT_ITEMS
from orca_jax.serve.openai.schema.input_items import (
    CallOutput,
    InputCall,
    InputMessage,
    InputReasoning,
    ItemReference,
    OutputText,
)
from orca_jax.serve.openai.schema.limits import MAX_MESSAGES
from orca_jax.serve.openai.schema.responses import InputItem, ResponsesRequest

RESPONSE_BYTES = 1024  # for the objects of Python around a response
ITEM_BYTES = 256  # for the objects around the id of an item
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[InputItem]).decode

_PREFIXES: dict[type, str] = {InputCall: "fc", CallOutput: "fco", InputReasoning: "rs"}

type Caller = str | None
"""The key of a call, None on a server without keys."""


def new_id(prefix: str) -> str:
    """An id with 128 random bits, so that it cannot be guessed."""
    return f"{prefix}_{secrets.token_hex(16)}"


def with_ids(items: Sequence[InputItem]) -> list[InputItem]:
    """The items, each with an id."""
    return [_with_id(item) for item in items]


def _with_id(item: InputItem) -> InputItem:
    if item.id:
        return item
    return msgspec.structs.replace(item, id=new_id(_PREFIXES.get(type(item), "msg")))


def as_input(item: OutputItem) -> InputItem:
    """An item of an answer for a later call."""
    match item:
        case MessageItem(name, content):
            return InputMessage(item.role, [OutputText(part.text) for part in content], name)
        case CallItem():
            namespace = None if item.namespace is UNSET else item.namespace
            return InputCall(item.call_id, item.name, item.arguments, namespace, item.id)
        case ReasoningItem(name, content):
            return InputReasoning(content, None, name)


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

    @property
    def num_items(self) -> int:
        """The number of items of its own input and output."""
        return len(self.item_ids)

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
    """The stored responses. A caller finds its own ones only. All methods may be called from any thread.

    Args:
        max_bytes: the most memory for all responses together; with 0, none is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._lock = threading.RLock()
        # the least recently used one first
        self._responses: dict[tuple[Caller, str], StoredResponse] = {}
        self._places: dict[tuple[Caller, str], str] = {}  # of an item -> its response

    def put(self, caller: Caller, name: str, stored: StoredResponse) -> None:
        """Add a response. Others leave for it; one that is larger than the whole store is not added."""
        if stored.num_bytes > self.max_bytes:
            return
        with self._lock:
            self._responses[caller, name] = stored
            self.num_bytes += stored.num_bytes
            self._places.update(((caller, item), name) for item in stored.item_ids)
            while self.num_bytes > self.max_bytes:
                self.delete(*next(iter(self._responses)))

    def get(self, caller: Caller, name: str) -> StoredResponse | None:
        """A response, or None if it is not there."""
        with self._lock:
            found = self._responses.pop((caller, name), None)
            if found is not None:
                self._responses[caller, name] = found
        return found

    def delete(self, caller: Caller, name: str) -> bool:
        """Remove a response. False if it is not there."""
        with self._lock:
            found = self._responses.pop((caller, name), None)
            if found is None:
                return False
            self.num_bytes -= found.num_bytes
            for item in found.item_ids:
                if self._places.get((caller, item)) == name:
                    del self._places[caller, item]
        return True

    def history(self, caller: Caller, name: str) -> list[StoredResponse] | None:
        """The responses up to one, the oldest first, or None if one of them is not there. Their items are not read."""
        found: list[StoredResponse] = []
        previous: str | None = name
        while previous is not None:
            stored = self.get(caller, previous)
            if stored is None:
                return None
            found.append(stored)
            previous = stored.previous
        found.reverse()
        return found

    def items(self, caller: Caller, names: Iterable[str]) -> dict[str, InputItem]:
        """The items with these ids, without those that are not there. Each response of them is read once."""
        wanted: dict[str, set[str]] = {}
        responses: dict[str, StoredResponse] = {}
        with self._lock:
            for name in names:
                if (place := self._places.get((caller, name))) is not None:
                    wanted.setdefault(place, set()).add(name)
            for place in wanted:
                stored = self.get(caller, place)
                assert stored is not None, f"{place} left without its items"
                responses[place] = stored
        found: dict[str, InputItem] = {}
        for place, ids in wanted.items():
            found |= {item.id: item for item in responses[place].items() if item.id in ids}
        return found


class History(NamedTuple):
    """The items before a call, and the bytes of the responses that have them."""

    items: list[InputItem]
    num_bytes: int


def history_of(store: ResponseStore, caller: Caller, call: ResponsesRequest) -> History:
    """The items of the conversation that a call continues.

    Raises:
        ApiError: a response is lost, or the conversation has too many items.
    """
    name = call.previous_response_id
    if name is None:
        return History([], 0)
    found = store.history(caller, name)
    if found is None:
        message = f"Previous response with id {name[:100]!r} not found: {_lost(store)}"
        raise ApiError(400, message, "previous_response_id", code="previous_response_not_found")
    kept = _newest(found, may_leave=call.truncation == "auto")
    items: list[InputItem] = []
    for stored in kept:
        items += stored.items()
    if len(kept) < len(found):  # the calls of the first results have left
        items = list(dropwhile(lambda item: isinstance(item, RESULT_ITEMS), items))
    return History(items, sum([stored.num_bytes for stored in kept]))


def _newest(conversation: Sequence[StoredResponse], *, may_leave: bool) -> Sequence[StoredResponse]:
    """The newest responses with at most `MAX_MESSAGES` items. Raises ApiError if others may not leave."""
    sizes = list(accumulate([stored.num_items for stored in reversed(conversation)]))
    num_kept = sum([size <= MAX_MESSAGES for size in sizes])
    if num_kept == len(conversation):
        return conversation
    if not may_leave:
        message = f"the conversation has {sizes[-1]} items, and may have {MAX_MESSAGES}; begin a new one, or send"
        raise ApiError(400, f'{message} truncation: "auto"', "previous_response_id", code=TOO_LONG)
    return conversation[len(conversation) - num_kept :]


def items_of(store: ResponseStore, caller: Caller, call: ResponsesRequest) -> list[InputItem]:
    """The items of a call's own input, stored ones in the place of references. Raises ApiError."""
    if isinstance(call.input, str):
        return [InputMessage("user", call.input)]
    items = [item for item in call.input or () if item is not None]
    names = Counter(item.id for item in items if isinstance(item, ItemReference))
    if not names:
        return items
    found = store.items(caller, names)
    for name, count in names.items():
        if name not in found:
            message = f"Item with id {name[:100]!r} not found: {_lost(store)}"
            raise ApiError(404, message, "input", code="item_not_found")
        if count > 1:  # a short body could repeat a large item very often
            raise ApiError(
                400, f"input refers to item {name[:100]!r} {count} times; send it once", "input"
            )
    return [found[item.id] if isinstance(item, ItemReference) else item for item in items]


def is_long(call: ResponsesRequest) -> bool:
    """True if a call reads stored items, of which there may be many."""
    if call.previous_response_id is not None:
        return True
    return isinstance(call.input, list) and any(
        [isinstance(item, ItemReference) for item in call.input]
    )


def find_response(store: ResponseStore, caller: Caller, name: str) -> StoredResponse:
    """A stored response. Raises ApiError."""
    found = store.get(caller, name)
    if found is None:
        raise no_response(store, name)
    return found


def no_response(store: ResponseStore, name: str) -> ApiError:
    """The error for a response that is not stored."""
    message = f"Response with id {name[:100]!r} not found: {_lost(store)}"
    return ApiError(404, message, "response_id", code="response_not_found")


def _lost(store: ResponseStore) -> str:
    """The reasons why something is not in the store."""
    if not store.max_bytes:
        return "this server stores none (--responses-store 0): send the whole conversation as input"
    return (
        "it was made with store: false, with another key, before the last start of the server, or has left the store "
        "(--responses-store): send the whole conversation as input"
    )
