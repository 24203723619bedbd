"""Memory of arrays on a CPU: taken page by page as it is used, given back, and moved to large pages."""

import gc
import logging
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from orca_jax.exec import untouched as module
from orca_jax.exec.host_memory import give_back, use_large_pages
from orca_jax.exec.untouched import untouched
from orca_jax.model.load import tensor_mesh

pytestmark = pytest.mark.usefixtures("optimised")  # memory is that of programs of users

SHAPE = jax.ShapeDtypeStruct((64, 8, 2**18), jnp.float32)  # 512 MiB
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def sharding_over(devices: int) -> NamedSharding:
    return NamedSharding(tensor_mesh(jax.devices()[:devices]), PartitionSpec(None, "tensor"))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGESIZE"
    )


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs Linux's files about processes"
)
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_memory_is_taken_at_the_first_use(devices: int) -> None:
    sharding = sharding_over(devices)
    write = jax.jit(lambda x, at: x.at[at].set(1), donate_argnums=0, out_shardings=sharding)
    small = untouched(jax.ShapeDtypeStruct((2, 8, 4), jnp.float32), sharding)
    write(small, 0).block_until_ready()  # what the first call of all needs
    gc.collect()
    before = resident()
    array = untouched(SHAPE, sharding)
    assert array.shape == SHAPE.shape and array.sharding.is_equivalent_to(sharding, 3)
    array = write(array, 5).block_until_ready()
    assert resident() - before < 2**27, "an eighth of the array was written"
    assert array[5].sum() == 8 * 2**18
    array.delete()


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs Linux's files about processes"
)
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_memory_that_is_given_back_has_zeros(devices: int) -> None:
    sharding = sharding_over(devices)
    kept = jax.jit(lambda: jnp.full((64, 8), 3.0), out_shardings=sharding)()
    array = jax.jit(lambda x: x.at[:].set(7), donate_argnums=0, out_shardings=sharding)(
        untouched(SHAPE, sharding)
    )
    jax.block_until_ready(array)
    before = resident()
    give_back([array, kept])
    assert before - resident() > 2**28
    assert not array[3, :, ::4096].any() and not array[60, :, ::4096].any()
    add = jax.jit(lambda x: x.at[2].add(1), donate_argnums=0, out_shardings=sharding)
    assert add(array)[2].sum() == 8 * 2**18, "it can be written again"
    assert kept.sum() == 3 * 64 * 8, "less than a page of the system stays as it is"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_any_type_can_be_written_and_read(dtype: str) -> None:
    array = untouched(jax.ShapeDtypeStruct((4, 8, 16), jnp.dtype(dtype)), sharding_over(8))
    assert array.at[:].set(jnp.dtype(dtype).type(3)).sum(dtype=jnp.float32) == 3 * 4 * 8 * 16


def test_without_the_call_there_are_zeros(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_TARGET", "a name without a registration")
    monkeypatch.setattr(module, "_register", lambda: None)
    with caplog.at_level(logging.WARNING):
        array = untouched(jax.ShapeDtypeStruct((4, 8, 16), jnp.float32), sharding_over(2))
    assert not array.any() and array.sharding.is_equivalent_to(sharding_over(2), 3)
    assert "takes all its memory at once" in caplog.text


def large_pages() -> int:
    """KiB of this process in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def wait(thread: threading.Thread | None) -> None:
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(),
    reason="the system has no large pages",
)
def test_large_arrays_are_in_large_pages() -> None:
    wanted = np.arange(8 << 20, dtype=np.int32)
    large, small = jnp.asarray(wanted) + 1, jnp.ones(3)
    before = large_pages()
    wait(use_large_pages(jax.block_until_ready([small])))
    assert large_pages() == before
    wait(use_large_pages([large, small]))
    assert large_pages() >= 30 << 10  # of 32 MiB; parts at both ends may stay as they are
    np.testing.assert_array_equal(large, wanted + 1)
