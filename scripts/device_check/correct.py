"""Compares kernels with the oracle: the case table of the tests on a CPU, and batches of real sizes."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from device_check.loads import TINY, Given, Heads, Requests, attention_of, check_fit, llama, make_batch
from device_check.part import Found, Setting, Skip, Write, attempt_all
from orca_jax.kernels.kv_pages import KVPages, PackedPages, page_tokens
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention import RowArrays, prepare, ragged_attention, write_and_attend
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays
from orca_jax.kernels.ragged_attention.reference import ragged_attention_reference

Check = tuple[Found, Callable[[], Callable[[], Found]]]
"""Keywords that describe a check, and a function to prepare it; see `attempt_all`."""

SCALE = 0.25  # of scores, as in the case table
MIXED: Requests = [(1, 4096), (1, 1000), (1, 77), (700, 700), (33, 1500)]
WINDOW = {"sliding_window": 128, "soft_cap": 5.0}
# Shapes and types supported by no kernel for GPUs except Triton's.
WIDE = ("3 heads of 80", "heads of 96", "heads of 256", "bfloat16", "int8 pages", "fp8 pages")
DRY = {"tpu": ("one token", "heads of 128", "fp8 pages"), "triton": ("fp8 pages",)}
DRY_WRITES = ("increments and chunks with padding", "bfloat16", "int8 pages")


def correct(what: str, setting: Setting, write: Write) -> None:
    """Check attention by the implementation `what`; with "write" a layer on a TPU, with the writes of its KV cache."""
    if what == "write":
        attempt_all(write, writes(setting))
        return
    try:
        check_fit(what, setting)
    except Skip as reason:
        write(skipped=str(reason))
        return
    attempt_all(write, [*real_sizes(what, setting), *cases(what, setting)])


def real_sizes(what: str, setting: Setting) -> list[Check]:
    """Batches of both phases, in bf16. Outputs are of order one; a difference above 0.03 is an error."""
    batches = [("mixed", MIXED, llama(setting))]
    batches += [("heads of 64, no groups", [(1, 300), (1, 64), (100, 300)], Heads(25, 25, 64, 16))]
    if setting.dry_run:
        batches = [("mixed", [(1, 200), (5, 21)], TINY)]

    def prepare(requests: Requests, heads: Heads, options: Found) -> Callable[[], Found]:
        options = {**options, "scale": heads.head_dim**-0.5}
        return compare(attention_of(what, setting, **options), options, make_batch(requests, heads), 0.03)

    return [
        ({"case": f"{name}, {kind}"}, partial(prepare, requests, heads, options))
        for name, requests, heads in batches
        for kind, options in (("causal", {}), ("window and soft cap", WINDOW))
    ]


def cases(what: str, setting: Setting) -> list[Check]:
    """Cases of the table: all of them for TPUs, and for Triton those without another kernel."""
    names = {"tpu": [case.name for case in CASES], "triton": WIDE}.get(what, ())
    if setting.dry_run:
        names = DRY.get(what, ())

    def prepare(case: Case) -> Callable[[], Found]:
        case = replace(case, head_dim=max(64, case.head_dim)) if what == "triton" else case
        given: Any = jax.tree.map(jnp.asarray, tuple(make_arrays(case, layout="packed")))
        # Sums have another order, and on a TPU products of float32 consist of several in bfloat16.
        return compare(attention_of(what, setting, **case.options), case.options, given, max(case.tolerance, 1e-4))

    return [({"case": case.name}, partial(prepare, case)) for case in CASES if case.name in names]


def compare(
    attend: Callable[..., jax.Array], options: dict[str, Any], given: Given, tolerance: float
) -> Callable[[], Found]:
    """Compile the implementation and the oracle. The returned function runs both and compares the tokens of requests.

    Raises:
        Skip: the implementation does not support such a batch.
    """
    oracle = compiled(partial(ragged_attention_reference, **options), given)
    program = compiled(attend, given)
    used = int(given[4].sum())

    def run() -> Found:
        wanted, found = (np.asarray(call(*given), np.float32)[:used] for call in (oracle, program))
        return judged(np.abs(wanted - found), tolerance)

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
    heads = llama(setting)
    shape = heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.page_size
    real = Case("mixed", tuple(MIXED), *shape, dtype="bfloat16", page_dtype="bfloat16")
    chosen = [real, *CASES]
    if setting.dry_run:
        chosen = [case for case in CASES if case.name in DRY_WRITES]
    return [({"case": case.name}, partial(prepare_write, case, setting)) for case in chosen]


def prepare_write(case: Case, setting: Setting) -> Callable[[], Found]:
    """Compile a layer and the oracle. The returned function runs both and compares the tokens of requests."""
    arrays = make_arrays(case, layout="packed")
    assert isinstance(arrays.pages, PackedPages), "as asked for"
    rng = np.random.default_rng(3)
    new = rng.standard_normal((2, arrays.q.shape[0], case.num_kv_heads, case.head_dim)).astype(jnp.dtype(case.dtype))
    given = jax.tree.map(jnp.asarray, (arrays.q, *new, *arrays[1:]))
    is_quantised, tolerance = arrays.pages.is_quantised, max(case.tolerance, 1e-4)
    oracle = compiled(partial(one_after_the_other, "pages" if is_quantised else "scatter"), given)
    with pltpu.force_tpu_interpret_mode() if setting.dry_run else nullcontext():
        program = compiled(one_layer, given)

    def run() -> Found:
        (expected, wanted), (actual, found) = (
            (out, values_of(x, case)) for out, x in (oracle(*given), program(*given))
        )
        owned = slots_of_requests(arrays.page_table, arrays.context_len, case, wanted.shape[0])
        others = ~owned.any(axis=1)
        if not np.array_equal(found[others], wanted[others], equal_nan=True):
            return {"error": "pages that belong to no request were changed"}
        # A compiler may divide by scales in its own way: a value of 8 bits may be rounded to a neighbour.
        step = 0.13 * np.abs(wanted[owned]) + 0.04 if is_quantised else 0.0
        in_pages = np.abs(wanted[owned] - found[owned])
        if not (in_pages <= step).all():
            return {"in_pages": float(in_pages.max()), "error": "pages differ from the oracle's"}
        apart = np.abs(np.asarray(expected, np.float32) - np.asarray(actual, np.float32))
        return {"in_pages": float(in_pages.max()), **judged(apart[: int(arrays.query_len.sum())], tolerance)}

    return run


def one_after_the_other(
    write: str, q: jax.Array, k: jax.Array, v: jax.Array, pages: PackedPages, *rows: jax.Array
) -> tuple[jax.Array, KVPages]:
    """Write new keys and values with the implementation `write`, then attend over them with the oracle."""
    written = write_kv(pages, k, v, *rows, implementation=write)
    return ragged_attention(q, written, *rows, scale=SCALE, implementation="reference"), written


def one_layer(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: PackedPages, *rows: jax.Array
) -> tuple[jax.Array, KVPages]:
    """The same, as a layer on a TPU does it."""
    device, shape = jax.devices()[0], jax.ShapeDtypeStruct(q.shape, q.dtype)
    prepared = prepare(device, shape, pages, RowArrays(*rows), "tpu")
    return write_and_attend(device, q, k, v, pages, prepared, jnp.int32(0), scale=SCALE, implementation="tpu")


def values_of(pages: PackedPages, case: Case) -> np.ndarray:
    """Keys and values of all slots, `[N, S, W]` in float32."""
    num_pages = pages.kv.shape[0]
    read = jax.jit(lambda pages: jnp.stack(page_tokens(pages, jnp.arange(num_pages), case.head_dim), axis=2))
    return np.asarray(read(pages)).reshape(num_pages, case.page_size, -1)


def slots_of_requests(table: np.ndarray, context: np.ndarray, case: Case, num_pages: int) -> np.ndarray:
    """Mask `[N, S]` of the slots with a token of a request."""
    owned = np.zeros((num_pages, case.page_size), bool)
    for pages, count in zip(table, context, strict=True):
        place = np.arange(count)
        owned[pages[place // case.page_size], place % case.page_size] = True
    return owned
