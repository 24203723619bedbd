"""The maker of parameters: their random values, their logical axes, and the form of matrices."""

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from orca_jax.model.matrices.base import ExpertMatrices, Matrix, TableMatrix
from orca_jax.model.matrices.plain import PlainMatrix, PlainTable
from orca_jax.model.matrices.quantise import check_inputs, quantise, quantise_rows
from orca_jax.model.matrices.scaled import QuantisedExperts, QuantisedMatrix, QuantisedTable
from orca_jax.model.sharding import MESH_AXES
from orca_jax.model.stages import LayerSpan
from orca_jax.values.config import Quantization

Init = Literal["normal", "zeros", "ones"]


class Storage(NamedTuple):
    """How weights are stored.

    `kind` is the quantisation, None for none; `shards` is the number of devices that share a matrix.
    """

    kind: Quantization | None = None
    shards: int = 1


def optional[**P, M](
    exists: object, make: Callable[P, M], *args: P.args, **kwargs: P.kwargs
) -> M | None:
    """`make(*args, **kwargs)` as data of a module, or None unless it `exists`. It must be assigned directly."""
    found: M | None = nnx.data(make(*args, **kwargs) if exists else None)
    return found


class Maker:
    """Creates parameters of one type. Each has its own random key, so values do not depend on the mesh.

    Args:
        dtype: type of every parameter.
        rngs: source of keys.
        span: the layers on the leading axis, or None for parameters outside the blocks.
        mesh: the devices of the model, for layers that are partitioned by hand; None: one device.
        storage: the form of matrices and of the vocabulary's tables.
    """

    def __init__(
        self,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        span: LayerSpan | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.dtype = dtype
        self.rngs = rngs
        self.span = span
        # leading axis
        self.layers: range | tuple[int, ...] = () if span is None else range(span.start, span.stop)
        self.mesh = mesh
        self.storage = storage or Storage()

    def stacked(self, span: LayerSpan) -> "Maker":
        """A maker of parameters with a leading axis for the layers of `span`."""
        return Maker(self.dtype, self.rngs, span, self.mesh, self.storage)

    def with_layers(self, layers: Collection[int]) -> "Maker":
        """A maker for some layers of the model alone, with its own key. It needs no `skip` in other stages."""
        maker = Maker(self.dtype, nnx.Rngs(self.rngs.params()), self.span, self.mesh, self.storage)
        maker.layers = tuple(layer for layer in self.layers if layer in layers)
        return maker

    @property
    def has_layers(self) -> bool:
        """True if the leading axis has some layers."""
        return len(self.layers) > 0

    def of_each_device(self) -> "Maker":
        """A maker for layers partitioned by hand. Their products get the matrices as one device holds them."""
        # A group of int4 may reach over the edge of a device: assembly/support.py refuses it.
        assert self.storage.kind != "int4" or self.storage.shards == 1, (
            "refused by assembly/support.py"
        )
        return Maker(self.dtype, self.rngs, self.span, self.mesh, Storage(self.storage.kind))

    def skip(self) -> None:
        """Consume the key of a random parameter of another stage: values do not depend on the number of stages."""
        self.rngs.params()

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str, ...], init: Init, std: float = 0.02
    ) -> nnx.Param[Array]:
        """A parameter of `shape`. `axes` names its dimensions. If stacked, both get a leading "layers" axis."""
        axes = self._stacked(axes)
        if init == "normal":
            return nnx.Param(self._layer_by_layer(shape, std, _same), axes=axes)
        return nnx.Param(self._constant(shape, float(init == "ones")), axes=axes)

    def plain_matrix(
        self, shape: tuple[int, ...], axes: tuple[str, ...], std: float = 0.02
    ) -> PlainMatrix:
        """A matrix of random values in the type of the model, or one for each expert, in every kind of storage."""
        return PlainMatrix(self._layer_by_layer(shape, std, _same), axes=self._stacked(axes))

    def matrix(self, sizes: tuple[int, int], axes: tuple[str, str], std: float) -> Matrix:
        """A matrix of random values from inputs to outputs."""
        kind = self.storage.kind
        splits = self._splits(axes[0])
        if kind is None:
            return self.plain_matrix(sizes, axes, std)
        check_inputs(kind, sizes[0], splits)
        parts = self._layer_by_layer(sizes, std, lambda values: quantise(values, kind))
        return QuantisedMatrix(
            parts, axes, kind, self.dtype, splits, is_stacked=self.span is not None
        )

    def experts(
        self, sizes: tuple[int, int, int], axes: tuple[str, str, str], std: float
    ) -> ExpertMatrices:
        """Matrices of random values, one for each expert, from inputs to outputs."""
        kind = self.storage.kind
        if kind is None:
            return self.plain_matrix(sizes, axes, std)
        check_inputs(kind, sizes[1], 1)
        parts = self._layer_by_layer(sizes, std, lambda values: quantise(values, kind))
        return QuantisedExperts(parts, axes, kind, self.dtype, is_stacked=self.span is not None)

    def table(self, rows: int, width: int, axis: str, used: int) -> TableMatrix:
        """A table of random values; rows from `used` on are zeros."""

        def padded(values: Array) -> Array:
            if used == rows:
                return values
            return jnp.where(jnp.arange(rows)[:, None] < used, values, 0)

        axes = (axis, "embed")
        if self.storage.kind is None or axis == "positions":
            return PlainTable(self._layer_by_layer((rows, width), 0.02, padded), axes=axes)
        parts = self._layer_by_layer(
            (rows, width), 0.02, lambda values: quantise_rows(padded(values))
        )
        return QuantisedTable(parts, axes, self.dtype, self._splits(axis))

    def _splits(self, axis: str) -> int:
        """The number of devices over which an axis is split."""
        if MESH_AXES[axis] is None:
            return 1
        return self.storage.shards

    def _stacked(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        if self.span is None:
            return axes
        return ("layers", *axes)

    def _constant(self, shape: tuple[int, ...], value: float) -> Array:
        if self.span is not None:
            shape = (len(self.layers), *shape)
        return jnp.full(shape, value, self.dtype)

    def _layer_by_layer[T](
        self, shape: tuple[int, ...], std: float, store: Callable[[Array], T]
    ) -> T:
        def draw(key: Array) -> T:
            return store((std * jax.random.normal(key, shape)).astype(self.dtype))

        if self.span is None:
            return draw(self.rngs.params())
        keys = jax.random.split(self.rngs.params(), self.span.num_layers)
        # A loop: the random bits of all layers at once would need several times the memory of the weights.
        layers = self.layers
        own = (
            keys[layers.start : layers.stop]
            if isinstance(layers, range)
            else keys[np.array(layers)]
        )
        stacked: T = jax.lax.map(draw, own)
        return stacked


def _same(values: Array) -> Array:
    return values
