"""The choice of matrix products on a CPU: those of XLA, or those of a library with packed matrices."""

from typing import TYPE_CHECKING

from orca_jax.config import DType, EngineConfig, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.processor import all_cpu_flags

if TYPE_CHECKING:
    from orca_jax.kernels.packed_product import Library

_MEASURED = "avx512f"  # with these instructions the library was measured to be faster (docs/benchmarks.md)
_MATRIX_UNIT = "amx_bf16"  # XLA uses it, and the library does not


def product_library(
    config: EngineConfig, model: ModelConfig, dtype: DType, platform: str, directory: str | None
) -> "Library | None":
    """Return the library of products with packed matrices; None for products of XLA.

    Args:
        config: the settings. "auto" takes the library where it is known to be faster.
        model: experts, quantised weights and decoders from outside this package have products of XLA.
        dtype: of the weights.
        platform: of the devices.
        directory: of compiled programs; it keeps the library too.

    Raises:
        ConfigError: the library is wanted and cannot be used; `param` is "cpu_products".
    """
    wanted = config.cpu_products
    if platform != "cpu" or wanted == "xla":
        return None
    if reason := _reason(model, dtype):
        if wanted == "native":
            raise ConfigError(f"cpu_products native has no products with {reason}: use xla", param="cpu_products")
        return None
    flags = all_cpu_flags()
    if wanted == "auto" and (_MEASURED not in flags or (dtype == "bfloat16" and _MATRIX_UNIT in flags)):
        return None
    from orca_jax.kernels.packed_product import load_library

    library = load_library(directory)
    if library is None and wanted == "native":
        message = "cpu_products native needs Linux, a processor with AVX2 and FMA, and a C compiler (cc): use auto"
        raise ConfigError(message, param="cpu_products")
    if library is not None and dtype == "bfloat16" and not library.has_bfloat16:
        if wanted == "native":
            message = "cpu_products native multiplies bfloat16 on processors with AVX512-BF16 alone: use float32 or xla"
            raise ConfigError(message, param="cpu_products")
        return None
    return library


def _reason(model: ModelConfig, dtype: DType) -> str:
    """The reason why no matrix can be packed; empty if some can."""
    if model.decoder is not None:
        return "a decoder of your own"
    if model.quantization is not None:
        return "quantised weights"
    return "" if dtype in ("float32", "bfloat16") else f"weights in {dtype}"
