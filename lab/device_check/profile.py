"""Profiles of whole iterations: the kernels that take most time, and the time between kernels."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from lab.device_check.part import Write

MOST = 25  # kernels
KINDS = {
    "attention": ("increments", "chunks", "combine"),
    "products": ("gemm", "cublas", "cutlass", "nvjet", "dot", "convolution", "xmma"),
    "copies": ("memcpy", "copy"),
}


def profile(run: Callable[[], object], steps: int, write: Write) -> None:
    """Run under JAX's profiler, and write microseconds per iteration: of kinds of kernels, of gaps, of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            write(skipped="the profiler wrote no file")
            return
        events = list(device_events(jax.profiler.ProfileData.from_file(str(files[0]))))
    if not events:
        write(skipped="the profile has no events of a device")
        return
    spent: dict[str, float] = defaultdict(float)
    calls = Counter[str]()
    for name, start, end in events:
        spent[name] += end - start
        calls[name] += 1
    kinds: dict[str, float] = defaultdict(float)
    for name, time in spent.items():
        kinds[kind_of(name)] += time
    kinds["gaps"] = gaps([(start, end) for _, start, end in events])
    write(
        profile="sums", **{f"us_{kind}": time / steps / 1e3 for kind, time in sorted(kinds.items())}
    )
    for name, time in sorted(spent.items(), key=lambda item: -item[1])[:MOST]:
        write(profile="kernel", us=time / steps / 1e3, calls=calls[name] / steps, kernel=name[:120])


def device_events(data: Any) -> Iterator[tuple[str, float, float]]:
    """Names, starts and ends (in nanoseconds) of the kernels of the first device; in a dry run, of XLA's threads."""
    planes = sorted((plane for plane in data.planes), key=lambda plane: str(plane.name))
    chosen = next(
        (plane for plane in planes if plane.name.startswith(("/device:GPU", "/device:TPU"))), None
    )
    host = next((plane for plane in planes if plane.name == "/host:CPU"), None)
    plane = chosen or host
    for line in plane.lines if plane else ():
        # Of a TPU one line has operations, of a GPU each stream is a line; of a host only XLA's threads count.
        if (
            (line.name.startswith("XLA Ops") or "Stream" in line.name)
            if chosen
            else "XLA" in line.name
        ):
            for event in line.events:
                yield event.name, event.start_ns, event.start_ns + event.duration_ns


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    lower = name.lower()
    for kind, parts in KINDS.items():
        if any(part in lower for part in parts):
            return kind
    return "other"


def gaps(spans: list[tuple[float, float]]) -> float:
    """The time between the first start and the last end in which nothing runs."""
    idle = 0.0
    reached = min(start for start, _ in spans)
    for start, end in sorted(spans):
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle
