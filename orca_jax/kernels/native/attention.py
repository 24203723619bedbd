"""Attention on CPUs by the library (`attention.c`), and the new tokens that it writes."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages, RowArrays
from orca_jax.kernels.native.compiler import ATTENTION


def attend_in_c(
    queries: Float[Array, "T K M D"],
    new: tuple[Float[Array, "B K D"], Float[Array, "B K D"]] | None,
    pages: HeadMajorPages,
    requests: RowArrays,
    window: Int[Array, ""],
    sinks: Float[Array, " H"] | None = None,
    *,
    soft_cap: float | None,
) -> tuple[Float[Array, "T K M D"], HeadMajorPages]:
    """Attention of all requests on one device, after their new tokens are written; 0 for padding.

    The bits of a query follow from its own context: not from the queries beside it, nor from the page size.

    Args:
        queries: scaled, for the M query heads of each KV head.
        new: the new keys and values of all requests, flattened like the queries, which may have more
            padding; None if the pages have them.
        pages: pages in float32, bfloat16 or int8; written in place, as all that is donated.
        requests: the requests.
        window: number of tokens that a query sees.
        sinks: as in `Scores`.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None leaves them.

    Returns:
        The attention, and the pages.
    """
    assert pages.v is not None, "the library refuses pages without values"
    number = queries.shape[1] * queries.shape[2]
    none = jnp.full(number, jnp.finfo(jnp.float32).min)  # sinks that add nothing
    arrays = [array.astype(jnp.int32) for array in (*requests, window)]
    shapes = [jax.ShapeDtypeStruct(queries.shape, jnp.float32)]
    scales = [] if pages.k_scale is None else [pages.k_scale, pages.v_scale]
    given = [
        queries.astype(jnp.float32),
        pages.k,
        pages.v,
        *arrays,
        (none if sinks is None else sinks).astype(jnp.float32),
        *scales,
    ]
    places = [1, 2, *range(len(given) - len(scales), len(given))] if new is not None else []
    shapes += [jax.ShapeDtypeStruct(given[place].shape, given[place].dtype) for place in places]
    aliases = {place: result for result, place in enumerate(places, start=1)}
    call = jax.ffi.ffi_call(ATTENTION, shapes, input_output_aliases=aliases)
    # The library reads attributes in the order of their names.
    numbers = {"devices": np.int64(_num_devices()), "soft_cap": np.float32(soft_cap or 0)}
    out, *written = call(*given, *(each.astype(jnp.float32) for each in new or ()), **numbers)
    return out, HeadMajorPages(*written) if written else pages


def _num_devices() -> int:
    """The number of devices of the traced function. They share the processors of this machine."""
    return max(1, jax.sharding.get_abstract_mesh().size)
