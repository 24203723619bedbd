"""The Mosaic GPU kernels in Pallas' simulator, without a GPU: numerics and synchronisation."""

from dataclasses import replace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.kernels.ragged_attention import Scores, implementations, triton
from orca_jax.kernels.ragged_attention.cases import CASES, HOPPER_CASES, Case, fitted, make_arrays
from orca_jax.kernels.ragged_attention.gpu_plan import ITEMS
from orca_jax.kernels.ragged_attention.hopper import attention
from orca_jax.kernels.ragged_attention.hopper.attention import HEAD_DIMS, PAGE_SIZES
from tests.aot.ptx import TENSOR_ALIGNMENT
from tests.kernels.ragged_attention.oracle import reference

MIXED = Case(
    "both phases, a window and a cap",
    ((1, 9), (1, 300), (70, 200)),
    num_heads=2,
    num_kv_heads=1,
    padding_tokens=5,
    padding_rows=2,
    sliding_window=150,
    soft_cap=2.0,
)


def fit(case: Case) -> Case:
    """The case with the nearest shapes supported by these kernels."""
    return fitted(case, HEAD_DIMS, PAGE_SIZES)


def check(case: Case) -> None:
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, seed=1, layout="token_major"))
    interpret = plgpu.InterpretGPUParams()
    attend = jax.jit(
        lambda a: attention.attend(*a, case.scores, multiprocessors=1, interpret=interpret)
    )
    actual = np.asarray(attend(arrays), np.float32)
    used = sum(count for count, _ in case.requests)
    np.testing.assert_allclose(
        actual[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance
    )
    assert np.isfinite(actual).all()


@pytest.mark.usefixtures("quick_compiles")
def test_both_phases() -> None:
    check(fit(MIXED))


def test_a_window_is_a_constant() -> None:
    arrays = jax.tree.map(jnp.asarray, make_arrays(fit(MIXED), layout="token_major"))
    with pytest.raises(NotImplementedError, match="known at compile time; unroll the layers"):
        attention.attend(*arrays, Scores(1.0, layer_window=jnp.int32(3)))


@pytest.mark.slow
@pytest.mark.timeout(400)
# the simulator multiplies infinity
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.name)
def test_every_case(case: Case) -> None:
    check(fit(case))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_dtype": "float32"}, "pages of bfloat16"),
        ({"head_dim": 256}, "head dims"),
        ({"head_dim": 80}, "head dims .*not 80"),
        ({"head_dim": 96}, "head dims .*not 96"),
        ({"page_size": 8}, "page sizes"),
        ({"num_heads": 65, "num_kv_heads": 1}, "at most 64 query heads"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unsupported_shapes_are_refused(change: dict[str, object], reason: str) -> None:
    case = replace(fit(CASES[0]), **change)  # type: ignore[arg-type]
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, layout="token_major"))
    with pytest.raises(NotImplementedError, match=reason):
        attention.attend(*arrays, Scores(1.0))


def test_rows_of_every_head_dim_can_be_stored_alone() -> None:
    """A partial tile is stored row by row; each row of shared memory must begin where a tensor copy may begin."""
    assert all(2 * head_dim % TENSOR_ALIGNMENT == 0 for head_dim in HEAD_DIMS)


@pytest.mark.parametrize(
    ("platform", "cores", "expected"), [("gpu", 78, 78), ("gpu", None, 132), ("cpu", 2, 132)]
)
def test_multiprocessors_are_those_of_the_card(
    platform: str, cores: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = jax.tree.map(jnp.asarray, make_arrays(fit(CASES[0]), layout="token_major"))
    device = Mock(jax.Device, platform=platform, core_count=cores)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    launch = Mock(return_value=arrays.q)
    monkeypatch.setattr(attention, "_ragged", launch)
    attention.attend(*arrays, Scores(1.0))
    assert launch.call_args.args[-2] == expected
    monkeypatch.setattr(triton, "attend_shaped", launch)
    triton.attend(*arrays, Scores(1.0))
    assert launch.call_args.args[-1] == ITEMS * expected


def test_they_run_on_gpus_only() -> None:
    assert "gpu" in implementations("gpu")
    assert "gpu" not in implementations("cpu")
