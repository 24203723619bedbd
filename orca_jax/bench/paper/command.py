"""Run the paper's evaluation (section 6) on simulated devices: the engine and its schedulers in virtual time.

Throughput and median normalised latency as in the paper. The first tenth of each run is served and not measured. The
last line is one JSON object.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from orca_jax.bench.paper.beyond import beyond
from orca_jax.bench.paper.curves import Digitised, read_digitised
from orca_jax.bench.paper.figures import PANELS, SYSTEMS, Effort, figure_9, figure_10, figure_11, headline
from orca_jax.bench.paper.pipeline import figure_8, stage_times
from orca_jax.bench.paper.plot import plot_batches, plot_curves, plot_stages
from orca_jax.bench.paper.runs import WARM_UP
from orca_jax.bench.paper.systems import EFFICIENCIES, FT_FACTOR
from orca_jax.errors import ConfigError
from orca_jax.plan.accelerators import ACCELERATORS
from orca_jax.reporting import print_table

PAPER_DEVICE = "a100-40"
FIGURES = ("fig8", "fig9", "fig10", "fig11")
PAGE = "page"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("figure", choices=(*FIGURES, "all", PAGE), help="figure of the paper; page draws them again")
    parser.add_argument(
        "--digitised", metavar="FILE",
        help="CSV file with points of Figure 10 (model,system,throughput_req_s,median_norm_latency_ms_per_token); "
        "they are drawn behind the curves, and the errors are printed",
    )  # fmt: skip
    parser.add_argument("--models", nargs="+", default=list(PANELS), choices=PANELS, help="panels of Figure 10")
    parser.add_argument(
        "--systems", nargs="+", default=list(SYSTEMS), metavar="NAME",
        help=f"systems of Figure 10, such as orca(32) or ft(16,8) (default: {' '.join(SYSTEMS)})",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=list(ACCELERATORS), default=PAPER_DEVICE,
        help="devices of Figure 10, as many as in the paper and with its efficiencies (default: the paper's, a100-40)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=int, default=2000, metavar="N",
        help="requests of a run under ORCA; ft(8,8) serves a fourth, the headline three times as many (default: 2000)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and arrivals (default: 0)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)"
    )
    parser.add_argument(
        "--plot",
        metavar="DIRECTORY",
        help="write paper-fig8.svg, paper-fig9.svg, paper-fig10.svg and paper-fig11.svg here; the figure page reads "
        "measured/paper-fig9.json and the like from here",
    )
    parser.add_argument(
        "--beyond", action="store_true",
        help="also tail latencies, sensitivities and later schedulers on 175B and 101B, with the same workload",
    )  # fmt: skip
    parser.add_argument("--trace-data", metavar="FILE", help="Azure's CSV file for --beyond: answers ended by EOS")


def run(args: argparse.Namespace) -> None:
    """Simulate the figures; print tables and a line of JSON.

    Raises:
        ConfigError: a flag is wrong; `param` names it.
    """
    if args.requests < 20 or args.processes < 1:
        raise ConfigError("requests must be at least 20 and processes at least 1", param="requests")
    if args.plot is not None and not os.path.isdir(args.plot):
        raise ConfigError(f"plot {args.plot!r} is not a directory", param="plot")
    if args.figure == PAGE:
        _redraw(args.plot)
        return
    effort = Effort(args.requests, args.seed, args.processes)
    digitised = read_digitised(args.digitised) if args.digitised else {}
    wanted = FIGURES if args.figure == "all" else (args.figure,)
    found: dict[str, Any] = {}
    if "fig8" in wanted:
        found["fig8"] = _figure_8(effort, args.plot)
    if "fig9" in wanted:
        found["fig9"] = _figure_9(args.plot)
    if "fig10" in wanted:
        found["fig10"] = _figure_10(args, effort, digitised)
    if "fig11" in wanted:
        found["fig11"] = figure_11(effort)
        _print_curves("Figure 11, 175B", found["fig11"]["curves"])
        if args.plot is not None:
            draw(args.plot, "fig11", found["fig11"])
    if args.beyond:
        found["beyond"] = beyond(effort, args.trace_data)
    settings = {
        **dataclasses.asdict(effort),
        "warm_up": WARM_UP,
        "ft_factor": FT_FACTOR,
        "efficiencies": {name: each._asdict() for name, each in EFFICIENCIES.items()},
    }
    line = found[args.figure] if len(wanted) == 1 and not args.beyond else found
    print(json.dumps(rounded({**line, "settings": settings})), flush=True)


def rounded(value: Any) -> Any:
    """Return the same value with floats of five digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def draw(directory: str, figure: str, found: Mapping[str, Any], digitised: Digitised | None = None) -> None:
    """Draw a figure into a directory. Raises ConfigError."""
    path = os.path.join(directory, f"paper-{figure}.svg")
    if figure == "fig9":
        plot_batches(path, found["batch_sizes"], found["batch_ms"])
    else:
        plot_curves(path, f"Figure {figure.removeprefix('fig')}, simulated", found["curves"], digitised or {})


def _redraw(directory: str | None) -> None:
    """Draw all figures from their results in `measured`, and Figure 8 from its short simulation."""
    if directory is None:
        raise ConfigError("page needs the directory of the figures; give plot", param="plot")
    plot_stages(os.path.join(directory, "paper-fig8.svg"), stage_times())
    for figure in FIGURES[1:]:
        file = os.path.join(directory, "measured", f"paper-{figure}.json")
        try:
            with open(file, encoding="utf-8") as content:
                found = json.load(content)
        except (OSError, ValueError) as error:
            raise ConfigError(f"plot: {file!r} cannot be read: {error}", param="plot") from error
        draw(directory, figure, found)
    print(json.dumps({PAGE: list(FIGURES)}))


def _figure_8(effort: Effort, directory: str | None) -> dict[str, Any]:
    found = figure_8(effort)
    for workload, gains in found["gain"].items():
        rows = {name: {f"{number} in flight": f"{gain:.2f}" for number, gain in each.items()}
                for name, each in gains.items()}  # fmt: skip
        print_table(f"Figure 8: requests/s on four stages (341B), {workload} requests", rows)
    if directory is not None:
        plot_stages(os.path.join(directory, "paper-fig8.svg"), stage_times())
    return found


def _figure_9(directory: str | None) -> dict[str, Any]:
    found = figure_9()
    for name, engines in found["batch_ms"].items():
        rows = {label: _cells(times) for label, times in engines.items()}
        print_table(f"Figure {name}: ms of a batch of {', '.join(map(str, found['batch_sizes']))}", rows)
    print_table("Figure 9b against the paper's, read off", found["9b"])
    if directory is not None:
        draw(directory, "fig9", found)
    return found


def _cells(times: list[float | None]) -> str:
    return "  ".join("out of memory" if each is None else f"{each:,.0f}" for each in times)


def _figure_10(args: argparse.Namespace, effort: Effort, digitised: Digitised) -> dict[str, Any]:
    found = figure_10(effort, digitised, args.models, args.systems, args.device)
    if "175B" in args.models and args.device == PAPER_DEVICE:
        found |= headline(effort)
    _print_curves("Figure 10", found["curves"])
    for name in [name for name in found if name.startswith("mean_abs_log_error")]:
        print_table(name.replace("_", " "), found[name])
    if "headline_ratio" in found:
        print_table("headline: 175B at 190 ms per token", {"ratio": found["headline_ratio"]} | found["headline_points"])
    if args.plot is not None:
        draw(args.plot, "fig10", found, digitised)
    return found


def _print_curves(title: str, curves: Mapping[str, Mapping[str, Any]]) -> None:
    for panel, systems in curves.items():
        rows = {name: "  ".join(f"{x:.3g}:{y:.0f}" for x, y in points) for name, points in systems.items()}
        print_table(f"{title}, {panel}: requests/s : ms per token", rows)
