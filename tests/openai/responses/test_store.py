"""The store of responses: bounded in bytes, apart for each key, with chains and items."""

import threading
from typing import Any

import httpx
import msgspec
import pytest

from orca_jax.serve.openai.responses.items import CallItem
from orca_jax.serve.openai.responses.store import (
    ResponseStore,
    StoredResponse,
    as_input,
    new_id,
    stored_response,
    with_ids,
)
from orca_jax.serve.openai.schema.input_items import InputCall, InputMessage
from orca_jax.serve.openai.schema.limits import MAX_MESSAGES
from orca_jax.serve.openai.schema.responses import InputItem
from tests.serve.played import Stage, on_stage, saying

TEXT = "x" * 1000


def stored(name: str, previous: str | None = None, text: str = TEXT) -> StoredResponse:
    inputs: list[InputItem] = [InputMessage("user", text, f"in_{name}")]
    outputs: list[InputItem] = [InputMessage("assistant", text, f"out_{name}")]
    return stored_response(b"{}", inputs, outputs, previous)


def test_bytes_are_bounded_and_the_least_recently_used_one_leaves() -> None:
    size = stored("a").num_bytes
    assert size > 2 * len(TEXT)
    store = ResponseStore(3 * size)
    for name in "abc":
        store.put(None, name, stored(name))
    assert store.num_bytes == 3 * size and store.get(None, "a") is not None
    store.put(None, "d", stored("d"))
    assert store.get(None, "b") is None and not store.items(None, ["out_b"]), "a was used since"
    assert {name for name in "abcd" if store.get(None, name)} == set(
        "acd"
    ) and store.num_bytes == 3 * size
    store.put(None, "large", stored("large", text=TEXT * 5))
    assert store.get(None, "large") is None and store.get(None, "a") is not None, (
        "one for which there is no room"
    )
    for name in "acd":
        assert store.delete(None, name)
    assert store.num_bytes == 0 and not store.delete(None, "a") and not store._places
    ResponseStore(0).put(None, "a", stored("a"))


def test_many_responses_stay_within_the_bound() -> None:
    store = ResponseStore(100_000)
    for number in range(1000):
        store.put(str(number % 7), str(number), stored(str(number)))
        assert store.num_bytes <= 100_000
    left = list(store._responses.values())
    assert store.num_bytes == sum(one.num_bytes for one in left) and 10 < len(left) < 50
    assert len(store._places) == 2 * len(left)


def test_keys_are_apart() -> None:
    store = ResponseStore(10**6)
    store.put("a", "r", stored("r"))
    for caller in ("b", None):
        assert store.get(caller, "r") is None and not store.items(caller, ["out_r"])
        assert store.history(caller, "r") is None and not store.delete(caller, "r")
    assert store.items("a", ["in_r"]) == {"in_r": InputMessage("user", TEXT, "in_r")}


def test_a_chain_is_a_conversation_and_breaks_with_a_link() -> None:
    store = ResponseStore(10**6)
    store.put(None, "1", stored("1"))
    store.put(None, "2", stored("2", "1"))
    store.put(None, "3", stored("3", "2"))
    found = store.history(None, "3")
    assert found is not None
    assert [item.id for one in found for item in one.items()] == [
        "in_1",
        "out_1",
        "in_2",
        "out_2",
        "in_3",
        "out_3",
    ]
    store.delete(None, "1")
    assert store.history(None, "3") is None


def test_items_of_one_id_are_those_of_the_newest_response() -> None:
    """Clients choose the ids of input items; a response that leaves takes only its own ones along."""
    store = ResponseStore(10**6)
    store.put(None, "1", stored_response(b"", [InputMessage("user", "old", "i")], [], None))
    store.put(None, "2", stored_response(b"", [InputMessage("user", "new", "i")], [], None))
    store.delete(None, "1")
    assert store.items(None, ["i"]) == {"i": InputMessage("user", "new", "i")}


def test_many_items_are_found_in_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may refer to thousands of items of a large response; the store is read on the event loop."""
    readings: list[StoredResponse] = []
    read = StoredResponse.items
    monkeypatch.setattr(
        StoredResponse, "items", lambda stored: readings.append(stored) or read(stored)
    )
    store = ResponseStore(10**6)
    store.put(
        None,
        "1",
        stored_response(b"", [InputMessage("user", f"{i}", f"i{i}") for i in range(100)], [], None),
    )
    store.put(None, "2", stored("2"))
    found = store.items(None, [*(f"i{i}" for i in range(0, 100, 2)), "out_2", "lost"])
    assert len(found) == 51 and found["i98"] == InputMessage("user", "98", "i98")
    assert len(readings) == 2


@pytest.mark.parametrize(("namespace", "expected"), [("crm", "crm"), (msgspec.UNSET, None)])
def test_a_call_keeps_its_namespace(namespace: Any, expected: str | None) -> None:
    call = CallItem("fc_1", "c1", "find", "{}", "completed", namespace)
    assert as_input(call) == InputCall("c1", "find", "{}", expected, "fc_1")


def test_ids_are_random() -> None:
    assert len({new_id("resp") for _ in range(100)}) == 100
    (name, mine) = (
        item.id for item in with_ids([InputMessage("user", "x"), InputMessage("user", "x", "mine")])
    )
    assert (
        mine == "mine"
        and name is not None
        and len(bytes.fromhex(name.removeprefix("msg_"))) * 8 == 128
    )


@pytest.mark.parametrize("length", [0, 10_000])
def test_the_ids_of_clients_count(length: int) -> None:
    one = stored_response(b"", [InputMessage("user", "x", "i" * length)], [], None)
    assert one.num_bytes >= 2 * length


def test_a_stored_conversation_has_a_bound_of_items() -> None:
    """A small call reads all of it. By `truncation: "auto"` the newest responses stay, and no result of a lost call."""
    result = {"type": "function_call_output", "call_id": "c", "output": "lost"}
    first = [{"role": "user", "content": "x"}] * (MAX_MESSAGES - 2)

    async def act(stage: Stage) -> tuple[dict[str, Any], list[int]]:
        async with stage.http() as http:

            async def ask(**fields: Any) -> httpx.Response:
                return await http.post(
                    "/v1/responses", json={"input": "new", "truncation": "auto", **fields}
                )

            name = (await ask(input=first)).json()["id"]
            name = (await ask(input=[result], previous_response_id=name)).json()["id"]
            refused = await ask(previous_response_id=name, truncation="disabled")
            begun = len(stage.link.submitted)
            kept = await ask(previous_response_id=name)
            assert kept.status_code == 200, kept.text
            prompts = [submit.prompt_ids for submit in stage.link.submitted[begun:]]
            return refused.json()["error"], prompts[0]

    error, prompt = on_stage(saying("ok"), act, chats=True)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "previous_response_id")
    assert f"has {MAX_MESSAGES + 1} items, and may have {MAX_MESSAGES}" in error["message"]
    text = bytes(prompt).decode()
    assert "new" in text and "ok" in text and "lost" not in text


def test_items_are_not_read_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    read = StoredResponse.items

    def noted(stored: StoredResponse) -> list[Any]:
        places.append(threading.current_thread().name)
        return read(stored)

    monkeypatch.setattr(StoredResponse, "items", noted)

    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            name = (await http.post("/v1/responses", json={"input": "x"})).json()["id"]
            assert (
                await http.post("/v1/responses", json={"input": "y", "previous_response_id": name})
            ).is_success

    on_stage(saying("ok"), act, chats=True)
    assert places == ["stored"]
