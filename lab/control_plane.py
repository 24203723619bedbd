"""The control plane: the same plans sent to another process by ZeroMQ and by a collective of the devices.

The plans are of the toy model, encoded as in a cluster. The leader waits until the worker, another process, has decoded
a plan and answered by ZeroMQ. For the collective it is padded to the longest one. An idle CPU has no queue of kernels,
in which the paper's messages wait: this cannot show its 47 %, but the cost of both ways if nothing waits.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from lab.pages.markdown import wide_table
from lab.real.opening import surroundings
from lab.real.page import machine_of
from lab.real.quiet import Quiet
from orca_jax.assembly.engine import build_engine
from orca_jax.cluster.launch import free_ports
from orca_jax.cluster.messages import Iteration, decode_call, encode
from orca_jax.cluster.sockets import bind
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import percentile, rounded, write_file
from orca_jax.sched.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import ExecutorStats, StepPlan

RESULT = Path(__file__).parent / "results" / "control.json"
WAYS = ("zeromq", "collective")
NUM_INPUT, NUM_OUTPUT = 32, 64  # tokens of each request
Taken = dict[str, dict[str, list[float]]]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_number(parser, "--rows", 256, "running requests")
    add_number(parser, "--passes", 5, "over all plans, by turns")
    parser.add_argument("--record", action="store_true", help="write the result into lab/results")


def run(args: argparse.Namespace) -> int:
    """Measure; print JSON."""
    config = EngineConfig(
        "preset:toy", scheduler="orca", max_num_seqs=args.rows, max_model_len=NUM_INPUT + NUM_OUTPUT
    )
    payloads = plans(config)
    found = surroundings(config) | {
        "rows": args.rows,
        "plans": len(payloads),
        "passes": args.passes,
    }
    taken, machine = Quiet().run_quietly(lambda: measure(payloads, args.passes))
    found |= machine | {"median_bytes": statistics.median(map(len, payloads))}
    for way in WAYS:
        found[way] = {
            f"median_{name}_us": 1e6 * statistics.median(each) for name, each in taken[way].items()
        }
        found[way]["p99_trip_us"] = 1e6 * percentile(taken[way]["trip"], 99)
    found = rounded(found)
    if args.record:
        write_file(RESULT, (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(found))
    return 0


class _Sent(Observer):
    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        self.payloads.append(encode(Iteration(plan, 0)))


def plans(config: EngineConfig) -> list[bytes]:
    """The encoded plans of a full batch of equal requests, from their prompts to their last tokens."""
    sent = _Sent()
    with build_engine(config) as built, built.engine.observed_by(sent):
        for index in range(config.max_num_seqs):
            params = SamplingParams(NUM_OUTPUT, temperature=0.0, ignore_eos=True)
            built.engine.add_request(f"r{index}", range(NUM_INPUT), params)
        while built.engine.has_work:
            built.engine.step()
    return sent.payloads


def measure(payloads: list[bytes], passes: int) -> Taken:
    """Send all plans by each way, in turn: seconds of the leader's call, and until the answer, for each plan."""
    spawn = multiprocessing.get_context("spawn")
    port = free_ports()
    here, there = spawn.Pipe(duplex=False)
    both = [
        spawn.Process(target=each, args=(port, payloads, passes, there), daemon=True)
        for each in (_lead, _follow)
    ]
    for process in both:
        process.start()
    there.close()
    taken: Taken = here.recv()  # EOFError if both have failed
    for process in both:
        process.join(10)
    return taken


def _lead(port: int, payloads: list[bytes], passes: int, result: Connection) -> None:
    broadcast = _broadcast(port, 0, payloads)
    socket = zmq.Context().socket(zmq.ROUTER)  # without keys: the cost of messages alone
    bind(socket, "127.0.0.1", port)
    name = socket.recv_multipart()[0]  # the worker is ready
    taken: Taken = {way: {"host": [], "trip": []} for way in WAYS}
    for way, payload in product(WAYS * passes, payloads):
        begin = time.perf_counter()
        socket.send_multipart((name, payload), zmq.NOBLOCK) if way == "zeromq" else broadcast(
            payload
        )
        sent = time.perf_counter()
        socket.recv_multipart()
        taken[way]["trip"].append(time.perf_counter() - begin)
        taken[way]["host"].append(sent - begin)
    result.send(taken)


def _follow(port: int, payloads: list[bytes], passes: int, _: Connection) -> None:
    broadcast = _broadcast(port, 1, payloads)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send(b"ready")
    plans = [(len(payload), decode_call(payload)) for payload in payloads]
    for way, (size, plan) in product(WAYS * passes, plans):
        payload = (
            socket.recv()
            if way == "zeromq"
            else np.asarray(broadcast(b"").addressable_data(0)).tobytes()
        )
        received = decode_call(payload[:size])
        socket.send(b"")
        assert received == plan


def _broadcast(port: int, rank: int, payloads: list[bytes]) -> Any:
    """A function that starts the broadcast of the leader's bytes, and returns the array of them on both devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"127.0.0.1:{port + 2}", 2, rank, cluster_detection_method="deactivate"
    )
    mesh = Mesh(np.array(jax.devices()), ("process",))
    capacity = 4 * ceil_div(max(map(len, payloads)), 4)
    split = NamedSharding(mesh, PartitionSpec("process"))
    program = jax.jit(
        lambda words: words.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec())
    )

    def broadcast(payload: bytes) -> jax.Array:
        words = np.frombuffer(payload.ljust(capacity, b"\0"), np.int32)[None]
        return program(jax.make_array_from_process_local_data(split, words))

    broadcast(b"").block_until_ready()  # compiles
    return broadcast


def block() -> str:
    """The table of the recorded result, in Markdown."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    names = ("median_host_us", "median_trip_us", "p99_trip_us")
    rows = []
    for way in WAYS:
        times = [f"{found[way][name]:,.0f}" for name in names]
        rows.append([way, *times])
    head = ["plan by", "call, us", "until the answer, us", "p99, us"]
    return f"{wide_table(head, rows)}\n{machine_of(found, [found])}."
