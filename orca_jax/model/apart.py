"""What the compiler for TPUs must not merge with what follows."""

import jax


def apart[T](values: T) -> T:
    """The values as they are; on a TPU they are computed by themselves, before anything that uses them.

    XLA draws what is cheap into its users, which may cost more than it saves (docs/kernels.md, TPU). On other devices
    this is nothing: there the same merging pays.
    """
    result: T = jax.lax.platform_dependent(values, tpu=jax.lax.optimization_barrier, default=lambda values: values)
    return result
