"""Pages of the KV cache, which holds the keys and values of running requests, in one of two layouts.

    head major   k, v  [N, K, D, S]       CPU: the inner loops of attention run over contiguous tokens
    token major  kv    [N, S, K * 2 * D]  TPU and GPU: for a token, K then V of head 0, K then V of head 1, ...

N = num_layers * num_pages; page p of layer l is l * num_pages + p. A page holds S consecutive tokens of one request.
With one flat page axis for all layers, the cache is a plain carry of the scan over layers. XLA updates it in place.

Pages without values have one array, whose keys are the values too: latents, for example. They are head major on every
platform, with K = 1 or a copy for each device.

Rows of token-major pages fill whole lanes for every number of heads (2 * D = 128 if D = 64): TPUs neither pad nor copy
them, and a page is one contiguous transfer. Heads are still contiguous: a mesh axis can split the last dimension.

Integer and 8-bit float pages have scales for K and for V: value = stored * scale. Head-major pages have one for each
token and head, so what is stored of a token depends on nothing else, and 8-bit floats are stored as bytes: XLA:CPU
converts a whole array of them, and back, at each write to it. Token-major pages have one for each page and head, in
one row, K's then V's of head 0 and so on: TPU kernels fetch this row alone.
Only this file defines the position of a token in a page; fast kernels are written for one layout and refuse the other.
"""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from orca_jax.values.config import PageLayout

LAYOUTS: tuple[PageLayout, ...] = get_args(PageLayout)
_SMALLEST_SCALE = 1e-30  # for a page of zeros
E4M3_IN_16 = 2.0**8
"""The ratio of a number in e4m3 to the one with the same bits in float16.

Both types have subnormal numbers, and their exponents differ by a constant.
"""


class HeadMajorPages(NamedTuple):
    """Keys and values of all layers, in separate arrays. A pytree, donated from one iteration to the next."""

    k: Num[Array, "N K D S"]
    v: Num[Array, "N K D S"] | None  # None: the values are the keys
    k_scale: Float[Array, "N K S"] | None = None
    v_scale: Float[Array, "N K S"] | None = None

    @property
    def page_size(self) -> int:
        """Number of tokens in a page."""
        return self.k.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the stored values; bytes are those of e4m3."""
        if self.k.dtype == jnp.uint8:
            return jnp.dtype(jnp.float8_e4m3fn)
        return self.k.dtype

    @property
    def is_quantised(self) -> bool:
        """True if values are stored as multiples of a scale."""
        return self.k_scale is not None


class TokenMajorPages(NamedTuple):
    """Keys and values of all layers in one array, side by side for each head. Their scales are laid out alike."""

    kv: Num[Array, "N S W"]
    scale: Float[Array, "N 1 2K"] | None = None

    @property
    def page_size(self) -> int:
        """Number of tokens in a page."""
        return self.kv.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the stored values."""
        return self.kv.dtype

    @property
    def is_quantised(self) -> bool:
        """True if values are stored as multiples of a scale."""
        return self.scale is not None


KVPages = HeadMajorPages | TokenMajorPages


class RowArrays(NamedTuple):
    """The requests of an iteration, one for each row, in the pages of one layer.

    Request r has the new tokens `query_start[r] : query_start[r] + query_len[r]` of the batch; they are the last
    `query_len[r]` of its `context_len[r]` tokens. Requests come in the order of `query_start`: those with one new token
    first, absent ones (`query_len` 0) last.
    """

    page_table: Int[Array, "R P"]  # pages of each request; entries past its context are not read
    query_start: Int[Array, " R"]  # first new token, which is also the first query
    query_len: Int[Array, " R"]  # number of new tokens; 0 for rows without a request
    context_len: Int[Array, " R"]  # tokens in the cache after this iteration

    def of_layer(self, first_page: Int[Array, ""]) -> "RowArrays":
        """The same requests in another layer, with its pages from `first_page` on."""
        return self._replace(page_table=self.page_table + first_page)


def needs_scales(dtype: jnp.dtype) -> bool:
    """True if pages of this type are quantised: all 8-bit types are."""
    return jnp.dtype(dtype).itemsize == 1


def pages_shape(
    layout: PageLayout,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: jnp.dtype,
    *,
    has_values: bool = True,
) -> KVPages:
    """Abstract pages: shapes and dtypes without memory. `num_pages` counts the pages of all layers (N)."""

    def scales(*shape: int) -> jax.ShapeDtypeStruct | None:
        if not needs_scales(dtype):
            return None
        return jax.ShapeDtypeStruct((num_pages, *shape), jnp.float32)

    if layout == "token_major" and has_values:
        kv = jax.ShapeDtypeStruct((num_pages, page_size, num_kv_heads * 2 * head_dim), dtype)
        return TokenMajorPages(kv, scales(1, 2 * num_kv_heads))  # type: ignore[arg-type]
    stored = jnp.uint8 if dtype == jnp.float8_e4m3fn else dtype
    page = jax.ShapeDtypeStruct((num_pages, num_kv_heads, head_dim, page_size), stored)
    scale = scales(num_kv_heads, page_size)
    return _head_major(page, scale, has_values)


def _head_major(page: Any, scale: Any, has_values: bool) -> HeadMajorPages:
    """Pages with the same of all arrays: shapes, or partitions."""
    if has_values:
        return HeadMajorPages(page, page, scale, scale)
    return HeadMajorPages(page, None, scale)


def pages_spec(
    layout: PageLayout, axis: str | None, dtype: jnp.dtype, *, has_values: bool = True
) -> KVPages:
    """A tree like the pages, of `PartitionSpec`: heads are split over the mesh axis `axis`."""
    is_quantised = needs_scales(dtype)
    if layout == "token_major" and has_values:
        spec = PartitionSpec(None, None, axis)
        return TokenMajorPages(spec, spec if is_quantised else None)  # type: ignore[arg-type]
    scale = PartitionSpec(None, axis, None) if is_quantised else None
    return _head_major(PartitionSpec(None, axis, None, None), scale, has_values)


def num_kv_heads(pages: KVPages, head_dim: int) -> int:
    """The number of KV heads, K. The shape of token-major pages gives only K * 2 * D."""
    if isinstance(pages, HeadMajorPages):
        return pages.k.shape[1]
    return pages.kv.shape[2] // (2 * head_dim)


def tile_tokens(dtype: jnp.dtype) -> int:
    """Tokens in one tile of a TPU's registers: 8 in float32, 16 in bfloat16, 32 in 8-bit types.

    TPUs write memory in whole tiles.
    """
    return 32 // jnp.dtype(dtype).itemsize


def lack_of_tiles(pages: KVPages) -> str | None:
    """The reason why pages are not whole tiles of a TPU, such as "needs token-major pages"; None if they are."""
    if not isinstance(pages, TokenMajorPages):
        return "needs token-major pages"
    least = tile_tokens(pages.dtype)
    if pages.page_size % least:
        return f"needs a page_size that is a multiple of {least}, not {pages.page_size}"
    return None


def as_bytes(values: Num[Array, "*any"]) -> Num[Array, "*any"]:
    """The form of values in head-major pages: e4m3 as bytes, other types unchanged."""
    if values.dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type(values, jnp.uint8)
    return values


def slots(
    k: Float[Array, "T K D"], v: Float[Array, "T K D"], dtype: jnp.dtype
) -> Num[Array, "T W"]:
    """K and V of each token in the layout and type of one slot of token-major pages."""
    return jnp.stack([k, v], axis=2).astype(dtype).reshape(k.shape[0], -1)


def read_page(
    pages: KVPages, page: Int[Array, ""], head_dim: int, dtype: DTypeLike = jnp.float32
) -> tuple[Float[Array, "K D S"], Float[Array, "K D S"]]:
    """K and V of one page in `dtype`, for every layout and stored type; quantised pages need float32."""

    def read(
        values: Num[Array, "N K D S"], scale: Float[Array, "N K S"] | None
    ) -> Float[Array, "K D S"]:
        return _times(
            widened(lax.dynamic_index_in_dim(values, page, keepdims=False), dtype), scale, page
        )

    if isinstance(pages, HeadMajorPages):
        k = read(pages.k, pages.k_scale)
        return k, k if pages.v is None else read(pages.v, pages.v_scale)
    kv = lax.dynamic_index_in_dim(pages.kv, page, keepdims=False).astype(dtype)
    kv = kv.reshape(pages.page_size, -1, 2, head_dim)
    k, v = (kv[:, :, part].transpose(1, 2, 0) for part in (0, 1))
    scales = page_scales(pages, page)
    if scales is None:
        return (k, v)
    return (k * scales[0][:, None, None], v * scales[1][:, None, None])


def _times(
    values: Float[Array, "K D S"], scale: Float[Array, "N K S"] | None, page: Array
) -> Float[Array, "K D S"]:
    """The values of a head-major page, with the scales of its tokens."""
    if scale is None:
        return values
    return values * lax.dynamic_index_in_dim(scale, page)[0][:, None]


def write_pages(
    pages: TokenMajorPages,
    page: Int[Array, " M"],
    values: tuple[Float[Array, "M K D S"], Float[Array, "M K D S"]],
    least: tuple[Float[Array, "M K"], Float[Array, "M K"]],
) -> TokenMajorPages:
    """The quantised token-major pages with several of them replaced.

    Args:
        pages: pages to update.
        page: indices of the pages to replace; those out of range are dropped.
        values: keys and values of whole pages, zeros in slots without a token.
        least: lower bounds on the scales, for K and for V. If these are a page's old scales, old values keep their
            bits unless a larger value is added.
    """
    quantise = jax.vmap(lambda values, least: _quantise(values, pages.dtype, least))
    (k, k_scale), (v, v_scale) = (
        quantise(x, bound) for x, bound in zip(values, least, strict=True)
    )
    kv = jnp.stack([k, v], axis=2).transpose(0, 4, 1, 2, 3).reshape(-1, *pages.kv.shape[1:])
    scale = jnp.stack([k_scale, v_scale], axis=-1).reshape(-1, 1, 2 * k.shape[1])

    def put(pool: Array, new: Array) -> Array:
        return pool.at[page].set(new, mode="drop", unique_indices=True)

    return TokenMajorPages(
        put(pages.kv, kv), None if pages.scale is None else put(pages.scale, scale)
    )


def page_scales(
    pages: TokenMajorPages, page: Int[Array, ""]
) -> tuple[Float[Array, " K"], Float[Array, " K"]] | None:
    """Scales of K and of V in one token-major page; None if pages are not quantised."""
    if pages.scale is None:
        return None
    return (pages.scale[page, 0, 0::2], pages.scale[page, 0, 1::2])


def page_tokens(
    pages: KVPages, page_list: Int[Array, " P"], head_dim: int
) -> tuple[Float[Array, "C K D"], Float[Array, "C K D"]]:
    """K and V of all tokens of the listed pages, in order, in float32; C = P * S."""
    k, v = jax.vmap(lambda page: read_page(pages, page, head_dim))(page_list)  # [P, K, D, S]
    heads = k.shape[1:3]
    return jnp.moveaxis(k, 3, 1).reshape(-1, *heads), jnp.moveaxis(v, 3, 1).reshape(-1, *heads)


def viewed(pages: KVPages, num_kv_heads: int, head_dim: int) -> KVPages:
    """The same memory as pages of other heads, smaller ones or larger ones; without scales, and on no TPU.

    XLA for CPUs would copy the pages without the barrier, which keeps the view out of fused loops.
    """
    assert not pages.is_quantised, "scales belong to heads"
    if isinstance(pages, TokenMajorPages):
        return lax.optimization_barrier(
            TokenMajorPages(pages.kv.reshape(-1, pages.page_size, num_kv_heads * 2 * head_dim))
        )
    shape = -1, num_kv_heads, head_dim, pages.page_size
    return lax.optimization_barrier(jax.tree.map(lambda values: values.reshape(shape), pages))


def like(view: KVPages, pages: KVPages) -> KVPages:
    """The memory of a view in the shape of `pages` again."""
    whole: KVPages = jax.tree.map(
        lambda new, old: lax.optimization_barrier(new).reshape(old.shape), view, pages
    )
    return whole


def copy_blocks(pages: KVPages, blocks: Int[Array, "C 2"], num_blocks: int) -> KVPages:
    """The pages with some blocks of a pool copied, one after the other; written in place if the pages are donated.

    Args:
        pages: a block has every `num_blocks`-th page, one in each layer of a group.
        blocks: source and target of each copy.
        num_blocks: blocks of the pool.
    """

    num_layers = jax.tree.leaves(pages)[0].shape[0] // num_blocks

    def copy_page(index: Int[Array, ""], pages: KVPages) -> KVPages:
        source, target = blocks[index // num_layers] + index % num_layers * num_blocks

        def of_array(values: Array) -> Array:
            return lax.dynamic_update_index_in_dim(
                values, lax.dynamic_index_in_dim(values, source), target, 0
            )

        copied: KVPages = jax.tree.map(of_array, pages)
        return copied

    # Pages are indexed as they lie: XLA writes the whole pool again if the update is within a reshape.
    return lax.fori_loop(0, blocks.shape[0] * num_layers, copy_page, pages)


def read_blocks[P](arrays: P, blocks: Int[Array, " C"], num_blocks: int) -> P:
    """The pages or states of some blocks, block after block, in new arrays; the arguments are as in `copy_blocks`."""

    def empty(values: Array) -> Array:
        number = blocks.shape[0] * (values.shape[0] // num_blocks)
        return jnp.zeros((number, *values.shape[1:]), values.dtype)

    found: P = jax.tree.map(empty, arrays)
    return _moved(arrays, found, blocks, num_blocks, is_read=True)


def write_blocks[P](arrays: P, blocks: Int[Array, " C"], values: P, num_blocks: int) -> P:
    """The arrays with some blocks replaced by `values` of `read_blocks`; the last one of a block counts."""
    return _moved(values, arrays, blocks, num_blocks, is_read=False)


def _moved[P](
    source: P, target: P, blocks: Int[Array, " C"], num_blocks: int, *, is_read: bool
) -> P:
    """`target` with rows of `source`: from a pool to a row of blocks, or from there to the pool."""
    pool = source if is_read else target
    num_layers = jax.tree.leaves(pool)[0].shape[0] // num_blocks

    def move_row(index: Int[Array, ""], target: P) -> P:
        in_pool = blocks[index // num_layers] + index % num_layers * num_blocks
        place, end = (in_pool, index) if is_read else (index, in_pool)

        def of_array(values: Array, moved: Array) -> Array:
            row = lax.dynamic_index_in_dim(values, place)
            return lax.dynamic_update_index_in_dim(moved, row, end, 0)

        result: P = jax.tree.map(of_array, source, target)
        return result

    moved: P = lax.fori_loop(0, blocks.shape[0] * num_layers, move_row, target)
    return moved


def largest_stored(dtype: jnp.dtype) -> float:
    """The largest magnitude of a stored value in quantised pages of this type."""
    return float(
        jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max
    )


def scales_of(
    largest: Float[Array, "*heads"], least: Float[Array, "*heads"], dtype: jnp.dtype
) -> Float[Array, "*heads"]:
    """The scale of each head of a page, for K or for V. It maps the head's largest value to the largest of the type.

    Args:
        largest: largest magnitude of the values. Values quantised with `least` may be left out: rounding is
            monotonic, so they are within the range of `least` and do not change the result.
        least: current scales of the page, which never shrink; zeros if the page holds no valid tokens.
        dtype: type of the stored values.
    """
    limit = largest_stored(dtype)
    # A value within range keeps the old scale: dividing a rounded product could give a slightly larger quotient.
    grown = jnp.where(largest <= limit * least, least, jnp.maximum(largest / limit, least))
    return jnp.maximum(grown, _SMALLEST_SCALE)


def quantise_tokens(
    tokens: Float[Array, "T K D"], dtype: jnp.dtype
) -> tuple[Num[Array, "T K D"], Float[Array, "T K"]]:
    """Values of each token in `dtype`, and the scale of each token and head, for head-major pages."""
    tokens = tokens.astype(jnp.float32)
    largest = jnp.abs(tokens).max(axis=2)
    scale = scales_of(largest, jnp.zeros_like(largest), dtype)
    return _stored(tokens / scale[..., None], dtype), scale


def stored_tokens(
    pages: HeadMajorPages, k: Float[Array, "T K D"], v: Float[Array, "T K D"] | None
) -> list[Array]:
    """What each pool of head-major pages stores of all tokens: [T, K, D], and scales [T, K] of quantised ones."""
    parts = [k] if v is None else [k, v]
    if not pages.is_quantised:
        return [tokens.astype(pages.dtype) for tokens in parts]
    values, scales = zip(*(quantise_tokens(tokens, pages.dtype) for tokens in parts), strict=True)
    return [*map(as_bytes, values), *scales]


def _quantise(
    values: Float[Array, "K D S"], dtype: jnp.dtype, least: Float[Array, " K"]
) -> tuple[Num[Array, "K D S"], Float[Array, " K"]]:
    """Stored values, rounded to nearest, and the scale of each head."""
    scale = scales_of(jnp.abs(values).max(axis=(1, 2)), least, dtype)
    return _stored(values / scale[:, None, None], dtype), scale


def _stored(values: Float[Array, "*any"], dtype: jnp.dtype) -> Num[Array, "*any"]:
    """Multiples of a scale, rounded to nearest, in the range of the type."""
    values = jnp.clip(values, -largest_stored(dtype), largest_stored(dtype))
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)


def bits_in_16(values: Num[Array, "*any"]) -> Float[Array, "*any"]:
    """Numbers in e4m3, divided by `E4M3_IN_16`, in float16. XLA:CPU takes some twenty times as long to convert them."""
    bits = as_bytes(values).astype(jnp.uint16)
    return lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)


def widened(values: Num[Array, "*any"], dtype: DTypeLike) -> Num[Array, "*any"]:
    """The same numbers in a wider type; bytes are those of e4m3."""
    if values.dtype != jnp.uint8:
        return values.astype(dtype)
    return bits_in_16(values).astype(dtype) * jnp.asarray(E4M3_IN_16, dtype)
