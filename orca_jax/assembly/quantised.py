"""The values of `quantization`: the kind of the stored weights, and the bits of activations."""

from pathlib import Path
from typing import get_args

from orca_jax.helpers.bundled import is_gguf
from orca_jax.values.config import Quantization, QuantizationName

_DYNAMIC = "-dynamic"
_KEPT = {"int8-dynamic": range(4, 9), "int4-dynamic": (4,)}


def is_dynamic(name: QuantizationName | None) -> bool:
    """True if products have activations of 8 bits."""
    return name is not None and name.endswith(_DYNAMIC)


def weights_of(name: QuantizationName | None) -> Quantization | None:
    """Return the kind in which weights are stored; None for that of the files."""
    return next((kind for kind in get_args(Quantization) if name in (kind, kind + _DYNAMIC)), None)


def kind_of(name: QuantizationName | None, source: str) -> Quantization | None:
    """Return the kind to which the weights of a source are quantised; None leaves them as they are.

    `int8-dynamic` keeps the bits of a GGUF file with 4 to 8 bits, and `int4-dynamic` those of one with 4 bits.

    Raises:
        ConfigError: the file cannot be read; `param` is "model".
    """
    if name not in _KEPT or not is_gguf(source):
        return weights_of(name)
    from orca_jax.model.gguf.weights import GgufFile

    if GgufFile.open(Path(source)).has_few_bits(_KEPT[name]):
        return None
    return weights_of(name)
