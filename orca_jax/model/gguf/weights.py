"""Load the weights of a GGUF file.

Where the library in C multiplies them, matrices of some types keep their bits. Others are dequantised by the library
`gguf`, a few rows at a time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flax import nnx

from orca_jax.helpers.console import Progress
from orca_jax.helpers.file_state import FileState
from orca_jax.helpers.gguf_file.header import (
    MAX_TENSORS,
    GgufHeader,
    GgufTensor,
    parts_of,
    read_header,
)
from orca_jax.kernels.native import Library, PackedBits
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import Weight
from orca_jax.model.files.opened import CHANGED, OpenFile, open_file
from orca_jax.model.files.stripes import DTYPES, STRIPE_BYTES
from orca_jax.model.gguf.config import FREQUENCIES, Architecture, architecture_of
from orca_jax.model.gguf.few_bits import BLOCK_KINDS, BlockKind, packed_blocks
from orca_jax.model.leaves.bits import bits_sources
from orca_jax.model.matrices.bits_shapes import BitsForm
from orca_jax.model.matrices.stored import (
    ForLibrary,
    StoredMatrices,
    experts_of,
    keep_bits,
    outputs_of,
)
from orca_jax.model.parameters import Wanted, first_line
from orca_jax.model.transformer import Decoder
from orca_jax.model.weights import Files, load_files, too_many_layers
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_SCALED = (FREQUENCIES, "rope_factors_long.weight", "rope_factors_short.weight")
_PERMUTED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")


@dataclass(frozen=True, eq=False)
class GgufMatrix:
    """A vector or matrix of a GGUF file, less `offset`: in its own type if that has no bits to dequantise, or float32.

    `permutation` has the stored row of each row, or in a vector the stored column of each column.
    """

    key: str
    tensor: GgufTensor
    file: OpenFile
    permutation: np.ndarray | None = None
    offset: float = 0.0

    @cached_property
    def dtype(self) -> np.dtype:
        if self.offset:
            return np.dtype(np.float32)
        return DTYPES.get(self.tensor.kind.name, np.dtype(np.float32))

    @property
    def num_rows(self) -> int:
        if len(self.tensor.shape) > 1:
            return self.tensor.shape[0]
        return 1

    @property
    def num_columns(self) -> int:
        return self.tensor.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    @property
    def step(self) -> int:
        return self.file.step

    @property
    def order(self) -> tuple[int, int]:
        return self.tensor.part, self.tensor.begin

    @property
    def is_turned(self) -> bool:
        return False

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on, dequantised, into a contiguous matrix. Raises OSError."""
        needed = np.arange(start, start + len(values))
        is_matrix = len(self.tensor.shape) > 1
        if self.permutation is not None and is_matrix:
            needed = self.permutation[needed]
        elif self.tensor.kind.name in DTYPES and not self.offset and self.permutation is None:
            self.file.read_into(self.tensor.begin + start * self.tensor.row_bytes, values)
            return
        first = int(needed.min())
        row_bytes = self.tensor.row_bytes
        rows = np.empty((int(needed.max()) + 1 - first, row_bytes), np.uint8)
        self.file.read_into(self.tensor.begin + first * row_bytes, rows)
        if self.permutation is not None and is_matrix:
            rows = rows[needed - first]
        found = self._numbers(rows)
        if self.permutation is not None and not is_matrix:
            found = found[:, self.permutation]
        values[:] = found
        if self.offset:
            values -= np.float32(self.offset)

    def _numbers(self, rows: np.ndarray) -> np.ndarray:
        """The numbers that bytes of the file stand for."""
        if (dtype := DTYPES.get(self.tensor.kind.name)) is not None:
            return rows.view(dtype)
        from gguf import dequantize

        return dequantize(rows, self.tensor.kind)


class GgufShape(NamedTuple):
    """The type of a tensor in the words of safetensors, or that of GGUF if the library cannot dequantise it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _StoredMatrix(ForLibrary):
    """A matrix in few bits. `outputs` has the stored row of each output; None if they are in their order."""

    key: str
    tensor: GgufTensor
    kind: BlockKind
    outputs: np.ndarray | None
    files: Sequence[OpenFile]  # the open parts of the file; empty until it is read

    @property
    def order(self) -> tuple[int, int]:
        return self.tensor.part, self.tensor.begin

    @property
    def form(self) -> BitsForm:
        return self.kind.form

    def fills(self, shape: tuple[int, ...], name: str) -> bool:
        outputs = self.tensor.shape[0] if self.outputs is None else len(self.outputs)
        return name == "table" or shape[-1] == outputs

    def blocks(self, num_blocks: int, width: int) -> Iterator[tuple[int, PackedBits]]:
        for first, rows in self._rows(num_blocks, width):
            yield first, packed_blocks(rows, self.kind, width)

    def _rows(self, num_blocks: int, width: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the bytes of some blocks of `width` outputs after the number of the first one. Raises OSError.

        They are few enough for the caches of a processor. The outputs of a table beyond the stored ones are zeros.
        """
        tensor = self.tensor
        file = self.files[tensor.part]
        each = max(1, STRIPE_BYTES // 4 // (tensor.shape[-1] * width)) * width
        whole = None
        if self.outputs is not None:
            whole = np.empty((tensor.shape[0], tensor.row_bytes), np.uint8)
            file.read_into(tensor.begin, whole)
        for start in range(0, num_blocks * width, each):
            rows = np.zeros((min(each, num_blocks * width - start), tensor.row_bytes), np.uint8)
            if whole is not None and self.outputs is not None:
                rows[:] = whole[self.outputs[start : start + each]]
            elif (stored := min(each, tensor.shape[0] - start)) > 0:
                begin = tensor.begin + start * tensor.row_bytes
                file.read_into(begin, rows[:stored])
            yield start // width, rows


@dataclass(frozen=True)
class _GgufModel:
    """The tensors of a file as those of a model."""

    config: ModelConfig
    architecture: Architecture
    tensors: Mapping[str, GgufTensor]
    table: tuple[Weight, ...]
    keys: Mapping[str, str]  # in safetensors, by the names here
    files: Sequence[OpenFile] = ()  # the open parts

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The names here, by the keys in safetensors."""
        return {key: theirs for theirs, key in self.keys.items()}

    def permutation(self, theirs: str) -> np.ndarray | None:
        if not self.architecture.is_permuted or not theirs.endswith(_PERMUTED):
            return None
        return permuted_rows(self.tensors[theirs].shape[0], self.config.head_dim)

    def matrix(self, name: str, tensor: GgufTensor, file: OpenFile) -> GgufMatrix:
        """A tensor of the model as the rows of a matrix in an open file."""
        offset = 0.0
        if name.endswith("norm.weight"):
            offset = self.architecture.norm_offset
        return GgufMatrix(self.keys[name], tensor, file, self.permutation(name), offset)

    @property
    def stored(self) -> StoredMatrices:
        """The matrices in few bits."""
        return StoredMatrices(self.config, self.table, self._stored)

    def _stored(self, weight: Weight, layer: int, expert: int | None) -> _StoredMatrix | None:
        key = _whole_key(weight, self.config).format(layer=layer, expert=expert)
        theirs = self.names.get(key)
        if (
            theirs is None
            or theirs not in self.tensors
            or self.tensors[theirs].kind.name not in BLOCK_KINDS
        ):
            return None
        tensor = self.tensors[theirs]
        outputs = self.permutation(theirs)
        if weight.part is not None:
            outputs = outputs_of(weight.part)
        kind = BLOCK_KINDS[tensor.kind.name]
        return _StoredMatrix(key, tensor, kind, outputs, self.files)


def _model_of(path: Path, header: GgufHeader, config: ModelConfig) -> _GgufModel:
    """The tensors of a file with the names of its model.

    Raises:
        ConfigError: the architecture is not supported.
        CheckpointError: the file has fewer matrices than layers or experts, or too many.
    """
    name, architecture = architecture_of(header, path)
    table = tuple(
        _in_gguf(weight, architecture) for weight in FAMILIES[config.family].weights(config)
    )
    tensors = dict(header.tensors)
    if config.experts is not None:
        tensors = _by_expert(path, header.tensors, config.experts.count)
    if problem := too_many_layers(config, len(tensors)):
        raise CheckpointError(str(path), [problem])
    keys = {theirs: key for key, theirs in _names(table, name, config)}
    return _GgufModel(config, architecture, tensors, table, keys)


def _by_expert(path: Path, tensors: Mapping[str, GgufTensor], count: int) -> dict[str, GgufTensor]:
    """The tensors, with a matrix for each expert in place of those that have the matrices of all experts.

    Args:
        path: the file, for errors.
        tensors: the tensors of the file.
        count: experts of the model; a tensor with other numbers of matrices stays whole, and fits nothing.

    Raises:
        CheckpointError: the matrices are too many.
    """
    stacks = [
        name
        for name, tensor in tensors.items()
        if len(tensor.shape) == 3 and tensor.shape[0] == count
    ]
    if (number := len(stacks) * count) > MAX_TENSORS:
        problem = f"its {len(stacks)} tensors of {count} experts have {number} matrices; at most {MAX_TENSORS} are read"
        raise CheckpointError(str(path), [problem])
    found = dict(tensors)
    for name in stacks:
        tensor = found.pop(name)
        _, *shape = tensor.shape
        for expert in range(count):
            begin = tensor.begin + expert * shape[0] * tensor.row_bytes
            found[f"{name}[{expert}]"] = tensor._replace(shape=tuple(shape), begin=begin)
    return found


@dataclass(frozen=True)
class GgufFile:
    """A file of weights, opened once: its header serves all that follows.

    Attributes:
        path: the file, or the first one of several parts.
        header: its metadata and the tensors of all parts.
    """

    path: Path
    header: GgufHeader

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read the header of a file. Raises ConfigError: the file cannot be read."""
        return cls(path, read_header(path))

    def has_few_bits(self, bits: Collection[int] = range(4, 9)) -> bool:
        """True if `keep_bits` may replace matrices of so many bits."""
        kinds = [BLOCK_KINDS.get(tensor.kind.name) for tensor in self.header.tensors.values()]
        return any([kind is not None and kind.form.bits in bits for kind in kinds])

    def keep_bits(self, decoder: Decoder, library: Library | None, num_devices: int) -> None:
        """Give matrices and tables the form of their bits in the file, for the library alone; see `keep_bits`."""
        if library is not None:
            model = _model_of(self.path, self.header, decoder.config)
            keep_bits(model.stored, decoder, library, num_devices)

    def load(self, config: ModelConfig, wanted: Wanted, progress: Progress) -> nnx.State:
        """Read the weights, each device its own shards.

        Raises:
            CheckpointError: lists every missing, unexpected and misshapen tensor, and those of unknown types; or a part
                has changed since it was opened.
        """
        path = str(self.path)
        model = _model_of(self.path, self.header, config)
        stored = dict(model.tensors)
        if model.architecture.model_type == "llama":
            stored.pop(FREQUENCIES, None)  # a part of the configuration
        scaled = [
            f"{key}: scaled rotary positions are not supported from GGUF"
            for key in _SCALED
            if key in stored
        ]
        if scaled:
            raise CheckpointError(path, scaled, remedy="Use the model with safetensors")
        files = Files()
        files.tensors |= {
            model.keys.get(theirs, theirs): _described(tensor) for theirs, tensor in stored.items()
        }
        with ExitStack() as stack:
            parts = zip(parts_of(self.path, self.header), self.header.states, strict=True)
            opened = [_opened(part, state, stack) for part, state in parts]
            for theirs, key in model.keys.items():
                if theirs in stored:
                    file = opened[stored[theirs].part]
                    files.rows[key] = model.matrix(theirs, stored[theirs], file)
            kept = bits_sources(path, replace(model, files=opened).stored, wanted)
            return load_files(path, files, model.table, config, wanted, progress, kept)


def _opened(part: Path, state: FileState, stack: ExitStack) -> OpenFile:
    """A file, which the stack closes. Raises CheckpointError: it cannot be read, or has changed."""
    try:
        file = open_file(part, stack)
    except OSError as error:
        problem = f"the file cannot be read: {first_line(error)}"
        raise CheckpointError(str(part), [problem]) from None
    if file.state != state:
        raise CheckpointError(str(part), [CHANGED])
    return file


def permuted_rows(num_rows: int, head_dim: int) -> np.ndarray:
    """The stored row of each row of queries or keys.

    GGUF has the two numbers of a rotated pair next to each other; here they are half a head apart.
    """
    stored = np.arange(num_rows - num_rows % head_dim).reshape(-1, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def _in_gguf(weight: Weight, architecture: Architecture) -> Weight:
    """The row of a tensor, with the order of its axes in GGUF."""
    is_other = weight.key.endswith(architecture.transposed)
    if not is_other:
        return weight
    return replace(weight, transpose=not weight.transpose)


def _whole_key(weight: Weight, config: ModelConfig) -> str:
    """The key of a tensor with the usual prefix of its family."""
    if not weight.prefixed:
        return weight.key
    return FAMILIES[config.family].prefixes[0] + weight.key


def _names(
    table: tuple[Weight, ...], architecture: str, config: ModelConfig
) -> Iterator[tuple[str, str]]:
    """The key of each tensor in safetensors, and its name in GGUF; each once."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    (kind,) = (arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    names = get_tensor_name_map(kind, config.num_layers)
    for weight in table:
        key = _whole_key(weight, config)
        for layer in range(config.num_layers if weight.stacked else 1):
            whole = key.replace(".{expert}", "").format(layer=layer)
            theirs = names.get_name(whole, try_suffixes=(".weight", ".bias"))
            if theirs is None:
                continue
            for expert in experts_of(weight, config):
                place = "" if expert is None else f"[{expert}]"
                yield key.format(layer=layer, expert=expert), theirs + place


def _described(tensor: GgufTensor) -> GgufShape:
    if _is_readable(tensor.kind):
        return GgufShape("F32", tensor.shape)
    return GgufShape(tensor.kind.name, tensor.shape)


@cache
def _is_readable(kind: "GGMLQuantizationType") -> bool:
    """True if the library can dequantise this type to floating-point numbers."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True
