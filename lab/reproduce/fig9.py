"""Figure 9: the time of one batch of equal requests, on 13B, 101B and 175B (section 6.1)."""

import math
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from lab.paper.effort import Effort
from lab.paper.fits import FITTED, Fit
from lab.paper.kernels import KernelSource
from lab.paper.places import Place, serve_system
from lab.paper.points import read_figure_9b
from lab.paper.runs import homogeneous
from lab.paper.systems import System
from lab.reproduce.rows import Row

BATCHES = (1, 2, 4, 8, 16, 32)
GENERATED = 32
ENGINES = ("orca", "ft")
PROMPTS = (32, 128)
PANELS = {"9a": "13B", "9b": "101B", "9c": "175B"}
WORSE = 0.25
""""Equal or slightly worse" (section 6.1): ORCA takes at most this much longer on one stage; 15 % in Figure 9b."""
PAPER_GAIN = 1.47


def batch_ms(
    engine: str,
    model: str,
    num_prompt: int,
    size: int,
    fit: Fit = FITTED,
    kernels: KernelSource | None = None,
) -> float | None:
    """Milliseconds of a batch, without pipelining for either engine, as in the paper; None: out of memory."""
    place = Place(model, fit=fit, n_workers=1, kernels=kernels)
    system = System("orca", size) if engine == "orca" else System("ft", size, size)
    if not place.fits(system):
        return None
    return 1e3 * max(
        serve_system(system, place, homogeneous(num_prompt, GENERATED, size), [0.0] * size).ends
    )


type BatchTimes = dict[str, list[float | None]]
"""Milliseconds of batches of all sizes, by engine and length of the prompts; None: out of memory."""


def all_times(fit: Fit = FITTED, kernels: KernelSource | None = None) -> dict[str, BatchTimes]:
    """The times of all panels."""
    return {panel: _times(model, fit, kernels) for panel, model in PANELS.items()}


def _times(model: str, fit: Fit, kernels: KernelSource | None) -> BatchTimes:
    found = {}
    for engine, num_prompt in product(ENGINES, PROMPTS):
        found[f"{engine}({num_prompt})"] = [
            batch_ms(engine, model, num_prompt, size, fit, kernels) for size in BATCHES
        ]
    return found


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """Return the results and their rows."""
    times = all_times()
    paper = _as_lists(read_figure_9b())
    return {"batch_sizes": BATCHES, "batch_ms": times, "paper_9b_ms": paper}, rows_of(times)


def rows_of(times: dict[str, BatchTimes]) -> list[Row]:
    """The rows of the figure."""
    points = read_figure_9b()
    errors: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for (engine, num_prompt, size), paper in points.items():
        ours = times["9b"][f"{engine}({num_prompt})"][BATCHES.index(size)]
        if ours is not None:
            errors[engine].append(abs(math.log(ours / paper)))
    every = errors["orca"] + errors["ft"]
    rows = [
        Row(f"fig9.9b.{engine}", f"9b, 101B: mean |log| of a batch's time, {engine}", fmean(each), "points",
            fmean(each), 0.08)
        for engine, each in errors.items()
    ]  # fmt: skip
    rows.append(
        Row(
            "fig9.9b.worst",
            "9b, 101B: the worst of all batches",
            max(every),
            "points",
            max(every),
            0.20,
        )
    )
    rows += [_slightly_worse(panel, times[panel]) for panel in ("9a", "9b")]
    rows += [_memory_limit("13B", 8), _memory_limit("101B", 16)]
    gain = max(_ratios(times["9c"]))
    rows.append(
        Row("fig9.9c.gain", "9c, 175B: the most by which FasterTransformer's batch takes longer than ORCA's", gain,
            PAPER_GAIN, abs(math.log(gain / PAPER_GAIN)), claim="C2", is_input=True)
    )  # fmt: skip
    return rows


def _as_lists(points: dict[tuple[str, int, int], float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for (engine, num_prompt, _), ms in points.items():
        found.setdefault(f"{engine}({num_prompt})", []).append(ms)
    return found


def _ratios(times: BatchTimes) -> list[float]:
    """The time of FasterTransformer's batches over that of ORCA's."""
    ratios = []
    for num_prompt in PROMPTS:
        pairs = zip(times[f"ft({num_prompt})"], times[f"orca({num_prompt})"], strict=True)
        ratios += [ft / orca for ft, orca in pairs if ft is not None and orca is not None]
    return ratios


def _slightly_worse(panel: str, times: BatchTimes) -> Row:
    longer = [1 / ratio - 1 for ratio in _ratios(times)]
    text = f"{panel}, {PANELS[panel]}: ORCA's batches take at most this much longer, and never less"
    holds = min(longer) >= -1e-3 and 0 < max(longer) <= WORSE
    return Row(f"fig9.{panel}.slower", text, max(longer), "slightly worse", holds=holds)


def _memory_limit(model: str, size: int) -> Row:
    place = Place(model)
    largest = max([each for each in range(1, 2 * size) if place.fits(System("ft", each, each))])
    text = f"{model}: the largest batch of FasterTransformer; {size} is out of memory"
    return Row(
        f"fig9.memory.{model}",
        text,
        largest,
        f"below {size}",
        claim="C4",
        holds=size // 2 <= largest < size,
    )


def normalised_ms(model: str, fit: Fit = FITTED) -> float:
    """Milliseconds per token of ORCA's batch of 32 requests with 128 prompt tokens (section 6.2)."""
    found = batch_ms("orca", model, 128, 32, replace(fit))
    assert found is not None, f"orca(32) does not fit on {model}"
    return found / GENERATED
