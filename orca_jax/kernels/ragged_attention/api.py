"""One op, several implementations, chosen by name.

`reference` is the oracle. Each other implementation is a file of its own here and passes the same case table
(`cases.py`). One that cannot do a shape raises `NotImplementedError` and says which shapes it can.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads
from orca_jax.kernels.kv_write import default_write, write_kv
from orca_jax.kernels.ragged_attention.reference import ragged_attention_reference
from orca_jax.kernels.ragged_attention.xla import ragged_attention_xla

if TYPE_CHECKING:
    from orca_jax.kernels.ragged_attention.tpu.plan import Prepared


def _tpu(*args: Any, **options: Any) -> jax.Array:
    """Imports Pallas where it is used: a start on a CPU need not wait for it."""
    from orca_jax.kernels.ragged_attention.tpu.attention import ragged_attention_tpu

    return ragged_attention_tpu(*args, **options)


def _gpu(*args: Any, **options: Any) -> jax.Array:
    from orca_jax.kernels.ragged_attention.hopper.attention import ragged_attention_gpu

    return ragged_attention_gpu(*args, **options)


def _triton(*args: Any, **options: Any) -> jax.Array:
    from orca_jax.kernels.ragged_attention.triton import ragged_attention_triton

    return ragged_attention_triton(*args, **options)


_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": ragged_attention_reference,
    "xla": ragged_attention_xla,
    "tpu": _tpu,
    "gpu": _gpu,
    "triton": _triton,
}
_PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "triton": "gpu"}  # of implementations that do not run everywhere
Queries = Float[Array, "T H D"] | jax.ShapeDtypeStruct
"""Of one device, or their shape."""
_HOPPER, _AMPERE = 9, 8  # compute capability, its first number


def default_implementation(device: jax.Device, q: Queries, pages: KVPages) -> str:
    """The name that None stands for: the first of the device's implementations that can do these shapes."""
    if device.platform == "tpu":
        return _default_of_tpu(pages)
    if device.platform == "gpu":
        return default_of_gpu(str(getattr(device, "compute_capability", "")), q, pages)
    return "xla"


def _default_of_tpu(pages: KVPages) -> str:
    from orca_jax.kernels.ragged_attention.tpu.attention import refusal

    return "tpu" if refusal(pages) is None else "xla"


def default_of_gpu(capability: str, q: Queries, pages: KVPages) -> str:
    """Hopper has kernels of its own; Ampere and later get Triton's, since older tensor cores know no bfloat16.

    Args:
        capability: CUDA's number, such as "9.0"; devices of others have words.
        q: queries.
        pages: K and V.
    """
    from orca_jax.kernels.ragged_attention import triton
    from orca_jax.kernels.ragged_attention.hopper import attention as hopper

    first, _, _ = capability.partition(".")
    generation = int(first) if first.isdigit() else 0
    if generation == _HOPPER and hopper.refusal(q, pages) is None:
        return "gpu"
    return "triton" if generation >= _AMPERE and triton.refusal(q, pages) is None else "xla"


def implementations(platform: str | None = None) -> tuple[str, ...]:
    """Names that `ragged_attention` knows; with a platform, those that run on its devices."""
    return tuple(name for name in _IMPLEMENTATIONS if platform is None or _PLATFORMS.get(name, platform) == platform)


def ragged_attention(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each request over its own pages; initiation and increment phases may be mixed.

    Request r has the queries `query_start[r] : query_start[r] + query_len[r]`; they are the last
    `query_len[r]` of its `context_len[r]` tokens, whose K and V already stand in the pages
    `page_table[r]`. RowArrays come in the order of `query_start`, those with one query first, absent ones
    (`query_len` 0) last.

    Args:
        q: queries of all requests, flattened; tokens past the last request are padding.
        pages: K and V, in any layout and type; an implementation may take only some.
        page_table: pages of each request, as indices into `pages`; entries past its context are not read.
        query_start: first query of each request.
        query_len: number of queries; 0 for rows without a request.
        context_len: tokens in the cache after this iteration.
        scale: factor on the scores, usually 1 / sqrt(D).
        sliding_window: a query sees this many tokens, itself included; None for all before it.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap), after `scale`; None leaves them.
        implementation: a name from `implementations()`; None takes the backend's default.

    Returns:
        The attention output for each query; rows of padding tokens hold finite values that mean nothing.

    Raises:
        NotImplementedError: the implementation does not exist or cannot do these shapes.
    """
    name = implementation or default_implementation(jax.devices()[0], q, pages)
    if name not in _IMPLEMENTATIONS:
        raise NotImplementedError(f"no attention implementation {name!r}; there are {', '.join(_IMPLEMENTATIONS)}")
    if q.shape[1] % num_kv_heads(pages, q.shape[2]):
        message = f"{q.shape[1]} query heads are not a multiple of {num_kv_heads(pages, q.shape[2])} KV heads"
        raise NotImplementedError(message)
    rows = page_table, query_start, query_len, context_len
    return _IMPLEMENTATIONS[name](q, pages, *rows, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)


class RowArrays(NamedTuple):
    """The requests of an iteration, as `ragged_attention` takes them, in the first layer's pages."""

    page_table: Int[Array, "R P"]
    query_start: Int[Array, " R"]
    query_len: Int[Array, " R"]
    context_len: Int[Array, " R"]


def prepare(
    device: jax.Device,
    q: jax.ShapeDtypeStruct,
    pages: KVPages,
    requests: RowArrays,
    implementation: str | None = None,
) -> "RowArrays | Prepared":
    """What layers need to know of an iteration's requests, so that none of them has to find it out again.

    Args:
        device: what this is compiled for, here or not.
        q: shape of the queries on one device.
        pages: of one device, or their shapes.
        requests: the iteration's.
        implementation: of attention; None takes the device's default.

    Raises:
        NotImplementedError: the implementation cannot read such pages.
    """
    name = implementation or default_implementation(device, q, pages)
    if name != "tpu":
        return requests
    from orca_jax.kernels.ragged_attention.tpu.attention import refusal
    from orca_jax.kernels.ragged_attention.tpu.plan import blocks_for, plan_attention

    if (reason := refusal(pages)) is not None or not isinstance(pages, PackedPages):
        raise NotImplementedError(reason)
    return plan_attention(q, pages, *requests, blocks_for(q, pages))


def write_and_attend(
    device: jax.Device,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: KVPages,
    prepared: "RowArrays | Prepared",
    first_page: Int[Array, ""],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """What a layer does: put the new K and V into their pages, then attend over these.

    An implementation that writes on the way does so; before any other comes `write_kv`, in the device's own way.

    Args:
        device: as for `prepare`, and so is `implementation`.
        q: queries.
        k: new keys of all requests, flattened.
        v: new values.
        pages: of all layers; donated by the caller, so that the update is in place.
        prepared: what `prepare` made of the requests.
        first_page: of this layer.
        scale: as for `ragged_attention`.
    """
    if not isinstance(prepared, RowArrays):
        from orca_jax.kernels.ragged_attention.tpu.attention import write_and_attend_tpu

        assert isinstance(pages, PackedPages), "what was prepared"
        return write_and_attend_tpu(q, k, v, pages, prepared.of_layer(first_page), scale=scale)
    rows = prepared._replace(page_table=prepared.page_table + first_page)
    name = implementation or default_implementation(device, q, pages)
    pages = write_kv(pages, k, v, *rows, implementation=default_write(device, pages))
    return ragged_attention(q, pages, *rows, scale=scale, implementation=name), pages
