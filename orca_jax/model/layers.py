"""The layers of a block. Matrix products run in the parameters' type with float32 sums, the rest in float32.

Parameters of blocks are stacked: their first axis is the layer. The methods of a block get one layer at a time, because
the decoder scans over this axis.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from orca_jax.kernels.matmul import matmul, table_scores
from orca_jax.kernels.native import Library
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.packed.bits import (
    MixedBitsMatrix,
    PackedBitsMatrix,
    PackedBitsTable,
    bits_matmuls,
    packed_bits,
    packed_bits_table,
)
from orca_jax.model.packed.matrices import (
    PackedMatrix,
    PackedTable,
    has_packed_form,
    packed_matmuls,
    packed_matrix,
    packed_table,
)
from orca_jax.model.quantise import (
    QuantisedExperts,
    QuantisedMatrix,
    QuantisedTable,
    Storage,
    check_inputs,
    quantise,
    quantise_rows,
)
from orca_jax.model.sharding import MESH_AXES
from orca_jax.model.stages import LayerSpan
from orca_jax.values.config import ModelConfig

Init = Literal["normal", "zeros", "ones"]
Matrix = nnx.Param[Array] | PackedMatrix | QuantisedMatrix | PackedBitsMatrix | MixedBitsMatrix
"""A matrix of one of the kinds of storage; `multiply` reads all of them."""

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


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
        if self.span is not None:
            axes = ("layers", *axes)
        if init == "normal":
            return nnx.Param(self._layer_by_layer(shape, std, lambda values: values), axes=axes)
        return nnx.Param(self._constant(shape, float(init == "ones")), axes=axes)

    def matrix(self, sizes: tuple[int, int], axes: tuple[str, str], std: float) -> Matrix:
        """A matrix of random values from inputs to outputs."""
        kind = self.storage.kind
        splits = self._splits(axes[0])
        if kind is None:
            return self(sizes, axes, "normal", std)
        check_inputs(kind, sizes[0], splits)
        parts = self._layer_by_layer(sizes, std, lambda values: quantise(values, kind))
        return QuantisedMatrix(
            parts, axes, kind, self.dtype, splits, is_stacked=self.span is not None
        )

    def experts(
        self, sizes: tuple[int, int, int], axes: tuple[str, str, str], std: float
    ) -> nnx.Param[Array] | QuantisedExperts:
        """Matrices of random values, one for each expert, from inputs to outputs."""
        kind = self.storage.kind
        if kind is None:
            return self(sizes, axes, "normal", std)
        check_inputs(kind, sizes[1], 1)
        parts = self._layer_by_layer(sizes, std, lambda values: quantise(values, kind))
        return QuantisedExperts(parts, axes, kind, self.dtype, is_stacked=self.span is not None)

    def table(
        self, rows: int, width: int, axis: str, used: int
    ) -> "nnx.Param[Array] | QuantisedTable":
        """A table of random values; rows from `used` on are zeros."""

        def padded(values: Array) -> Array:
            if used == rows:
                return values
            return jnp.where(jnp.arange(rows)[:, None] < used, values, 0)

        axes = (axis, "embed")
        if self.storage.kind is None or axis == "positions":
            return nnx.Param(self._layer_by_layer((rows, width), 0.02, padded), axes=axes)
        parts = self._layer_by_layer(
            (rows, width), 0.02, lambda values: quantise_rows(padded(values))
        )
        return QuantisedTable(parts, axes, self.dtype, self._splits(axis))

    def _splits(self, axis: str) -> int:
        """The number of devices over which an axis is split."""
        if MESH_AXES[axis] is None:
            return 1
        return self.storage.shards

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


def multiply(
    x: Float[Array, "T I"], *kernels: Matrix, sizes: Int[Array, "X"] | None = None
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices of any storage, with float32 sums. The library multiplies them in one call.

    `sizes` is for packed ones of experts; see `packed_matmuls`.
    """
    if all([isinstance(kernel, PackedMatrix) for kernel in kernels]):
        return packed_matmuls(x, kernels, sizes=sizes)  # type: ignore[arg-type]
    if all([isinstance(kernel, PackedBitsMatrix | MixedBitsMatrix) for kernel in kernels]):
        return bits_matmuls(x, kernels, sizes)  # type: ignore[arg-type]
    if len(kernels) > 1:
        return [multiply(x, kernel)[0] for kernel in kernels]
    (kernel,) = kernels
    if isinstance(kernel, QuantisedMatrix):
        return [kernel.product(x)]
    return [matmul(x, kernel[...])]  # type: ignore[index]


def plus(values: Float[Array, "*T O"], bias: nnx.Param[Array] | None) -> Float[Array, "*T O"]:
    """The values and a vector in float32, if there is one."""
    if bias is None:
        return values
    return values + bias[...].astype(jnp.float32)


def scaled(values: Float[Array, "*any"], factor: float) -> Float[Array, "*any"]:
    """The product, without an operation if the factor is one."""
    if factor == 1:
        return values
    return values * factor


def capped(values: Float[Array, "*any"], cap: float | None) -> Float[Array, "*any"]:
    """Values v as cap * tanh(v / cap), or as they are without a cap."""
    if cap is None:
        return values
    return cap * jnp.tanh(values / cap)


def kept[Values](values: Values, keep: Int[Array, "B"] | None) -> Values:
    """The rows `keep` of each array of a tree; None for all."""
    if keep is None:
        return values
    rows: Values = jax.tree.map(lambda each: each[keep], values)
    return rows


def unfused[T](values: T) -> T:
    """The values unchanged. A TPU computes them on their own, before anything that uses them.

    XLA fuses cheap operations into their users, which may cost more than it saves (docs/kernels.md, TPU). On other
    devices this function does nothing: fusion pays there.
    """
    result: T = jax.lax.platform_dependent(
        values, tpu=jax.lax.optimization_barrier, default=lambda values: values
    )
    return result


class Linear(nnx.Module):
    """`x @ kernel + bias`; `axes` are the logical axes of input and output."""

    def __init__(
        self,
        make: Maker,
        sizes: tuple[int, int],
        axes: tuple[str, str],
        *,
        bias: bool,
        std: float = 0.02,
    ) -> None:
        self.kernel = make.matrix(sizes, axes, std)
        self.bias = optional(bias, make, sizes[1:], axes[1:], "zeros")

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """Project every token; float32 out."""
        return project(x, [self])[0]

    def pack(self, library: Library, num_devices: int) -> None:
        """Replace the matrix by its packed form, if it has one; see `packed_matrix` and `packed_bits`."""
        if isinstance(self.kernel, QuantisedMatrix):
            self.kernel = packed_bits(self.kernel, library, num_devices)
        elif isinstance(self.kernel, nnx.Param):
            self.kernel = packed_matrix(self.kernel, library, num_devices)

    def has_packed_form(self, library: Library) -> bool:
        """True if `pack` replaces the matrix, or it is packed already."""
        if isinstance(self.kernel, PackedBitsMatrix | MixedBitsMatrix):
            return True
        return type(self.kernel) is nnx.Param and has_packed_form(self.kernel, library)

    def take_outputs(self, columns: np.ndarray) -> None:
        """Replace the outputs by those of `columns`, which may repeat."""
        for parameter in jax.tree.leaves(
            nnx.state(self), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        ):
            parameter.set_value(parameter.get_value()[..., columns])


def project(x: Float[Array, "T I"], layers: Sequence[Linear]) -> list[Float[Array, "T O"]]:
    """The results of some linear layers with the same inputs."""
    products = multiply(x, *[layer.kernel for layer in layers])
    return [plus(out, layer.bias) for out, layer in zip(products, layers, strict=True)]


def with_adapters(
    adapters: LayerAdapters | None,
    name: str,
    x: Float[Array, "T I"],
    results: Sequence[Float[Array, "T _"]],
) -> list[Float[Array, "T _"]]:
    """`adapters.added`, or the results if there are no adapters."""
    if adapters is None:
        return list(results)
    return adapters.added(name, x, results)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the embedding, or over another axis of `width` numbers, in float32."""

    def __init__(
        self,
        make: Maker,
        config: ModelConfig,
        width: int | None = None,
        axis: str = "embed",
        *,
        has_scale: bool = True,
    ) -> None:
        self.centred = config.norm == "layernorm"
        self.eps = config.norm_eps
        self.offset = config.norm_offset
        self.width = width or config.embed_dim
        init: Init = "zeros" if self.offset else "ones"
        has_scale = has_scale and config.norm_scale
        self.scale = optional(has_scale, make, (self.width,), (axis,), init)
        has_bias = has_scale and self.centred and config.norm_bias
        self.bias = optional(has_bias, make, (self.width,), (axis,), "zeros")

    def __call__(self, x: Float[Array, "*T E"]) -> Float[Array, "*T E"]:
        """Normalise the last axis."""
        if self.centred:
            x = x - x.mean(axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + self.eps)
        if self.scale is None:
            return x
        scale = self.scale[...].astype(jnp.float32)
        if self.offset:
            scale = scale + self.offset
        return plus(x * scale, self.bias)

    def of_groups(self, x: Float[Array, "T *X"]) -> Float[Array, "T *X"]:
        """Normalise each group of `width` numbers by itself."""
        return self(x.reshape(x.shape[0], -1, self.width)).reshape(x.shape)


class Table(nnx.Module):
    """A vector for each index: token embeddings, learned positions, and the unembedding.

    Scores are multiplied by `scale`, after a bias if there is one. Then scores s become soft_cap * tanh(s / soft_cap),
    unless it is None.
    """

    def __init__(
        self,
        make: Maker,
        rows: int,
        width: int,
        axis: str,
        *,
        used: int | None = None,
        soft_cap: float | None = None,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        self.soft_cap = soft_cap
        self.scale = scale
        self.bias = optional(bias, make, (rows,), (axis,), "zeros")
        self.table: nnx.Param[Array] | QuantisedTable | PackedBitsTable = make.table(
            rows, width, axis, used or rows
        )

    @property
    def num_rows(self) -> int:
        """Number of rows, those of padding included."""
        table = self.table
        if isinstance(table, PackedTable | PackedBitsTable):
            return table.num_rows
        if isinstance(table, QuantisedTable):
            return int(table.values.get_value().shape[0])
        return int(table.get_value().shape[0])

    def __call__(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Look up rows. An index out of range gets the nearest row: padding may hold any index."""
        if isinstance(self.table, QuantisedTable | PackedTable | PackedBitsTable):
            return self.table.rows(index)
        return self.table[...].at[index].get(mode="clip").astype(jnp.float32)

    def pack(self, library: Library, num_devices: int) -> None:
        """Compute `scores` by the library, if the table fits; see `packed_table` and `packed_bits_table`."""
        if isinstance(self.table, QuantisedTable):
            self.table = packed_bits_table(self.table, library, num_devices)
        elif isinstance(self.table, nnx.Param):
            self.table = packed_table(self.table, library, num_devices)

    @property
    def can_skip(self) -> bool:
        """True if `scores` can leave out the vectors after some."""
        return isinstance(self.table, PackedTable | PackedBitsTable)

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector with every row, its bias, its scale and its soft cap.

        With `count`, only the scores of the first vectors are defined. The table must be one that `can_skip`.
        """
        scores = scaled(plus(self._products(hidden, count), self.bias), self.scale)
        return capped(scores, self.soft_cap)

    def _products(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None
    ) -> Float[Array, "B V"]:
        if isinstance(self.table, PackedTable | PackedBitsTable):
            return self.table.scores(hidden, count)
        assert count is None, "only the library skips vectors"
        if isinstance(self.table, QuantisedTable):
            return self.table.scores(hidden)
        return table_scores(hidden, self.table[...])


class Xielu(nnx.Module):
    """The activation xIELU, with parameters of its own (arXiv 2411.13010)."""

    def __init__(self, make: Maker) -> None:
        self.positive = make((1,), ("head_dim",), "zeros")
        self.negative = make((1,), ("head_dim",), "zeros")
        self.slope = make((1,), ("head_dim",), "ones")
        self.least = make((1,), ("head_dim",), "zeros")

    def __call__(self, x: Float[Array, "*T E"]) -> Float[Array, "*T E"]:
        """A parabola for positive numbers, an exponential for others; both begin with the same slope."""
        parameters = (self.positive, self.negative, self.slope, self.least)
        positive, negative, slope, least = (each[...].astype(jnp.float32) for each in parameters)
        parabola = jax.nn.softplus(positive) * jnp.square(x)
        exponential = (jnp.expm1(jnp.minimum(x, least)) - x) * (slope + jax.nn.softplus(negative))
        return jnp.where(x > 0, parabola, exponential) + slope * x


class Mlp(nnx.Module):
    """Two layers with an activation between them. Gated models multiply the hidden vector by a second projection."""

    def __init__(
        self, make: Maker, config: ModelConfig, out_std: float, width: int | None = None
    ) -> None:
        inner = ((config.embed_dim, width or config.mlp_dim), ("embed", "mlp"))
        self.activation = config.activation
        self.xielu = optional(config.activation == "xielu", Xielu, make)
        self.gate = optional(config.gated_mlp, Linear, make, *inner, bias=config.mlp_bias)
        self.up = Linear(make, *inner, bias=config.mlp_bias)
        self.down = Linear(make, inner[0][::-1], inner[1][::-1], bias=config.mlp_bias, std=out_std)

    @property
    def linear_layers(self) -> list[Linear]:
        """Those with matrices."""
        return [layer for layer in (self.gate, self.up, self.down) if layer is not None]

    def __call__(
        self, x: Float[Array, "T E"], adapters: LayerAdapters | None = None
    ) -> Float[Array, "T E"]:
        """Apply to every token."""
        act = self.xielu or ACTIVATIONS[self.activation]
        results = project(x, [*filter(None, [self.gate]), self.up])
        first, *others = with_adapters(adapters, "mlp", x, results)
        hidden = act(first)
        for other in others:
            hidden = hidden * other
        return with_adapters(adapters, "mlp_out", hidden, [self.down(hidden)])[0]
