"""The files of measured figures, and the sections of docs/paper.md made from them."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lab.pages.markdown import wide_table
from lab.paper.runs import WARM_UP
from orca_jax.helpers.reporting import p99_name, write_file
from orca_jax.values.errors import ConfigError, reason_of

FILES = {figure: f"paper-real-{figure}" for figure in ("fig9", "fig10", "fig11")}
"""Names of files without their endings."""
HELD_OUT = "held_out"
NAMES = FILES | {HELD_OUT: "held-out"}
USUAL_MODEL = "preset:distilgpt2"
"""The model whose figures have the names in `FILES`. Those of other models have the model's name after them."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = {
    "requests_per_s": "throughput",
    "median_normalized_latency_ms": "median normalised latency",
    "p99_normalized_latency_ms": "normalised latency, {tail}",
    "p50_ttft_ms": "median TTFT",
    "p99_ttft_ms": "TTFT, {tail}",
    "p50_itl_ms": "median inter-token",
    "p99_itl_ms": "p99 inter-token",
}
"""Figures of a prediction, by name; `tail` is the name of a 99th percentile of the requests."""
Found = Mapping[str, Any]


def check_docs(directory: str | None) -> None:
    """Check the directory of pages, if there is one. Raises ConfigError; `param` is "docs"."""
    if directory is not None and not os.path.isdir(os.path.join(directory, "measured")):
        raise ConfigError(
            f"docs {directory!r} is not a directory with a folder measured", param="docs"
        )


def label_of(figure: str, found: Found) -> str:
    """The figure, with the model if it is another one than the usual one, such as "fig10-demo"."""
    model = found.get("config", {}).get("model", USUAL_MODEL)
    if model == USUAL_MODEL or figure == HELD_OUT:
        return figure
    return f"{figure}-{re.sub(r'[^a-z0-9.]+', '-', os.path.basename(model.removeprefix('preset:')).lower()).strip('-')}"


def file_of(label: str) -> str:
    """The name of a file for a figure with its model, without its ending."""
    figure, dash, model = label.partition("-")
    return NAMES[figure] + dash + model


def write_result(directory: str, figure: str, found: Found) -> None:
    """Write the result of a figure below a directory of pages.

    Raises:
        ConfigError: the file cannot be written; `param` is "docs".
    """
    _write(
        os.path.join(directory, "measured", f"{file_of(label_of(figure, found))}.json"),
        json.dumps(found, indent=1) + "\n",
    )


def measured() -> str:
    """The section of the measured Figures 9 to 11."""
    return section(read_results(str(DOCS)))


def held_out() -> str:
    """The section of held-out predictions."""
    return held_out_section(read_results(str(DOCS)))


def read_results(directory: str) -> dict[str, Found]:
    """The results below a directory of pages, by figure and model as in `label_of`. Raises ConfigError."""
    found: dict[str, Found] = {}
    for figure, name in NAMES.items():
        more = "" if figure == HELD_OUT else "-*"
        for pattern in dict.fromkeys((f"{name}.json", f"{name}{more}.json")):
            for path in sorted(Path(directory, "measured").glob(pattern)):
                found[figure + path.stem.removeprefix(name)] = json.loads(_read(str(path)))
    return found


def held_out_section(found: Mapping[str, Found]) -> str:
    """The section of held-out predictions in Markdown: a row for each run, a column for each figure."""
    if HELD_OUT not in found:
        return ""
    result = found[HELD_OUT]
    rows = []
    for part in ("model", "held_out_model"):
        for name, run in result.get(part, {"runs": {}})["runs"].items():
            label = f"{result[part]['name'].removeprefix('preset:')}, {name}"
            rows.append([label, *(_error(run[key]) if key in run else "" for key in SHOWN)])
    title = "**Errors of predictions, and in brackets the spread of two recordings.**"
    count = result["num_requests"]
    tail = p99_name(count - int(count * WARM_UP))
    heads = [head.format(tail=tail) for head in SHOWN.values()]
    about = [_where(title, result, NAMES[HELD_OUT]), wide_table(["", *heads], rows)]
    errors = [
        _largest_errors(result[part]) for part in ("model", "held_out_model") if part in result
    ]
    text = "The largest errors of throughput and median normalised latency are {} for the model of the fit".format
    after = "" if len(errors) == 1 else f", and {errors[1]} for the other model, by the scaled cost"
    return "\n".join(["", *about, f"{text(errors[0])}{after}.\n"])


def _largest_errors(part: Mapping[str, Any]) -> str:
    keys = ("requests_per_s", "median_normalized_latency_ms")
    return " and ".join(f"{_largest_error(part, key):.1%}" for key in keys)


def _largest_error(part: Mapping[str, Any], key: str) -> float:
    return max(abs(run[key]["error"]) for run in part["runs"].values())


def _error(row: Mapping[str, float]) -> str:
    return f"{row['error']:+.1%} ({row['spread']:.1%})"


def section(found: Mapping[str, Found]) -> str:
    """The section in Markdown, by figure, and the usual model first."""
    makers: Mapping[str, Callable[[Found], list[str]]] = {
        "fig9": _figure_9,
        "fig10": _figure_10,
        "fig11": _figure_11,
    }
    parts: list[str] = []
    for figure, make in makers.items():
        for label, result in found.items():
            if label.partition("-")[0] == figure:
                parts += make(result)
    return "\n".join(["", *parts]) if parts else ""


def _figure_9(found: Found) -> list[str]:
    sizes = found["batch_sizes"]
    rows = []
    for kind, engines in found["batch_ms"].items():
        for name, times in engines.items():
            rows.append([f"{kind}, {name}", *(f"{each:,.0f}" for each in times)])
    ratio = found["padded_by_merged"][-1]
    outputs = found["generated_tokens"]
    prompts = found["prompt_tokens"]["unequal"]
    return [
        _about("Figure 9", found),
        f"One batch, from its arrival to its last token, in ms; the median of {found['passes']} runs in alternation. "
        f"`orca(n)` and `ft(n)` have equal prompts of n tokens and {outputs['equal']} generated tokens. The unequal "
        f"requests have {prompts[0]} to {prompts[1]} and {outputs['unequal'][0]} to {outputs['unequal'][1]} tokens; "
        "`merged` batches are selective, and in `padded` ones each prompt and output is as long as the longest: at "
        f"{sizes[-1]} requests they take **{ratio:.2f} times** as long.\n",
        wide_table(["batch of", *map(str, sizes)], rows),
        _picture("Time of a batch over its size", found),
    ]


def _figure_10(found: Found) -> list[str]:
    lines = [_about("Figure 10", found), _curves_table(found, "paper")]
    if found.get("headline_points"):
        lines.append(f"- **Headline.** {_headline(found)}\n")
    return [*lines, _picture("Median normalised latency over throughput", found)]


def _headline(found: Found) -> str:
    """The throughputs at the paper's latency, if both systems reached it, and with all requests at once."""
    points = found["headline_points"]
    latency = f"{found['headline_latency_ms']:.0f} ms per token"
    ours, theirs = points
    at_once = f"With all requests at once {ours} serves {found['saturation_ratio']:.2f} times the requests of {theirs}."
    if found["headline_ratio"] is None:
        short = " and ".join([name for name, point in points.items() if point is None])
        return f"There is no ratio at {latency}: {short} did not reach this latency in these runs. {at_once}"
    each = " and ".join([f"{name} {point[0]:.3g} requests/s" for name, point in points.items()])
    return (
        f"At {latency}, twice the normalised execution time of a full batch as in the paper, the systems serve {each}: "
        f"a ratio of **{found['headline_ratio']:.2f}**. {at_once}"
    )


def _figure_11(found: Found) -> list[str]:
    lines = [_about("Figure 11", found)]
    for kind in found["curves"]:
        lines += [f"Requests of {kind} input and output tokens:\n", _curves_table(found, kind)]
    return [*lines, _picture("Median latency of equal requests over throughput", found)]


def _about(title: str, found: Found) -> str:
    return _where(f"**{title}, measured.**", found, file_of(label_of(found["figure"], found)))


def _picture(title: str, found: Found) -> str:
    return f"![{title}, measured]({file_of(label_of(found['figure'], found))}.svg)\n"


def _where(title: str, found: Found, file: str) -> str:
    """A paragraph: the command, the machine and its load."""
    groups = found.get("runs", [])
    runs = list(chain.from_iterable(groups.values())) if isinstance(groups, Mapping) else groups
    return f"{title} {machine_of(found, runs)} ([JSON](measured/{file}.json)).\n"


def machine_of(found: Found, runs: Sequence[Found]) -> str:
    """The command of a result, its date and commit, the machine, and how much others disturbed its runs."""
    machine = found["hardware"]
    dtype = f" ({found['dtype']})" if "dtype" in found else ""
    flags = ", ".join(machine["cpu_flags"]) or "none"
    # its name in earlier results
    command = found["command"].replace("python -m orca_jax.bench", "python -m lab")
    text = (
        f"`{command}`, {found['began'][:10]}, commit {found['commit']}; {found['config']['model']}{dtype}, "
        f"{machine['devices']}, {machine['cores']} cores, {machine['cpu']} ({flags}); load average "
    )
    if not runs:  # results before this was noted
        return f"{text}{found['load_average'][0]:.1f} before"
    load = max(run["load_average"] for run in runs)
    steal = max(run["steal"] or 0.0 for run in runs)
    repeated = sum(run["attempts"] > 1 for run in runs)
    return f"{text}at most {load:.1f} after a run, steal at most {steal:.1%}; {repeated} of {len(runs)} runs repeated"


def _curves_table(found: Found, kind: str) -> str:
    """A row for each system: its saturation, and the median latency at each load."""
    curves = found["curves"][kind]
    saturations = found["saturation"][kind]
    unit = {"ms": "ms", "ms/token": "ms per token"}[found["latency_unit"]]
    head = ["", "saturation, requests/s", *(f"{unit} at {load:g} of it" for load in found["loads"])]
    rows = []
    for name, points in curves.items():
        latencies = [f"{latency:,.0f}" for _, latency in points]
        rows.append([name, f"{saturations[name]:.3g}", *latencies])
    return wide_table(head, rows)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path!r} cannot be read: {error}", param="docs") from error


def _write(path: str, text: str) -> None:
    try:
        write_file(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be written: {reason_of(error)}", param="docs"
        ) from error
