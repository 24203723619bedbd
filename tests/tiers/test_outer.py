"""Pages outside of the KV cache, with a tier of the toy's blocks: the same tokens, and no block lost."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from orca_jax.sched import states
from orca_jax.sched.blocks import BlockName
from orca_jax.sched.prefixes.outer import MOST_READINGS, OuterPages
from orca_jax.sim.toy_memory import ToyMemory
from orca_jax.values.request import SamplingParams
from tests.sched.lab import Lab, Shape, groups_of
from tests.sched.test_machine import Machine

PROMPT = [(7 * number) % 59 for number in range(22)]
GREEDY = SamplingParams(max_tokens=5, temperature=0)


class ToyReading:
    """Pages that come when the test says so."""

    def __init__(self, pages: Mapping[BlockName, Any], *, is_done: bool) -> None:
        self.pages = pages
        self.is_done = is_done


class ToyTier:
    """The contents of toy blocks by their names. It outlives an engine."""

    def __init__(self) -> None:
        self.stored: dict[BlockName, Any] = {}
        self.readings: list[ToyReading] = []
        self.room = 100
        self.is_quick = True
        self.lost: set[BlockName] = set()
        self.num_loaded = 0
        self.num_saved = 0
        self.num_failed = 0
        self.memory: ToyMemory

    def attach(self, lab: Lab, seconds: float = 1.0) -> OuterPages:
        self.memory = lab.executor._memory
        assert lab.pool.reuse is not None
        outer = OuterPages(lab.kv, self, lambda tokens: seconds * tokens)
        lab.pool.reuse.outer = outer
        return outer

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def call_when_saved(self, function: Callable[[], None]) -> None:
        self.when_saved = function

    def wait_for_room(self, seconds: float) -> bool:
        self.room = 2
        return True

    def save(self, pages: Sequence[tuple[BlockName, int, int]]) -> None:
        for name, _, block in pages:
            content = self._pool(name)[block]
            self.stored[name] = list(content) if isinstance(content, list) else content
            self.num_saved += 1

    def fetch(self, names: Sequence[BlockName]) -> ToyReading:
        found = {name: self.stored[name] for name in names if name not in self.lost}
        self.readings.append(ToyReading(found, is_done=self.is_quick))
        return self.readings[-1]

    def load(self, pages: Sequence[tuple[BlockName, int, Any]]) -> None:
        for name, block, content in pages:
            self._pool(name)[block] = list(content) if isinstance(content, list) else content
            self.num_loaded += 1

    def seconds(self, num_pages: int) -> float:
        return 0.1 * num_pages

    def wait(self, reading: ToyReading, seconds: float) -> None:
        reading.is_done = True

    def touch(self, names: Sequence[BlockName]) -> None:
        assert all(len(digest) == 32 for _, digest in names)

    def clear(self) -> None:
        self.stored.clear()

    def close(self) -> None:
        pass

    def _pool(self, name: BlockName) -> list[Any]:
        groups = self.memory._groups
        if name[0] == len(groups):
            return self.memory._states
        return self.memory._blocks[groups[name[0]].pool]


def lab_of(*windows: int | None, **fields: Any) -> Lab:
    shape = Shape(budget=16, **fields)
    return Lab(max_bs=2, page_size=4, max_model_len=40, shape=shape, groups=groups_of(*windows))


def with_states(*windows: int | None, spare_states: int) -> Lab:
    return Lab(
        max_bs=2,
        page_size=4,
        max_model_len=40,
        shape=Shape(budget=16),
        groups=groups_of(*windows),
        spare_states=spare_states,
    )


def answer(lab: Lab, prompt: Sequence[int], **fields: Any) -> list[int]:
    request_id = str(len(lab.ends))
    params = SamplingParams(max_tokens=5, temperature=0, **fields)
    lab.engine.add_request(request_id, prompt, params)
    lab.run()
    lab.pool.check_integrity()
    return lab.tokens[request_id]


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 6), (6, 9)])
def test_a_restart_finds_the_pages(windows: tuple[int | None, ...]) -> None:
    tier = ToyTier()
    first = lab_of(*windows)
    tier.attach(first)
    wanted = answer(first, PROMPT)
    assert wanted == first.expected(PROMPT, GREEDY)
    later = lab_of(*windows)
    outer = tier.attach(later)
    assert answer(later, [*PROMPT[:20], 3, 4, 5]) == later.expected([*PROMPT[:20], 3, 4, 5], GREEDY)
    assert later.engine.stats.cache_hits == 20
    assert outer.num_restored == tier.num_loaded > 0
    stats = later.engine.stats
    assert (stats.saved_pages, stats.restored_pages) == (tier.num_saved, tier.num_loaded)
    # a window needs its last pages alone
    full = sum(window is None for window in windows)
    assert tier.num_loaded < 5 * len(windows) or full == len(windows)
    again = tier.num_loaded
    assert answer(later, PROMPT) == wanted
    assert tier.num_loaded == again, "all pages are in the cache"


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_states_come_back_with_their_pages(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last snapshot at the end of a page."""
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
    monkeypatch.setattr(states, "WORTH_A_SNAPSHOT", 1)
    fields: dict[str, Any] = {"spare_states": 12}
    tier = ToyTier()
    tier.attach(lab := with_states(*windows, **fields))
    wanted = answer(lab, PROMPT)
    assert wanted == lab.expected(PROMPT, GREEDY)
    group = len(windows)
    assert len([name for name in tier.stored if name[0] == group]) >= 2
    outer = tier.attach(later := with_states(*windows, **fields))
    assert answer(later, [*PROMPT[:21], 3]) == later.expected([*PROMPT[:21], 3], GREEDY)
    assert later.engine.stats.cache_hits == 16 and outer.num_restored > 1
    tier.lost = {name for name in tier.stored if name[0] == group}
    tier.attach(third := with_states(*windows, **fields))
    assert answer(third, PROMPT) == wanted
    assert not third.engine.stats.cache_hits


def test_salts_divide() -> None:
    tier = ToyTier()
    tier.attach(lab := lab_of(None))
    answer(lab, PROMPT, cache_salt="one")
    tier.attach(later := lab_of(None))
    answer(later, PROMPT, cache_salt="other")
    assert not later.engine.stats.cache_hits and not tier.num_loaded


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_pages_up_to_a_lost_one_come_back(lost: int) -> None:
    tier = ToyTier()
    tier.attach(lab := lab_of(None))
    wanted = answer(lab, PROMPT)
    tier.lost = {list(tier.stored)[lost]}
    tier.attach(later := lab_of(None))
    assert answer(later, PROMPT) == wanted
    assert later.engine.stats.cache_hits == 4 * lost


def test_reading_that_takes_longer_than_computing_is_left_out() -> None:
    tier = ToyTier()
    tier.attach(lab := lab_of(None))
    answer(lab, PROMPT)
    tier.attach(later := lab_of(None), seconds=0.02)
    answer(later, PROMPT)
    assert not tier.readings


def test_requests_with_one_beginning_read_it_once() -> None:
    tier = ToyTier()
    tier.attach(lab := lab_of(None))
    answer(lab, PROMPT)
    tier.is_quick = False
    tier.attach(later := lab_of(None))
    for number in range(2):
        later.engine.add_request(f"r{number}", [*PROMPT, number], GREEDY)
    later.run()
    assert len(tier.readings) == 1 and later.engine.stats.cache_hits >= 40


def test_few_beginnings_are_read_at_once() -> None:
    tier = ToyTier()
    prompts = [[number, *PROMPT] for number in range(7)]
    tier.attach(lab := lab_of(None))
    for prompt in prompts:
        answer(lab, prompt)
    tier.is_quick = False
    tier.attach(later := lab_of(None))
    for number, prompt in enumerate(prompts):
        later.engine.add_request(f"r{number}", prompt, GREEDY)
    later.engine.add_request("new", [50, 51, 52], GREEDY)
    later.step()
    assert len(tier.readings) == MOST_READINGS
    later.run()
    assert len(tier.readings) == len(prompts) and later.engine.stats.cache_hits == 7 * 20
    assert later.tokens["r6"] == later.expected(prompts[6], GREEDY)


def test_others_run_while_pages_are_read() -> None:
    tier = ToyTier()
    tier.attach(lab := lab_of(None))
    answer(lab, PROMPT)
    tier.is_quick = False
    outer = tier.attach(later := lab_of(None))
    later.engine.add_request("known", PROMPT, GREEDY)
    later.engine.add_request("new", [50, 51, 52], GREEDY)
    for _ in range(3):
        later.step()
    assert later.tokens["new"] and not later.tokens.get("known") and outer.is_reading
    tier.readings[0].is_done = True
    later.run()
    assert later.tokens["known"] == later.expected(PROMPT, GREEDY)


def test_pages_without_room_for_them_are_computed() -> None:
    """A running request holds nearly all blocks."""
    tier = ToyTier()
    tier.attach(lab := lab_of(None))
    wanted = answer(lab, PROMPT)
    tier.attach(later := lab_of(None, num_pages=10))
    later.engine.add_request("large", list(range(30)), SamplingParams(max_tokens=9, temperature=0))
    later.step()
    assert answer(later, PROMPT) == wanted


def test_what_cannot_be_saved_now_is_saved_later() -> None:
    tier = ToyTier()
    tier.room = 0
    outer = tier.attach(lab := lab_of(None))
    answer(lab, PROMPT)
    assert not tier.stored
    outer.close()
    assert len(tier.stored) == 6, "two at a time"


def test_other_weights_turn_it_off() -> None:
    tier = ToyTier()
    tier.attach(lab := lab_of(None))
    answer(lab, PROMPT)
    stored = dict(tier.stored)
    tier.attach(later := lab_of(None))
    later.engine.update_weights(lambda: None)
    answer(later, PROMPT)
    answer(later, list(reversed(PROMPT)))
    assert tier.stored == stored and not tier.num_loaded


class TieredMachine(Machine):
    """Pages come and go at any time, some are lost, and the engine is replaced by a later one."""

    @rule()
    def attach(self) -> None:
        """Use the tier from now on, or begin with an empty cache that knows it."""
        if hasattr(self, "tier"):
            return
        self.tier = ToyTier()
        self.tier.is_quick = False
        self.tier.attach(self.lab)

    @precondition(lambda self: hasattr(self, "tier"))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        open_readings = [each for each in self.tier.readings if not each.is_done]
        if open_readings:
            data.draw(st.sampled_from(open_readings)).is_done = True

    @precondition(lambda self: hasattr(self, "tier") and self.tier.stored)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.tier.lost.add(data.draw(st.sampled_from(sorted(self.tier.stored))))

    @precondition(lambda self: hasattr(self, "tier"))
    @rule(room=st.integers(0, 4))
    def fill(self, room: int) -> None:
        self.tier.room = room

    @precondition(lambda self: hasattr(self, "tier") and not len(self.lab.pool))
    @rule()
    def restart(self) -> None:
        """An empty cache, as a later process has it."""
        prefixes = self.lab.kv.prefixes
        prefixes.forget_all()
        self.tier.lost.clear()


class TestMachine(TieredMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=30, stateful_step_count=80, deadline=None)


@pytest.mark.slow
class TestMachineForLong(TieredMachine.TestCase):  # type: ignore[misc, valid-type]
    """Some 1,000 interleavings."""

    settings = settings(max_examples=300, stateful_step_count=100, deadline=None)
