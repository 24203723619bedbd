"""Measure the time to send plans to the workers of a cluster, which the device's next iteration waits for."""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

from orca_jax.assembly.choices import TOY
from orca_jax.assembly.cluster import LeaderBuild
from orca_jax.assembly.engine import build_engine
from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.launch import free_ports
from orca_jax.cluster.leader import Leader
from orca_jax.cluster.messages import Call
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.tools.bench.measure import run_workload
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ClusterLostError, ConfigError
from orca_jax.values.startup import ClusterConfig

NUM_INPUT, NUM_OUTPUT = 32, 512  # tokens; equal, so that nearly all iterations have all requests


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_number(parser, "--rows", 256, "running requests")
    add_number(parser, "--nnodes", 2, "processes, on this machine")


def run(args: argparse.Namespace) -> None:
    """Run the toy model on several processes, and time each message of the leader; print a table and JSON."""
    for name, least in (("rows", 1), ("nnodes", 2)):
        if getattr(args, name) < least:
            raise ConfigError(f"{name} must be at least {least}", param=name)
    config = EngineConfig(
        TOY, max_num_seqs=args.rows, max_model_len=NUM_INPUT + NUM_OUTPUT, progress=False
    )
    ids = random.Random(0)
    workload = [
        WorkloadRequest(0.0, tuple(ids.choices(range(256), k=NUM_INPUT)), NUM_OUTPUT)
        for _ in range(args.rows)
    ]
    sent: list[tuple[float, float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.key")
        make_key_file(path)
        cluster = ClusterConfig(
            args.nnodes, 0, master_port=free_ports(), cluster_key_file=str(path)
        )
        leader = LeaderBuild(cluster, TOY, _lost)
        with _workers(cluster), build_engine(config, host=leader) as built, _timed(sent):
            run_workload(built.engine, workload)
    wall = sorted(1e6 * seconds for seconds, _, _ in sent)
    processor = sorted(1e6 * seconds for _, seconds, _ in sent)
    row = {
        "messages": float(len(sent)),
        "median_bytes": statistics.median(num_bytes for _, _, num_bytes in sent),
        "median_us": statistics.median(wall),
        "p99_us": wall[int(0.99 * len(wall))],
        "median_cpu_us": statistics.median(processor),
        "p99_cpu_us": processor[int(0.99 * len(processor))],
    }
    print_table(f"messages to {args.nnodes - 1} workers, {args.rows} rows", row)
    print(json.dumps({**row, "rows": args.rows, "nnodes": args.nnodes, "hardware": hardware()}))


def _timed(sent: list[tuple[float, float, int]]) -> AbstractContextManager[object]:
    """Add the seconds of each message of the leader, those of the processor, and its bytes to a list."""
    call = Leader.call

    def timed(self: Leader, message: Call) -> bytes:
        begun = time.perf_counter()
        processor = time.thread_time()
        payload = call(self, message)
        sent.append((time.perf_counter() - begun, time.thread_time() - processor, len(payload)))
        return payload

    return mock.patch.object(Leader, "call", timed)


@contextmanager
def _workers(cluster: ClusterConfig) -> Iterator[None]:
    """The workers of the toy, each a process; they end with the leader."""
    flags = ["--model", TOY, f"--nnodes={cluster.nnodes}", f"--master-port={cluster.master_port}"]
    flags.append(f"--cluster-key-file={cluster.cluster_key_file}")
    command = [sys.executable, "-m", "orca_jax.serve", *flags]
    ranks = range(1, cluster.nnodes)
    started = [
        subprocess.Popen([*command, f"--node-rank={rank}"], stderr=subprocess.DEVNULL)
        for rank in ranks
    ]
    try:
        yield
    finally:
        for each in started:
            try:
                each.wait(5)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def _lost(reason: str, status: int) -> None:
    raise ClusterLostError(reason)
