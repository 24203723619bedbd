"""Memory of the KV cache on a CPU that is taken page by page, as it is used."""

import gc
import logging
import mmap
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from orca_jax.exec import untouched as module
from orca_jax.exec.untouched import Populating, untouched
from orca_jax.model.load import tensor_mesh

SHAPE = jax.ShapeDtypeStruct((64, 8, 2**18), jnp.float32)  # 512 MiB


def sharding_over(devices: int) -> NamedSharding:
    return NamedSharding(tensor_mesh(jax.devices()[:devices]), PartitionSpec(None, "tensor"))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's files about processes")
@pytest.mark.parametrize("devices", [1, 2])
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


def can_populate() -> bool:
    """True on Linux 5.14 or later."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(module._POPULATE_WRITE)
        except (AttributeError, OSError):
            return False
    return True


@pytest.mark.skipif(not can_populate(), reason="needs Linux 5.14")
def test_memory_can_be_taken_without_a_use() -> None:
    sharding = sharding_over(2)
    array = untouched(SHAPE, sharding).at[3].set(7.0)
    before = resident()
    fresh = untouched(SHAPE, sharding)
    populating = Populating([fresh], lambda: True)
    populating._thread.join(60)
    populating.stop()
    assert not populating._thread.is_alive() and resident() - before > 2**28
    assert array[3].sum() == 7 * 8 * 2**18, "values stay"
    array.delete()
    fresh.delete()


@pytest.mark.skipif(not can_populate(), reason="needs Linux 5.14")
def test_no_memory_is_taken_while_a_launch_runs() -> None:
    runs, looks = threading.Event(), threading.Semaphore(0)
    runs.set()

    def is_idle() -> bool:
        looks.release()
        return not runs.is_set()

    array = untouched(SHAPE, sharding_over(1))
    before = resident()
    populating = Populating([array], is_idle)
    for _ in range(3):
        assert looks.acquire(timeout=60)
    assert resident() - before < 2**27, "it looks, and takes nothing"
    runs.clear()
    populating._thread.join(60)
    assert resident() - before > 2**28
    populating.stop()
    array.delete()


@pytest.mark.parametrize("is_idle", [True, False])
def test_it_ends_when_it_is_stopped(is_idle: bool) -> None:
    array = untouched(SHAPE, sharding_over(1))
    populating = Populating([array], lambda: is_idle)
    populating.stop()
    assert not populating._thread.is_alive()
    array.delete()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_any_type_can_be_written_and_read(dtype: str) -> None:
    array = untouched(jax.ShapeDtypeStruct((4, 8, 16), jnp.dtype(dtype)), sharding_over(8))
    assert array.at[:].set(jnp.dtype(dtype).type(3)).sum(dtype=jnp.float32) == 3 * 4 * 8 * 16


def test_without_the_call_there_are_zeros(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_TARGET", "a name without a registration")
    monkeypatch.setattr(module, "_register", lambda: None)
    with caplog.at_level(logging.WARNING):
        array = untouched(jax.ShapeDtypeStruct((4, 8, 16), jnp.float32), sharding_over(2))
    assert not array.any() and array.sharding.is_equivalent_to(sharding_over(2), 3)
    assert "takes all its memory at once" in caplog.text


@pytest.mark.skipif(not can_populate(), reason="needs Linux 5.14")
def test_it_can_be_stopped_in_its_own_thread() -> None:
    """The garbage collector may free an engine there."""
    array, made = untouched(SHAPE, sharding_over(1)), list[Populating]()
    begun, stopped = threading.Event(), threading.Event()

    def is_idle() -> bool:
        begun.wait(60)
        made[0].stop()
        stopped.set()
        return True

    made.append(Populating([array], is_idle))
    begun.set()
    assert stopped.wait(60)
    made[0].stop()
    assert not made[0]._thread.is_alive()
    array.delete()
