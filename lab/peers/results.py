"""The results of comparisons as one JSON object, which later runs add to."""

import datetime
import json
import os
import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lab.peers.served import OWN
from orca_jax.helpers.processor import cpu_flags, cpu_name
from orca_jax.helpers.reporting import print_table, write_file
from orca_jax.values.errors import ConfigError, reason_of

_URL = re.compile(r"\w+://[^\s'\"]+")
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/:'\"]+/)*")
SECTIONS = ("settings", "online", "clients", "sides", "servers", "unavailable")
LATENCY = "median_normalized_latency_ms"

type Results = dict[str, Any]


def new_results(path: str | None) -> Results:
    """Return the results in a file, or empty ones. Raises ConfigError if the file is not one of this command."""
    return {name: {} for name in SECTIONS} | read_saved(path, ("hardware", "config"), SECTIONS)


def read_saved(path: str | None, needed: Collection[str], objects: Collection[str]) -> Results:
    """Return the results in a file; nothing without a file.

    Args:
        path: the file of --save; None for none.
        needed: keys that results have.
        objects: keys whose values are objects, if the results have them.

    Raises:
        ConfigError: the file has no such results.
    """
    if path is None or not Path(path).exists():
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        found = None
    is_whole = isinstance(found, dict) and found.keys() >= set(needed)
    if not is_whole or not all(isinstance(found.get(name, {}), dict) for name in objects):
        raise ConfigError(
            f"save {path!r} has no results of this command; give another file", param="save"
        )
    whole: Results = found
    return whole


def add(results: Results, part: Mapping[str, Any], num_requests: int) -> None:
    """Add a part to results, in place, with day, commit and size of the workload.

    A measured peer is no longer unavailable.
    """
    stamp = {**stamp_of_now(), "num_requests": num_requests}
    for section, entries in part.items():
        for name, entry in entries.items():
            is_measured = section in ("settings", "online", "clients")
            results[section][name] = {**entry, **stamp} if is_measured else without_places(entry)
            if is_measured:
                peer = name.split("/")[0]
                results["unavailable"].pop(
                    peer if section == "settings" else f"{peer} (server)", None
                )


def stamp_of_now() -> dict[str, str | None]:
    """Return the day and the commit."""
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": _commit()}


def finish(results: Results, config: Mapping[str, Any]) -> Results:
    """Return the whole object: ratios, machine and flags beside the results."""
    return {
        "ratios": ratios(results),
        "latency_ratios": latency_ratios(results),
        **{name: results[name] for name in SECTIONS},
        "hardware": machine(),
        "config": without_places(dict(config)),
    }


def machine() -> dict[str, Any]:
    """Return the processor, its flags and the number of cores."""
    return {"cpu": cpu_name(), "cpu_flags": cpu_flags(), "cores": os.cpu_count()}


def ratios(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the throughput of ours to that of each peer: medians of passes, and of bursts to the servers."""
    offline = {name: one["ratio"] for name, one in results["settings"].items()}
    online = {
        f"{name}/online": own["output_throughput"] / peer["output_throughput"]
        for name, load, own, peer in _beside_ours(results)
        if load == "burst"
    }
    return offline | online


def latency_ratios(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the median normalised latency of our server to that of each peer's, for each load."""
    return {
        f"{name}/{load}": own[LATENCY] / peer[LATENCY]
        for name, load, own, peer in _beside_ours(results)
    }


def _beside_ours(
    results: Mapping[str, Any],
) -> list[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    """The peer, the load, our figures and the peer's figures, wherever both were measured on a day at a commit."""
    online = results["online"]
    found: list[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = []
    for name, loads in online.items():
        peer, dtype, _, threads = name.split("/")
        own = online.get(f"{OWN}/{dtype}/chunked/{threads}", {})
        if any(own.get(stamp) != loads.get(stamp) for stamp in ("date", "commit")):
            continue  # another version of ours, or another state of the machine
        found += [
            (name, load, own[load], figures)
            for load, figures in loads.items()
            if peer != OWN and isinstance(figures, dict) and load in own
        ]
    return found


def without_places(value: Any) -> Any:
    """Return a value of JSON without the folders of paths and without URLs: they belong to one machine."""
    if isinstance(value, str):
        return _FOLDERS.sub("", _URL.sub("(URL)", value))
    if isinstance(value, list | tuple):
        return [without_places(one) for one in value]
    if isinstance(value, dict):
        return {name: without_places(one) for name, one in value.items()}
    return value


def save(results: Results, path: str) -> None:
    """Write the object to a file. Raises ConfigError."""
    try:
        write_file(path, (json.dumps(results, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(
            f"save {path!r} cannot be written: {reason_of(error)}", param="save"
        ) from error


def print_results(results: Results) -> None:
    """Print a table for the passes, one for the servers, and the peers without results."""
    passes = {
        name: f"{one['own_tokens_per_s']:.1f} to {one['peer_tokens_per_s']:.1f} tokens/s, "
        f"ratio {one['ratio']:.2f} ({one['ratio_least']:.2f} to {one['ratio_most']:.2f})"
        for name, one in results["settings"].items()
    }
    servers = {}
    for name, loads in results["online"].items():
        for load, one in loads.items():
            if isinstance(one, dict):
                servers[f"{name}, {load}"] = (
                    f"{one['output_throughput']:.1f} tokens/s, {one[LATENCY]:.1f} ms/token, "
                    f"TTFT {one['median_ttft_ms']:.0f} ms, ITL p99 {one['p99_itl_ms']:.0f} ms"
                )
    missing = {f"{name}: not available": reason for name, reason in results["unavailable"].items()}
    for title, rows in (
        ("throughput, ours to the peer's; medians", passes),
        ("servers under the same requests", servers),
        ("peers without results", missing),
    ):
        if rows:
            print_table(title, rows)


def _commit() -> str | None:
    """Return the commit of the source tree, if this package runs from one."""
    tree = Path(__file__).parents[2]
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None
