"""The choice of matrix products on a CPU: those of XLA, or those of a library with packed matrices."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from orca_jax.assembly.support import Facts, refusal
from orca_jax.config import DType, EngineConfig, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.processor import all_cpu_flags

if TYPE_CHECKING:
    from orca_jax.kernels.native import Library

logger = logging.getLogger(__name__)

_MEASURED = "avx512f"  # with these instructions the library was measured to be faster (docs/benchmarks.md)
_MATRIX_UNIT = "amx_bf16"  # with it, neither the library nor XLA was measured in bfloat16


def product_library(
    config: EngineConfig, model: ModelConfig, dtype: DType, platform: str, directory: str | None
) -> "Library | None":
    """Return the library of products with packed matrices; None for products of XLA.

    Args:
        config: the settings. "auto" takes the library where it is known to be faster, or found to be by a trial.
        model: experts, weights in fp8 and decoders from outside this package have products of XLA.
        dtype: the type of the weights.
        platform: the platform of the devices.
        directory: the directory of compiled programs; it keeps the library too, and the result of the trial.

    Raises:
        ConfigError: the library is wanted and cannot be used; `param` is "cpu_products".
    """
    wanted = config.cpu_products
    if platform != "cpu" or wanted == "xla":
        return None
    from orca_jax.kernels.native import load_library

    unfit = refusal(
        Facts(replace(config, cpu_products="native"), model=model, platform=platform, dtype=dtype), "platform"
    )
    library = None if unfit else load_library(directory)  # if None, the log has the reason
    reason = unfit.message if unfit else _lack(config, model, library, dtype)
    if reason and wanted == "native":
        raise ConfigError(reason, param="cpu_products")
    if unfit or (reason and library is not None):
        why = reason.removeprefix("cpu_products native ").partition(":")[0]
        logger.info("products are those of XLA: the library in C %s", why)
    if reason or library is None:
        return None
    if wanted == "native" or model.quantization is not None or _is_measured(dtype):
        return library
    from orca_jax.assembly.trial import is_faster

    return library if is_faster(library, dtype, directory) else None


def _is_measured(dtype: DType) -> bool:
    flags = all_cpu_flags()
    return _MEASURED in flags and not (dtype == "bfloat16" and _MATRIX_UNIT in flags)


def _lack(config: EngineConfig, model: ModelConfig, library: "Library | None", dtype: DType) -> str:
    """What this machine lacks for the library, or for its products in a type; empty if it has all."""
    has_bfloat16 = library is not None and (library.has_bfloat16 or model.quantization is not None)
    facts = Facts(replace(config, cpu_products="native"), dtype=dtype, has_library=library is not None)
    lack = refusal(replace(facts, has_bfloat16=has_bfloat16), "library")
    return "" if lack is None else lack.message
