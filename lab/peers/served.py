"""Servers of both sides under the same open-loop client, one server alive at a time.

Each server takes the same requests at the same times. The rates are fractions of the throughput of our server in a
burst, with all requests at once.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.peers.environment import Environment, error_line
from lab.peers.inputs import Inputs
from lab.peers.side import Keep, Side
from orca_jax.values.errors import OrcaError

OWN = "orca-jax"
BURST = "burst"
FIGURES = (
    "request_rate", "request_throughput", "output_throughput", "request_goodput", "median_normalized_latency_ms",
    "p99_normalized_latency_ms", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "completed", "failed",
    "other_output_lengths", "p99_send_lateness_ms", "client_cpu_share",
)  # fmt: skip

type ServedResult = dict[str, Any]


@dataclass(frozen=True)
class ServedSystem:
    """A server to measure: ours, without an environment, or a peer's in its way of running."""

    name: str
    mode: str
    environment: Environment | None = None


@dataclass
class Setting:
    """The visits to servers at one type and number of threads."""

    args: argparse.Namespace
    inputs: Inputs
    dtype: str
    threads: int
    # by their names, from the first burst of ours
    rates: dict[str, float] = field(default_factory=dict)
    visits: dict[str, list[ServedResult]] = field(default_factory=dict)

    def visit(self, system: ServedSystem, clients: Sequence[Environment]) -> ServedResult:
        """Start a server, measure it and end it. Returns the results so far. Raises OrcaError if it fails."""
        key = f"{system.name}/{self.dtype}/{system.mode}/{self.threads}"
        with Side(f"the server of {system.name}", self._command(system), self.args.timeout) as side:
            about = side.about()
            url = about.pop("url")
            passes = {BURST: self._measure(url, ["inf"])[0]}
            if not self.rates:
                most = passes[BURST]["request_throughput"]
                self.rates |= {
                    f"{part:g}": max(0.01, round(part * most, 2)) for part in self.args.load
                }
            names = list(self.rates)
            rates = [str(rate) for rate in self.rates.values()]
            passes |= dict(zip(names, self._measure(url, rates) if rates else [], strict=True))
            outside = {f"{client.name}/{key}": self._outside(client, url) for client in clients}
        self.visits.setdefault(key, []).append(passes)
        print(f"{key}: {_summary(passes)}", file=sys.stderr)
        return {
            "online": {key: medians(self.visits[key])},
            "servers": {key: about},
            "clients": outside,
        }

    def _command(self, system: ServedSystem) -> list[str]:
        common = [
            "--model",
            str(self.inputs.model),
            "--dtype",
            self.dtype,
            "--threads",
            str(self.threads),
        ]
        if system.environment is None:
            return own_command(self.args, common)
        peer = system.environment.peer
        program = system.environment.command(peer.server, self.threads)
        slots = str(self.args.peer_max_num_seqs or peer.max_num_seqs)
        return [*program, *common, "--mode", system.mode, "--max-num-seqs", slots]

    def _measure(self, url: str, rates: Sequence[str]) -> list[ServedResult]:
        """Run our client, one pass for each rate."""
        args = self.args
        command = [
            *(
                sys.executable,
                "-m",
                "orca_jax.tools.bench",
                "online",
                "--base-url",
                url,
                "--model",
                "model",
            ),
            *(
                "--trace",
                args.trace,
                "--num-requests",
                str(args.num_requests),
                "--seed",
                str(args.seed),
            ),
            *(
                "--length-scale",
                str(args.length_scale),
                "--vocab-size",
                str(self.inputs.vocab_size),
            ),
            *("--prompts", "ids", "--request-rate", *rates, "--goodput", *args.goodput),
            *(["--trace-data", args.trace_data] if args.trace_data else []),
        ]
        return [_figures(found) for found in _last_line(command)["passes"]]

    def _outside(self, client: Environment, url: str) -> ServedResult:
        """Run a client of others at the highest rate."""
        rate = max(self.rates.values(), default=1.0)
        seconds = max(1, round(self.args.num_requests / rate))
        return _last_line([
            *client.command(client.peer.program, self.threads),
            *("--base-url", url, "--model", str(self.inputs.model), "--rate", str(rate), "--seconds", str(seconds)),
        ])  # fmt: skip


def run_online(
    args: argparse.Namespace,
    inputs: Inputs,
    environments: Sequence[Environment],
    clients: Sequence[Environment],
    keep: Keep,
) -> None:
    """Measure all servers at every type and number of threads; `keep` takes the results of each visit.

    Ours is first in the first round, and the order is reversed in every other round. The clients of others measure in
    the first round. A peer whose server fails is reported and left out.
    """
    systems = [ServedSystem(OWN, "chunked")]
    systems += [
        ServedSystem(one.name, one.peer.server_mode, one) for one in environments if one.peer.server
    ]
    failed: set[str] = set()
    for dtype in args.dtype:
        for threads in args.threads:
            setting = Setting(args, inputs, dtype, threads)
            for number in range(args.online_rounds):
                for system in systems if number % 2 == 0 else reversed(systems):
                    if system.name in failed:
                        continue
                    try:
                        keep(setting.visit(system, clients if number == 0 else ()))
                    except OrcaError as error:
                        if system.environment is None:
                            raise
                        failed.add(system.name)
                        keep({"unavailable": {f"{system.name} (server)": str(error)}})


def own_command(args: argparse.Namespace, common: Sequence[str]) -> list[str]:
    """Return the command of our server."""
    program = [
        sys.executable,
        "-m",
        "lab.peers.own_server",
        *common,
        "--served-model-name",
        "model",
    ]
    return [*program, "--max-num-seqs", str(args.max_num_seqs), *args.engine_flags]


def medians(visits: Sequence[ServedResult]) -> ServedResult:
    """Return the median of each figure over the visits, for each rate."""
    result: ServedResult = {}
    for rate, figures in visits[0].items():
        result[rate] = {}
        for name in figures:
            found = [visit[rate][name] for visit in visits]
            result[rate][name] = None if None in found else statistics.median(found)
    return result


def _figures(found: ServedResult) -> ServedResult:
    """The figures of a pass that a result keeps."""
    return {name: found.get(name) for name in FIGURES}


def _summary(passes: ServedResult) -> str:
    shown = [
        f"{name} {one['output_throughput']:.0f} tokens/s, {one['median_normalized_latency_ms']:.0f} ms/token"
        for name, one in passes.items()
    ]
    return "; ".join(shown)


def _last_line(command: Sequence[str]) -> ServedResult:
    """Run a program and return the JSON of its last line. Raises OrcaError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OrcaError(f"the client ended with code {done.returncode}: {error_line(done)}")
    found: ServedResult = json.loads(done.stdout.splitlines()[-1])
    return found
