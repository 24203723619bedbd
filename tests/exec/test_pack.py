"""Packing by hand: what stands where in the arrays of a launch."""

import jax.numpy as jnp
import numpy as np

from orca_jax.exec.buckets import launches
from orca_jax.exec.pack import Batch, Layout, RowTable, pack
from orca_jax.step import Member, RowSampling


def batch_of(members: list[Member], layout: Layout, rows: RowTable) -> tuple[Batch, list[int]]:
    rows.update(members)
    [segments] = launches(members, layout.num_tokens)
    vector, sampling = pack(members, segments, rows, layout)
    return Batch(*(np.asarray(array) for array in layout.unpack(jnp.asarray(vector)))), sampling


def test_a_mixed_batch() -> None:
    rows = RowTable(num_rows=4, num_pages=3)
    sampling = RowSampling(temperature=0.5, top_k=7, top_p=0.9, seed=-1)
    members = [
        Member("prompt", 2, 0, [10, 11, 12, 13, 14], samples=True, new_pages=[5, 1], sampling=sampling),
        Member("increment", 1, 4, [20], samples=True, num_old_pages=1, new_pages=[3]),
        Member("chunk", 0, 0, [30, 31], samples=False, new_pages=[2]),
    ]
    batch, sampled = batch_of(members, Layout(num_tokens=10, num_rows=4, num_pages=3), rows)

    assert sampled == [1, 0], "the increment comes first; the chunk does not sample"
    assert batch.ids.tolist() == [20, 10, 11, 12, 13, 14, 30, 31, 0, 0]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4, 0, 1, 0, 0]
    assert batch.query_start.tolist() == [0, 1, 6, 0]
    assert batch.query_len.tolist() == [1, 5, 2, 0]
    assert batch.context_len.tolist() == [5, 5, 2, 0]
    assert batch.page_table.tolist() == [[0, 3, 0], [5, 1, 0], [2, 0, 0], [0, 0, 0]]
    assert batch.sample_token[:2].tolist() == [0, 5]
    assert batch.sample_row.tolist() == [1, 2, 4, 4], "row 4 does not exist: padding"
    assert batch.sample_position[:2].tolist() == [5, 5]
    assert batch.temperature[:2].tolist() == [0.0, 0.5]
    assert batch.top_k[:2].tolist() == [0, 7]
    assert np.allclose(batch.top_p[:2], [1.0, 0.9])
    assert (batch.seed_high[1], batch.seed_low[1]) == (-1, -1), "64 bits of -1"
    assert not batch.on_device.any()


def test_an_id_that_is_still_on_the_device() -> None:
    rows = RowTable(num_rows=2, num_pages=2)
    members = [
        Member("waiting", 1, 3, [], samples=True, last_on_device=True, new_pages=[1]),
        Member("known", 0, 2, [40, 41], samples=True, new_pages=[0]),
    ]
    batch, sampled = batch_of(members, Layout(num_tokens=4, num_rows=2, num_pages=2), rows)
    assert sampled == [0, 1]
    assert batch.on_device.tolist() == [True, False, False, False]
    assert batch.token_row.tolist() == [1, 0, 0, 0]
    assert batch.ids.tolist() == [0, 40, 41, 0]


def test_known_ids_before_one_on_the_device() -> None:
    """A recomputed prompt whose last token was never collected."""
    rows = RowTable(num_rows=1, num_pages=2)
    members = [Member("r", 0, 0, [50, 51, 52], samples=True, last_on_device=True, new_pages=[1])]
    batch, _ = batch_of(members, Layout(num_tokens=4, num_rows=1, num_pages=2), rows)
    assert batch.ids.tolist() == [50, 51, 52, 0]
    assert batch.on_device.tolist() == [False, False, False, True]


def test_a_cut_member_samples_only_in_its_last_launch() -> None:
    rows = RowTable(num_rows=1, num_pages=2)
    members = [Member("long", 0, 0, list(range(60, 66)), samples=True, new_pages=[1, 0])]
    rows.update(members)
    layout = Layout(num_tokens=4, num_rows=1, num_pages=2)
    first, last = (pack(members, cut, rows, layout) for cut in launches(members, 4))
    assert first[1] == []
    assert last[1] == [0]
    view = layout.views(last[0])
    assert view["ids"].tolist() == [64, 65, 0, 0]
    assert view["context_len"].tolist() == [6]
    assert view["sample_position"].tolist() == [6]


def test_a_row_keeps_its_pages_and_parameters_between_plans() -> None:
    rows = RowTable(num_rows=2, num_pages=2)
    sampling = RowSampling(temperature=1.0, top_k=0, top_p=1.0, seed=2**40 + 3)
    rows.update([Member("r", 1, 0, [1, 2, 3, 4], samples=True, new_pages=[7], sampling=sampling)])
    rows.update([Member("r", 1, 4, [5], samples=True, num_old_pages=1, new_pages=[9])])
    assert rows.page_table[1].tolist() == [7, 9]
    assert (rows.temperature[1], rows.seed_high[1], rows.seed_low[1]) == (1.0, 256, 3)
