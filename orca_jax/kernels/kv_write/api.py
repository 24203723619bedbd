"""Write the keys and values of an iteration's tokens to their pages: one operation, and the table of its backends.

    tpu      for TPUs: a scatter for increments and a kernel for chunks (`tpu.py`); for quantised pages a kernel
             with the fewest possible rewrites (`tpu_quantised.py`)
    blocks   head-major pages, since XLA scatters one element at a time on a CPU: an increment writes one column of a
             page, a chunk writes page after page
    pages    head-major pages without values on accelerators, and quantised token-major pages, all at once: a GPU waits
             for its host at every pass of a loop with a dynamic trip count, and a TPU would copy all pages in order to
             write columns
    scatter  all other pages, and the oracle of `blocks`

Quantised pages: a token of a head-major page has its own scales, and is written like any other. In a token-major page,
a token larger than all before it changes the scale, and with it the stored values. So these pages are written whole.
"""

from jaxtyping import Array, Float

from orca_jax.kernels.backend import Backend, known_backend
from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays

_HERE = "orca_jax.kernels.kv_write"

BACKENDS = (
    Backend("tpu", f"{_HERE}.tpu", "tpu"),
    Backend("blocks", f"{_HERE}.blocks", is_plain=True),
    Backend("pages", f"{_HERE}.pages", is_plain=True),
    Backend("scatter", f"{_HERE}.scatter", is_plain=True),
)
"""A module has `refusal(pages)` and `write(pages, k, v, requests)`. The default is the first plain one that fits."""


def write_kv(
    pages: KVPages,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    requests: RowArrays,
    *,
    implementation: str | None = None,
) -> KVPages:
    """Write new tokens to their pages, and return the pages. Padding is not written.

    Args:
        pages: pages to update; donated by the caller, so that the update is in place.
        k: new keys of all requests, flattened.
        v: new values; None for pages without values.
        requests: the requests, with indices into `pages`.
        implementation: the name of a backend; None takes the default for the layout and type.

    Raises:
        NotImplementedError: the implementation does not exist, or cannot write these pages.
    """
    assert (v is None) == (isinstance(pages, HeadMajorPages) and pages.v is None), (
        "values, or pages without them"
    )
    if implementation is None:
        module = next(
            each for row in BACKENDS if row.is_plain and (each := row.load()).refusal(pages) is None
        )
    else:
        module = known_backend("write_kv", BACKENDS, implementation).load()
        if (reason := module.refusal(pages)) is not None:
            raise NotImplementedError(f"write_kv {implementation!r} {reason}")
    written: KVPages = module.write(pages, k, v, requests)
    return written
