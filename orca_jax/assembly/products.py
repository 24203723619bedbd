"""The choice of matrix products on a CPU: those of XLA, or those of a library with packed matrices."""

import contextlib
import logging
import threading
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

from orca_jax.assembly.support import Facts, refusal
from orca_jax.errors import ConfigError
from orca_jax.processor import all_cpu_flags

if TYPE_CHECKING:
    from orca_jax.kernels.native import Library

logger = logging.getLogger(__name__)

_MEASURED = {"float32": "avx512f", "bfloat16": "avx512_bf16"}
"""By type, the instructions with which the library was measured to be faster (docs/benchmarks.md)."""
_MATRIX_UNIT = "amx_bf16"  # with it, neither the library nor XLA was measured in bfloat16


def product_library(facts: Facts, directory: str | None) -> "Library | None":
    """Return the library of products with packed matrices; None for products of XLA.

    Args:
        facts: the settings and all facts. "auto" takes the library where it is known to be faster, or found to be by a
            trial, and for matrices of few bits. Experts on several devices, weights in fp8 and decoders from outside
            this package have products of XLA. Products of few bits are those with activations of 16 bits, unless the
            settings have a type: in float32 they are those of the dequantised matrix.
        directory: the directory of compiled programs; it keeps the library too, and the result of the trial.

    Raises:
        ConfigError: the library is wanted and cannot be used; `param` is "cpu_products".
    """
    wanted, dtype = facts.config.cpu_products, facts.dtype
    if facts.platform != "cpu" or wanted == "xla" or facts.num_hosts > 1:
        return None
    from orca_jax.kernels.native import load_library

    native = replace(facts, config=replace(facts.config, cpu_products="native"))
    unfit = refusal(native, "platform")
    library = None if unfit else load_library(directory)  # if None, the log has the reason
    lack = unfit or refusal(replace(native, has_library=library is not None), "library")
    reason = "" if lack is None else lack.message
    if reason and wanted == "native":
        raise ConfigError(reason, param="cpu_products")
    if unfit or (reason and library is not None):
        why = reason.removeprefix("cpu_products native ").partition(":")[0]
        logger.info("products are those of XLA: the library in C %s", why)
    if reason or library is None:
        return None
    if facts.has_few_bits:
        return library._replace(narrows=facts.config.dtype == "auto")
    if wanted == "native" or _is_measured(dtype):
        return library
    from orca_jax.assembly.trial import is_faster

    return library if is_faster(library.width, dtype, directory, library.name) else None


def begin_products(directory: str | None) -> None:
    """Begin to compile the library if it may be used, while JAX is imported. `directory` as for `product_library`."""
    if entry_points(group="jax_plugins") or find_spec("libtpu") is not None:
        return  # JAX has an accelerator
    from orca_jax.kernels.native import require_library  # in this thread: two that import JAX would wait for each other

    def begin() -> None:
        with contextlib.suppress(Exception):  # `product_library` logs the reason
            require_library(directory)

    threading.Thread(target=begin, name="library").start()


def _is_measured(dtype: str) -> bool:
    flags = all_cpu_flags()
    return _MEASURED[dtype] in flags and not (dtype == "bfloat16" and _MATRIX_UNIT in flags)
