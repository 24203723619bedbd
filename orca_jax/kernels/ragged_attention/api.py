"""Attention of a merged batch: one operation, and the table of its backends.

`reference` is the oracle. Every backend passes the same case table (`cases.py`). A module of the table has

    refusal(q, pages)     the reason why it cannot do these shapes, or None
    refusal_of_device(d)  optional: likewise for a device, for instance because of its driver
    attend(...)           the arguments of `ragged_attention` without `implementation`

If it writes new tokens during attention, it has `write_and_attend`. If layers then share more than the arrays of the
requests, it also has `prepare`; else `prepared` is these arrays:

    prepare(q, pages, page_table, query_start, query_len, context_len)          once per iteration
    write_and_attend(q, k, v, pages, prepared, first_page, *, scale, sliding_window, soft_cap)    in each layer
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.backend import Backend, first_backend, named_backend, refusals
from orca_jax.kernels.kv_pages import KVPages, num_kv_heads
from orca_jax.kernels.kv_write import write_kv

_HERE = "orca_jax.kernels.ragged_attention"

BACKENDS = (
    Backend("tpu", f"{_HERE}.tpu.attention", "tpu"),
    Backend("gpu", f"{_HERE}.hopper.attention", "gpu", least_capability=9, greatest_capability=9),
    Backend("triton", f"{_HERE}.triton", "gpu", least_capability=8),  # older tensor cores have no bfloat16
    Backend("native", f"{_HERE}.native", "cpu"),
    Backend("gather", f"{_HERE}.gather", "gpu", is_plain=True),
    Backend("xla", f"{_HERE}.xla", is_plain=True),
    Backend("reference", f"{_HERE}.reference", is_plain=True),
)
"""In order of preference: the default of a device is the first that is meant for it and can do the shapes."""

NO_WINDOW = 2**30
"""A traced window as wide as this one leaves out no token."""

Queries = Float[Array, "T H D"] | jax.ShapeDtypeStruct
"""The queries on one device, or their shape."""


def implementations(platform: str | None = None) -> tuple[str, ...]:
    """Names of the backends in order of preference; with a platform, only of those that run on its devices."""
    return tuple(backend.name for backend in BACKENDS if platform is None or backend.platform in (None, platform))


def choose_backend(device: jax.Device, q: Queries, pages: KVPages, implementation: str | None = None) -> Backend:
    """The backend of this name, or the device's default for these shapes if it is None.

    Raises:
        NotImplementedError: there is no backend of this name.
    """
    if implementation is not None:
        return _named(implementation)
    backend = first_backend(BACKENDS, device, q, pages)
    assert backend is not None, "xla runs everywhere and refuses nothing"
    return backend


class BackendChoice(NamedTuple):
    """The backend used on a device, and the reason."""

    backend: Backend
    reason: str
    is_slow: bool  # true if the user should hear of it


def explain_choice(device: jax.Device, q: Queries, pages: KVPages, implementation: str | None = None) -> BackendChoice:
    """The backend of `choose_backend`, with the reason.

    Raises:
        NotImplementedError: there is no backend of this name, or it cannot do these shapes on this device.
    """
    backend = choose_backend(device, q, pages, implementation)
    if implementation is not None:
        if (reason := backend.refusal(device, q, pages)) is not None:
            raise NotImplementedError(reason)
        return BackendChoice(backend, "as configured", is_slow=False)
    reasons = refusals(BACKENDS, device, q, pages)
    is_plain = backend.is_plain and device.platform != "cpu"
    is_held_back = any(other.refusal_of_device(device) in reasons for other in BACKENDS if other.is_meant_for(device))
    kind = f"the default of {device.device_kind or device.platform}"
    return BackendChoice(backend, "; ".join([kind, *reasons]), is_slow=is_plain or is_held_back)


def _named(name: str) -> Backend:
    found = named_backend(BACKENDS, name)
    if found is None:
        raise NotImplementedError(f"no attention implementation {name!r}; there are {', '.join(implementations())}")
    return found


def ragged_attention(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each request over its own pages; initiation and increment phases may be mixed.

    Request r has the queries `query_start[r] : query_start[r] + query_len[r]`; they are the last
    `query_len[r]` of its `context_len[r]` tokens, and the pages `page_table[r]` already hold their keys and values.
    Requests come in the order of `query_start`: those with one query first, absent ones (`query_len` 0) last.

    Args:
        q: queries of all requests, flattened; tokens past the last request are padding.
        pages: keys and values; a backend may support only some layouts and types.
        page_table: pages of each request, as indices into `pages`; entries past its context are not read.
        query_start: first query of each request.
        query_len: number of queries; 0 for rows without a request.
        context_len: tokens in the cache after this iteration.
        scale: factor on the scores, usually 1 / sqrt(D).
        sliding_window: number of tokens that a query sees, itself included; None for all before it. A traced scalar
            lets layers with several windows share a program; the kernels for GPUs take constants only.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap), after `scale`; None leaves them.
        implementation: a name from `implementations()`; None takes the device's default.

    Returns:
        The attention output of each query. Padding tokens get finite values without meaning.

    Raises:
        NotImplementedError: the backend does not exist or cannot do these shapes.
    """
    backend = _named(implementation) if implementation else choose_backend(jax.devices()[0], q, pages)
    if q.shape[1] % num_kv_heads(pages, q.shape[2]):
        message = f"{q.shape[1]} query heads are not a multiple of {num_kv_heads(pages, q.shape[2])} KV heads"
        raise NotImplementedError(message)
    rows = page_table, query_start, query_len, context_len
    out: jax.Array = backend.load().attend(
        q, pages, *rows, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )
    return out


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
) -> Any:
    """Prepare the data of an iteration that is the same in all layers: `requests` itself, or the backend's plan.

    Args:
        device: the device that the program is compiled for; it may be absent.
        q: shape of the queries on one device.
        pages: pages of one device, or their shapes.
        requests: the requests of the iteration.
        implementation: name of the attention backend; None takes the device's default.

    Raises:
        NotImplementedError: the backend does not exist or cannot read such pages.
    """
    backend = choose_backend(device, q, pages, implementation).load()
    return backend.prepare(q, pages, *requests) if hasattr(backend, "prepare") else requests


def write_and_attend(
    device: jax.Device,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: KVPages,
    prepared: Any,
    first_page: Int[Array, ""],
    *,
    scale: float,
    sliding_window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """The work of one layer: write the new keys and values to their pages, then attend over the pages.

    A backend with its own `write_and_attend` does both at once. Otherwise `write_kv` comes first, in plain XLA: a
    backend chosen because a device's kernels fail must not use another one of them.

    Args:
        device: as for `prepare`, and so is `implementation`.
        q: queries.
        k: new keys of all requests, flattened.
        v: new values.
        pages: pages of all layers; donated by the caller, so that the update is in place.
        prepared: the result of `prepare` for the same device, shapes and implementation.
        first_page: first page of this layer.
        scale: as for `ragged_attention`, and so are `sliding_window` and `soft_cap`.
    """
    backend = choose_backend(device, q, pages, implementation)
    module = backend.load()
    scores: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    if hasattr(module, "write_and_attend"):
        done: tuple[Array, KVPages] = module.write_and_attend(q, k, v, pages, prepared, first_page, **scores)
        return done
    rows = prepared._replace(page_table=prepared.page_table + first_page)
    pages = write_kv(pages, k, v, *rows)
    return ragged_attention(q, pages, *rows, **scores, implementation=backend.name), pages
