"""Slots of adapters: their owner, and requests with adapters under every scheduler."""

from random import Random

import pytest

from orca_jax.sched.adapters import AdapterSlots
from orca_jax.sched.request import Request
from orca_jax.values.errors import RequestError
from orca_jax.values.lora_request import Adapter
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import SlotWrite
from tests.sched.lab import VOCAB, Lab, Shape
from tests.sim.oracle import toy_generate

A, B, C = (Adapter(name, f"key of {name}") for name in "abc")
LABS = {
    "orca": {"name": "orca", "n_workers": 2},
    "request_level": {"name": "request_level"},
    "chunked": {"shape": Shape()},
    "chunked, few pages": {"shape": Shape(num_pages=18)},
    "chunked, many ahead": {"shape": Shape(depth=4, check_in_interval=3)},
    "chunked, a pipeline": {"shape": Shape(depth=2, stages=2)},
}


def slots_with(number: int, *adapters: Adapter) -> AdapterSlots:
    slots = AdapterSlots(number, 10)
    for adapter in adapters:
        slots.add_adapter(adapter)
        slots.enter(adapter)
    return slots


def test_the_least_recently_used_slot_without_pins_is_taken() -> None:
    slots = slots_with(2, A, B, C)
    assert (slots.pin(A), slots.pin(B)) == (1, 2)
    slots.unpin(B)
    slots.unpin(A)
    assert slots.pin(C) == 2, "B was used less recently than A"
    assert slots.pin(A) == 1, "A has kept its slot"
    assert slots.take_writes() == (SlotWrite(1, A.key), SlotWrite(2, B.key), SlotWrite(2, C.key))
    assert slots.take_writes() == ()
    slots.check_integrity()


def test_pinned_slots_are_never_taken() -> None:
    slots = slots_with(1, A, B)
    slots.pin(A)
    room = slots.room()
    assert room.takes(A)
    assert not room.takes(B)
    with pytest.raises(AssertionError, match="admitted too many adapters"):
        slots.pin(B)


def test_the_room_of_a_selection_counts_newcomers_once() -> None:
    room = slots_with(2, A, B, C).room()
    assert room.takes(A) and room.takes(A) and room.takes(B)
    assert not room.takes(C)
    assert room.takes(B)


def test_equal_content_shares_a_slot() -> None:
    other = Adapter("other", A.key)
    slots = slots_with(1, A, other)
    assert slots.pin(A) == slots.pin(other) == 1
    assert slots.running == ["a", "other"]
    slots.remove("a")
    assert not slots.take_unused(), "the content has another name"


def test_weights_are_unused_after_the_name_and_the_last_request() -> None:
    slots = slots_with(1, A)
    slots.remove("a")
    assert not slots.take_unused()
    slots.leave(A)
    assert slots.take_unused() == {A.key}


def test_names() -> None:
    slots = AdapterSlots(1, 1)
    slots.add_adapter(A)
    with pytest.raises(RequestError, match="is loaded already") as error:
        slots.add_adapter(A)
    assert error.value.param == "lora_name"
    with pytest.raises(RequestError, match="1 adapters are loaded"):
        slots.add_adapter(B)
    with pytest.raises(RequestError, match="is not loaded"):
        slots.remove("b")
    with pytest.raises(RequestError, match="enable_lora"):
        AdapterSlots().add_adapter(A)


def test_running_and_waiting_names() -> None:
    slots = slots_with(1, A, B)
    slots.pin(A)
    assert (slots.running, slots.waiting) == (["a"], ["b"])


@pytest.mark.parametrize("kind", LABS)
def test_each_request_gets_the_tokens_of_its_adapter_while_adapters_come_and_go(kind: str) -> None:
    """Names are given to other adapters, more of them than slots are in use, and prompts share their beginnings."""
    random, lab = Random(kind), Lab(max_bs=4, num_loras=2, **LABS[kind])  # type: ignore[arg-type]
    weights: dict[str, int] = {}
    expected: dict[str, list[int]] = {}
    for turn in range(200):
        name = random.choice("abcde")
        if name in weights:
            lab.engine.remove_adapter(name)
        weights[name] = turn + 1
        lab.engine.add_adapter(Adapter(name, f"version {turn}"), turn + 1)
        chosen = random.choice([*weights, None])
        prompt, params = (
            [*range(1, random.choice((3, 9, 14)))],
            SamplingParams(max_tokens=5, temperature=0),
        )
        lab.engine.add_request(str(turn), prompt, params, adapter=chosen)
        number = 0 if chosen is None else weights[chosen]
        expected[str(turn)] = toy_generate(prompt, params, vocab_size=VOCAB, adapter=number)
        for _ in range(random.choice((0, 1, 3))):
            lab.step()
        assert len(lab.executor.adapters) <= len(weights) + len(lab.pool)
    lab.run()
    assert lab.tokens == expected
    assert set(lab.executor.adapters) == {
        adapter.key for adapter in lab.pool.adapters.named.values()
    }
    assert sum(len(plan.writes) for plan in lab.executor.plans) > 50
    lab.pool.check_integrity()


@pytest.mark.parametrize("kind", ["orca", "request_level", "chunked"])
def test_a_request_waits_for_a_slot_and_those_behind_it_do_not_pass(kind: str) -> None:
    lab = Lab(max_bs=4, num_loras=1, **LABS[kind])  # type: ignore[arg-type]
    for adapter in (A, B):
        lab.engine.add_adapter(adapter, 3)
    params = SamplingParams(max_tokens=6, temperature=0)
    for request_id, name in (("0", "a"), ("1", "b"), ("2", "a"), ("3", None)):
        lab.engine.add_request(request_id, [1, 2], params, adapter=name)
    lab.step()
    assert list(lab.pool.running) == ["0"]
    assert lab.engine.stats.running_loras == ("a",)
    assert lab.engine.stats.waiting_loras == ("a", "b")
    lab.run()
    first = {
        member.request_id: plan.iteration
        for plan in reversed(lab.executor.plans)
        for member in plan.members
    }
    assert first["0"] < first["1"] < first["2"]
    assert first["2"] <= first["3"]


def test_the_reason_for_waiting() -> None:
    lab = Lab(max_bs=4, num_loras=1, shape=Shape())
    for adapter in (A, B):
        lab.engine.add_adapter(adapter, 3)
        lab.engine.add_request(
            adapter.name, [1, 2], SamplingParams(max_tokens=4), adapter=adapter.name
        )
    lab.step()
    assert lab.scheduler.inner.select(lab.pool, lab.kv).held == "adapters"


def test_an_unknown_adapter_is_refused() -> None:
    with pytest.raises(RequestError, match="the adapter 'none' is not loaded"):
        Lab(num_loras=1).engine.add_request("0", [1], SamplingParams(), adapter="none")


def test_the_digests_of_pages_depend_on_the_adapter() -> None:
    def first_page(adapter: Adapter | None, salt: str = "") -> bytes:
        params = SamplingParams(cache_salt=salt)
        request = Request("0", [1, 2, 3, 4], params, 0.0, 0, 0, frozenset(), adapter=adapter)
        return request.digests(4, 1)[0]

    renamed, changed = Adapter("x", A.key), Adapter("a", "another key")
    digests = [first_page(each) for each in (None, A, B, changed)] + [
        first_page(A, "salt"),
        first_page(None, A.key),
    ]
    assert len(set(digests)) == len(digests)
    assert first_page(renamed) == first_page(A)


def test_a_changed_adapter_finds_no_page_of_the_one_before() -> None:
    lab = Lab(max_bs=2, num_loras=2, shape=Shape())
    prompt, params = list(range(1, 14)), SamplingParams(max_tokens=3, temperature=0)
    for turn, key in enumerate(("one", "two", "two")):
        lab.engine.add_adapter(Adapter("a", key), 3 if key == "one" else 4)
        lab.engine.add_request(str(turn), prompt, params, adapter="a")
        lab.run()
        lab.engine.remove_adapter("a")
        assert lab.pool.num_cache_hits == (12 if turn == 2 else 0)
