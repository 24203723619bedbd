"""An open loop: requests arrive at their times at any OpenAI-compatible server, whether earlier ones have ended or not.

Each rate is a pass. The first requests of a pass warm the server up and have no part in its figures. Calls that fail or
time out are counted and named. The figures have the names of `vllm bench serve`; beside them are the normalised latency
of the paper, end-to-end latency by output tokens, and the client's own overhead.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence

from orca_jax.helpers.reporting import need_matplotlib, print_table, print_warning, write_file
from orca_jax.tools.bench.online.figures import (
    Figure,
    client_figures,
    figures,
    steady_figures,
    warnings,
)
from orca_jax.tools.bench.online.load import make_load, run_load, warmup_count
from orca_jax.tools.bench.online.plot import plot_passes
from orca_jax.tools.bench.online.prompts import RequestForm
from orca_jax.tools.bench.online.server import RemoteTarget, look_at
from orca_jax.tools.bench.online.settings import OpenLoopSettings, read_settings
from orca_jax.tools.bench.workload.generate import READERS, WorkloadRequest
from orca_jax.tools.bench.workload.write import write_mooncake
from orca_jax.values.errors import ConfigError, OrcaError, reason_of

SWEEP = {
    "request_rate": " rate",
    "steady_request_throughput": "steady requests/s",
    "request_throughput": "requests/s",
    "request_goodput": "goodput/s",
    "output_throughput": "output tokens/s",
    "median_normalized_latency_ms": "normalised median ms",
    "p99_normalized_latency_ms": "normalised p99 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "p99_tpot_ms": "TPOT p99 ms",
    "failed": "failed",
}
FEW = 100  # below so many requests, the interpolated p99 is beyond all but the largest of them
SECRET = ("api_key",)  # settings that are not reported


def run(args: argparse.Namespace) -> None:
    """Run every pass; print a table for each and a line of JSON.

    Raises:
        ConfigError: a flag is wrong, or the server cannot be used.
        OrcaError: a pass has no completed request.
    """
    settings = read_settings(args, tuple(READERS))
    if settings.plot is not None:
        need_matplotlib()
    if settings.trace in READERS:
        # before the first call, since the file may be wrong
        make_load(settings, settings.rates[0], None)
    target = look_at(settings)
    print(_described(target))
    loads = [(rate, make_load(settings, rate, target.max_model_len)) for rate in settings.rates]
    for _, planned in loads:
        warmup_count(settings, len(planned))
    if settings.write_trace is not None:
        write_mooncake(settings.write_trace, loads[0][1])
    passes = [_measure(settings, target, rate, planned) for rate, planned in loads]
    if len(passes) > 1:
        _print_sweep(passes)
    _report(settings, target, passes)
    if not all(result["completed"] for result in passes):
        raise OrcaError("a pass has no completed request; its errors are in the line of JSON")


def _measure(
    settings: OpenLoopSettings,
    target: RemoteTarget,
    rate: float | None,
    planned: Sequence[WorkloadRequest],
) -> dict[str, Figure]:
    load = run_load(target, planned, settings.timeout)
    warmup = warmup_count(settings, len(planned))
    result: dict[str, Figure] = {
        "request_rate": rate if rate is not None and math.isfinite(rate) else None,
        "num_prompts": len(planned),
        "warmup_requests": warmup,
        **figures(planned[warmup:], load.outcomes[warmup:], settings.goodput),
        "failed_in_warmup": sum(bool(outcome.failure) for outcome in load.outcomes[:warmup]),
        **steady_figures(load.outcomes, warmup),
        **client_figures(load.outcomes, load.cpu_share),
    }
    times = (
        "the times of the file"
        if rate is None
        else "all at once"
        if math.isinf(rate)
        else f"{rate:g} requests/s"
    )
    shown = {name: value for name, value in result.items() if not isinstance(value, dict)}
    print_table(
        f"{times}: {len(planned)} requests; the first {warmup} warm up and are not counted", shown
    )
    _note_few(sum(not outcome.failure for outcome in load.outcomes[warmup:]))
    is_burst = planned[-1].arrival == 0
    for warning in warnings(result, is_burst, target.form.ignores_eos):
        print_warning(warning)
    return result


def _note_few(completed: int) -> None:
    if completed < FEW:
        print(f"note: p99 of {completed} requests lies between their two largest values")


def _print_sweep(passes: Sequence[Mapping[str, Figure]]) -> None:
    """Print a row for each pass."""
    print("  ".join(SWEEP.values()))
    for result in passes:
        cells = [result[name] for name in SWEEP]
        shown = ["inf" if name == "request_rate" else "-" for name in SWEEP]
        texts = [
            text if cell is None else f"{cell:,.4g}"
            for cell, text in zip(cells, shown, strict=True)
        ]
        print(
            "  ".join(
                f"{text:>{len(title)}}" for text, title in zip(texts, SWEEP.values(), strict=True)
            )
        )


def _described(target: RemoteTarget) -> str:
    form: RequestForm = target.form
    prompts = "token ids" if form.uses_ids else f"text, {form.tokens_per_word:.3g} tokens per word"
    lengths = (
        "fixed by ignore_eos"
        if form.ignores_eos
        else "at most those of the trace: ignore_eos is not accepted"
    )
    return f"{form.model} at {form.url}{form.path}: prompts as {prompts}; output lengths {lengths}"


def _report(
    settings: OpenLoopSettings, target: RemoteTarget, passes: Sequence[dict[str, Figure]]
) -> None:
    """Write the files and print the line of JSON. It is printed even if a file cannot be written."""
    form = target.form
    config = {
        name: value for name, value in dataclasses.asdict(settings).items() if name not in SECRET
    }
    config["rates"] = [
        rate if rate is None or math.isfinite(rate) else "inf" for rate in settings.rates
    ]
    config["burstiness"] = settings.burstiness if math.isfinite(settings.burstiness) else "inf"
    result = {
        **(passes[0] if len(passes) == 1 else {}),
        "passes": passes,
        "model_id": form.model,
        "uses_token_ids": form.uses_ids,
        "ignores_eos": form.ignores_eos,
        "client": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "config": config,
    }
    line = json.dumps(result)
    try:
        if settings.save is not None:
            _save(settings.save, line)
        if settings.plot is not None:
            plot_passes(settings.plot, passes, f"{form.model}, {settings.trace}")
    finally:
        print(line)


def _save(path: str, line: str) -> None:
    try:
        write_file(path, f"{line}\n".encode())
    except OSError as error:
        raise ConfigError(
            f"save {path!r} cannot be written: {reason_of(error)}", param="save"
        ) from error
