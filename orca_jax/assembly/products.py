"""The choice of matrix products on a CPU: those of XLA, or those of a library with packed matrices."""

import contextlib
import logging
import threading
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from orca_jax.assembly.quantised import is_dynamic, weights_of
from orca_jax.assembly.resolve import dtype_of
from orca_jax.assembly.support import Facts, refusal
from orca_jax.helpers.processor import all_cpu_flags
from orca_jax.values.config import DType
from orca_jax.values.errors import ConfigError

if TYPE_CHECKING:
    from orca_jax.kernels.native import Library

logger = logging.getLogger(__name__)

_MEASURED = {"float32": "avx512f", "bfloat16": "avx512_bf16"}
"""By type, the instructions with which the library was measured to be faster (docs/benchmarks.md)."""
_MATRIX_UNIT = "amx_bf16"  # with it, neither the library nor XLA was measured in bfloat16


class Products(NamedTuple):
    """The type of weights and activations, and the library of matrix products; None for products of XLA."""

    dtype: DType
    library: "Library | None"


def choose_products(facts: Facts, directory: str | None) -> Products:
    """Choose the type of a model and the code of its products.

    Args:
        facts: the settings, and all facts but the type. "auto" takes the library where it is known to be faster, or
            found to be by a trial, and for matrices of few bits. Experts on several devices and decoders from
            outside this package have products of XLA. Products of few bits are those with activations of
            16 bits, unless the settings have a type: in float32 they are those of the dequantised matrix. A dynamic
            quantisation has activations of 8 bits. On a CPU the type "auto" is bfloat16 if the checkpoint has it and
            the library multiplies it; beside matrices of few bits only if another program published them.
        directory: the directory of compiled programs; it keeps the library too, and the result of the trial.

    Raises:
        ConfigError: the library is wanted and cannot be used; `param` is "cpu_products". Or a dynamic quantisation
            needs it; `param` is "quantization".
    """
    chosen = _chosen(facts, directory)
    name = facts.config.quantization
    if not is_dynamic(name):
        return chosen
    if chosen.library is None:
        message = f"quantization {name} needs the products of the library in C, and this engine has those of XLA"
        raise ConfigError(
            f"{message}; use {weights_of(name)} (docs/kernels.md says who has it)",
            param="quantization",
        )
    return chosen._replace(library=chosen.library._replace(activation_bits=8))


def _chosen(facts: Facts, directory: str | None) -> Products:
    """`choose_products` without the activations of a dynamic quantisation."""
    wanted = facts.config.cpu_products
    dtype = dtype_of(facts.config.dtype, facts.platform)
    if not facts.is_host or wanted == "xla" or facts.num_hosts > 1:
        return Products(dtype, None)
    is_auto = facts.config.dtype == "auto"
    library = _loaded(replace(facts, dtype=dtype), directory)
    if library is None:
        return Products(dtype, None)
    if facts.has_few_bits:
        # a published file has plain tables, whose bytes weigh; those of GGUF are in few bits
        is_published = facts.known.stored is not None
        if is_auto and is_published and _is_measured("bfloat16") and _is_narrow(facts.source):
            dtype = "bfloat16"
        return Products(dtype, library._replace(activation_bits=16 if is_auto else 0))
    from orca_jax.assembly.trial import is_faster

    for each in ("bfloat16", dtype) if is_auto and _is_narrow(facts.source) else (dtype,):
        if (
            wanted == "native"
            or _is_measured(each)
            or is_faster(library.width, each, directory, library.name)
        ):
            return Products(each, library)
    return Products(dtype, None)


def _is_narrow(source: str) -> bool:
    """True if the checkpoint has its weights in bfloat16."""
    from orca_jax.model.stored_type import stored_dtype

    return stored_dtype(source) == "bfloat16"


def _loaded(facts: Facts, directory: str | None) -> "Library | None":
    """The library, if it has products with this model; else the log has the reason."""
    from orca_jax.kernels.native import load_library

    native = replace(facts, config=replace(facts.config, cpu_products="native"))
    unfit = refusal(native, "platform")
    library = None if unfit else load_library(directory)  # if None, the log has the reason
    lack = unfit or refusal(replace(native, has_library=library is not None), "library")
    if lack is None:
        return library
    if facts.config.cpu_products == "native":
        raise ConfigError(lack.message, param="cpu_products")
    if unfit or library is not None:
        why = lack.message.removeprefix("cpu_products native ").partition(":")[0]
        logger.info("products are those of XLA: the library in C %s", why)
    return None


def begin_products(directory: str | None) -> None:
    """Begin to compile the library if it may be used, while JAX is imported. `directory` as for `choose_products`."""
    if entry_points(group="jax_plugins") or find_spec("libtpu") is not None:
        return  # JAX has an accelerator
    # in this thread: two that import JAX would wait for each other
    from orca_jax.kernels.native import require_library

    def begin() -> None:
        with contextlib.suppress(Exception):  # `choose_products` logs the reason
            require_library(directory)

    threading.Thread(target=begin, name="library").start()


def _is_measured(dtype: str) -> bool:
    flags = all_cpu_flags()
    return _MEASURED[dtype] in flags and not (dtype == "bfloat16" and _MATRIX_UNIT in flags)
