"""The files that one completion crosses, from its bytes to the last byte of its answer.

A file counts if a function of it runs for the call. The front end and the engine process are traced while a server
answers one streamed completion of the toy model. The device's part is traced on a real model: one launch on the host,
and the tracing of its two programs, which stands for their run. Code of start-up does not count.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil
import pytest

import orca_jax
from orca_jax.exec.executor import JaxExecutor
from orca_jax.step import Member
from tests.exec.test_executor import PROMPT, make_executor, plan
from tests.sampling import GREEDY
from tests.serve.running import Server, running, wait_until

MAX_FILES = 56
NUM_CALLS = 5  # only files of all calls count: a heartbeat falls into some of them
PACKAGE = Path(orca_jax.__file__).parent
TRACER = Path(__file__).parent / "tracer"
STARTUP = {
    "exec/programs.py",
    "exec/compile.py",
    "exec/cache.py",
}  # they run when programs are lowered, before any call


def relative(paths: set[str]) -> set[str]:
    return {str(Path(path).relative_to(PACKAGE)) for path in paths if Path(path).is_relative_to(PACKAGE)}


def record_of(folder: Path, process: psutil.Process) -> dict[str, float]:
    """The times that a traced process has recorded so far."""
    path = folder / f"{process.pid}.json"
    path.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR2)
    wait_until(path.exists)
    record: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return record


def files_of(call: Callable[[], object]) -> set[str]:
    """The package's files with a function that `call` runs in this thread."""
    seen: set[str] = set()

    def trace(frame: FrameType, event: str, arg: object) -> None:
        seen.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return relative(seen)


@pytest.fixture(scope="module")
def host_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files of a streamed completion in both processes; the toy executor stands for the device."""
    folder = tmp_path_factory.mktemp("tracer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TRACER), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("ORCA_JAX_TRACER", str(folder))
        with running() as server:
            processes = [psutil.Process(server.process.pid), server.engine()]
            windows = [files_of_one_call(server, folder, processes) for _ in range(NUM_CALLS)]
    files = set.intersection(*windows)
    return {file for file in files if not file.startswith("sim/")}


def files_of_one_call(server: Server, folder: Path, processes: list[psutil.Process]) -> set[str]:
    """Files with a function that has run since the start of one call, heartbeats and timers of that time included."""
    start = time.monotonic()
    with server.stream("hi", max_tokens=4, ignore_eos=True) as events:
        assert list(events)
    records = [record_of(folder, process) for process in processes]
    return relative({path for record in records for path, at in record.items() if at >= start})


@pytest.fixture(scope="module")
def device_files(program_cache: str) -> set[str]:
    """Files of one launch and of its programs."""
    executor = make_executor(program_cache)

    def run() -> None:
        member = Member("r", 0, 0, PROMPT, is_sampling=True, new_pages=range(8), sampling=GREEDY)
        assert len(executor.collect(executor.submit(plan(member))).token_ids) == 1

    run()  # once before: the first launch loads what later ones have
    files = files_of(run) | files_of(lambda: lower(executor))
    executor.close()
    return files - STARTUP


def lower(executor: JaxExecutor) -> None:
    """Trace the programs of a launch."""
    shapes, state = executor._shapes, executor._state
    shapes._lower_layers(executor.config.buckets[-1], state)
    shapes._lower_sampler("plain", shapes.widths[0], state)


def test_a_completion_crosses_few_files(host_files: set[str], device_files: set[str]) -> None:
    assert {"serve/handlers.py", "engine.py", "link/process.py"} <= host_files
    assert {"exec/executor.py", "model/transformer.py"} <= device_files
    files = sorted(host_files | device_files)
    assert len(files) <= MAX_FILES, f"{len(files)} files: {' '.join(files)}"
