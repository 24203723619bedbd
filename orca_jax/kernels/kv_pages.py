"""K/V pages: where the keys and values of running requests live, in one of two layouts.

    head major   k, v  [N, K, D, S]       CPU: the inner loops of attention run over contiguous tokens
    packed       kv    [N, S, K * 2 * D]  TPU and GPU: of a token, K then V of head 0, K then V of head 1, ...

N = num_layers * num_pages; page p of layer l is l * num_pages + p. A page holds S consecutive tokens of one request.
One flat page axis for all layers lets the cache be a plain carry of the scan over layers, which XLA updates in place.

Packed pages are rows of whole lanes for every number of heads (2 * D = 128 where D = 64), so that TPUs neither pad
nor copy them, and a page is one contiguous transfer. Heads are still contiguous: a mesh axis can split the last one.

Integer and 8-bit float pages have scales, one for K and one for V of each page and head: value = stored * scale.
Packed pages have them in a line for each page, K's then V's of head 0 and so on: TPU kernels fetch that line alone.
Only this file knows where a token stands in a page; what needs speed in its layout says so and takes no other.
"""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from orca_jax.config import PageLayout

LAYOUTS: tuple[PageLayout, ...] = get_args(PageLayout)
_SMALLEST_SCALE = 1e-30  # of a page of zeros


class HeadMajorPages(NamedTuple):
    """Keys and values of all layers; a pytree, donated from one iteration to the next."""

    k: Num[Array, "N K D S"]
    v: Num[Array, "N K D S"]
    k_scale: Float[Array, "N K"] | None = None
    v_scale: Float[Array, "N K"] | None = None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the stored values."""
        return self.k.dtype

    @property
    def is_quantised(self) -> bool:
        """Whether stored values are to be multiplied by scales."""
        return self.k_scale is not None


class PackedPages(NamedTuple):
    """Keys and values of all layers, side by side for each head, and so are their scales."""

    kv: Num[Array, "N S W"]
    scale: Float[Array, "N 1 2K"] | None = None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the stored values."""
        return self.kv.dtype

    @property
    def is_quantised(self) -> bool:
        """Whether stored values are to be multiplied by scales."""
        return self.scale is not None


KVPages = HeadMajorPages | PackedPages


def needs_scales(dtype: jnp.dtype) -> bool:
    """Whether pages of this type are quantised: all of eight bits are."""
    return jnp.dtype(dtype).itemsize == 1


def pages_shape(
    layout: PageLayout,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: jnp.dtype,
) -> KVPages:
    """Abstract pages: shapes and dtypes without memory. `num_pages` counts those of all layers (N)."""

    def scales(*shape: int) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct((num_pages, *shape), jnp.float32) if needs_scales(dtype) else None

    if layout == "packed":
        kv = jax.ShapeDtypeStruct((num_pages, page_size, num_kv_heads * 2 * head_dim), dtype)
        return PackedPages(kv, scales(1, 2 * num_kv_heads))  # type: ignore[arg-type]
    page = jax.ShapeDtypeStruct((num_pages, num_kv_heads, head_dim, page_size), dtype)
    scale = scales(num_kv_heads)
    return HeadMajorPages(page, page, scale, scale)  # type: ignore[arg-type]


def pages_spec(layout: PageLayout, axis: str | None, dtype: jnp.dtype) -> KVPages:
    """How pages are split over the mesh: their heads over `axis`. A tree like the pages, of `PartitionSpec`."""
    is_quantised = needs_scales(dtype)
    if layout == "packed":
        packed = PartitionSpec(None, None, axis)
        return PackedPages(packed, packed if is_quantised else None)  # type: ignore[arg-type]
    scale = PartitionSpec(None, axis) if is_quantised else None
    page = PartitionSpec(None, axis, None, None)
    return HeadMajorPages(page, page, scale, scale)  # type: ignore[arg-type]


def num_kv_heads(pages: KVPages, head_dim: int) -> int:
    """K, which packed pages do not say by themselves."""
    if isinstance(pages, HeadMajorPages):
        return pages.k.shape[1]
    return pages.kv.shape[2] // (2 * head_dim)


def tile_tokens(dtype: jnp.dtype) -> int:
    """Tokens in a tile of a TPU's registers, which memory is written in: 8 in float32, 16 in bfloat16, 32 in 8 bits."""
    return 32 // jnp.dtype(dtype).itemsize


def slots(k: Float[Array, "T K D"], v: Float[Array, "T K D"], dtype: jnp.dtype) -> Num[Array, "T W"]:
    """K and V of each token as a slot of packed pages of this type has them."""
    return jnp.stack([k, v], axis=2).astype(dtype).reshape(k.shape[0], -1)


def read_page(
    pages: KVPages, page: Int[Array, ""], head_dim: int
) -> tuple[Float[Array, "K D S"], Float[Array, "K D S"]]:
    """K and V of one page in float32, whatever the layout and the stored type."""

    def of_page(pool: Array) -> Array:
        return lax.dynamic_index_in_dim(pool, page, keepdims=False).astype(jnp.float32)

    if isinstance(pages, HeadMajorPages):
        k, v = of_page(pages.k), of_page(pages.v)
    else:
        kv = of_page(pages.kv).reshape(pages.page_size, -1, 2, head_dim)
        k, v = (kv[:, :, part].transpose(1, 2, 0) for part in (0, 1))
    scales = page_scales(pages, page)
    return (k, v) if scales is None else (k * scales[0][:, None, None], v * scales[1][:, None, None])


def write_page(
    pages: KVPages,
    page: Int[Array, ""],
    k: Float[Array, "K D S"],
    v: Float[Array, "K D S"],
    least: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None,
) -> KVPages:
    """The pages with one of them replaced.

    Args:
        pages: to be updated.
        page: which.
        k: keys of the whole page; those of slots without a token are zeros.
        v: values.
        least: quantised pages get no smaller scales than these, for K and for V. With the scales that the page had,
            values that were in it keep their bits as long as nothing larger comes.
    """
    scales: tuple[Array, ...] = ()
    if pages.is_quantised:
        (k, k_scale), (v, v_scale) = (
            _quantise(x, pages.dtype, None if least is None else least[i]) for i, x in enumerate((k, v))
        )
        scales = k_scale, v_scale

    def put(pool: Array, new: Array) -> Array:
        return lax.dynamic_update_index_in_dim(pool, new.astype(pool.dtype), page, axis=0)

    if isinstance(pages, HeadMajorPages):
        old = (pages.k_scale, pages.v_scale) if scales else ()
        kept = [put(pool, new) for pool, new in zip(old, scales, strict=True) if pool is not None]
        return HeadMajorPages(put(pages.k, k), put(pages.v, v), *kept)
    # [K, D, S] twice -> [S, K, 2, D]
    kv = jnp.stack([k, v], axis=1).transpose(3, 0, 1, 2).reshape(pages.page_size, -1)
    scale = None if pages.scale is None else put(pages.scale, jnp.stack(scales, axis=-1).reshape(1, -1))
    return PackedPages(put(pages.kv, kv), scale)


def write_pages(
    pages: PackedPages,
    page: Int[Array, " M"],
    values: tuple[Float[Array, "M K D S"], Float[Array, "M K D S"]],
    least: tuple[Float[Array, "M K"], Float[Array, "M K"]],
) -> PackedPages:
    """The quantised pages with some of them replaced at once; see `write_page`. Pages that do not exist are dropped."""
    quantise = jax.vmap(lambda values, least: _quantise(values, pages.dtype, least))
    (k, k_scale), (v, v_scale) = (quantise(x, bound) for x, bound in zip(values, least, strict=True))
    kv = jnp.stack([k, v], axis=2).transpose(0, 4, 1, 2, 3).reshape(-1, *pages.kv.shape[1:])
    scale = jnp.stack([k_scale, v_scale], axis=-1).reshape(-1, 1, 2 * k.shape[1])

    def put(pool: Array, new: Array) -> Array:
        return pool.at[page].set(new, mode="drop", unique_indices=True)

    return PackedPages(put(pages.kv, kv), None if pages.scale is None else put(pages.scale, scale))


def page_scales(pages: KVPages, page: Int[Array, ""]) -> tuple[Float[Array, " K"], Float[Array, " K"]] | None:
    """Scales of K and of V in one page; None where pages are not quantised."""
    if isinstance(pages, HeadMajorPages):
        if pages.k_scale is None or pages.v_scale is None:
            return None
        return pages.k_scale[page], pages.v_scale[page]
    return None if pages.scale is None else (pages.scale[page, 0, 0::2], pages.scale[page, 0, 1::2])


def page_tokens(
    pages: KVPages, page_list: Int[Array, " P"], head_dim: int
) -> tuple[Float[Array, "C K D"], Float[Array, "C K D"]]:
    """K and V of the tokens of some pages in order, in float32; C = P * S."""
    k, v = jax.vmap(lambda page: read_page(pages, page, head_dim))(page_list)  # [P, K, D, S]
    heads = k.shape[1:3]
    return jnp.moveaxis(k, 3, 1).reshape(-1, *heads), jnp.moveaxis(v, 3, 1).reshape(-1, *heads)


def largest_stored(dtype: jnp.dtype) -> float:
    """The largest magnitude that quantised pages of this type store."""
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def scales_of(
    largest: Float[Array, "*heads"], least: Float[Array, "*heads"], dtype: jnp.dtype
) -> Float[Array, "*heads"]:
    """The scale of each head, K's or V's, of a page: its largest value becomes the type's largest.

    Args:
        largest: magnitude of the values. Values that were quantised by `least` can be left out: rounding is monotonic,
            so none is beyond what `least` reaches, and none changes the result.
        least: scales that the page has, which do not shrink; zeros where nothing in it counts.
        dtype: of the stored values.
    """
    limit = largest_stored(dtype)
    # What fits is not divided: the quotient of a rounded product may be a bit larger than the scale that made it.
    grown = jnp.where(largest <= limit * least, least, jnp.maximum(largest / limit, least))
    return jnp.maximum(grown, _SMALLEST_SCALE)


def _quantise(
    values: Float[Array, "K D S"], dtype: jnp.dtype, least: Float[Array, " K"] | None
) -> tuple[Num[Array, "K D S"], Float[Array, " K"]]:
    """Stored values, rounded to nearest, and the scale of each head."""
    largest, limit = jnp.abs(values).max(axis=(1, 2)), largest_stored(dtype)
    scale = scales_of(largest, jnp.zeros_like(largest) if least is None else least, dtype)
    stored = jnp.clip(values / scale[:, None, None], -limit, limit)
    return (jnp.round(stored) if jnp.issubdtype(dtype, jnp.integer) else stored).astype(dtype), scale
