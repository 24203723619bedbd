"""Figures 9, 10 and 11 of the paper on a real engine."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

from lab.paper.runs import Lengths, homogeneous, paper_lengths, scaled
from lab.paper.systems import System, parse_system
from lab.real.curves import LOADS, Sweep, ratios
from lab.real.laboratory import Laboratory

SYSTEMS = {
    "fig9": ("orca(32)", "ft(32,32)"),
    "fig10": ("ft(1,1)", "ft(8,8)", "orca(8)", "orca(32)", "chunked(32)"),
    "fig11": ("orca(1)", "ft(8,8)", "orca(8)", "orca(32)"),
}
"""Systems of each figure by default."""
EQUAL = {"(32,32)": (32, 32), "(256,256)": (256, 256)}
"""Input and output tokens of the requests of Figure 11, before scaling."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MICRO_PROMPTS = (32, 128)
MICRO_GENERATED = 32
PASSES = 3
"""Runs of each batch of Figure 9; the median counts."""
MULTIPLES = (1.0, 2.0, 4.0)
"""Of the normalised execution time of a full batch: latencies at which systems are compared along their curves."""

Batches = Mapping[str, Callable[[int], tuple[str, Sequence[Lengths]]]]
"""By name, the engine of a batch and its requests, by its size."""


def figure_9(
    laboratory: Laboratory, seed: int, sizes: Sequence[int] = MICRO_BATCHES, passes: int = PASSES
) -> Any:
    """The time of one batch over its size, by engine and workload.

    Equal requests as in the paper, on both engines. Then requests of unequal lengths: merged token by token without
    padding, and as a padded batch, where each prompt and each output is as long as the longest of its batch.
    """
    scale = laboratory.scale
    generated = scaled(MICRO_GENERATED, scale)
    found: dict[str, dict[str, list[float]]] = {}
    spread: dict[str, float] = {}
    machine: list[dict[str, Any]] = []
    equal = product(("orca", "ft"), [scaled(num, scale) for num in MICRO_PROMPTS])
    kinds: dict[str, Batches] = {
        "equal": {f"{engine}({num})": _equal(engine, num, generated) for engine, num in equal},
        "unequal": {"merged": _unequal(seed, scale), "padded": _padded(seed, scale)},
    }
    for kind, engines in kinds.items():
        taken: dict[str, list[list[float]]] = {name: [] for name in engines}  # by pass and size
        order = list(engines)
        for _ in range(passes):
            seconds, about = laboratory.quiet.run_quietly(
                partial(_one_pass, laboratory, engines, order, sizes)
            )
            machine.append({"kind": kind, **about})
            for name, times in seconds.items():
                taken[name].append([1e3 * each for each in times])
            order.reverse()
        by_size = {name: list(zip(*times, strict=True)) for name, times in taken.items()}
        found[kind] = {name: list(map(statistics.median, each)) for name, each in by_size.items()}
        spread[kind] = statistics.median(
            max(times) / min(times) for times in chain.from_iterable(by_size.values())
        )
        for name, times in found[kind].items():
            print(
                f"  {kind:<8} {name:<10}" + "".join(f"{each:>9,.0f}" for each in times) + " ms",
                flush=True,
            )
    merged, padded = found["unequal"].values()
    return {
        "batch_ms": found,
        "batch_sizes": list(sizes),
        "passes": passes,
        "runs": machine,
        "most_by_least_of_passes": spread,
        "padded_by_merged": [theirs / ours for ours, theirs in zip(merged, padded, strict=True)],
        "generated_tokens": {"equal": generated, "unequal": [scaled(1, scale), scaled(128, scale)]},
        "prompt_tokens": {"unequal": [scaled(32, scale), scaled(512, scale)]},
    }


def _one_pass(
    laboratory: Laboratory, engines: Batches, order: Sequence[str], sizes: Sequence[int]
) -> dict[str, list[float]]:
    """The seconds of a batch of each size, by engine; at each size the engines run in this order."""
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for size in sizes:
        for name in order:
            seconds[name].append(batch_seconds(laboratory, *engines[name](size)))
    return seconds


def batch_seconds(laboratory: Laboratory, engine: str, requests: Sequence[Lengths]) -> float:
    """Seconds of one batch with all requests, from its arrival to its last token."""
    size = len(requests)
    system = System("orca", size) if engine == "orca" else System("ft", size, size)
    return max(laboratory.serve_requests(system, requests, [0.0] * size, has_gaps=False).ends)


def _equal(
    engine: str, num_prompt: int, generated: int
) -> Callable[[int], tuple[str, Sequence[Lengths]]]:
    return lambda size: (engine, homogeneous(num_prompt, generated, size))


def _unequal(seed: int, scale: float) -> Callable[[int], tuple[str, Sequence[Lengths]]]:
    return lambda size: ("orca", paper_lengths(size, seed, scale))


def _padded(seed: int, scale: float) -> Callable[[int], tuple[str, Sequence[Lengths]]]:
    def batch(size: int) -> tuple[str, Sequence[Lengths]]:
        prompts, outputs, _ = zip(*paper_lengths(size, seed, scale), strict=True)
        return "ft", homogeneous(max(prompts), max(outputs), size)

    return batch


def figure_10(
    laboratory: Laboratory,
    names: Sequence[str],
    seed: int,
    minutes: float,
    loads: Sequence[float] = LOADS,
) -> dict[str, Any]:
    """The curves of the paper's workload, and the ratio of throughputs at one latency.

    As in the paper, the latency is twice the normalised execution time of a batch of the largest ORCA system, with
    prompts of 128 tokens and 32 generated ones, both scaled. Throughput at this latency is found by halving rates.
    """
    start = time.monotonic()
    sweep = Sweep(
        laboratory, lambda count: paper_lengths(count, seed, laboratory.scale), names, seed, loads
    )
    sweep.saturate()
    pair = _pair(names)
    base = execution_ms(laboratory, parse_system(pair[0]).max_bs) if pair else 0.0
    seconds = sweep.measure(minutes - (time.monotonic() - start) / 60, pair)
    found = _of_sweeps({"paper": sweep}, laboratory, start)
    if not pair:
        return found
    points = sweep.at_latency(2 * base, pair, seconds)
    ours = points[pair[0]].throughput
    theirs = points[pair[1]].throughput
    return found | {
        "seconds": time.monotonic() - start,
        "normalized_execution_ms": base,
        "headline_latency_ms": 2 * base,
        "headline_points": {
            name: point if point.throughput else None for name, point in points.items()
        },
        "headline_ratio": ours / theirs if ours and theirs else None,
        "saturation_ratio": sweep.saturations[pair[0]] / sweep.saturations[pair[1]],
        "ratios_along_curves": ratios(
            sweep.curves, *pair, [multiple * base for multiple in MULTIPLES]
        ),
    }


def execution_ms(laboratory: Laboratory, size: int) -> float:
    """Milliseconds of a batch of equal requests by their generated tokens: the median of `PASSES`."""
    generated = scaled(MICRO_GENERATED, laboratory.scale)
    requests = homogeneous(scaled(MICRO_PROMPTS[-1], laboratory.scale), generated, size)
    taken = [batch_seconds(laboratory, "orca", requests) for _ in range(PASSES)]
    return 1e3 * statistics.median(taken) / generated


def figure_11(
    laboratory: Laboratory,
    names: Sequence[str],
    seed: int,
    minutes: float,
    loads: Sequence[float] = LOADS,
) -> dict[str, Any]:
    """The curves of equal requests, whose latency is not normalised; each workload has half of the time."""
    start = time.monotonic()
    sweeps = {}
    for number, (kind, lengths) in enumerate(EQUAL.items(), 1):
        equal = [scaled(length, laboratory.scale) for length in lengths]
        label = f"({equal[0]},{equal[1]})"
        print(f"{label}, after {kind} of the paper", flush=True)
        sweeps[label] = sweep = Sweep(
            laboratory, _homogeneous(*equal), names, seed, loads, is_normalized=False
        )
        sweep.saturate()
        sweep.measure(minutes * number / len(EQUAL) - (time.monotonic() - start) / 60)
    return _of_sweeps(sweeps, laboratory, start)


def _homogeneous(num_prompt: int, generated: int) -> Callable[[int], Sequence[Lengths]]:
    return lambda count: homogeneous(num_prompt, generated, count)


def _pair(names: Sequence[str]) -> tuple[str, str] | tuple[()]:
    """The largest ORCA system and the smallest FasterTransformer, for the headline; nothing if one is missing."""
    by_size = sorted(names, key=lambda name: parse_system(name).max_bs)
    orca = [name for name in by_size if parse_system(name).kind == "orca"]
    ft = [name for name in by_size if parse_system(name).kind == "ft"]
    return (orca[-1], ft[0]) if orca and ft else ()


def _of_sweeps(sweeps: Mapping[str, Sweep], laboratory: Laboratory, start: float) -> dict[str, Any]:
    return {
        "curves": {kind: sweep.curves for kind, sweep in sweeps.items()},
        "saturation": {kind: sweep.saturations for kind, sweep in sweeps.items()},
        "loads": list(next(iter(sweeps.values())).loads),
        "latency_unit": "ms/token" if next(iter(sweeps.values())).is_normalized else "ms",
        "runs": {kind: sweep.runs for kind, sweep in sweeps.items()},
        "length_scale": laboratory.scale,
        "seconds": time.monotonic() - start,
        "load_average_at_end": list(os.getloadavg()),
    }
