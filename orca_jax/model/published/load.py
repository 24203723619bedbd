"""Load a directory with weights that another program quantised.

Matrices keep their bits where the library in C or XLA has a product for them. Others are dequantised while they are
read, some rows at a time.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from flax import nnx

from orca_jax.helpers.buckets.views import shown
from orca_jax.helpers.console import Progress
from orca_jax.kernels.matmul import MatrixKind
from orca_jax.kernels.native import Library
from orca_jax.model.experts import Experts
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import Weight
from orca_jax.model.files.expert_stacks import MXFP4_GROUP, Mxfp4Matrix, has_stacks, oriented
from orca_jax.model.files.folder import SafetensorsFolder
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.leaves.bits import bits_sources
from orca_jax.model.matrices.grouped import GroupedForm, grouped_shapes, kept_group
from orca_jax.model.matrices.stored import (
    StoredBits,
    StoredMatrices,
    keep_bits,
    matrix_names,
    outputs_of,
)
from orca_jax.model.parameters import Wanted, first_line
from orca_jax.model.published.integers import IntegerMatrix
from orca_jax.model.published.mxfp4 import Mxfp4Bits
from orca_jax.model.published.numbers import FP4_GROUP, FloatMatrix
from orca_jax.model.published.tensors import with_published
from orca_jax.model.transformer import Decoder
from orca_jax.model.weights import Files, find_source, load_files, open_files
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import StoredForm


def load_published(
    folder: SafetensorsFolder, config: ModelConfig, wanted: Wanted, progress: Progress
) -> nnx.State:
    """Read the weights of a directory, each device its own shards. As `load_safetensors`, with the bits of files."""
    with ExitStack() as stack:
        files, table = _opened(folder, config, stack)
        others = bits_sources(shown(folder.directory), _matrices(files, table, config), wanted)
        return load_files(shown(folder.directory), files, table, config, wanted, progress, others)


def has_mxfp4(folder: SafetensorsFolder, config: ModelConfig) -> bool:
    """True if a directory without a published form has matrices of experts in MXFP4. Raises CheckpointError."""
    table = FAMILIES[config.family].weights(config)
    if not has_stacks(table):
        return False
    with ExitStack() as stack:
        files = open_files(folder, stack, has_stacks=True)
        return oriented(table, files.rows) is not table


def keep_published(
    folder: SafetensorsFolder, decoder: Decoder, library: Library | None, num_devices: int
) -> None:
    """Give matrices and tables the form of their bits in the files; see `keep_bits`. Raises CheckpointError."""
    with ExitStack() as stack:
        files, table = _opened(folder, decoder.config, stack)
        keep_bits(_matrices(files, table, decoder.config), decoder, library, num_devices)


def keep_planned(decoder: Decoder, form: StoredForm) -> None:
    """Give the matrices of a decoder XLA's form, without files: the upper bound of a plan."""
    for _, module in list(nnx.iter_modules(decoder)):
        is_meant = isinstance(module, Experts) or not form.is_of_experts
        for name in matrix_names(module, has_library=False):
            matrix: Any = getattr(module, name)
            if is_meant and matrix.is_plain:
                setattr(module, name, _planned(matrix, form) or matrix)


def _planned(plain: nnx.Param[Any], form: StoredForm) -> Any:
    """The shapes of a matrix in XLA's form; None if there is none."""
    inputs = plain.get_value().shape[-2]
    if form.is_of_experts:
        return grouped_shapes(plain, GroupedForm("fp4", MXFP4_GROUP, scale="bfloat16"))
    if form.bits == 4 and not form.has_integers:
        return grouped_shapes(plain, GroupedForm("fp4", FP4_GROUP))
    size = kept_group(form.group_size or inputs, inputs)
    if size is None:
        return None
    kind: MatrixKind = "fp8"
    if form.has_integers:
        kind = "int4" if form.bits == 4 else "int8"
    return grouped_shapes(
        plain, GroupedForm(kind, size, has_zero=kind == "int4", has_order=form.is_ordered)
    )


def _opened(
    folder: SafetensorsFolder, config: ModelConfig, stack: ExitStack
) -> tuple[Files, tuple[Weight, ...]]:
    """The open files, with a matrix in place of the tensors that it consists of, and the table of weights."""
    table = FAMILIES[config.family].weights(config)
    files = open_files(folder, stack, has_stacks=has_stacks(table))
    if config.stored is None or config.stored.is_of_experts:
        return files, oriented(table, files.rows)
    tensors = {
        key: tensor for key, tensor in files.tensors.items() if isinstance(tensor, StoredTensor)
    }
    try:
        found = with_published(tensors, config.stored)
    except OSError as error:
        files.problems.append(f"the files cannot be read: {first_line(error)}")
        return files, table
    files.tensors = dict(found.tensors)
    files.rows |= found.rows
    files.optional |= found.optional
    files.problems += found.problems
    return files, oriented(table, files.rows)


def _matrices(files: Files, table: tuple[Weight, ...], config: ModelConfig) -> StoredMatrices:
    """The quantised matrices."""
    return StoredMatrices(config, table, partial(_matrix_of, files, config))


def _matrix_of(
    files: Files, config: ModelConfig, weight: Weight, layer: int, expert: int | None
) -> StoredBits | None:
    one = replace(weight, key=weight.key.format(layer=layer, expert=expert), instead=None)
    (key,) = find_source(one, FAMILIES[config.family], files, config).keys
    outputs = None if weight.part is None else outputs_of(weight.part)
    match files.rows.get(key):
        case Mxfp4Matrix() as matrix:
            return Mxfp4Bits(matrix, outputs)
        case IntegerMatrix() | FloatMatrix() as matrix:
            return replace(matrix, outputs=outputs)
    return None
