"""Backends of ragged attention for every platform, against the oracle; the oracle against first principles.

Kernels of accelerators have their own test files, which run them in interpreters.
"""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import LAYOUTS, HeadMajorPages
from orca_jax.kernels.ragged_attention import (
    NO_WINDOW,
    RowArrays,
    Scores,
    gather,
    ragged_attention,
    xla,
)
from orca_jax.kernels.ragged_attention.cases import CASES, Arrays, Case, make_arrays
from orca_jax.values.config import PageLayout
from tests.covering import chosen, covering
from tests.kernels.ragged_attention.oracle import (
    INCREMENTS,
    aspects,
    meanings,
    numpy_attention,
    reference,
    run,
)

PACKED = [
    case
    for case in CASES
    if case.name in ("increments and chunks with padding", "sliding window", "int8 pages")
]
COMPARED: list[tuple[PageLayout, Case]] = [("head_major", case) for case in CASES] + [
    ("token_major", case) for case in PACKED
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("case", covering(CASES, meanings, size=1), ids=lambda case: case.name)
def test_reference_is_attention(case: Case) -> None:
    used = sum(count for count, _ in case.requests)
    found = run(make_arrays(case, seed=1), case, "reference").astype(np.float32)
    np.testing.assert_allclose(found[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("layout", "case"),
    chosen(COMPARED, lambda pair: (pair[0], *meanings(pair[1])), size=1),
    ids=lambda x: x.name if isinstance(x, Case) else x,
)
def test_xla_equals_reference(case: Case, layout: PageLayout) -> None:
    check_xla(case, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "case"), COMPARED, ids=lambda x: x.name if isinstance(x, Case) else x
)
def test_the_programs_that_users_run_equal_the_reference(case: Case, layout: PageLayout) -> None:
    check_xla(case, layout)


def check_xla(case: Case, layout: PageLayout) -> None:
    arrays = make_arrays(case, seed=1, layout=layout)
    used = int(arrays.requests.query_len.sum())
    actual = run(arrays, case, "xla").astype(np.float32)
    np.testing.assert_allclose(
        actual[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance
    )
    assert np.isfinite(actual).all(), (
        "padding must stay finite, since it flows through the other layers"
    )


WITHOUT_VALUES = [
    case
    for case in CASES
    if case.name
    in (
        "increments and chunks with padding",
        "window and soft cap",
        "int8 pages",
        "all heads share one",
    )
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("case", "implementation"),
    covering(product(WITHOUT_VALUES, ("xla", "gather", "reference")), size=1),
    ids=lambda x: x.name if isinstance(x, Case) else x,
)
def test_keys_are_the_values_of_pages_without_values(case: Case, implementation: str) -> None:
    arrays = make_arrays(case, seed=1)
    assert isinstance(arrays.pages, HeadMajorPages)
    one = arrays.pages._replace(v=None, v_scale=None)
    both = arrays.pages._replace(v=one.k, v_scale=one.k_scale)
    used = int(arrays.requests.query_len.sum())
    found = run(arrays._replace(pages=one), case, implementation).astype(np.float32)
    expected = numpy_attention(case, arrays._replace(pages=both))
    np.testing.assert_allclose(found[:used], expected[:used], rtol=1e-5, atol=case.tolerance)
    assert np.isfinite(found).all()


PRODUCTS = [
    Case("pages of 8 tokens", ((1, 40),)),
    Case("channels in no groups of 8", ((1, 40),), head_dim=12, page_size=16),
    Case("many heads of each KV head", ((1, 40),), 16, 2, 128, 16),
    Case("several heads of a single KV head", ((1, 40),), 4, 1, 64, 16),
    Case("quantised pages", ((1, 40),), 4, 4, 64, 32, page_dtype="int8"),
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    "case",
    covering(INCREMENTS + PRODUCTS, lambda case: (case in INCREMENTS, *aspects(case)), size=1),
    ids=lambda case: case.name,
)
def test_increments_equal_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over parts of a page, or matrix products where these are faster."""
    calls = []
    attend = xla.attend_increment
    monkeypatch.setattr(xla, "attend_increment", lambda *args: calls.append(1) or attend(*args))
    arrays = make_arrays(case, seed=1)
    used = int(arrays.requests.query_len.sum())
    found = run(arrays, case, "xla").astype(np.float32)
    np.testing.assert_allclose(found[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance)
    assert bool(calls) == (case in INCREMENTS)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("implementation", "name"),
    covering(
        product(("xla", "gather", "reference"), ("sliding window", "window within a page")), size=1
    ),
)
def test_layers_with_several_windows_share_a_program(implementation: str, name: str) -> None:
    case = next(case for case in (*CASES, *INCREMENTS) if case.name == name)
    attend = jax.jit(lambda a, scores: ragged_attention(*a, scores, implementation=implementation))
    for window, same in ((6, case), (NO_WINDOW, replace(case, sliding_window=None))):
        arrays = jax.tree.map(jnp.asarray, make_arrays(same, seed=1))
        used = int(arrays.requests.query_len.sum())
        actual = np.asarray(attend(arrays, Scores(0.25, layer_window=jnp.int32(window))))
        np.testing.assert_allclose(
            actual[:used], reference(same)[:used], rtol=1e-5, atol=case.tolerance
        )


@pytest.mark.parametrize(
    "case", [case for case in CASES if "bfloat16" in case.name], ids=lambda case: case.name
)
def test_xla_multiplies_bfloat16_as_the_processor_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With operands of bfloat16 or float32, by the processor. Both are near the oracle, and they differ."""
    arrays = make_arrays(case, seed=1)
    used = int(arrays.requests.query_len.sum())
    found = []
    for multiplies in (True, False):
        monkeypatch.setattr(xla, "multiplies_bfloat16", lambda answer=multiplies: answer)
        found.append(run(arrays, case, "xla").astype(np.float32)[:used])
        np.testing.assert_allclose(
            found[-1], reference(case)[:used], rtol=1e-5, atol=case.tolerance
        )
    assert (found[0] != found[1]).any()


GATHERED: list[tuple[PageLayout, Case]] = [("head_major", CASES[-3])] + [
    ("token_major", case)
    for case in CASES
    if case.name in ("more queries than one block", "window and soft cap")
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("layout", "case"), GATHERED, ids=lambda x: x.name if isinstance(x, Case) else x
)
def test_gather_equals_reference(case: Case, layout: PageLayout) -> None:
    check_gather(case, layout)


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, aspects, size=1), ids=lambda case: case.name)
def test_gather_for_every_case(case: Case) -> None:
    check_gather(case, "token_major")


def check_gather(case: Case, layout: PageLayout) -> None:
    arrays = make_arrays(case, seed=1, layout=layout)
    used = int(arrays.requests.query_len.sum())
    actual = run(arrays, case, "gather").astype(np.float32)
    np.testing.assert_allclose(
        actual[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance
    )
    assert np.isfinite(actual).all()


def test_gather_leaves_out_the_pages_before_a_window() -> None:
    """One row in its 1,000th token and a tile of queries from position 500 on, with pages of 16 tokens."""
    lists = jnp.arange(2 * 64).reshape(2, 64)
    rows = gather._Rows(
        jnp.zeros((2, 4, 1, 1, 8)),
        lists,
        jnp.array([[999] * 4, [500, 501, 502, 503]]),
        jnp.array([1000, 504]),
    )
    found = gather._from_window(rows, 40, 16)
    assert found.contexts.tolist() == [1000 - 60 * 16, 504 - 28 * 16]
    assert found.positions[:, 0].tolist() == [999 - 60 * 16, 500 - 28 * 16]
    assert found.page_lists[:, :3].tolist() == [[60, 61, 62], [64 + 28, 64 + 29, 64 + 30]]


def test_no_loop_of_gather_asks_the_host_for_its_length() -> None:
    """A GPU's host must know each trip count: every `while` has a constant one, and there are two branches in all."""
    case = CASES[-3]
    args = jax.tree.map(jnp.asarray, make_arrays(case, layout="token_major"))

    def compiled(implementation: str) -> str:
        attend = jax.jit(lambda a: ragged_attention(*a, case.scores, implementation=implementation))
        return attend.lower(args).compile().as_text() or ""

    def lines(text: str, word: str) -> list[str]:
        return [line for line in text.splitlines() if f" {word}(" in line]

    text = compiled("gather")
    assert len(lines(text, "conditional")) == 2
    assert all("known_trip_count" in line for line in lines(text, "while"))
    assert not all("known_trip_count" in line for line in lines(compiled("xla"), "while"))


@pytest.mark.usefixtures("quick_compiles")
def test_a_request_does_not_depend_on_other_requests() -> None:
    """Queries of a request give the same result alone and in a batch."""
    together = Case("together", ((1, 9), (6, 20), (3, 3)))
    arrays = make_arrays(together)
    merged = run(arrays, together, "xla")
    for row, (count, _) in enumerate(together.requests):
        start = arrays.requests.query_start[row]
        one = RowArrays(*(each[row : row + 1] for each in arrays.requests))._replace(
            query_start=np.zeros(1, np.int32)
        )
        alone = Arrays(arrays.q[start : start + count], arrays.pages, one)
        np.testing.assert_allclose(
            run(alone, together, "xla"), merged[start : start + count], rtol=1e-6, atol=1e-6
        )


def test_unknown_implementation_names_the_known_ones() -> None:
    with pytest.raises(NotImplementedError, match=r"'fast'.*xla, reference"):
        run(make_arrays(CASES[0]), CASES[0], "fast")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_that_do_not_group_are_refused(layout: PageLayout) -> None:
    case = Case("3 over 2", ((1, 1),), num_heads=4, num_kv_heads=2)
    arrays = make_arrays(case, layout=layout)
    with pytest.raises(NotImplementedError, match="3 query heads"):
        run(arrays._replace(q=arrays.q[:, :3]), case, "xla")
