"""Rows, reserved slots and blocks."""

import math
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orca_jax.sched.admission import check_length
from orca_jax.sched.blocks import by_pool, count_of, most_slots, not_below_zero
from orca_jax.sched.kv import KVManager
from orca_jax.values.cache_spec import NO_BLOCK
from orca_jax.values.errors import ConfigError, RequestError
from tests.sched.lab import groups_of


def holding(slots: int = 10) -> tuple[KVManager, int]:
    kv = KVManager(num_blocks=(8,), page_size=4, num_rows=2, n_slots=26)
    row = kv.acquire_row()
    kv.reserve(row, 1, slots)
    return kv, row


def new_blocks(kv: KVManager, row: int, num_tokens: int) -> list[int]:
    return [block for blocks in kv.allocate(row, num_tokens) for block in blocks]


@pytest.mark.parametrize("param", ["num_pages", "page_size", "num_rows", "n_slots"])
def test_sizes_are_positive(param: str) -> None:
    sizes = {"num_blocks": (8,), "page_size": 4, "num_rows": 2, "n_slots": 26}
    sizes |= {"num_blocks": (0,)} if param == "num_pages" else {param: 0}
    with pytest.raises(ConfigError, match=param) as caught:
        KVManager(**sizes)
    assert caught.value.param == param


def test_pages_cover_every_reservation() -> None:
    KVManager(num_blocks=(8,), page_size=4, num_rows=2, n_slots=26)  # 8 * 4 == 26 + 2 * 3
    with pytest.raises(ConfigError, match="at most 26 or raise num_pages to 9") as caught:
        KVManager(num_blocks=(8,), page_size=4, num_rows=2, n_slots=27)
    assert caught.value.param == "n_slots"
    KVManager(num_blocks=(9,), page_size=4, num_rows=2, n_slots=27)


def test_too_few_pages_for_the_rows() -> None:
    with pytest.raises(ConfigError, match="raise num_pages to 7") as caught:
        KVManager(num_blocks=(1,), page_size=4, num_rows=8, n_slots=3)
    assert caught.value.param == "num_pages"
    KVManager(num_blocks=(7,), page_size=4, num_rows=8, n_slots=3)


def test_pages_come_as_tokens_are_written() -> None:
    kv, row = holding(slots=10)
    assert new_blocks(kv, row, 4) == [0]
    assert new_blocks(kv, row, 4) == []
    assert new_blocks(kv, row, 10) == [1, 2]
    assert new_blocks(kv, row, 1) == []
    assert list(kv.blocks_of(row)[0]) == [0, 1, 2]
    assert kv.num_free_blocks == 5
    kv.check_integrity()


def test_release_restores_the_start() -> None:
    kv, row = holding(slots=10)
    kv.allocate(row, 10)
    kv.free(row)
    kv.release(row)
    kv.release_row(row)
    kv.check_integrity()
    assert (kv.num_free_blocks, kv.num_held_rows, kv.num_free_rows, kv.reserved_slots) == (
        8,
        0,
        2,
        0,
    )
    again = kv.acquire_row()
    kv.reserve(again, 1, 12)
    assert again == row
    assert new_blocks(kv, again, 12) == [0, 1, 2], "the page used last is reused first"


def test_misuse_is_noticed() -> None:
    kv, row = holding(slots=10)
    with pytest.raises(AssertionError, match="reserved already"):
        kv.reserve(row, 1, 1)
    with pytest.raises(AssertionError, match="needs slots for 13"):
        kv.allocate(row, 13)
    with pytest.raises(AssertionError, match="still reserves"):
        kv.release_row(row)
    other = kv.acquire_row()
    with pytest.raises(AssertionError, match="n_slots=26"):
        kv.reserve(other, 1, 17)
    with pytest.raises(AssertionError, match="reserved nothing"):
        kv.release(other)
    with pytest.raises(AssertionError, match="all 2 rows"):
        kv.acquire_row()
    kv.allocate(row, 4)
    kv.release(row)
    with pytest.raises(AssertionError, match="still holds blocks"):
        kv.release_row(row)
    kv.release_row(other)
    with pytest.raises(AssertionError, match="not held"):
        kv.release_row(other)
    with pytest.raises(AssertionError, match="not held"):
        kv.reserve(other, 1, 1)


DAMAGE: dict[str, tuple[Callable[[KVManager, int], object], str]] = {
    "lost block": (lambda kv, row: kv._pools[0]._free.pop(), "not all blocks"),
    "block freed twice": (lambda kv, row: kv._pools[0]._free.append(7), "not all blocks"),
    "block in one row twice": (
        lambda kv, row: kv._blocks_of_row[row][0].__setitem__(1, 0),
        r"holds a block twice: \[0, 0\]",
    ),
    "wrong sum": (lambda kv, row: setattr(kv, "reserved_slots", 9), "the rows' sum is 12"),
    "too much reserved": (lambda kv, row: setattr(kv, "capacity", 9), "12 of 9 slots"),
    "held row among the free": (
        lambda kv, row: kv._free_rows.append(row),
        "free and held rows differ",
    ),
    "lost row": (lambda kv, row: kv._held.__setitem__(row, False), "free and held rows differ"),
    "blocks beyond the reservation": (
        lambda kv, row: kv._slots_of_row.__setitem__(row, (4,)),
        "covers 1",
    ),
    "reservation without a row": (
        lambda kv, row: kv._slots_of_row.__setitem__(1, (4,)),
        "free row 1 reserves",
    ),
    "blocks without a row": (
        lambda kv, row: kv._blocks_of_row[1][0].append(7),
        "free row 1 holds blocks",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_integrity_sees(damage: str) -> None:
    do_damage, message = DAMAGE[damage]
    kv, row = holding(slots=12)
    kv.allocate(row, 8)
    kv.check_integrity()
    do_damage(kv, row)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity()


def test_counts_of_several_pools() -> None:
    one, two = count_of([1, 5]), count_of([2, 4])
    assert (by_pool(one + two), by_pool(one - two), by_pool(3 * one)) == ((3, 9), (-1, 1), (3, 15))
    assert one > two and two > one, "each exceeds the other in a pool"
    assert not one > one and not one > count_of([1, 5]) and one > 4 and not one > 5
    assert by_pool(not_below_zero(one - two)) == (0, 1) and not_below_zero(-3) == 0
    assert by_pool(sum([one, two], count_of([0, 0]))) == (3, 9)
    assert count_of([7]) == 7, "an int with one pool"


WINDOWS = groups_of(None, 9, 9)


@pytest.mark.parametrize(
    ("num_prompt", "max_total", "slots"),
    [
        (3, 5, 3 * 5),  # all of it in each group
        (3, 40, 40 + 2 * (10 + 4)),  # the window, one token, and a page that is left in part
        (20, 40, 40 + 2 * (20 + 4)),  # the prompt is one member
        (38, 40, 3 * 40),
    ],
)
def test_a_request_reserves_its_peak_in_each_group(
    num_prompt: int, max_total: int, slots: int
) -> None:
    kv = KVManager((60,), page_size=4, num_rows=2, n_slots=60, groups=WINDOWS)
    assert (kv.demand(num_prompt, max_total), kv.capacity) == (slots, 180)


def test_a_request_holds_its_peak_in_each_group_without_reservations() -> None:
    kv = KVManager((30,), page_size=4, num_rows=2, groups=WINDOWS, longest=8)
    assert kv.demand(3, 40) == 10 + 2 * 5, (
        "eight tokens, and the eight before them, in five pages if both ends are cut"
    )
    assert kv.blocks_by_group(40) == [10, 5, 5]
    assert kv.longest_request == 80, "twenty pages of a full group, and ten of the others"
    assert [kv.num_fitting(1, total) for total in (4, 40, 80, 81)] == [10, 1, 1, 0]
    apart = KVManager((10, 15), 4, 2, groups=groups_of(None, 9, 9, pools=(0, 1, 1)), longest=8)
    assert by_pool(apart.demand(3, 40)) == (10, 10) and apart.longest_request == 40


def test_a_request_that_exceeds_one_pool_is_refused() -> None:
    apart = KVManager((10, 15), 4, 2, groups=groups_of(None, 9, 9, pools=(0, 1, 1)), longest=8)
    check_length(30, 10, max_model_len=99, kv=apart)
    with pytest.raises(
        RequestError,
        match="30 prompt tokens and max_tokens=11 make 41 tokens, and the KV cache holds 40",
    ):
        check_length(30, 11, max_model_len=99, kv=apart)


def test_slots_are_those_of_each_group() -> None:
    assert most_slots(WINDOWS, (60,), 4, 2) == 60 * 4 // 3 - 6
    KVManager((60,), 4, 2, 74, groups=WINDOWS)
    with pytest.raises(
        ConfigError, match=r"in each of 3 groups of layers.*at most 74 or raise num_pages to 61"
    ):
        KVManager((60,), 4, 2, 75, groups=WINDOWS)


def test_a_window_gives_blocks_back() -> None:
    kv = KVManager((30,), page_size=4, num_rows=2, groups=WINDOWS, longest=8)
    row = kv.acquire_row()
    kv.allocate(row, 20)
    assert (kv.behind(row, 20), kv.num_free_blocks, kv.used_by_group()) == (6, 15, (5, 5, 5))
    kv.leave(row, 20)  # its window begins at 12
    assert (kv.behind(row, 20), kv.num_free_blocks, kv.used_by_group()) == (0, 21, (5, 2, 2))
    assert list(kv.blocks_of(row)[1][:4]) == [NO_BLOCK] * 3 + [8]
    kv.check_integrity()
    kv.free(row)
    assert kv.num_free_blocks == 30


class AnyOrder(RuleBasedStateMachine):
    """All verbs in any order, compared with a model of counters."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(num_blocks=(9,), page_size=4, num_rows=3, n_slots=27)
        self.rows: dict[int, tuple[int, int]] = {}  # row -> slots reserved, tokens written

    @property
    def reserved(self) -> int:
        return sum(slots for slots, _ in self.rows.values())

    @precondition(lambda self: len(self.rows) < 3 and self.reserved < 27)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        slots = data.draw(st.integers(1, 27 - self.reserved))
        row = self.kv.acquire_row()
        assert row not in self.rows
        self.kv.reserve(row, 1, slots)
        self.rows[row] = (slots, 0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        slots, written = self.rows[row]
        tokens = data.draw(st.integers(written, slots))
        before = list(self.kv.blocks_of(row)[0])
        new = new_blocks(self.kv, row, tokens)
        assert [*before, *new] == list(self.kv.blocks_of(row)[0])
        self.rows[row] = (slots, tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.kv.free(row)
        self.kv.release(row)
        self.kv.release_row(row)
        del self.rows[row]

    @invariant()
    def adds_up(self) -> None:
        self.kv.check_integrity()
        assert self.kv.reserved_slots == self.reserved
        assert self.kv.num_held_rows == len(self.rows)
        pages = sum(math.ceil(tokens / 4) for _, tokens in self.rows.values())
        assert self.kv.num_free_blocks == 9 - pages


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
