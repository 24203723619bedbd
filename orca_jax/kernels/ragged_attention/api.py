"""Attention of a merged batch: one operation, and the table of its backends.

`reference` is the oracle. Every backend passes the same case table (`cases.py`). A module of the table has

    refusal(q, pages)     the reason why it cannot do these shapes, or None
    refusal_of_device(d)  optional: likewise for a device, for instance because of its driver
    attend(q, pages, requests, scores)

If it writes new tokens during attention, it has `write_and_attend`. If layers then share more than the arrays of the
requests, it also has `prepare`; else `prepared` is these arrays:

    prepare(q, pages, requests)                                     once for each page table of an iteration
    write_and_attend(q, k, v, pages, prepared, first_page, scores)  in each layer
    attend_prepared(q, pages, prepared, scores)                     in layers that read the pages of others

What is prepared is a pytree of arrays. Their shapes depend on the shapes of the arguments alone, so the results for
several page tables can be stacked, and a scan over layers can select one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.backend import Backend, first_backend, known_backend, refusals
from orca_jax.kernels.kv_pages import KVPages, RowArrays, num_kv_heads
from orca_jax.kernels.kv_write import write_kv
from orca_jax.values.platforms import platform_of

_HERE = "orca_jax.kernels.ragged_attention"

BACKENDS = (
    Backend("tpu", f"{_HERE}.tpu.attention", "tpu"),
    Backend("tpu_latents", f"{_HERE}.tpu.latents", "tpu"),
    Backend("gpu", f"{_HERE}.hopper.attention", "gpu", least_capability=9, greatest_capability=9),
    # older tensor cores have no bfloat16
    Backend("triton", f"{_HERE}.triton", "gpu", least_capability=8),
    Backend("triton_latents", f"{_HERE}.triton_latents", "gpu", least_capability=8),
    Backend("native", f"{_HERE}.native", "cpu"),
    Backend("gather", f"{_HERE}.gather", "gpu", is_plain=True),
    Backend("xla", f"{_HERE}.xla", is_plain=True),
    Backend("reference", f"{_HERE}.reference", is_plain=True),
)
"""In order of preference: the default of a device is the first that is meant for it and can do the shapes."""

MASKED = -1e30
"""The score of a token that a query does not see."""

_OF_LIBRARY = "native"

NO_WINDOW = 2**30
"""A window as wide as this one leaves out no token."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layer_window", "sinks"],
    meta_fields=["scale", "sliding_window", "soft_cap"],
)
@dataclass(frozen=True)
class Scores:
    """The way from products of queries and keys to scores. A pytree: a layer's window and sinks are traced.

    Attributes:
        scale: factor on the products, usually 1 / sqrt(D).
        sliding_window: number of tokens that a query sees, itself included; None for all before it.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap), after `scale`; None leaves them.
        layer_window: a traced window in place of `sliding_window`, so that layers with several windows share a program.
            `NO_WINDOW` is that of a layer without one. The kernels for GPUs take constants only.
        sinks: scores of each head that join its softmax and have no values, neither scaled nor capped; None for none.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    layer_window: Int[Array, ""] | None = None
    sinks: Float[Array, " H"] | None = None

    @property
    def window(self) -> int | Int[Array, ""] | None:
        """The window, constant or traced; None if a query sees all tokens before it."""
        if self.layer_window is None:
            return self.sliding_window
        return self.layer_window

    def with_window(self, window: int | Int[Array, ""] | None) -> "Scores":
        """The same scores with another window, constant or traced."""
        if isinstance(window, jax.Array):
            return replace(self, sliding_window=None, layer_window=window)
        return replace(self, sliding_window=window, layer_window=None)

    def capped(self, products: Float[Array, "*any"]) -> Float[Array, "*any"]:
        """The scores of scaled products."""
        if self.soft_cap is None:
            return products
        return self.soft_cap * jnp.tanh(products / self.soft_cap)

    def before_tokens(
        self, kv_heads: int, groups: int, size: int
    ) -> tuple[Float[Array, "K M"], Float[Array, "K M"]]:
        """Maximum and denominator of an online softmax before its first token, for M = groups * size queries.

        They are those of the sinks. Without any, the maximum is finite: a fully masked block must not make NaN out of
        inf - inf.
        """
        if self.sinks is None:
            return jnp.full((kv_heads, groups * size), MASKED), jnp.zeros((kv_heads, groups * size))
        sinks = self.sinks.astype(jnp.float32).reshape(kv_heads, groups)
        return jnp.repeat(sinks, size, axis=1), jnp.ones((kv_heads, groups * size))


Queries = Float[Array, "T H D"] | jax.ShapeDtypeStruct
"""The queries on one device, or their shape."""


def implementations(platform: str | None = None) -> tuple[str, ...]:
    """Names of the backends in order of preference; with a platform, only of those that run on its devices."""
    return tuple(
        backend.name
        for backend in BACKENDS
        if platform is None or backend.platform in (None, platform)
    )


def choose_backend(
    device: jax.Device,
    q: Queries,
    pages: KVPages,
    implementation: str | None = None,
    *,
    has_library: bool = False,
) -> Backend:
    """The backend of this name, or the device's default for these shapes if it is None.

    The default of a CPU can be `native` if the process has its library.

    Raises:
        NotImplementedError: there is no backend of this name.
    """
    if implementation is not None:
        return known_backend("attention", BACKENDS, implementation)
    backend = first_backend(_usable(has_library), device, q, pages)
    assert backend is not None, "xla runs everywhere and refuses nothing"
    return backend


def _usable(has_library: bool) -> Sequence[Backend]:
    """The backends with all their parts in this process."""
    return [backend for backend in BACKENDS if has_library or backend.name != _OF_LIBRARY]


class BackendChoice(NamedTuple):
    """The backend used on a device, and the reason."""

    backend: Backend
    reason: str
    is_slow: bool  # true if the user should hear of it


def explain_choice(
    device: jax.Device,
    q: Queries,
    pages: KVPages,
    implementation: str | None = None,
    *,
    has_library: bool = False,
) -> BackendChoice:
    """The backend of `choose_backend`, with the reason.

    Raises:
        NotImplementedError: there is no backend of this name, or it cannot do these shapes on this device.
    """
    backend = choose_backend(device, q, pages, implementation, has_library=has_library)
    if implementation is not None:
        if implementation == _OF_LIBRARY and not has_library:
            raise NotImplementedError(
                "this process has not loaded the library of 'native'; see cpu_products"
            )
        if (reason := backend.refusal(device, q, pages)) is not None:
            raise NotImplementedError(reason)
        return BackendChoice(backend, "as configured", is_slow=False)
    reasons = refusals(_usable(has_library), device, q, pages)
    is_plain = backend.is_plain and not platform_of(device).is_host
    is_held_back = any(
        other.refusal_of_device(device) in reasons
        for other in BACKENDS
        if other.is_meant_for(device)
    )
    kind = f"the default of {device.device_kind or device.platform}"
    return BackendChoice(backend, "; ".join([kind, *reasons]), is_slow=is_plain or is_held_back)


def ragged_attention(
    q: Float[Array, "T H D"],
    pages: KVPages,
    requests: RowArrays,
    scores: Scores,
    *,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each request over its own pages; initiation and increment phases may be mixed.

    Args:
        q: queries of all requests, flattened; tokens past the last request are padding.
        pages: keys and values, also those of the new tokens; a backend may support only some layouts and types.
        requests: the requests, with indices into `pages`.
        scores: factor, window and cap.
        implementation: a name from `implementations()`; None takes the device's default.

    Returns:
        The attention output of each query. Padding tokens get finite values without meaning.

    Raises:
        NotImplementedError: the backend does not exist or cannot do these shapes.
    """
    backend = choose_backend(jax.devices()[0], q, pages, implementation)
    if q.shape[1] % num_kv_heads(pages, q.shape[2]):
        message = f"{q.shape[1]} query heads are not a multiple of {num_kv_heads(pages, q.shape[2])} KV heads"
        raise NotImplementedError(message)
    out: jax.Array = backend.load().attend(q, pages, requests, scores)
    return out


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
        NotImplementedError: the backend does not exist or cannot read these pages.
    """
    backend = choose_backend(device, q, pages, implementation).load()
    if not hasattr(backend, "prepare"):
        return requests
    return backend.prepare(q, pages, requests)


def write_and_attend(
    device: jax.Device,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    pages: KVPages,
    prepared: Any,
    first_page: Int[Array, ""],
    scores: Scores,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """The work of one layer: write the new keys and values to their pages, then attend over the pages.

    A backend with its own `write_and_attend` does both at once. Otherwise `write_kv` comes first, in plain XLA: a
    backend chosen because a device's kernels fail must not use another one of them.

    Args:
        device: the device of the arrays; it decides the default, as in `prepare`.
        q: queries.
        k: new keys of all requests, flattened.
        v: new values; None for pages without values, and the values are the keys then.
        pages: pages of all layers; donated by the caller, so that the update is in place.
        prepared: the result of `prepare` for the same device, shapes and implementation.
        first_page: first page of this layer.
        scores: factor, window and cap of this layer.
    """
    backend = choose_backend(device, q, pages, implementation)
    module = backend.load()
    if hasattr(module, "write_and_attend"):
        done: tuple[Array, KVPages] = module.write_and_attend(
            q, k, v, pages, prepared, first_page, scores
        )
        return done
    requests = prepared.of_layer(first_page)
    writer = None
    if v is None and not platform_of(device).is_host:
        writer = "pages"
    pages = write_kv(pages, k, v, requests, implementation=writer)
    return ragged_attention(q, pages, requests, scores, implementation=backend.name), pages


def attend_pages(
    device: jax.Device,
    q: Float[Array, "T H D"],
    pages: KVPages,
    prepared: Any,
    first_page: Int[Array, ""],
    scores: Scores,
    *,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Attention of a layer that reads the pages of an earlier one. That layer has written the new tokens.

    The arguments are those of `write_and_attend`; `first_page` is that of the earlier layer.
    """
    module = choose_backend(device, q, pages, implementation).load()
    own = prepared.of_layer(first_page)
    attend = getattr(module, "attend_prepared", module.attend)
    out: jax.Array = attend(q, pages, own, scores)
    return out
