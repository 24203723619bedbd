"""An engine over several real processes with the toy model; each stands for a host."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.launch import free_ports
from tests.serve.running import MODEL, Server, running, spawn

DEVICE_MODEL = "preset:gpt2-tiny"
DEVICE_FLAGS = (
    *("--tokenizer", "byte", "--max-num-seqs", "2", "--max-model-len", "1024", "--page-size", "8"),
    *("--num-pages", "260", "--max-num-batched-tokens", "4", "--no-progress", "--strict-compile"),
)

# A worker with a fault: the toy's executor does this from iteration FAULTY on.
FAULTY = 200
_CODE = f"""
import sys, time
import orca_jax.assembly.cluster as cluster
from orca_jax.sim.toy import ToyExecutor

class Faulty(ToyExecutor):
    def submit(self, plan):
        if plan.iteration == {FAULTY}:
            HAPPENS
        return super().submit(plan)

cluster.toy_executor = lambda job: Faulty(
    job.vocab_size, (job.num_pages,), job.page_size, job.num_rows, latency=job.latency, check_pages=False
)
from orca_jax.serve.__main__ import main
sys.exit(main())
"""
STUCK = "time.sleep(1000)"
FAILING = 'raise ValueError("a fault")'
DIVERGING = "self._override = lambda request, length, token: (token + 1) % 256"


@dataclass
class Hosts:
    """A leader that serves, and its workers from rank 1 on."""

    server: Server
    workers: list[subprocess.Popen[str]]
    flags: tuple[str, ...]  # of all processes

    def statuses(self, timeout: float = 60.0) -> list[int]:
        """The exit statuses of the workers, which must end in time."""
        return [worker.wait(timeout) for worker in self.workers]

    def leader_status(self, timeout: float = 60.0) -> int:
        """The exit status of the leader's front end, which must end in time."""
        return self.server.process.wait(timeout)


def start_worker(
    *flags: str, fault: str | None = None, prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a worker, with a fault from iteration FAULTY on, behind the words of another command."""
    if fault is None:
        return spawn(*flags, prefix=prefix)
    code = _CODE.replace("HAPPENS", fault)
    return subprocess.Popen(
        [sys.executable, "-c", code, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def key_flag(folder: Path) -> str:
    """The flag of a new key file in a folder."""
    path = folder / "cluster.key"
    make_key_file(path)
    return f"--cluster-key-file={path}"


def errors_of(process: subprocess.Popen[str], timeout: float = 60.0) -> str:
    """The standard error of a process that ends."""
    return process.communicate(timeout=timeout)[1]


@contextlib.contextmanager
def hosts(
    nnodes: int, *flags: str, fault: str | None = None, model: str = MODEL, uds: Path | None = None
) -> Iterator[Hosts]:
    """Start all processes, and wait until the leader serves; afterwards check that none of them is left.

    Args:
        nnodes: their number.
        flags: of all of them.
        fault: of worker 1.
        model: to serve.
        uds: Unix socket of the leader's HTTP.
    """
    shared = ("--model", model, f"--nnodes={nnodes}", f"--master-port={free_ports()}", *flags)
    keys = tempfile.TemporaryDirectory()
    if not any(flag.startswith("--cluster-key-file") for flag in flags):
        shared = (*shared, key_flag(Path(keys.name)))
    ranks = range(1, nnodes)
    workers = [
        start_worker(*shared, f"--node-rank={rank}", fault=fault if rank == 1 else None)
        for rank in ranks
    ]
    try:
        with running(*shared, model=model, uds=uds) as server:
            yield Hosts(server, workers, shared)
        for worker in workers:
            worker.wait(60)
    finally:
        keys.cleanup()
        for worker in workers:
            worker.kill()
            worker.wait()
            for stream in (worker.stdout, worker.stderr):
                if stream is not None:
                    stream.close()
