"""Products of sorted tokens with the experts of each, for CUDA cards, through Pallas' Triton backend.

A tile is up to M rows of one expert, and each expert in use has as few tiles as its rows need:

    sizes      5           0    19                        M = 16
    rows       0 .. 4           5 .. 20    21 .. 23
    tiles      (0, 0, 5)        (2, 5, 16) (2, 21, 3)     expert, first row, number

A program computes one tile by N columns. Stored matrices are converted in registers, without a copy in memory.
Programs of the same columns are neighbours: those of one expert find its matrix in the cache. Rows past the tile are
copies of its last row, and are not stored. Tiles without rows end at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, Num

from orca_jax.kernels.expert_mlp import ragged
from orca_jax.kernels.expert_mlp.parts import Activate, ExpertKernels, KernelForm, Routed
from orca_jax.kernels.kv_pages import E4M3_IN_16, bits_in_16
from orca_jax.kernels.matmul import PER_BYTE, MatrixKind, numbers_of

LEAST_ROWS, MOST_ROWS = 16, 128  # of a tile; tensor cores multiply 16
_COLUMNS = (128, 64, 32)  # of a program, the first number that divides those of the matrix
_INPUTS = (64, 32)  # that are multiplied at once, likewise
_STAGES = 3  # blocks of inputs that the compiler prefetches

Ref = Any  # Pallas has no public type for references


class ExpertTiles(NamedTuple):
    """Rows of one expert each, N tiles of them."""

    expert: Int[Array, "N"]
    first: Int[Array, "N"]
    length: Int[Array, "N"]  # 0: there is no such tile


@dataclass(frozen=True)
class _ProductShape:
    """Static parameters of a product.

    Attributes:
        rows: M.
        columns: N.
        step: rows of stored values in one product.
        kind: the kind of the stored values; None for plain matrices.
        outputs: the columns of a matrix.
        stored: the rows of stored values, each with one input or two.
        group: the rows of stored values with one scale; None for one scale of all inputs.
        dtype: type of factors; sums are float32.
    """

    rows: int
    columns: int
    step: int
    kind: MatrixKind | None
    outputs: int
    stored: int
    group: int | None
    dtype: Any

    @property
    def is_even(self) -> bool:
        """True if programs have whole blocks: neighbours in memory are read at once."""
        return not (self.outputs % self.columns or self.stored % self.step)


def mix_experts(
    x: Float[Array, "T E"],
    routed: Routed,
    kernels: ExpertKernels,
    activation: Activate,
    form: KernelForm,
) -> Float[Array, "T E"]:
    """The arguments and the result of `api.expert_mlp`."""
    grouped = partial(_products, form)
    return ragged.mix_experts(x, routed, kernels, activation, form._replace(grouped=grouped))


def tile_rows(num_rows: int, num_experts: int) -> int:
    """M: from 27 rows of an expert on average, tiles have at most 1.3 times as many as there are."""
    rows = LEAST_ROWS
    while rows < MOST_ROWS and 2 * rows <= 0.6 * num_rows / num_experts:
        rows *= 2
    return rows


def lay_out(sizes: Int[Array, "X"], num_rows: int, rows: int) -> ExpertTiles:
    """The tiles of all experts.

    Args:
        sizes: rows of each expert, one expert after the other.
        num_rows: their sum, or more.
        rows: M.
    """
    number = num_rows // rows + min(len(sizes), num_rows)
    tiles = (sizes + rows - 1) // rows
    ends = jnp.cumsum(tiles)
    index = jnp.arange(number, dtype=jnp.int32)
    expert = jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, len(sizes) - 1)
    place = (index - (ends - tiles)[expert]) * rows
    first = (jnp.cumsum(sizes) - sizes)[expert] + place
    length = jnp.clip(sizes[expert] - place, 0, rows)
    return ExpertTiles(expert, first, jnp.where(index < ends[-1], length, 0))


def _products(
    form: KernelForm, x: Float[Array, "A I"], stacks: list[Any], sizes: Int[Array, "X"]
) -> list[Float[Array, "A O"]]:
    """`KernelForm.grouped` for plain and stored matrices."""
    rows = tile_rows(len(x), len(sizes))
    tiles = lay_out(sizes, len(x), rows)
    return [_product(form, x, stack, tiles, rows) for stack in stacks]


def _product(
    form: KernelForm, x: Float[Array, "A I"], stack: Any, tiles: ExpertTiles, rows: int
) -> Float[Array, "A O"]:
    arrays = [stack]
    group = None
    if form.kind is not None:
        arrays = [part for part in stack if part is not None]
        if stack.is_grouped:
            group = stack.values.shape[1] // stack.scale.shape[1]
    if form.kind == "fp8":  # not all cards convert it
        arrays[0] = lax.bitcast_convert_type(stack.values, jnp.uint8)
    _, stored, outputs = arrays[0].shape
    per_byte = 1 if form.kind is None else PER_BYTE[form.kind]
    shape = _ProductShape(
        rows=rows,
        columns=_whole(_COLUMNS, outputs),
        step=_whole([size // per_byte for size in _INPUTS], stored),
        kind=form.kind,
        outputs=outputs,
        stored=stored,
        group=group,
        dtype=jnp.dtype(form.dtype or arrays[0].dtype),
    )
    lanes = x.astype(shape.dtype).reshape(len(x), stored, per_byte).transpose(2, 0, 1)
    out: Array = lax.platform_dependent(
        lanes,
        tiles,
        arrays,
        cuda=partial(_launch, shape, interpret=False),
        default=partial(_launch, shape, interpret=True),
    )
    return out


def _whole(sizes: Sequence[int], whole: int) -> int:
    """The first size that divides a number, or the last one."""
    return next((size for size in sizes if whole % size == 0), sizes[-1])


def _launch(
    shape: _ProductShape,
    x: Num[Array, "lanes A J"],
    tiles: ExpertTiles,
    arrays: list[Array],
    *,
    interpret: bool,
) -> Float[Array, "A O"]:
    """Run the kernel on all tiles.

    Args:
        shape: static parameters.
        x: the rows, in a part for each lane of a byte.
        tiles: the tiles.
        arrays: the matrices of all experts, or their values, scales and zero points.
        interpret: true to interpret the kernel instead of compiling it.
    """

    def kernel(expert_ref: Ref, first_ref: Ref, length_ref: Ref, x_ref: Ref, *refs: Ref) -> None:
        *stored, out = refs
        tile = pl.program_id(0)
        begin = pl.program_id(1) * shape.columns
        length = length_ref[tile]

        @pl.when(length > 0)
        def _exists() -> None:
            first = first_ref[tile]
            row = jnp.arange(shape.rows, dtype=jnp.int32)
            column = begin + jnp.arange(shape.columns, dtype=jnp.int32)
            columns = _places(shape, begin, shape.columns, shape.outputs)
            matrix = _Columns(shape, stored, expert_ref[tile], columns)
            rows = first + jnp.minimum(row, length - 1)

            def step(index: Array, total: Array) -> Array:
                start = index * shape.step
                place = start + jnp.arange(shape.step, dtype=jnp.int32)
                inputs = _places(shape, start, shape.step, shape.stored)
                for lane, numbers in enumerate(matrix.numbers(inputs, place)):
                    if shape.is_even:
                        own = x_ref[lane, rows, inputs]
                    else:
                        own = x_ref[lane, rows[:, None], inputs[None, :]]
                        own = jnp.where(place[None, :] < shape.stored, own, jnp.zeros_like(own))
                    total += _dot(own, numbers.astype(shape.dtype))
                return total

            steps = pl.cdiv(shape.stored, shape.step)
            zeros = jnp.zeros((shape.rows, shape.columns), jnp.float32)
            total = lax.fori_loop(0, steps, step, zeros) * matrix.factor()
            is_own = (row < length)[:, None] & (column < shape.outputs)[None, :]
            pltriton.store(out.at[(first + row)[:, None], column[None, :]], total, mask=is_own)

    launch = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[1], shape.outputs), jnp.float32),
        grid=(len(tiles.expert), pl.cdiv(shape.outputs, shape.columns)),
        compiler_params=pltriton.CompilerParams(
            num_warps=8 if shape.rows == MOST_ROWS else 4, num_stages=_STAGES
        ),
        interpret=interpret,
        name="experts",
    )
    out: Array = launch(*tiles, x, *arrays)
    return out


def _places(shape: _ProductShape, begin: Array, size: int, most: int) -> Any:
    """The indices from `begin` on; the last one of an axis of length `most` in place of those behind it."""
    if shape.is_even:
        return pl.ds(begin, size)
    return jnp.minimum(begin + jnp.arange(size, dtype=jnp.int32), most - 1)


class _Columns(NamedTuple):
    """Some columns of the matrix of one expert."""

    shape: _ProductShape
    refs: list[Ref]  # values; scales and zero points of stored ones
    expert: Int[Array, ""]
    columns: Any

    def numbers(self, inputs: Any, place: Int[Array, "J"]) -> list[Num[Array, "J N"]]:
        """The entries in some rows of stored values, for each lane, without the factor of all inputs.

        Args:
            inputs: the rows, as `_places` gives them.
            place: their numbers.
        """
        shape = self.shape
        values = self._read(0, inputs)
        if shape.kind is None:
            return [values]
        if shape.kind == "fp8":
            found = [bits_in_16(values)]
        else:
            found = [*numbers_of(values, shape.kind)]
        if shape.group is None:
            return found
        group = jnp.minimum(place, shape.stored - 1) // shape.group
        scale = self._read(1, group).astype(jnp.float32)
        if shape.kind == "fp8":
            scale *= E4M3_IN_16
        entries = [lane.astype(jnp.float32) for lane in found]
        if len(self.refs) > 2:
            zero = self._read(2, group).astype(jnp.float32)
            entries = [lane - zero for lane in entries]
        return [lane * scale for lane in entries]

    def factor(self) -> Float[Array, "1 N"] | float:
        """The factor of the sums over all inputs."""
        if self.shape.kind is None or self.shape.group is not None:
            return 1.0
        scale: Array = self.refs[1][self.expert, self.columns].astype(jnp.float32)[None, :]
        return scale * E4M3_IN_16 if self.shape.kind == "fp8" else scale

    def _read(self, part: int, rows: Any) -> Num[Array, "J N"]:
        read: Array
        if self.shape.is_even:
            read = self.refs[part][self.expert, rows, self.columns]
        else:
            read = self.refs[part][self.expert, rows[:, None], self.columns[None, :]]
        return read


def _dot(a: Num[Array, "M J"], b: Num[Array, "J N"]) -> Float[Array, "M N"]:
    """The product with float32 sums, in full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)
