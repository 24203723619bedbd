"""The layers of a block. Matrix products run in the parameters' type with float32 sums, the rest in float32.

Parameters of blocks are stacked: their first axis is the layer. The methods of a block get one layer at a time, because
the decoder scans over this axis.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.kernels.matmul import rounded_matmul
from orca_jax.kernels.native import Library
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Init, Maker, optional
from orca_jax.model.matrices.base import Matrix, TableMatrix
from orca_jax.model.matrices.plain import PlainMatrix
from orca_jax.values.config import ModelConfig

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def multiply(
    x: Float[Array, "T I"],
    *matrices: Matrix,
    sizes: Int[Array, "X"] | None = None,
    may_round: bool = False,
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices in memory, with float32 sums. The library multiplies them in one call.

    Args:
        x: the activations of all tokens.
        matrices: matrices of any forms with these inputs.
        sizes: for packed matrices of experts on one device: each expert multiplies so many rows, one after the other.
        may_round: products of plain matrices are those of `rounded_matmul`.
    """
    if may_round and all(isinstance(matrix, PlainMatrix) for matrix in matrices):
        return [rounded_matmul(x, matrix[...]) for matrix in matrices]  # type: ignore[index]
    if len({matrix.products_of for matrix in matrices}) == 1:
        return matrices[0].products(x, matrices, sizes)
    return [matrix.products(x, [matrix], sizes)[0] for matrix in matrices]


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
        self.kernel: Matrix = make.matrix(sizes, axes, std)
        self.bias = optional(bias, make, sizes[1:], axes[1:], "zeros")

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """Project every token; float32 out."""
        return project(x, [self])[0]

    def pack(self, library: Library, num_devices: int) -> None:
        """Replace the matrix by its packed form, if it has one."""
        self.kernel = self.kernel.packed(library, num_devices)

    def has_packed_form(self, library: Library) -> bool:
        """True if `pack` replaces the matrix, or it is packed already."""
        return self.kernel.has_packed_form(library)

    def take_outputs(self, columns: np.ndarray) -> None:
        """Replace the outputs by those of `columns`, which may repeat."""
        for parameter in jax.tree.leaves(
            nnx.state(self), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        ):
            parameter.set_value(parameter.get_value()[..., columns])


def project(
    x: Float[Array, "T I"], layers: Sequence[Linear], *, may_round: bool = False
) -> list[Float[Array, "T O"]]:
    """The results of some linear layers with the same inputs; `may_round` is that of `multiply`."""
    products = multiply(x, *[layer.kernel for layer in layers], may_round=may_round)
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
        self.table: TableMatrix = make.table(rows, width, axis, used or rows)

    @property
    def num_rows(self) -> int:
        """Number of rows, those of padding included."""
        return self.table.num_rows

    def __call__(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Look up rows. An index out of range gets the nearest row: padding may hold any index."""
        return self.table.rows(index)

    def pack(self, library: Library, num_devices: int) -> None:
        """Compute `scores` by the library, if the table fits."""
        self.table = self.table.packed(library, num_devices)

    @property
    def can_skip(self) -> bool:
        """True if `scores` can leave out the vectors after some."""
        return self.table.can_skip

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector with every row, its bias, its scale and its soft cap.

        With `count`, only the scores of the first vectors are defined. The table must be one that `can_skip`.
        """
        products = self.table.scores(hidden, count)
        return capped(scaled(plus(products, self.bias), self.scale), self.soft_cap)


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
    """Two layers with an activation between them. Gated models multiply the hidden vector by a second projection.

    With the residual "carried" there is a last projection of the results.
    """

    def __init__(
        self, make: Maker, config: ModelConfig, out_std: float, width: int | None = None
    ) -> None:
        inner = ((config.embed_dim, width or config.mlp_dim), ("embed", "mlp"))
        self.activation = config.activation
        self.xielu = optional(config.activation == "xielu", Xielu, make)
        self.gate = optional(config.gated_mlp, Linear, make, *inner, bias=config.mlp_bias)
        self.up = Linear(make, *inner, bias=config.mlp_bias)
        self.down = Linear(make, inner[0][::-1], inner[1][::-1], bias=config.mlp_bias, std=out_std)
        has_last = config.residual == "carried"
        square = ((config.embed_dim,) * 2, ("embed", "latent"))
        self.last = optional(has_last, Linear, make, *square, bias=False)

    @property
    def linear_layers(self) -> list[Linear]:
        """Those with matrices."""
        return [layer for layer in (self.gate, self.up, self.down, self.last) if layer is not None]

    def __call__(
        self, x: Float[Array, "T E"], adapters: LayerAdapters | None = None
    ) -> Float[Array, "T E"]:
        """Apply to every token."""
        act = self.xielu or ACTIVATIONS[self.activation]
        # The product of both is rounded, too: it is the input of the next layer.
        results = project(x, [*filter(None, [self.gate]), self.up], may_round=True)
        first, *others = with_adapters(adapters, "mlp", x, results)
        hidden = act(first)
        for other in others:
            hidden = hidden * other
        result = with_adapters(adapters, "mlp_out", hidden, [self.down(hidden)])[0]
        if self.last is None:
            return result
        return self.last(result)
