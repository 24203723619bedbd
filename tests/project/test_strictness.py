"""The suite's own strictness: without one of these settings all other tests would still pass, and prove less."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from orca_jax.kernels.kv_pages import HeadMajorPages, RowArrays
from orca_jax.kernels.kv_write import write_kv


def test_fake_devices() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("on an accelerator, tests use its own devices")
    assert jax.device_count() == 8


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


def test_no_implicit_promotion() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.int32)


def test_shapes_are_checked() -> None:
    pages = HeadMajorPages(jnp.zeros((4, 2, 8, 16)), jnp.zeros((4, 2, 8, 16)))
    new = jnp.zeros((3, 2, 8))
    requests = RowArrays(*(jnp.array(x, jnp.int32) for x in ([[1]], [0], [3], [3])))
    write_kv(pages, new, new, requests)
    with pytest.raises(TypeCheckError):
        write_kv(pages, new, new[:, :1], requests)
