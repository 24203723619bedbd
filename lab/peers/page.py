"""The results as a page in Markdown, a block of `lab/pages/command.py`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pages.markdown import wide_table
from lab.peers.results import LATENCY, latency_ratios, ratios

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured" / "peers.json"
SHAPES = ("lfm2", "gpt_oss")
"""Models of `lab/peers/shapes` with results of their own, `peers-NAME-STREAMS.json` beside the others."""
_HEAD = """\
# Beside other engines

This page is made by the commands at its end from [peers.json](measured/peers.json). Ratios are ours to theirs: above 1
in throughput, and below 1 in latency, orca-jax is the faster one. A comparison should quote a peer's fastest way of
running. All engines have the same weights, the same requests and the same processors.

- **Offline.** Both sides are processes with a loaded model. Each round runs a pass of both, and they take turns in
  being first. The result is the median of the rounds' ratios, with their range.
- **Online.** The servers take the same requests at the same times from `bench online`, one server at a time: all at
  once, then at parts of the rate at which our server completed them. Prefix caches are off, since the loads repeat
  prompts.
- **Environments.** Each peer has one in `~/.cache/orca-jax/peers`, made at the first use from the network. vLLM and
  EasyDeL need Python 3.11, llama.cpp a compiler of C++. EasyDeL compiles for minutes, once for each size of a batch.
- **Settings.** Each peer runs as it recommends: vLLM compiled and eager, with Intel's OpenMP; llama.cpp with
  continuous batching and its KV cache in float16; transformers with batches of 8 (`--peer-max-num-seqs`).
"""
_MAKE = """
To repeat it, without torch or any peer in the environment of orca-jax:

    python -m lab peers --save docs/measured/peers.json
    python -m lab pages
"""
_SHAPES = """\
Offline, with random weights of the shapes in `lab/peers/shapes`, some 600 million numbers: LFM2 with short convolutions
in ten of 16 layers, and gpt-oss with 16 experts, sinks and windows. `--max-num-seqs` and `--peer-max-num-seqs` are the
streams: `python -m lab peers --peer vllm --modes compiled --dtype bfloat16 --offline --model lab/peers/shapes/NAME`,
and after it `-- --tensor-parallel-size 1`, one device with two threads. On a processor with AVX2 alone, vLLM multiplies
bfloat16 by PyTorch, since oneDNN has no such product (its warning says so). The machine was idle. LFM2, whose
matrices are all multiplied for every token, has one short request (`--num-requests 1 --seed 9`), since a longer pass of
vLLM takes minutes.

"""
_PAIRS = ("orca-jax", "peer's", "ratio", "range", "requests", "measured")
_ONLINE = (
    ("output_throughput", "output tokens/s", 1),
    (LATENCY, "normalised latency, median, ms/token", 1),
    ("median_ttft_ms", "TTFT, median, ms", 0),
    ("p99_itl_ms", "ITL p99, ms", 0),
    ("request_goodput", "good requests/s", 2),
)
_OUTSIDE = (
    ("rate", "requests/s", 2),
    ("completed", "requests", 0),
    (LATENCY, "normalised latency, median, ms/token", 1),
    ("p99_normalized_latency_ms", "p99 (of few requests about the largest)", 1),
    ("median_ttft_ms", "TTFT, median, ms", 0),
    ("output_throughput", "output tokens/s", 1),
    ("failed", "failed", 0),
)


def block() -> str:
    """Return the text of the page of `docs/measured/peers.json`, and of the files beside it."""
    files = [MEASURED]
    for name in SHAPES:
        files += sorted(MEASURED.parent.glob(f"peers-{name}-*.json"))
    results, *shapes = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return page(results, shapes)


def page(results: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the text of the page; `shapes` are the results of hybrids and mixtures."""
    parts = [
        _HEAD,
        _machine(results),
        *_offline(results),
        *_online(results),
        *_clients(results),
        *_missing(results),
    ]
    return "".join([*parts, *_versions(results), *_shapes(shapes), _MAKE])


def _machine(results: Mapping[str, Any]) -> str:
    config = results["config"]
    return (
        f"\n{processor(results)}; {config['model']}, random weights, --trace {config['trace']}, "
        f"seed {config['seed']}.\n"
    )


def processor(results: Mapping[str, Any]) -> str:
    """Return the processor of results, its flags and its cores."""
    hardware = results["hardware"]
    return f"{hardware['cpu']} ({', '.join(hardware['cpu_flags'])}), {hardware['cores']} cores"


def _shapes(shapes: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if not shapes:
        return
    yield f"\n## A hybrid and a mixture with sinks\n\n{_SHAPES}"
    rows = []
    for results in shapes:
        config = results["config"]
        for name, one in sorted(results["settings"].items()):
            peer, dtype, mode, _ = _cells(name)
            model = [
                Path(config["model"]).name,
                str(config["max_num_seqs"]),
                f"{peer}, {mode}",
                dtype,
            ]
            rows.append([*model, *_pairs(one)])
    yield wide_table(["model", "streams", "peer", "type", *_PAIRS], rows)
    yield f"\n{processor(shapes[0])}; --trace {shapes[0]['config']['trace']}.\n\n"
    yield from (side_line(name, side) for name, side in sorted(shapes[0]["sides"].items()))


def _offline(results: Mapping[str, Any]) -> Iterable[str]:
    if not results["settings"]:
        return
    yield "\n## Offline\n\nAll requests at once; output tokens per second, medians of passes that alternate.\n\n"
    rows = [[*_cells(name), *_pairs(one)] for name, one in sorted(results["settings"].items())]
    yield wide_table(["peer", "type", "its way of running", "threads", *_PAIRS], rows)


def _pairs(one: Mapping[str, Any]) -> list[str]:
    """Return the figures of `_PAIRS`."""
    rates = [f"{one[f'{side}_tokens_per_s']:.1f}" for side in ("own", "peer")]
    found = [f"**{one['ratio']:.2f}**", f"{one['ratio_least']:.2f} to {one['ratio_most']:.2f}"]
    return [*rates, *found, str(one["num_requests"]), _stamp(one)]


def _online(results: Mapping[str, Any]) -> Iterable[str]:
    if not results["online"]:
        return
    limits = ", ".join(results["config"]["goodput"])
    yield (
        "\n## Online\n\nServers under the same open-loop client: all requests at once (burst), or Poisson arrivals at "
        f"parts of our server's rate in the burst. Good requests are within {limits} (milliseconds). There is a "
        "ratio if both were measured together.\n\n"
    )
    latency = latency_ratios(results)
    throughput = ratios(results)
    rows = []
    for name, loads in sorted(results["online"].items()):
        for load, one in loads.items():
            if not isinstance(one, dict):
                continue
            ratio = (
                throughput.get(f"{name}/online")
                if load == "burst"
                else latency.get(f"{name}/{load}")
            )
            kind = "throughput" if load == "burst" else "latency"
            shown = "" if ratio is None else f"**{ratio:.2f}** ({kind})"
            rate = "" if one["request_rate"] is None else f", {one['request_rate']:g} requests/s"
            rows.append(
                [*_cells(name), f"{load}{rate}", *_numbers(one, _ONLINE), shown, _stamp(loads)]
            )
    figures = [title for _, title, _ in _ONLINE]
    titles = ["server", "type", "mode", "threads", "load", *figures, "ours to theirs", "measured"]
    yield wide_table(titles, rows)


def _clients(results: Mapping[str, Any]) -> Iterable[str]:
    if not results["clients"]:
        return
    yield "\n## By a client of others\n\nThe same servers, measured by a third party's client.\n\n"
    rows = []
    for name, one in sorted(results["clients"].items()):
        client, _, server = name.partition("/")
        rows.append([client, *_cells(server), *_numbers(one, _OUTSIDE)])
    yield wide_table(
        ["client", "server", "type", "mode", "threads", *(title for _, title, _ in _OUTSIDE)], rows
    )


def _missing(results: Mapping[str, Any]) -> Iterable[str]:
    if results["unavailable"]:
        yield "\n## Not available\n\n"
        yield "".join(
            f"- {name}: {reason}\n" for name, reason in sorted(results["unavailable"].items())
        )


def _versions(results: Mapping[str, Any]) -> Iterable[str]:
    yield "\n## Versions and settings\n\n"
    yield from (side_line(name, side) for name, side in sorted(results["sides"].items()))


def side_line(name: str, side: Mapping[str, Any]) -> str:
    """Return a line of a list: versions and flags of a side."""
    found = side.get("versions") or {key: side["hardware"][key] for key in ("jax", "python")}
    shown = [f"{key} {value}" for key, value in found.items()]
    config = side.get("config", {})
    shown += [f"`{' '.join(config['flags'])}`"] if "flags" in config else []
    shown += [config["version"]] if "version" in config else []
    return f"- {name}: {', '.join(shown)}\n"


def _cells(name: str) -> list[str]:
    """Return peer, type, mode and threads."""
    return name.split("/")


def _numbers(one: Mapping[str, Any], columns: Sequence[tuple[str, str, int]]) -> list[str]:
    return [
        "-" if one.get(name) is None else f"{one[name]:,.{digits}f}" for name, _, digits in columns
    ]


def _stamp(one: Mapping[str, Any]) -> str:
    return " at ".join(str(one[name]) for name in ("date", "commit") if one.get(name))
