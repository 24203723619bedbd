"""The Triton kernels in Pallas' interpreter, without a GPU, and the default kernels of each GPU."""

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import KVPages, pages_shape
from orca_jax.kernels.ragged_attention import Scores, implementations
from orca_jax.kernels.ragged_attention.api import choose_backend, explain_choice
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays
from orca_jax.kernels.ragged_attention.hopper import assembler
from orca_jax.kernels.ragged_attention.triton import HEAD_DIMS, refusal
from orca_jax.kernels.ragged_attention.triton import attend as ragged_attention_triton
from tests.covering import chosen
from tests.kernels.ragged_attention.oracle import aspects, reference

MIXED = Case(
    "both phases, two parts of a head, a window and a cap",
    ((1, 9), (1, 300), (70, 200)),
    num_heads=6,
    num_kv_heads=2,
    head_dim=80,
    padding_tokens=5,
    padding_rows=2,
    sliding_window=150,
    soft_cap=2.0,
)
HALF = Case(
    "float16, a head of 48",
    ((1, 40), (9, 33)),
    2,
    1,
    48,
    16,
    padding_tokens=1,
    dtype="float16",
    page_dtype="float16",
)
PREFIX = Case(
    "blocks without masks, fp8 pages",
    ((1, 290), (140, 300)),
    2,
    1,
    64,
    16,
    page_dtype="float8_e4m3fn",
)


def fitted(case: Case) -> Case:
    """The case with the nearest head dim supported by these kernels."""
    return replace(case, head_dim=min(dim for dim in HEAD_DIMS if dim >= case.head_dim))


def check(case: Case) -> None:
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, seed=1, layout="token_major"))
    actual = ragged_attention_triton(*arrays, case.scores, multiprocessors=2, interpret=True)
    used = sum(count for count, _ in case.requests)
    found = np.asarray(actual, np.float32)
    np.testing.assert_allclose(found[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance)
    assert np.isfinite(found).all()


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    "case",
    [MIXED, *(pytest.param(case, marks=pytest.mark.slow) for case in (PREFIX, HALF))],
    ids=lambda case: case.name,
)
def test_both_phases(case: Case) -> None:
    check(case)


def test_a_window_is_a_constant() -> None:
    arrays = jax.tree.map(jnp.asarray, make_arrays(fitted(MIXED), layout="token_major"))
    with pytest.raises(NotImplementedError, match="known at compile time; unroll the layers"):
        ragged_attention_triton(*arrays, Scores(1.0, layer_window=jnp.int32(3)))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("case", chosen(CASES, aspects, size=1), ids=lambda case: case.name)
def test_every_case(case: Case) -> None:
    check(fitted(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "page_size"), chosen(product(HEAD_DIMS, (16, 32, 64, 128, 256)), size=1)
)
def test_every_page_size_and_head_dim(head_dim: int, page_size: int) -> None:
    case = Case(
        "",
        ((1, 257), (1, 31), (9, 140)),
        4,
        2,
        head_dim,
        page_size,
        3,
        dtype="bfloat16",
        page_dtype="bfloat16",
    )
    check(case)


def shapes(case: Case, num_pages: int = 8) -> tuple[Any, KVPages]:
    """Shapes of the queries and pages of a case."""
    page = case.num_kv_heads, case.head_dim, case.page_size
    q = jax.ShapeDtypeStruct((8, case.num_heads, case.head_dim), case.dtype)
    return q, pages_shape("token_major", num_pages, *page, jnp.dtype(case.page_dtype))


@pytest.mark.parametrize(
    ("change", "num_pages", "reason"),
    [
        ({"head_dim": 72}, 8, "head dims"),
        ({"num_heads": 65, "num_kv_heads": 1}, 8, "at most 64 query heads"),
        ({"page_dtype": "int8"}, 3 * 2**30 // (2 * 4 * 32 * 8), "32-bit"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unsupported_shapes_are_refused(
    change: dict[str, Any], num_pages: int, reason: str
) -> None:
    case = replace(fitted(CASES[0]), **change)
    found: list[str | None] = []
    jax.eval_shape(lambda q, pages: found.append(refusal(q, pages)), *shapes(case, num_pages))
    assert found[0] is not None
    assert reason in found[0]


def test_pages_of_cpus_are_refused() -> None:
    arrays = jax.tree.map(jnp.asarray, make_arrays(fitted(CASES[0]), layout="head_major"))
    with pytest.raises(NotImplementedError, match="token-major pages"):
        ragged_attention_triton(*arrays, Scores(1.0))


HOPPERS = Case("", ((1, 1),), 4, 4, 64, 16, dtype="bfloat16", page_dtype="bfloat16")


@pytest.mark.parametrize(
    ("capability", "change", "expected"),
    [
        ("9.0", {}, "gpu"),
        ("9.0", {"page_dtype": "int8"}, "triton"),
        ("9.0", {"head_dim": 80}, "triton"),
        ("9.0", {"head_dim": 96}, "triton"),
        ("9.0", {"head_dim": 256}, "triton"),
        ("9.0", {"head_dim": 32}, "triton"),
        ("9.0", {"page_size": 8}, "triton"),
        ("9.0", {"dtype": "float16", "page_dtype": "float16"}, "triton"),
        ("9.0", {"head_dim": 72}, "gather"),
        ("8.0", {}, "triton"),
        ("8.9", {"dtype": "float32", "page_dtype": "float32"}, "triton"),
        ("10.0", {}, "triton"),
        ("12.1", {}, "triton"),
        ("7.5", {}, "gather"),
        ("gfx942", {}, "gather"),
    ],
)
def test_default_kernels_of_each_gpu(
    capability: str, change: dict[str, Any], expected: str
) -> None:
    device = Mock(jax.Device, platform="gpu", compute_capability=capability)
    case = replace(HOPPERS, **change)
    found = choose_backend(device, *abstract(case))
    assert found.name == expected


def abstract(case: Case) -> tuple[Any, KVPages]:
    """Arrays of a case as a trace sees them."""
    found: list[tuple[Any, KVPages]] = []
    jax.eval_shape(lambda *arrays: found.append(arrays), *shapes(case))
    return found[0]


@pytest.mark.parametrize(
    ("capability", "change", "reason"),
    [
        ("9.0", {"head_dim": 72}, "the default of Card; attention 'gpu' supports head dims"),
        (
            "7.5",
            {},
            "the default of Card; 'gpu' is for GPUs of compute capability 9; 'triton' is for GPUs of compute",
        ),
        ("9.0", {}, "the default of Card; attention 'gpu' needs ptxas"),
    ],
)
def test_the_choice_has_a_reason(
    capability: str, change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler, "ptxas_version", lambda: (12, 8, 93))
    device = Mock(jax.Device, platform="gpu", compute_capability=capability, device_kind="Card")
    choice = explain_choice(device, *abstract(replace(HOPPERS, **change)))
    assert choice.backend.name == ("triton" if not change and capability == "9.0" else "gather")
    assert choice.reason.startswith(reason)
    assert choice.is_slow


def test_a_named_kernel_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "ptxas_version", lambda: (12, 8, 93))
    device = Mock(jax.Device, platform="gpu", compute_capability="9.0", device_kind="Card")
    with pytest.raises(NotImplementedError, match=r"ptxas 12\.8\.93 miscompiles"):
        explain_choice(device, *abstract(HOPPERS), "gpu")
    assert explain_choice(device, *abstract(HOPPERS), "triton").reason == "as configured"


def test_they_run_on_gpus_only() -> None:
    assert "triton" in implementations("gpu")
    assert "triton" not in implementations("cpu")
