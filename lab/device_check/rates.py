"""The time of a program without its host, and the best rates of the device: other rates are shares of these."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lab.device_check.part import Setting, Write

GIB = 1 << 30


def machine(what: str, setting: Setting, write: Write) -> None:
    """Write the name and the number of the devices, and the rates of one."""
    device = jax.local_devices()[0]
    write(
        device=device.device_kind,
        devices=jax.local_device_count(),
        compute_capability=getattr(device, "compute_capability", None),
        jax=jax.__version__,
        runtime=device.client.platform_version.splitlines()[0],
    )
    write(
        copy_bytes_per_s=copy_rate(setting),
        matmul_flop_per_s=matmul_rate(512 if setting.dry_run else 8192),
    )


def copy_rate(setting: Setting) -> float:
    """Bytes read and written per second by an elementwise operation on one device."""
    size = 64 << 20 if setting.dry_run else 2 * GIB
    x = jnp.ones(size // 4, jnp.float32)
    return 2 * size / seconds_per_call(lambda i, x: x + 1, x, repeats=10)


def matmul_rate(n: int) -> float:
    """Operations per second in a product of random bf16 matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    seconds = seconds_per_call(
        lambda i, a, b: jnp.matmul(a, b) * jnp.bfloat16(0.01), a, b, repeats=10
    )
    return 2 * n**3 / seconds


def seconds_per_call(
    call: Callable[..., jax.Array], carry: jax.Array, *fixed: Any, repeats: int
) -> float:
    """Seconds of `carry = call(i, carry, *fixed)`, best of 3; repeated in one program, to exclude the host."""
    return seconds_of(compile_calls(call, repeats, carry, *fixed), carry, *fixed) / repeats


def compile_calls(
    call: Callable[..., jax.Array], repeats: int, *args: jax.Array
) -> jax.stages.Compiled:
    """One program of many calls. Their number is a constant: a loop over an argument would ask the host at every turn.

    Compiles once, here. A function from `jax.jit` may compile again at its second call, within the measurement: its
    cache depends on settings created by the import of a kernel's modules.
    """
    program = jax.jit(lambda x, *rest: lax.fori_loop(0, repeats, lambda i, x: call(i, x, *rest), x))
    return program.lower(*args).compile()


def seconds_of(program: jax.stages.Compiled, *args: Any) -> float:
    """Seconds of a run, after an unmeasured one: the best of 3, or of fewer once half a second is spent."""
    jax.block_until_ready(program(*args))
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 0.5:
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        taken.append(time.perf_counter() - start)
    return min(taken)


KERNELS = ("increments", "combine", "chunks")
"""Parts of the names of the attention kernels; all else in a call prepares them."""


def kernel_times(program: jax.stages.Compiled, *args: Any) -> dict[str, float]:
    """Seconds of each attention kernel in one run of a program, by the card's own clock; empty if it has none to read.

    The plan before the kernels is left out: in an iteration it is made once for all layers.
    """
    if jax.default_backend() != "gpu":
        return {}
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, timings = profiler.measure(program, aggregate=False)(*args)
    except Exception as problem:  # for instance without CUPTI
        print("kernel times:", problem, flush=True)
        return {}
    seconds: dict[str, float] = {}
    for name, milliseconds in timings or ():
        if kind := next((kernel for kernel in KERNELS if kernel in name), None):
            seconds[kind] = seconds.get(kind, 0.0) + milliseconds / 1e3
    return seconds


def timed(program: jax.stages.Compiled, repeats: int, *args: Any) -> tuple[float, dict[str, Any]]:
    """Seconds of the kernels of one call, or of the whole call without a clock for kernels; and both as columns."""
    call = seconds_of(program, *args) / repeats
    kernels = {name: seconds / repeats for name, seconds in kernel_times(program, *args).items()}
    seconds = sum(kernels.values()) or call
    split = {f"us_{name}": value * 1e6 for name, value in kernels.items()}
    return seconds, {"us": seconds * 1e6, "us_call": call * 1e6, **split}


def bytes_of_device() -> int:
    """Bytes of device memory available to JAX."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 16 * GIB))
