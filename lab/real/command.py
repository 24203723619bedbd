"""Run the paper's evaluation (section 6) on the engine in this process: Figures 9, 10 and 11, in real time.

Arrivals follow a Poisson clock in an open loop, and lengths are those of the paper's trace, scaled from its context of
2,048 tokens to the model's. Systems alternate, so that ratios hold on a shared machine. Before anything else the
saturation of each system is measured; rates are multiples of it. The last line is one JSON object. `draw` draws the
figures again from the files below `--docs`; `python -m lab pages` writes the sections of docs/paper.md.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from lab.paper.plot import plot_batches, plot_curves
from lab.paper.runs import WARM_UP
from lab.paper.systems import System, parse_system
from lab.real.curves import LOADS
from lab.real.figures import MICRO_BATCHES, SYSTEMS, figure_9, figure_10, figure_11
from lab.real.laboratory import Laboratory
from lab.real.opening import open_laboratory, surroundings
from lab.real.page import FILES, check_docs, file_of, label_of, read_results, write_result
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import need_matplotlib, print_table, rounded
from orca_jax.values.errors import ConfigError

MINUTES = 12.0


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    parser.add_argument(
        "figure",
        choices=(*SYSTEMS, "all", "draw"),
        help="figure of the paper, or drawings of results",
    )
    add_number(
        parser,
        "--minutes",
        MINUTES,
        "about the time for each of Figures 10 and 11, without loading and compiling",
        metavar="M",
    )
    add_number(
        parser,
        "--loads",
        LOADS,
        "rates of Figures 10 and 11, as multiples of the saturation of each system, in rising order",
        nargs="+",
        metavar="X",
    )
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME",
        help=f"systems such as orca(32), ft(8,8) or chunked(32) (default of Figure 10: {' '.join(SYSTEMS['fig10'])}); "
        "Figure 9 has batches up to the largest of their sizes",
    )  # fmt: skip
    parser.add_argument(
        "--docs", metavar="DIRECTORY",
        help="write measured/paper-real-fig10.json, paper-real-fig10.svg and the like here",
    )  # fmt: skip
    add_engine_args(
        parser,
        without=("scheduler", "max_num_seqs", "trace_file", "n_workers"),
        model="preset:gpt2",
    )


def run(args: argparse.Namespace) -> None:
    """Measure; print tables and a line of JSON.

    Raises:
        ConfigError: a flag is wrong; `param` names it.
    """
    check_docs(args.docs)
    if args.docs is not None:
        need_matplotlib()
    if args.figure == "draw":
        if args.docs is None:
            raise ConfigError("draw needs the directory of results; give docs", param="docs")
        results = {
            label: each
            for label, each in read_results(args.docs).items()
            if each.get("figure") in FILES
        }
        for result in results.values():
            draw(args.docs, result["figure"], result)
        print(json.dumps({"drawn": list(results)}))
        return
    if not (args.minutes > 0 and math.isfinite(args.minutes)):
        raise ConfigError(f"minutes must be above 0, got {args.minutes}", param="minutes")
    if not all(0 < low < high for low, high in pairwise([*args.loads, math.inf])):
        raise ConfigError(f"loads must be above 0 and rise, got {args.loads}", param="loads")
    config = engine_config_from_args(args)
    wanted = tuple(SYSTEMS) if args.figure == "all" else (args.figure,)
    systems: dict[str, list[System]] = {}
    for figure in wanted:
        systems[figure] = [parse_system(name) for name in args.systems or SYSTEMS[figure]]
    found: dict[str, Any] = {}
    with open_laboratory(config, list(chain.from_iterable(systems.values()))) as laboratory:
        for figure, each in systems.items():
            about = surroundings(config)
            found[figure] = rounded(
                {
                    **measure(laboratory, figure, each, config.seed, args.minutes, args.loads),
                    **about,
                }
            )
            if args.docs is not None:  # at once: a later figure that fails loses nothing
                write_result(args.docs, figure, found[figure])
                draw(args.docs, figure, found[figure])
    print(json.dumps(found[args.figure] if len(wanted) == 1 else found), flush=True)


def measure(
    laboratory: Laboratory,
    figure: str,
    systems: Sequence[System],
    seed: int,
    minutes: float,
    loads: Sequence[float],
) -> dict[str, Any]:
    """Measure one figure, and print its tables."""
    print(f"{figure}: lengths of the paper x {laboratory.scale:g}", flush=True)
    names = [system.name for system in systems]
    if figure == "fig9":
        most = max(system.max_bs for system in systems)
        found = figure_9(laboratory, seed, [size for size in MICRO_BATCHES if size <= most])
    elif figure == "fig10":
        found = figure_10(laboratory, names, seed, minutes, loads)
    else:
        found = figure_11(laboratory, names, seed, minutes, loads)
    _print(figure, found)
    about = {
        "figure": figure,
        "seed": seed,
        "minutes": minutes,
        "warm_up": WARM_UP,
        "dtype": laboratory.dtype,
    }
    return about | found


def draw(directory: str, figure: str, found: Mapping[str, Any]) -> None:
    """Draw a figure into a directory. Raises ConfigError."""
    path = os.path.join(directory, f"{file_of(label_of(figure, found))}.svg")
    if figure == "fig9":
        plot_batches(path, found["batch_sizes"], found["batch_ms"], "")
    else:
        title = f"{figure.replace('fig', 'Figure ')}, measured: {found['config']['model']}"
        latency = "median latency" if found["latency_unit"] == "ms" else "median normalised latency"
        plot_curves(
            path,
            title,
            found["curves"],
            {},
            limits=None,
            latency=f"{latency}, {found['latency_unit']}",
        )


def _print(figure: str, found: dict[str, Any]) -> None:
    if figure == "fig9":
        sizes = found["batch_sizes"]
        times = zip(sizes, found["padded_by_merged"], strict=True)
        print_table(
            "time of a padded batch by that of a merged one",
            {f"batch of {size}": each for size, each in times},
        )
        return
    for kind, systems in found["curves"].items():
        rows = {}
        for name, points in systems.items():
            rows[name] = "  ".join(f"{x:.3g}:{y:.0f}" for x, y in points)
        print_table(f"{figure}, {kind}: requests/s : {found['latency_unit']}", rows)
        print_table("saturation, requests/s", found["saturation"][kind])
    if found.get("headline_ratio") is not None:
        title = f"headline at {found['headline_latency_ms']:.0f} ms per token"
        print_table(title, {"ratio": found["headline_ratio"], **found["headline_points"]})
