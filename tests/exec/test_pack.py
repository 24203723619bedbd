"""Packing by hand: the arrays of a launch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.exec.buckets import Segment, launches
from orca_jax.exec.pack import Batch, Kept, Layout, Packer, pack
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.draw import SamplingParameters
from orca_jax.exec.sampling.programs import (
    Draws,
    DrawsPacker,
    draws_layout,
    extras_layout,
    pack_draws,
    pack_extras,
    pack_masks,
    unpack_draws,
)
from orca_jax.values.step import Member, StateMove
from tests.sampling import row_sampling


def batch_of(members: list[Member], layout: Layout, rows: RowTable) -> tuple[Batch, Kept]:
    rows.update(members)
    [segments] = launches(members, layout.num_tokens, 64)
    vector, kept = pack(members, segments, rows, layout)
    return jax.tree.map(np.asarray, layout.unpack(jnp.asarray(vector))), kept


def draws_of(kept: Kept, rows: RowTable, width: int) -> Draws:
    layout = draws_layout(width)
    row, parameters = unpack_draws(layout, jnp.asarray(pack_draws(kept, rows, layout)))
    return Draws(np.asarray(row), SamplingParameters(*(np.asarray(array) for array in parameters)))


def test_a_mixed_batch() -> None:
    rows = RowTable(num_rows=4, num_pages=3)
    sampling = row_sampling(0.5, 7, 0.9, -1, min_p=0.25)
    members = [
        Member(
            "prompt",
            2,
            0,
            [10, 11, 12, 13, 14],
            is_sampling=True,
            new_blocks=([5, 1],),
            sampling=sampling,
        ),
        Member("increment", 1, 4, [20], is_sampling=True, num_old_blocks=1, new_blocks=([3],)),
        Member("chunk", 0, 0, [30, 31], is_sampling=False, new_blocks=([2],)),
    ]
    batch, kept = batch_of(members, Layout(num_tokens=10, num_rows=4, num_pages=3), rows)

    assert kept.members == [1, 0], "the increment comes first; the chunk does not sample"
    assert kept.targets == [None, None]
    assert batch.ids.tolist() == [20, 10, 11, 12, 13, 14, 30, 31, 0, 0]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4, 0, 1, 0, 0]
    assert batch.requests[0].query_start.tolist() == [0, 1, 6, 0]
    assert batch.requests[0].query_len.tolist() == [1, 5, 2, 0]
    assert batch.requests[0].context_len.tolist() == [5, 5, 2, 0]
    assert batch.requests[0].page_table.tolist() == [[0, 3, 0], [5, 1, 0], [2, 0, 0], [0, 0, 0]]
    assert batch.token_row.tolist() == [1, 2, 2, 2, 2, 2, 0, 0, 4, 4], (
        "row 4 does not exist: padding"
    )
    assert batch.kept_token[:2].tolist() == [0, 5]
    assert not batch.on_device.any()

    row, draw = draws_of(kept, rows, 3)
    assert row.tolist() == [1, 2, 4]
    assert draw.position[:2].tolist() == [5, 5]
    assert draw.temperature.tolist() == [0.0, 0.5, 0.0]
    assert draw.top_k[:2].tolist() == [0, 7]
    assert np.allclose(draw.top_p[:2], [1.0, 0.9])
    assert draw.min_p[:2].tolist() == [0.0, 0.25]
    assert (draw.seed_high[1], draw.seed_low[1]) == (-1, -1), "64 bits of -1"


def test_an_id_that_is_still_on_the_device() -> None:
    rows = RowTable(num_rows=2, num_pages=2)
    members = [
        Member("waiting", 1, 3, [], is_sampling=True, last_on_device=True, new_blocks=([1],)),
        Member("known", 0, 2, [40, 41], is_sampling=True, new_blocks=([0],)),
    ]
    batch, kept = batch_of(members, Layout(num_tokens=4, num_rows=2, num_pages=2), rows)
    assert kept.members == [0, 1]
    assert batch.on_device.tolist() == [True, False, False, False]
    assert batch.token_row.tolist() == [1, 0, 0, 2]
    assert batch.ids.tolist() == [0, 40, 41, 0]


def test_known_ids_before_one_on_the_device() -> None:
    """A recomputed prompt whose last token was never collected."""
    rows = RowTable(num_rows=1, num_pages=2)
    members = [
        Member("r", 0, 0, [50, 51, 52], is_sampling=True, last_on_device=True, new_blocks=([1],))
    ]
    batch, _ = batch_of(members, Layout(num_tokens=4, num_rows=1, num_pages=2), rows)
    assert batch.ids.tolist() == [50, 51, 52, 0]
    assert batch.on_device.tolist() == [False, False, False, True]


NUM_ROWS = 3
LAYOUTS = {
    "plain": Layout(num_tokens=4, num_rows=NUM_ROWS, num_pages=20),
    "adapters": Layout(num_tokens=4, num_rows=NUM_ROWS, num_pages=20, has_slots=True),
    "windows": Layout(
        num_tokens=4, num_rows=NUM_ROWS, num_pages=20, windows=(None, 3, 3), page_size=2
    ),
    "states": Layout(num_tokens=4, num_rows=NUM_ROWS, num_pages=20, has_states=True),
}
WORK = st.sampled_from(["newcomer", "increment", "increment", "increment", "known", "again"])
ITERATION = st.tuples(
    st.permutations(range(NUM_ROWS)),
    st.lists(st.tuples(WORK, st.booleans()), min_size=1, max_size=NUM_ROWS),
)


@pytest.mark.parametrize("kind", LAYOUTS)
@given(iterations=st.lists(ITERATION, max_size=16))
def test_launches_made_from_earlier_ones_are_packed_alike(
    kind: str, iterations: list[tuple[list[int], list[tuple[str, bool]]]]
) -> None:
    """Rows in any order, with new holders, new blocks, ids of the host, and positions computed again."""
    layout = LAYOUTS[kind]
    groups = len(layout.windows)
    rows = RowTable(NUM_ROWS, layout.num_pages, groups)
    packer, draws_packer = Packer(rows), DrawsPacker(rows, for_scored=False)
    positions = [-1] * NUM_ROWS  # of the last token of each row; -1: no holder
    pages = [0] * NUM_ROWS
    numbers = iter(range(1, 1000))

    def member(row: int, work: str, has_page: bool) -> Member:
        sampling = None
        if work == "newcomer" or positions[row] < 0 or pages[row] >= layout.num_pages:
            sampling = row_sampling(0.5, seed=next(numbers))._replace(slot=next(numbers))
            positions[row] = -1
            pages[row] = 0
            has_page = True
        elif work == "again":
            positions[row] -= 1
        positions[row] += 1
        blocks = [[next(numbers)] for _ in range(groups)] if has_page else []
        pages[row] += has_page
        is_known = work == "known" or sampling is not None
        return Member(
            f"{row}",
            row,
            max(positions[row], 0),
            [next(numbers)] if is_known else [],
            is_sampling=True,
            last_on_device=not is_known,
            num_old_blocks=pages[row] - has_page,
            new_blocks=blocks,
            sampling=sampling,
            state=StateMove(next(numbers), next(numbers)) if layout.has_states else None,
        )

    for order, works in iterations:
        members = [member(row, *work) for row, work in zip(order, works, strict=False)]
        rows.update(members)
        [segments] = launches(members, layout.num_tokens, 64)
        vector, kept = packer.pack(members, segments, layout)
        expected, expected_kept = pack(members, segments, rows, layout)
        assert vector.tolist() == expected.tolist()
        for own, other in zip(kept, expected_kept, strict=True):
            assert np.array_equal(own, other)
        draws = draws_layout(4)
        assert (
            draws_packer.pack(kept, draws).tolist()
            == pack_draws(expected_kept, rows, draws).tolist()
        )


def test_the_launch_after_increments_is_made_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowTable(num_rows=2, num_pages=2)
    layout = Layout(num_tokens=2, num_rows=2, num_pages=2)
    packer = Packer(rows)
    members = [Member("r", 1, 3, [], is_sampling=True, last_on_device=True)]
    packer.pack(members, [Segment(0, 0, 1)], layout)
    monkeypatch.delattr("orca_jax.exec.pack.pack")
    vector, kept = packer.pack([members[0]._replace(start=4)], [Segment(0, 0, 1)], layout)
    assert layout.views(vector)["positions"].tolist() == [4, 0]
    assert kept.context_len.tolist() == [5]


def test_a_cut_member_samples_only_in_its_last_launch() -> None:
    rows = RowTable(num_rows=1, num_pages=2)
    members = [Member("long", 0, 0, list(range(60, 66)), is_sampling=True, new_blocks=([1, 0],))]
    rows.update(members)
    layout = Layout(num_tokens=4, num_rows=1, num_pages=2)
    first, last = (pack(members, cut, rows, layout) for cut in launches(members, 4, 64))
    assert first[1].members == []
    assert last[1].members == [0]
    view = layout.views(last[0])
    assert view["ids"].tolist() == [64, 65, 0, 0]
    assert view["context_len"].tolist() == [6]
    assert last[1].context_len.tolist() == [6]


def test_a_row_keeps_its_pages_and_parameters_between_plans() -> None:
    rows = RowTable(num_rows=2, num_pages=2)
    sampling = row_sampling(1.0, seed=2**40 + 3)
    rows.update(
        [Member("r", 1, 0, [1, 2, 3, 4], is_sampling=True, new_blocks=([7],), sampling=sampling)]
    )
    rows.update([Member("r", 1, 4, [5], is_sampling=True, num_old_blocks=1, new_blocks=([9],))])
    assert rows.blocks[0, 1].tolist() == [7, 9]
    assert [rows.sampling[name][1] for name in ("temperature", "seed_high", "seed_low")] == [
        1.0,
        256,
        3,
    ]


def test_targets_are_kept_with_the_token_before_and_draw_nothing() -> None:
    rows = RowTable(num_rows=2, num_pages=2)
    members = [
        Member(
            "scored",
            1,
            2,
            [52, 53, 54],
            is_sampling=True,
            targets=[53, 54],
            num_top_targets=3,
            new_blocks=([1, 0],),
        ),
    ]
    batch, kept = batch_of(members, Layout(num_tokens=4, num_rows=2, num_pages=2), rows)
    assert kept.targets == [53, 54, None]
    assert kept.members == [0, 0, 0]
    assert batch.kept_token[:3].tolist() == [0, 1, 2]
    assert kept.row.tolist() == [2, 2, 1]
    assert kept.context_len.tolist() == [3, 4, 5]
    layout = extras_layout(4)
    view = layout.views(pack_extras(kept, [3, 0, None], rows, layout))
    assert view["has_target"].tolist() == [1, 1, 0, 0]
    assert view["target"][:2].tolist() == [53, 54]
    assert view["wants_logprobs"].tolist() == [1, 1, 0, 0]
    assert view["wants_top"].tolist() == [1, 0, 0, 0]
    assert view["repetition"].tolist() == [1, 1, 1, 1], "neutral, also without a request"


def test_a_cut_gives_each_launch_its_targets() -> None:
    rows = RowTable(num_rows=1, num_pages=2)
    members = [
        Member(
            "scored",
            0,
            0,
            list(range(50, 57)),
            is_sampling=True,
            targets=range(51, 57),
            new_blocks=([1, 0],),
        )
    ]
    rows.update(members)
    kept = [pack(members, cut, rows, Layout(4, 1, 2))[1] for cut in launches(members, 4, 4)]
    assert [launch.targets for launch in kept] == [[51, 52, 53, 54], [55, 56, None]]


def test_a_new_holder_loses_the_extras_of_the_one_before() -> None:
    rows = RowTable(num_rows=1, num_pages=1)
    rich = row_sampling(1.0, repetition_penalty=2.0, logit_bias={7: 1.5, 9: -100.0}, logprobs=0)
    zero = np.zeros(1, np.int32)
    kept = Kept([0], [None], zero, zero, np.ones(1, np.int32), zero)
    layout = extras_layout(2)
    rows.update([Member("rich", 0, 0, [1], is_sampling=True, sampling=rich)])
    view = layout.views(pack_extras(kept, [0], rows, layout))
    assert (view["listed_id"][0, :3].tolist(), view["bias"][0, :3].tolist()) == (
        [7, 9, 0],
        [1.5, -100.0, 0.0],
    )
    assert (view["repetition"][0], view["wants_logprobs"][0], rows.has_extras[0]) == (2, 1, True)
    rows.update([Member("plain", 0, 0, [1], is_sampling=True, sampling=row_sampling(1.0))])
    view = layout.views(pack_extras(kept, [None], rows, layout))
    assert not view["bias"].any()
    assert (view["repetition"][0], view["wants_logprobs"][0], rows.has_extras[0]) == (1, 0, False)


@given(st.lists(st.none() | st.sets(st.integers(0, 255), min_size=1), max_size=3))
def test_masks_have_a_bit_for_each_allowed_id(wanted: list[set[int] | None]) -> None:
    masks = [None if ids is None else sum(1 << token for token in ids) for ids in wanted]
    words = pack_masks(masks, 3, 256)
    bits = (words[:, :, None].view(np.uint32) >> np.arange(32, dtype=np.uint32)) & 1
    allowed = [set(np.flatnonzero(row).tolist()) for row in bits.reshape(3, 256)]
    everything = set(range(256))
    expected = [everything if ids is None else ids for ids in wanted] + [everything] * (
        3 - len(wanted)
    )
    assert allowed == expected


def test_ids_without_a_column_are_dropped_from_a_mask() -> None:
    assert pack_masks([(1 << 5) | (1 << 4000)], 1, 128).tolist() == [[32, 0, 0, 0]]
