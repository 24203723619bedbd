"""Compares kernels with the oracle: the case table of the tests on a CPU, and batches of real sizes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from lab.device_check.loads import (
    TINY,
    Given,
    Heads,
    Requests,
    attention_of,
    is_fit,
    llama,
    make_batch,
)
from lab.device_check.part import Found, Setting, Skip, Write, attempt_all
from orca_jax.kernels.kv_pages import KVPages, TokenMajorPages, page_tokens
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention import (
    RowArrays,
    Scores,
    prepare,
    ragged_attention,
    write_and_attend,
)
from orca_jax.kernels.ragged_attention.cases import (
    CASES,
    HOPPER_CASES,
    LATENT_CASES,
    Case,
    fitted,
    make_arrays,
)
from orca_jax.kernels.ragged_attention.gather import attend as ragged_attention_gather
from orca_jax.kernels.ragged_attention.hopper.attention import HEAD_DIMS, PAGE_SIZES
from orca_jax.kernels.ragged_attention.reference import attend as ragged_attention_reference

Check = tuple[Found, Callable[[], Callable[[], Found]]]
"""Keywords that describe a check, and a function to prepare it; see `attempt_all`."""

MIXED: Requests = [(1, 4096), (1, 1000), (1, 77), (700, 700), (33, 1500)]
CAP, LOUD = 50.0, 10.0  # of queries, so that scores come near the cap
# Shapes and types supported by no kernel for GPUs except Triton's.
WIDE = ("3 heads of 80", "heads of 96", "heads of 256", "bfloat16", "int8 pages", "fp8 pages")
HALF = replace(
    CASES[5], name="float16", head_dim=64, page_size=16, dtype="float16", page_dtype="float16"
)
FEW = ("increments and chunks with padding", "window and soft cap", "int8 pages", "bfloat16")
DRY = {
    "gpu": ("one token",),
    "tpu": ("one token", "heads of 128", "fp8 pages"),
    "triton": ("fp8 pages",),
    "gather": ("int8 pages",),
}
LATENTS = {"gpu": "triton_latents", "tpu": "tpu_latents"}
"""The kernels of latents that are checked with others."""
BIG = 9 << 30  # bytes of a cache with more than 2**31 elements
DRY_WRITES = ("increments and chunks with padding", "bfloat16", "int8 pages")


def correct(what: str, setting: Setting, write: Write) -> None:
    """Check attention by the implementation `what`; with "write" a layer on a TPU, with the writes of its KV cache."""
    if what == "write":
        attempt_all(write, writes(setting))
        return
    if not is_fit(what, setting, write):
        return
    checks = [
        *cases(what, setting),
        *real_sizes(what, setting),
        *big_cache(what, setting),
        *latents(what, setting),
    ]
    attempt_all(write, [check for check in checks if setting.case in (None, check[0]["case"])])


def real_sizes(what: str, setting: Setting) -> list[Check]:
    """Batches of both phases, in bf16. Outputs are of order one; a difference above 0.03 is an error."""
    uneven: Requests = [(1, 300), (1, 64), (100, 300)]
    batches = [("mixed", MIXED, llama()), ("heads of 64, no groups", uneven, Heads(25, 25, 64, 16))]
    batches += [
        ("64 heads over one", uneven, Heads(64, 1, 128, 32)),
        ("pages of 256", uneven, Heads(8, 2, 128, 256)),
    ]
    batches += [("one row", [(1, 5000)], llama()), ("no increments", [(70, 900), (2, 33)], llama())]
    batches += [("256 rows", [(1, 1 + 37 * i % 900) for i in range(256)], llama())]
    if setting.dry_run:
        batches = [("mixed", [(1, 200), (5, 21)], TINY)]

    def prepare(requests: Requests, heads: Heads, cap: float | None) -> Callable[[], Found]:
        loud = LOUD if cap else 1.0
        scores = Scores(heads.head_dim**-0.5 * loud, 128 if cap else None, cap)
        attend = attention_of(what, setting, scores)
        batches = [make_batch(requests, heads, seed) for seed in (0, 1)]
        # The reference computes one row after the other in one program; its compilation would take too long.
        oracle = ragged_attention_gather if len(requests) > 16 else ragged_attention_reference
        return compare(attend, scores, batches, 0.03 * (2 if cap else 1), oracle)

    kinds: list[tuple[str, float | None]] = [("causal", None), ("window and soft cap", CAP)]
    return [
        ({"case": f"{name}, {kind}"}, partial(prepare, requests, heads, cap))
        for (name, requests, heads), (kind, cap) in product(batches, kinds)
    ]


def cases(what: str, setting: Setting) -> list[Check]:
    """Cases of the table: all of them for the kernels of TPUs and Hopper; their unwritten slots hold NaN."""
    table: list[Case] = [*CASES, HALF]
    names = {"tpu": [case.name for case in CASES], "triton": (*WIDE, HALF.name), "gather": FEW}.get(
        what, ()
    )
    if what == "gpu":
        table = [fitted(case, HEAD_DIMS, PAGE_SIZES) for case in HOPPER_CASES]
        names = [case.name for case in table]
    if setting.dry_run:
        names = DRY.get(what, ())

    def prepare(case: Case) -> Callable[[], Found]:
        given: Any = [
            jax.tree.map(jnp.asarray, tuple(make_arrays(case, seed, layout="token_major")))
            for seed in (0, 1)
        ]
        # Sums have another order, and on a TPU products of float32 consist of several in bfloat16.
        return compare(
            attention_of(what, setting, case.scores), case.scores, given, max(case.tolerance, 1e-4)
        )

    return [({"case": case.name}, partial(prepare, case)) for case in table if case.name in names]


def latents(what: str, setting: Setting) -> list[Check]:
    """Pages without values, by the kernels of the same devices: those of the table, and DeepSeek's with 64 rows."""
    name = LATENTS.get(what)
    if name is None:
        return []
    sizes = ((1, 1 + 37 * i % 900) for i in range(62))
    many = replace(LATENT_CASES[3], name="latents, 64 rows", requests=(*sizes, (5, 900), (70, 300)))
    table = LATENT_CASES[:1] if setting.dry_run else (many, *LATENT_CASES)

    def prepare(case: Case) -> Callable[[], Found]:
        given: Any = [jax.tree.map(jnp.asarray, tuple(make_arrays(case, seed))) for seed in (0, 1)]
        attend = attention_of(name, setting, case.scores)
        oracle = ragged_attention_gather if case is many else ragged_attention_reference
        return compare(attend, case.scores, given, max(case.tolerance, 1e-4), oracle)

    return [({"case": case.name}, partial(prepare, case)) for case in table]


def big_cache(what: str, setting: Setting) -> list[Check]:
    """The last pages of a cache whose elements 32 bits cannot count."""
    heads = llama()
    if what not in ("gpu", "tpu", "triton") or setting.dry_run:
        return []

    def prepare() -> Callable[[], Found]:
        q, pages, requests = make_batch([(1, 900), (40, 300)], heads)
        num_pages = BIG // (heads.page_size * heads.token_bytes)
        used = pages.kv.shape[0]
        create = jax.jit(
            lambda kv: (
                jnp.zeros((num_pages, *kv.shape[1:]), kv.dtype).at[num_pages - used :].set(kv)
            )
        )
        given = q, TokenMajorPages(create(pages.kv)), requests.of_layer(jnp.int32(num_pages - used))
        scores = Scores(heads.head_dim**-0.5)
        return compare(attention_of(what, setting, scores), scores, [given], 0.03)

    return [({"case": "the end of a cache of more than 2**31 elements"}, prepare)]


def compare(
    attend: Callable[..., jax.Array],
    scores: Scores,
    batches: Sequence[Given],
    tolerance: float,
    reference: Callable[..., jax.Array] = ragged_attention_reference,
) -> Callable[[], Found]:
    """Compile the implementation and the oracle. The returned function runs both and compares the tokens of requests.

    Each batch runs twice: different results show a race. Padding must be finite.

    Args:
        attend: the implementation.
        scores: of the oracle.
        batches: batches of the same shapes.
        tolerance: the allowed difference.
        reference: the oracle.

    Raises:
        Skip: the implementation does not support such a batch.
    """
    with jax.default_matmul_precision("highest"):
        oracle = compiled(partial(reference, scores=scores), batches[0])
    program = compiled(attend, batches[0])

    def run() -> Found:
        worst: Found = {"difference": -1.0}
        for given in batches:
            used = int(given[2].query_len.sum())
            wanted = np.asarray(oracle(*given), np.float32)[:used]
            found, again = (np.asarray(program(*given), np.float32) for _ in range(2))
            result = judged(np.abs(wanted - found[:used]), tolerance)
            if "error" not in result and not np.isfinite(found).all():
                result["error"] = "the output of padding is not finite"
            if "error" not in result and not np.array_equal(found, again):
                result["error"] = "two runs over the same data differ"
            if "error" in result:
                return result
            worst = max(worst, result, key=lambda each: each["difference"])
        return worst

    return run


def compiled(function: Callable[..., Any], given: tuple[Any, ...]) -> jax.stages.Compiled:
    """Compile a function.

    Raises:
        Skip: a kernel refused the shapes while it was traced. A refusal by the compiler is an error.
    """
    try:
        traced = jax.jit(function).trace(*given)
    except NotImplementedError as refusal:
        raise Skip(str(refusal)) from None
    return traced.lower().compile()


def judged(apart: np.ndarray, allowed: float) -> Found:
    """The largest difference, with an error if it is larger than allowed or not a number."""
    found: Found = {"difference": float(apart.max()), "allowed": allowed}
    if (apart <= allowed).all():
        return found
    return {**found, "error": f"differs from the oracle by {found['difference']:.3g}"}


def writes(setting: Setting) -> list[Check]:
    """Checks of a layer's writes and attention on a TPU, over the table and at a real size."""
    heads = llama()
    shape = heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.page_size
    real = Case("mixed", tuple(MIXED), *shape, dtype="bfloat16", page_dtype="bfloat16")
    chosen = [real, *CASES]
    if setting.dry_run:
        chosen = [case for case in CASES if case.name in DRY_WRITES]
    return [({"case": case.name}, partial(prepare_write, case, setting)) for case in chosen]


def prepare_write(case: Case, setting: Setting) -> Callable[[], Found]:
    """Compile a layer and the oracle. The returned function runs both and compares the tokens of requests."""
    arrays = make_arrays(case, layout="token_major")
    assert isinstance(arrays.pages, TokenMajorPages), "as asked for"
    rng = np.random.default_rng(3)
    new = rng.standard_normal((2, arrays.q.shape[0], case.num_kv_heads, case.head_dim)).astype(
        jnp.dtype(case.dtype)
    )
    given = jax.tree.map(jnp.asarray, (arrays.q, *new, *arrays[1:]))
    is_quantised = arrays.pages.is_quantised
    tolerance = max(case.tolerance, 1e-4)
    oracle = compiled(
        partial(one_after_the_other, "pages" if is_quantised else "scatter", case.scores), given
    )
    with pltpu.force_tpu_interpret_mode() if setting.dry_run else nullcontext():
        program = compiled(partial(one_layer, case.scores), given)

    def run() -> Found:
        (expected, wanted), (actual, found) = (
            (out, values_of(x, case)) for out, x in (oracle(*given), program(*given))
        )
        owned = slots_of_requests(arrays.requests, case, wanted.shape[0])
        others = ~owned.any(axis=1)
        if not np.array_equal(found[others], wanted[others], equal_nan=True):
            return {"error": "pages that belong to no request were changed"}
        owned &= np.isfinite(wanted).all(axis=2)  # slots before a window hold NaN
        # A compiler may divide by scales in its own way: a value of 8 bits may be rounded to a neighbour.
        step = 0.13 * np.abs(wanted[owned]) + 0.04 if is_quantised else 0.0
        in_pages = np.abs(wanted[owned] - found[owned])
        if not (in_pages <= step).all():
            return {"in_pages": float(in_pages.max()), "error": "pages differ from the oracle's"}
        apart = np.abs(np.asarray(expected, np.float32) - np.asarray(actual, np.float32))
        return {
            "in_pages": float(in_pages.max()),
            **judged(apart[: int(arrays.requests.query_len.sum())], tolerance),
        }

    return run


def one_after_the_other(
    write: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: TokenMajorPages,
    requests: RowArrays,
) -> tuple[jax.Array, KVPages]:
    """Write new keys and values with the implementation `write`, then attend over them with the oracle."""
    written = write_kv(pages, k, v, requests, implementation=write)
    return ragged_attention(q, written, requests, scores, implementation="reference"), written


def one_layer(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: TokenMajorPages,
    requests: RowArrays,
) -> tuple[jax.Array, KVPages]:
    """The same, as a layer on a TPU does it."""
    device = jax.devices()[0]
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    prepared = prepare(device, shape, pages, requests, "tpu")
    return write_and_attend(
        device, q, k, v, pages, prepared, jnp.int32(0), scores, implementation="tpu"
    )


def values_of(pages: TokenMajorPages, case: Case) -> np.ndarray:
    """Keys and values of all slots, `[N, S, W]` in float32."""
    num_pages = pages.kv.shape[0]
    read = jax.jit(
        lambda pages: jnp.stack(page_tokens(pages, jnp.arange(num_pages), case.head_dim), axis=2)
    )
    return np.asarray(read(pages)).reshape(num_pages, case.page_size, -1)


def slots_of_requests(requests: RowArrays, case: Case, num_pages: int) -> np.ndarray:
    """Mask `[N, S]` of the slots with a token of a request."""
    owned = np.zeros((num_pages, case.page_size), bool)
    for pages, count in zip(
        *map(np.asarray, (requests.page_table, requests.context_len)), strict=True
    ):
        place = np.arange(count)
        owned[pages[place // case.page_size], place % case.page_size] = True
    return owned
