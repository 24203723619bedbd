"""Tries sizes of blocks of the Hopper kernels, and runs their kernels under a program that reads counters."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.device_check.loads import TINY, Heads, is_fit, llama, make_batch
from lab.device_check.part import Found, Setting, Write, attempt
from lab.device_check.speed import Increments, chunk
from orca_jax.kernels.ragged_attention import Scores, gpu_plan, ragged_attention
from orca_jax.kernels.ragged_attention.gpu_plan import PipelineSize

INCREMENTS = [PipelineSize(*size) for size in ((64, 4), (64, 6), (128, 2), (128, 3))]
ITEMS = (4, 1, 2)
CHUNKS = [PipelineSize(*size) for size in ((128, 2), (64, 2), (64, 4))]
LOADS = ((64, 4096), (1, 32768))  # rows and context of increments


def tune(what: str, setting: Setting, write: Write) -> None:
    """Measure the kernels with several sizes; the best are written to `gpu_blocks.json`."""
    if not is_fit("gpu", setting, write):
        return
    heads = TINY if setting.dry_run else llama()
    loads = ((2, 64),) if setting.dry_run else LOADS
    best: dict[str, Found] = {}

    def run(name: str, values: Found, measure: Callable[[], Found]) -> None:
        with blocks(heads.head_dim, **values):
            row = attempt(write, measure, load=name, **described(values))
        if "us" in row and row["us"] < best.get(name, {"us": float("inf")})["us"]:
            best[name] = row
            (setting.work / "gpu_blocks.json").write_text(
                json.dumps(best, indent=1), encoding="utf-8"
            )

    for rows, context in loads:
        for size in INCREMENTS[:2] if setting.dry_run else INCREMENTS:
            for items in ITEMS[:1] if setting.dry_run or size != INCREMENTS[0] else ITEMS:
                load = Increments("gpu", setting, heads, rows, context)
                contexts = np.full(rows, context, np.int32)
                run(
                    f"increments, {rows} x {context}",
                    {"increments": size, "items": items},
                    partial(load.measure, contexts),
                )
    tokens = 32 if setting.dry_run else 4096
    for size in CHUNKS[:1] if setting.dry_run else CHUNKS:
        run(
            f"chunk of {tokens}",
            {"chunks": size},
            partial(chunk, "gpu", setting, heads, tokens, tokens),
        )


def described(values: Found) -> Found:
    """Sizes as columns."""
    sizes = {
        name: f"{value.block} x {value.stages}" for name, value in values.items() if name != "items"
    }
    return sizes | {name: value for name, value in values.items() if name == "items"}


@contextmanager
def blocks(
    head_dim: int,
    increments: PipelineSize | None = None,
    items: int | None = None,
    chunks: PipelineSize | None = None,
) -> Iterator[None]:
    """Use other sizes within this block. Programs compiled before are forgotten."""
    plan: Any = gpu_plan
    before = plan.INCREMENT_BLOCKS[head_dim], plan.ITEMS, plan.CHUNK_BLOCKS
    try:
        plan.INCREMENT_BLOCKS[head_dim] = increments or before[0]
        plan.ITEMS = items or before[1]
        plan.CHUNK_BLOCKS = chunks or before[2]
        jax.clear_caches()
        yield
    finally:
        plan.INCREMENT_BLOCKS[head_dim], plan.ITEMS, plan.CHUNK_BLOCKS = before
        jax.clear_caches()


def counters(what: str, setting: Setting, write: Write) -> None:
    """Run each kernel of the implementation `what` once, for a program such as ncu, whose report is in the log."""
    if not is_fit(what, setting, write):
        return
    heads: Heads = TINY if setting.dry_run else llama()
    name = "xla" if setting.dry_run else what
    for about, batch in (
        ("increments", [(1, 64 if setting.dry_run else 4096)] * 64),
        ("chunk", [(64, 64)]),
    ):
        requests = batch if setting.dry_run or about == "increments" else [(2048, 2048)]
        given = make_batch(requests, heads)
        attend = jax.jit(
            partial(ragged_attention, scores=Scores(heads.head_dim**-0.5), implementation=name)
        )

        def run(given: Any = given, attend: Any = attend) -> Found:
            return {"finite": bool(jnp.isfinite(attend(*given)).all()), "report": "in the log"}

        attempt(write, run, load=about)
