"""The Triton kernels of latents in Pallas' interpreter, without a GPU."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import pages_shape
from orca_jax.kernels.ragged_attention import Scores
from orca_jax.kernels.ragged_attention.api import choose_backend
from orca_jax.kernels.ragged_attention.cases import CASES, LATENT_CASES, Case, make_arrays
from orca_jax.kernels.ragged_attention.triton_latents import attend, refusal, shape_of
from tests.kernels.ragged_attention.oracle import reference

# interpreted kernels are not the programs that users run
pytestmark = pytest.mark.usefixtures("quick_compiles")
SMALL = replace(
    LATENT_CASES[1],
    name="latents: pages of 16",
    requests=((1, 9), (1, 140), (5, 33), (16, 16), (40, 70)),
    page_size=16,
)
SIZES = [
    replace(LATENT_CASES[0], name=f"latents: {heads} heads, pages of {size}", **sizes)
    for heads, size, head_dim in ((1, 32, 64), (20, 64, 48), (65, 48, 16), (128, 128, 80))
    for sizes in [{"num_heads": heads, "page_size": size, "head_dim": head_dim}]
]
LONG = replace(SMALL, name="latents: a long prompt", requests=((1, 9), (600, 610)), head_dim=16)
SIZES += [LONG]
ALL = [SMALL, *(pytest.param(case, marks=pytest.mark.slow) for case in (*LATENT_CASES, *SIZES))]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_every_case(case: Case) -> None:
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, seed=1))
    found = np.asarray(attend(*arrays, case.scores, multiprocessors=2, interpret=True), np.float32)
    used = sum(count for count, _ in case.requests)
    np.testing.assert_allclose(found[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance)
    assert np.isfinite(found).all()


def shapes(**sizes: Any) -> Any:
    """Shapes of queries and pages."""
    given = {"num_heads": 16, "head_dim": 576, "page_size": 128, "dtype": "bfloat16", "number": 8}
    of = {**given, **sizes}
    q = jax.ShapeDtypeStruct((8, of["num_heads"], of["head_dim"]), jnp.bfloat16)
    page = 1, of["head_dim"], of["page_size"], jnp.dtype(of["dtype"])
    return q, pages_shape("token_major", of["number"], *page, has_values=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 24}, "multiples of 16, not 24 and 128"),
        ({"page_size": 8}, "multiples of 16, not 576 and 8"),
        ({"dtype": "int8", "number": 3 * 2**30 // (576 * 128)}, "32-bit"),
        ({"dtype": "int4"}, "supports pages of"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unsupported_shapes_are_refused(change: dict[str, Any], reason: str) -> None:
    assert reason in str(refusal(*shapes(**change)))


def test_keys_and_values_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="without values"):
        attend(*jax.tree.map(jnp.asarray, make_arrays(CASES[0])), Scores(1.0))


@pytest.mark.parametrize(("heads", "parts", "rows"), [(16, 1, 16), (20, 1, 32), (128, 4, 32)])
def test_many_heads_are_several_programs(heads: int, parts: int, rows: int) -> None:
    q, pages = shapes(num_heads=heads)
    shape = shape_of(q, pages, Scores(1.0))
    assert (shape.num_kv_heads, shape.rows) == (parts, rows)
    assert shape.parts == [*((128 * part, 128) for part in range(4)), (512, 64)]


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "name"),
    [
        ("gpu", "H200", "9.0", "triton_latents"),
        ("gpu", "A100", "8.0", "triton_latents"),
        ("gpu", "V100", "7.0", "gather"),
        ("tpu", "TPU v6 lite", "", "tpu_latents"),
        ("cpu", "cpu", "", "xla"),
    ],
)
def test_devices_have_kernels_of_latents(
    platform: str, kind: str, capability: str, name: str
) -> None:
    device = Mock(platform=platform, device_kind=kind, compute_capability=capability)
    assert choose_backend(device, *shapes()).name == name
