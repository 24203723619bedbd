"""Load the weights of a GGUF file. Quantised tensors are dequantised by the library, a few rows at a time."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flax import nnx

from orca_jax.checks import open_regular
from orca_jax.config import ModelConfig
from orca_jax.errors import CheckpointError
from orca_jax.gguf_file.header import GgufTensor, read_header
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import Weight
from orca_jax.model.files.stripes import read_exactly
from orca_jax.model.gguf.config import Architecture, architecture_of
from orca_jax.model.parameters import Wanted, first_line
from orca_jax.model.weights import Files, load_files
from orca_jax.progress import Progress

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_SCALED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PERMUTED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")


@dataclass(frozen=True, eq=False)
class GgufMatrix:
    """A vector or matrix of a GGUF file as float32.

    `permutation` has the stored row of each row, or in a vector the stored column of each column.
    """

    key: str
    tensor: GgufTensor
    descriptor: int
    permutation: np.ndarray | None = None

    dtype = np.dtype(np.float32)

    @property
    def num_rows(self) -> int:
        return self.tensor.shape[0] if len(self.tensor.shape) > 1 else 1

    @property
    def num_columns(self) -> int:
        return self.tensor.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    @property
    def order(self) -> tuple[int, int]:
        return 0, self.tensor.begin

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Dequantise the rows from `start` on into a contiguous matrix. Raises OSError."""
        from gguf import dequantize

        needed = np.arange(start, start + len(values))
        is_matrix = len(self.tensor.shape) > 1
        if self.permutation is not None and is_matrix:
            needed = self.permutation[needed]
        first, row_bytes = int(needed.min()), self.tensor.row_bytes
        rows = np.empty((int(needed.max()) + 1 - first, row_bytes), np.uint8)
        read_exactly(self.descriptor, self.tensor.begin + first * row_bytes, rows)
        if self.permutation is not None and is_matrix:
            rows = rows[needed - first]
        found = dequantize(rows, self.tensor.kind)
        values[:] = found if self.permutation is None or is_matrix else found[:, self.permutation]


class GgufShape(NamedTuple):
    """The type of a tensor in the words of safetensors, or that of GGUF if the library cannot dequantise it."""

    dtype: str
    shape: tuple[int, ...]


def load_gguf(path: Path, config: ModelConfig, wanted: Wanted, progress: Progress) -> nnx.State:
    """Read a GGUF file, each device its own shards.

    Raises:
        ConfigError: the library is not installed, or the file cannot be read.
        CheckpointError: lists every missing, unexpected and misshapen tensor, and those of unknown types.
    """
    header = read_header(path)
    name, architecture = architecture_of(header, path)
    stored = dict(header.tensors)
    scaled = [f"{key}: scaled rotary positions are not supported from GGUF" for key in _SCALED if key in stored]
    if scaled:
        raise CheckpointError(str(path), scaled, remedy="Use the model with safetensors")
    table = tuple(_in_gguf(weight, architecture) for weight in FAMILIES[config.family].weights(config))
    files = Files()
    num_layers = min(config.num_layers, len(stored))  # more of them are refused by `load_files`
    keys = {theirs: key for key, theirs in _names(table, name, replace(config, num_layers=num_layers))}
    files.tensors |= {keys.get(theirs, theirs): _described(tensor) for theirs, tensor in stored.items()}
    with ExitStack() as stack:
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise CheckpointError(str(path), [f"the file cannot be read: {first_line(error)}"]) from None
        stack.callback(os.close, descriptor)
        for theirs, key in keys.items():
            if theirs in stored:
                permutation = None
                if architecture.is_permuted and theirs.endswith(_PERMUTED):
                    permutation = permuted_rows(stored[theirs].shape[0], config.head_dim)
                files.rows[key] = GgufMatrix(key, stored[theirs], descriptor, permutation)
        return load_files(str(path), files, table, config, wanted, progress)


def permuted_rows(num_rows: int, head_dim: int) -> np.ndarray:
    """The stored row of each row of queries or keys.

    GGUF has the two numbers of a rotated pair next to each other; here they are half a head apart.
    """
    stored = np.arange(num_rows - num_rows % head_dim).reshape(-1, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def _in_gguf(weight: Weight, architecture: Architecture) -> Weight:
    """The row of a tensor, with the order of its axes in GGUF."""
    is_other = weight.key.endswith(architecture.transposed)
    return replace(weight, transpose=not weight.transpose) if is_other else weight


def _names(table: tuple[Weight, ...], architecture: str, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """The key of each tensor in safetensors, and its name in GGUF; each once."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    (kind,) = (arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    names = get_tensor_name_map(kind, config.num_layers)
    family = FAMILIES[config.family]
    keys = dict.fromkeys(
        (family.prefixes[0] if weight.prefixed else "") + weight.key.format(layer=layer)
        for weight in table
        for layer in (range(config.num_layers) if weight.stacked else (None,))
    )
    for key in keys:
        theirs = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if theirs is not None:
            yield key, theirs


def _described(tensor: GgufTensor) -> GgufShape:
    return GgufShape("F32" if _is_readable(tensor.kind) else tensor.kind.name, tensor.shape)


def _is_readable(kind: "GGMLQuantizationType") -> bool:
    """True if the library can dequantise this type to floating-point numbers."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True
