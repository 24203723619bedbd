"""Attention by the library in C, against the oracle."""

import ctypes
import subprocess
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import HeadMajorPages
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.native import library
from orca_jax.kernels.ragged_attention import NO_WINDOW, RowArrays, Scores, native, ragged_attention
from orca_jax.kernels.ragged_attention.api import choose_backend, explain_choice
from orca_jax.kernels.ragged_attention.cases import CASES, Arrays, Case, make_arrays
from tests.covering import covering
from tests.kernels.native.machine import SANITIZED, needs_library, run_cases
from tests.kernels.ragged_attention.oracle import INCREMENTS, aspects, reference, run

PAGES = 16  # tokens: the smallest page of the library on every processor
FITTED = [replace(case, page_size=max(case.page_size, PAGES)) for case in (*CASES, *INCREMENTS)]
READ = [case for case in FITTED if case.page_dtype in ("float32", "bfloat16", "int8")]
OTHERS = [
    *(
        Case(f"{heads} heads of each KV head", ((1, 200), (1, 31), (2, 7)), 2 * heads, 2, 64, 32)
        for heads in range(3, 7)
    ),
    Case(
        "a window between pages", ((1, 64), (1, 65), (1, 80)), 4, 2, page_size=16, sliding_window=16
    ),
    Case(
        "large bfloat16 pages",
        ((1, 300), (1, 128), (1, 127)),
        4,
        2,
        128,
        128,
        dtype="bfloat16",
        page_dtype="bfloat16",
    ),
    Case("pages of 1024 tokens", ((1, 1500), (1, 1024), (1, 5)), 4, 2, 8, 1024),
]


@needs_library
@pytest.mark.usefixtures("quick_compiles")  # for all but the library
@pytest.mark.parametrize(
    "case", covering(READ + OTHERS, aspects, size=1), ids=lambda case: case.name
)
def test_native_equals_the_reference(case: Case) -> None:
    arrays = make_arrays(case, seed=1)
    used = int(arrays.requests.query_len.sum())
    found = run(arrays, case, "native").astype(np.float32)
    np.testing.assert_allclose(found[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance)
    assert np.isfinite(found).all(), (
        "padding must stay finite, since it flows through the other layers"
    )


def what_a_write_sees(case: Case) -> tuple[Hashable, ...]:
    chunks, padding = any(count > 1 for count, _ in case.requests), case.padding_tokens > 0
    return (
        case.dtype,
        case.page_dtype,
        case.page_size > 100,
        case.num_heads > case.num_kv_heads,
        chunks,
        padding,
    )


@needs_library
@pytest.mark.usefixtures("quick_compiles")  # for all but the library
@pytest.mark.parametrize(
    "case", covering(READ + OTHERS, what_a_write_sees, size=1), ids=lambda case: case.name
)
def test_new_tokens_are_written(case: Case) -> None:
    """Outputs and pages are those of a write by XLA and then attention; all other slots keep their bits."""
    q, pages, requests = jax.tree.map(jnp.asarray, make_arrays(case, seed=1))
    assert isinstance(pages, HeadMajorPages)
    draw = np.random.default_rng(3)
    new = [
        jnp.asarray(draw.standard_normal((q.shape[0], *pages.k.shape[1:3])), jnp.float32)
        for _ in range(2)
    ]
    # Of a layer whose pages begin at the third.
    prepared = requests.of_layer(jnp.int32(-2))

    @jax.jit
    def one_by_one(
        q: jax.Array, new: list[jax.Array], pages: HeadMajorPages
    ) -> tuple[jax.Array, HeadMajorPages]:
        written = write_kv(pages, *new, requests, implementation="blocks")
        return native.attend(q, written, requests, case.scores), written

    wanted, expected = one_by_one(q, new, pages)
    write = jax.jit(native.write_and_attend, donate_argnums=3)
    found, written = write(q, *new, pages, prepared, jnp.int32(2), case.scores)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    for ours, theirs in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@needs_library
@pytest.mark.parametrize("tokens", [1, 40])
def test_bfloat16_is_rounded_as_by_xla(tokens: int) -> None:
    """Halfway between two numbers, infinite, and not a number: alone, and in a chunk."""
    bits = np.array(
        [
            0x3F808000,
            0x3F818000,
            0x3F808001,
            0x7F7FFFFF,
            0x7F800000,
            0xFF800000,
            0x7FC00001,
            0x80000000,
        ]
    )
    new = jnp.asarray(np.resize(bits.astype(np.uint32).view(np.float32), (tokens, 1, 8)))
    pages = HeadMajorPages(*(jnp.zeros((2, 1, 8, 32), jnp.bfloat16) for _ in range(2)))
    requests = RowArrays(
        jnp.array([[0, 1]]), jnp.zeros(1, jnp.int32), jnp.array([tokens]), jnp.array([tokens])
    )
    _, written = jax.jit(native.write_and_attend, donate_argnums=3)(
        jnp.zeros((tokens, 1, 8)), new, -new, pages, requests, jnp.int32(0), Scores(1.0)
    )
    for part, sign in zip(written[:2], (1, -1), strict=True):
        stored = np.asarray(part).transpose(0, 3, 1, 2).reshape(64, 1, 8)[:tokens]
        expected = np.asarray((sign * new).astype(jnp.bfloat16))
        same = stored.view(np.uint16) == expected.view(np.uint16)
        assert (same | (np.isnan(stored) & np.isnan(expected))).all()


@needs_library
@pytest.mark.usefixtures("quick_compiles")
def test_scores_of_every_size() -> None:
    """A softmax over large and small scores: the largest one may come first or last."""
    case = Case("steep", ((1, 100), (1, 100)), 4, 4, 64, 32)
    arrays = make_arrays(case, seed=1)
    steep = arrays._replace(q=40 * arrays.q)
    found = run(steep, case, "native")
    np.testing.assert_allclose(found, run(steep, case, "reference"), rtol=1e-4, atol=1e-5)


# Of one KV head: (part, value), which row 0 has in one place. A name with NaN says that heads of row 0 must be NaN.
ODD = {
    "NaN in a key": {"key": np.nan},
    "NaN in the query": {"query": np.nan},
    "infinity in a key: NaN where the score is positive": {"key": np.inf},
    "infinity in the query: NaN": {"query": np.inf},
    "1e38 in a key": {"key": 1e38},
    "1e38 in the query": {"query": 1e38},
    "1e38 in both: NaN where the score is positive": {"key": 1e38, "query": 1e38},
    "1e38 in a value, far below the others": {"value": 1e38, "key": -1e4},
    "NaN in a value": {"value": np.nan},
}


@pytest.fixture(params=["own", "AVX2"])
def vectors(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The vectors of attention: those of this processor, or eight lanes."""
    if request.param == "AVX2":
        if "avx512f" not in library.all_cpu_flags():
            pytest.skip("this processor has eight lanes")
        register_avx2(tmp_path_factory.getbasetemp() / "avx2.so")
        monkeypatch.setattr("orca_jax.kernels.native.attention.ATTENTION", "test_attention_avx2")
    return str(request.param)


@cache
def register_avx2(path: Path) -> None:
    source = Path(library.__file__).with_name("attention.c")
    options = [*library.OPTIONS, "-march=haswell", "-shared", f"-I{jax.ffi.include_dir()}"]
    command = ["cc", *options, str(source), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    made = ctypes.CDLL(str(path))
    jax.ffi.register_ffi_target(
        "test_attention_avx2", jax.ffi.pycapsule(made.orca_jax_attention), platform="cpu"
    )


@cache
def program(case: Case, implementation: str, vectors: str) -> Callable[[Arrays], jax.Array]:
    return jax.jit(lambda a: ragged_attention(*a, case.scores, implementation=implementation))


def odd_arrays(case: Case, values: dict[str, float], token: int) -> Arrays:
    """The arrays of a case, with odd values in KV head 1 of row 0."""
    arrays = make_arrays(case, seed=1)
    keys, pooled = (np.array(pool) for pool in (arrays.pages.k, arrays.pages.v))  # type: ignore[union-attr]
    place = arrays.requests.page_table[0, token // case.page_size], 1, 2, token % case.page_size
    for part, value in values.items():
        if part == "query":
            arrays.q[0, case.num_heads // case.num_kv_heads, 2] = value
        else:
            (keys if part == "key" else pooled)[place] = value
    return arrays._replace(pages=HeadMajorPages(keys, pooled))  # type: ignore[arg-type]


@needs_library
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("page_dtype", "soft_cap"), covering(product(("float32", "bfloat16"), (None, 2.0)), size=1)
)
def test_numbers_that_are_not_finite_are_those_of_the_reference(
    kind: str, page_dtype: str, soft_cap: float | None, vectors: str
) -> None:
    """A request with NaN must fail, so attention must not hide it; other requests and heads are as before."""
    case = Case(
        "odd", ((1, 70), (1, 33), (1, 64)), 6, 3, 16, 32, soft_cap=soft_cap, page_dtype=page_dtype
    )  # type: ignore[arg-type]
    has_nan = False
    for token in (0, 40, 69):
        arrays = odd_arrays(case, ODD[kind], token)
        args = jax.tree.map(jnp.asarray, arrays)
        found = np.asarray(program(case, "native", vectors)(args))
        wanted = np.asarray(program(case, "reference", "")(args))
        rtol = 1e-4 if page_dtype == "float32" else 0.01
        np.testing.assert_allclose(
            found, wanted, rtol=rtol, atol=case.tolerance, err_msg=f"token {token}"
        )
        assert np.isfinite(found[1:]).all() and np.isfinite(found[0, [0, 1, 4, 5]]).all()
        has_nan |= bool(np.isnan(found).any())
    if soft_cap is None:
        assert has_nan == ("NaN" in kind)


@needs_library
@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16"])
def test_scores_of_every_finite_size(page_dtype: str, vectors: str) -> None:
    """From -1e38 to 1e38, where a score minus the largest one may overflow. A score of -1e38 alone has weight 1."""
    pages = np.zeros((2, 1, 16, 16), np.float32)
    pages[:, 0, 0] = np.resize([-1e38, 1e38, -3e38, 0, 3e38, -1e31], 16)
    pages[1, 0, 0] = -1e38
    values = np.arange(2 * 16 * 16, dtype=np.float32).reshape(pages.shape) / 64
    queries = jnp.zeros((3, 1, 16)).at[:, 0, 0].set(1)
    table = jnp.array([[0, 1], [1, 0], [1, 1]])
    requests = RowArrays(table, jnp.arange(3), jnp.ones(3, jnp.int32), jnp.array([23, 31, 9]))
    arrays = [jnp.asarray(each, page_dtype) for each in (pages, values)]
    found, wanted = (
        ragged_attention(
            queries, HeadMajorPages(*arrays), requests, Scores(1.0), implementation=name
        )
        for name in ("native", "reference")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@needs_library
def test_a_request_without_any_weight_is_not_a_number(vectors: str) -> None:
    """All scores are -inf: a softmax of nothing."""
    pages = HeadMajorPages(jnp.full((1, 1, 16, 16), -jnp.inf), jnp.ones((1, 1, 16, 16)))
    zero = jnp.zeros(1, jnp.int32)
    requests = RowArrays(zero[None], zero, zero + 1, jnp.array([9]))
    found = ragged_attention(
        jnp.ones((1, 1, 16)), pages, requests, Scores(1.0), implementation="native"
    )
    assert jnp.isnan(found).all()


@needs_library
@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", ["sliding window", "window within a page"])
def test_layers_with_several_windows_share_a_program(name: str) -> None:
    case = next(case for case in READ if case.name == name)
    attend = jax.jit(lambda a, scores: ragged_attention(*a, scores, implementation="native"))
    for window, same in ((6, case), (NO_WINDOW, replace(case, sliding_window=None))):
        arrays = jax.tree.map(jnp.asarray, make_arrays(same, seed=1))
        used = int(arrays.requests.query_len.sum())
        found = np.asarray(attend(arrays, Scores(0.25, layer_window=jnp.int32(window))))
        np.testing.assert_allclose(
            found[:used], reference(same)[:used], rtol=1e-5, atol=case.tolerance
        )


@needs_library
@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 3, 7])
def test_the_bits_of_a_query_follow_from_its_context_alone(heads: int, dtype: str) -> None:
    """One chunk beside another, increments, other borders, and larger pages: no schedule changes a token."""
    case = Case(
        "a chunk",
        ((60, 300), (9, 9)),
        2 * heads,
        2,
        24,
        16,
        sliding_window=170,
        dtype=dtype,
        page_dtype=dtype,
    )  # type: ignore[arg-type]
    arrays = make_arrays(case)
    q, (table, *_) = arrays.q[:60], arrays.requests
    expected = run(arrays, case, "native")[:60]

    def pieces(
        lengths: list[int], table: np.ndarray = table, pages: HeadMajorPages = arrays.pages
    ) -> np.ndarray:  # type: ignore[assignment]
        ends = np.cumsum(lengths)
        rows = np.repeat(table[:1], len(lengths), axis=0), ends - lengths, lengths, 240 + ends
        requests = RowArrays(*(np.asarray(each, np.int32) for each in rows))  # type: ignore[arg-type]
        return run(Arrays(q, pages, requests), case, "native")

    for lengths in ([1] * 60, [1, 50, 7, 2], [60]):
        np.testing.assert_array_equal(pieces(lengths), expected, err_msg=str(lengths))
    tokens = (
        np.asarray(pool)[table[0]].transpose(1, 2, 0, 3).reshape(2, 24, -1)
        for pool in arrays.pages[:2]
    )
    large = (np.pad(each[..., :300], ((0, 0), (0, 0), (0, 84))) for each in tokens)
    pages = HeadMajorPages(*(each.reshape(2, 24, 2, 192).transpose(2, 0, 1, 3) for each in large))  # type: ignore[arg-type]
    np.testing.assert_array_equal(pieces([60], np.array([[0, 1]]), pages), expected)


@needs_library
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-march=native", *SANITIZED), id="sanitizers", marks=pytest.mark.slow),
        pytest.param(("-march=haswell", *SANITIZED), id="AVX2, sanitizers", marks=pytest.mark.slow),
    ],
)
def test_random_attention_in_c(options: tuple[str, ...], tmp_path: Path) -> None:
    """With arrays that end where those of a call do; also more heads of a KV head than rows that are read together."""
    run_cases("attention_cases.c", options, tmp_path)


@needs_library
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("pages of 4 tokens", ((1, 1),), page_size=4), "pages of a multiple of"),
        (Case("wide heads", ((1, 1),), head_dim=1024, page_size=16), "heads of up to 512 channels"),
        (
            Case("fp8", ((1, 1),), page_size=16, page_dtype="float8_e4m3fn"),
            "in float32, bfloat16 or int8",
        ),
        (
            Case("float16", ((1, 1),), page_size=16, dtype="float16", page_dtype="float16"),
            "in float32, bfloat16 or int8",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_other_pages_are_refused(case: Case, reason: str) -> None:
    """Then XLA computes the increments too."""
    arrays = jax.tree.map(jnp.asarray, make_arrays(case))
    assert reason in str(native.refusal(arrays.q, arrays.pages))
    assert choose_backend(jax.devices()[0], arrays.q, arrays.pages, has_library=True).name == "xla"
    token_major = jax.tree.map(jnp.asarray, make_arrays(CASES[0], layout="token_major"))
    assert "head-major" in str(native.refusal(token_major.q, token_major.pages))


@pytest.mark.parametrize(("has_library", "default"), [(True, "native"), (False, "xla")])
def test_the_default_with_and_without_the_library(has_library: bool, default: str) -> None:
    q, pages, _ = jax.tree.map(jnp.asarray, make_arrays(FITTED[0]))
    assert choose_backend(jax.devices()[0], q, pages, has_library=has_library).name == default
    assert explain_choice(jax.devices()[0], q, pages, has_library=has_library).reason.startswith(
        "the default of cpu"
    )


def test_native_without_the_library_is_refused() -> None:
    q, pages, _ = jax.tree.map(jnp.asarray, make_arrays(FITTED[0]))
    with pytest.raises(NotImplementedError, match="has not loaded"):
        explain_choice(jax.devices()[0], q, pages, "native")


@needs_library
def test_shapes_that_do_not_fit_are_refused_by_the_library() -> None:
    pages = HeadMajorPages(jnp.ones((1, 2, 8, 20)), jnp.ones((1, 2, 8, 20)))
    one = jnp.ones(1, jnp.int32)
    assert (
        native.refusal(jnp.ones((1, 2, 8)), pages)
        == "'native' reads pages of a multiple of 16 tokens"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention do not fit"):
        requests = RowArrays(jnp.zeros((1, 1), jnp.int32), 0 * one, one, one)
        native.attend(jnp.ones((1, 2, 8)), pages, requests, Scores(1.0)).block_until_ready()
