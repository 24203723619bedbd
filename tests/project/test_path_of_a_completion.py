"""The files and the forms of data that one completion, response or message crosses, from its bytes to its answer.

A file counts if a function of it runs for the call. The front end and the engine process are traced while a server
answers one streamed completion of the toy model. The device's part is traced on a real model: one launch on the host,
and the tracing of its two programs, which stands for their run. Code of start-up does not count.

A form is a value class, or bytes with a layout, that carries the request's data on its way. A container counts together
with its elements. The traced calls show every value class that is made for a request, so that a new one is noticed.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import msgspec
import psutil
import pytest

import orca_jax
from orca_jax.assembly.engine import build_engine
from orca_jax.batch.local import LocalEngine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.serve.app import create_app
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.step import Member
from tests.exec.test_executor import PROMPT, make_executor, plan
from tests.programs import compiled_late, compiled_with
from tests.sampling import GREEDY
from tests.serve.running import MODEL, Server, running, wait_until

COMPLETION, RESPONSE, MESSAGE = "/v1/completions", "/v1/responses", "/v1/messages"
MAX_FILES = {COMPLETION: 56, RESPONSE: 60, MESSAGE: 60}  # the others render a conversation
MAX_FORMS = {COMPLETION: 18, RESPONSE: 19, MESSAGE: 19}
BODIES = {
    COMPLETION: {"prompt": "hi", "max_tokens": 4, "ignore_eos": True},
    RESPONSE: {"input": "hi", "max_output_tokens": 4},
    MESSAGE: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
NUM_CALLS = 5  # only files of all calls count: a heartbeat falls into some of them
PACKAGE = Path(orca_jax.__file__).parent
TRACER = Path(__file__).parent / "tracer"
STARTUP = {
    "exec/programs.py",
    "exec/compile.py",
    "exec/cache.py",
}  # they run when programs are lowered, before any call


def relative(paths: set[str]) -> set[str]:
    return {
        str(Path(path).relative_to(PACKAGE)) for path in paths if Path(path).is_relative_to(PACKAGE)
    }


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
def host_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Files of a streamed answer in both processes, by route; the toy executor stands for the device."""
    folder = tmp_path_factory.mktemp("tracer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(TRACER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        )
        patch.setenv("ORCA_JAX_TRACER", str(folder))
        with running() as server:
            processes = [psutil.Process(server.process.pid), server.engine()]
            windows = {
                path: [files_of_one_call(server, path, folder, processes) for _ in range(NUM_CALLS)]
                for path in BODIES
            }
    files = {path: set.intersection(*each) for path, each in windows.items()}
    return {
        path: {file for file in each if not file.startswith("sim/")} for path, each in files.items()
    }


def files_of_one_call(
    server: Server, path: str, folder: Path, processes: list[psutil.Process]
) -> set[str]:
    """Files with a function that has run since the start of one call, heartbeats and timers of that time included."""
    start = time.monotonic()
    answer = server.http.post(path, json={"model": MODEL, "stream": True, **BODIES[path]})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/event-stream"
    ), answer.text
    records = [record_of(folder, process) for process in processes]
    return relative({path for record in records for path, at in record.items() if at >= start})


@contextlib.contextmanager
def small_executor(program_cache: str) -> Iterator[JaxExecutor]:
    """An executor with one sampler of each kind, which compiles its programs at their first launch."""
    with pytest.MonkeyPatch.context() as patch, compiled_late(), compiled_with(optimised=False):
        patch.setattr("orca_jax.exec.buckets._MIN_LARGEST_WIDTH", 8)
        executor = make_executor(program_cache, buckets=(8,))
        yield executor
        executor.close()


@pytest.fixture(scope="module")
def device_files(program_cache: str) -> set[str]:
    """Files of one launch and of its programs."""
    with small_executor(program_cache) as executor:

        def run() -> None:
            member = Member(
                "r", 0, 0, PROMPT, is_sampling=True, new_blocks=(range(8),), sampling=GREEDY
            )
            assert len(executor.collect(executor.submit(plan(member))).token_ids) == 1

        run()  # once before: the first launch loads what later ones have
        return (files_of(run) | files_of(lambda: lower(executor))) - STARTUP


def lower(executor: JaxExecutor) -> None:
    """Trace the programs of a launch."""
    shapes, state = executor.stages[0].shapes, executor.stages[0].state
    shapes._lower_layers(executor.config.buckets[-1], state)
    shapes._lower_sampler("plain", shapes.widths[0], state)


@pytest.mark.parametrize("path", MAX_FILES)
def test_a_call_crosses_few_files(
    path: str, host_files: dict[str, set[str]], device_files: set[str]
) -> None:
    assert {"serve/handlers.py", "engine.py", "link/loop.py"} <= host_files[path]
    assert {"exec/executor.py", "model/transformer.py"} <= device_files
    files = sorted(host_files[path] | device_files)
    assert len(files) <= MAX_FILES[path], f"{len(files)} files: {' '.join(files)}"


# Forms in their order, and the containers that count with them. Those in quotes are no classes: bytes, or arrays.
FORMS: dict[str, set[str]] = {
    "'body of the call'": set(),
    "CompletionRequest": set(),
    "Prompt": {"Asked"},
    "SamplingParams": set(),
    "Submit": {"Job"},
    "'frame of the link'": set(),
    "Request": {"Page"},
    "Choice": {"Selection", "SelectionDraft", "Hit"},
    "Member": {"RowSampling", "StepPlan", "InFlight"},
    "'columns of the row table'": set(),
    "Segment": set(),
    "'vector of a launch'": {"Kept", "PackedDraws", "PackedIncrements"},
    "Batch": {"RowArrays", "Scores", "Draws", "SamplingParameters"},
    "Drawn": {"Launch", "JaxHandle"},
    "MemberResult": {"StepResult"},
    "RequestUpdate": {"Updates"},
    "Piece": set(),
    "'event of the answer'": {"CompletionChoice"},
}
SHARED = {form: containers for form, containers in FORMS.items() if form != "CompletionRequest"}
FORMS_OF = {
    COMPLETION: FORMS,
    RESPONSE: {
        **SHARED,
        "ResponsesRequest": {"InputMessage"},
        "TemplatePrompt": set(),
        "'event of the answer'": {"ModelResponse", "MessageItem", "ShownText", "StoredResponse"},
    },
    MESSAGE: {
        **SHARED,
        "MessagesRequest": {"TurnMessage", "TextBlock"},
        "TemplatePrompt": set(),
        "'event of the answer'": {"MessageAnswer", "AnswerText"},
    },
}
"""A response and a message are conversations before they are prompts: one form more."""
# Made for a call too, but without its prompt or its tokens.
ABOUT_A_CALL = {
    "Answer", "AnswerForm", "AskedTools", "BadLine", "Caches", "Deadlines", "DeviceState",
    "DraftCounts", "EngineStats", "ExecutorStats", "FlatTools", "HeadMajorPages", "Heartbeat",
    "History", "Ignored", "Limits", "MessageUsage", "PromptDetails", "Range", "RequestEnd",
    "RequestMetrics", "ResponseUsage", "ResultReady", "Row", "ToolRules", "ToyRow", "Urgency", "Usage",
    "VectorLayout", "VocabularyShards", "_Filters", "_SoftmaxState", "_ToyHandle",
}  # fmt: skip


def value_classes(values: dict[str, Any], found: dict[str, set[int]], kept: list[object]) -> None:
    """Note the value classes of the package among the variables of a function; `kept` keeps ids from being reused."""
    for value in values.values():
        kind = type(value)
        is_value = (
            dataclasses.is_dataclass(kind)
            or issubclass(kind, msgspec.Struct)
            or hasattr(kind, "_fields")
        )
        if is_value and kind.__module__.startswith("orca_jax."):
            found.setdefault(kind.__name__, set()).add(id(value))
            kept.append(value)


class Collector:
    """Collects value classes of all threads, without those of earlier tests, while it is entered."""

    def __init__(self, others: Collection[int | None] = ()) -> None:
        self.others = others
        self.found: dict[str, set[int]] = {}
        self.kept: list[object] = []
        self.is_entered = False

    def __enter__(self) -> "Collector":
        self.is_entered = True
        threading.settrace_all_threads(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        self.is_entered = False
        sys.settrace(None)
        threading.settrace_all_threads(None)  # type: ignore[arg-type]

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not self.is_entered:  # a frame of a thread that was entered before returns
            return None
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)) or code.co_name == "<module>":
            return None
        if event in ("call", "return") and threading.get_ident() not in self.others:
            value_classes({**frame.f_locals, "returned": arg}, self.found, self.kept)
        return self._trace


def made_in_the_last(collectors: list[Collector]) -> set[str]:
    """Names of the classes with an instance that only the last collector saw: values that live longer do not count."""
    *before, last = collectors
    old = {
        number for collector in before for numbers in collector.found.values() for number in numbers
    }
    return {name for name, numbers in last.found.items() if numbers - old}


def classes_of_the_host(path: str) -> set[str]:
    """Value classes made for a call of the toy model, in one process."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    body = {"model": MODEL, **BODIES[path]}

    async def answer() -> list[Collector]:
        config = ServerConfig(EngineConfig(model=MODEL, max_num_seqs=4))
        collectors = []
        with build_engine(config.engine) as built:
            async with LocalEngine(built, config) as engine:
                app = create_app(engine._service, config, ServerObserver(config))
                http = httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
                )
                for _ in range(3):
                    with Collector(others) as collector:
                        answer = await http.post(path, json=body)
                    assert answer.status_code == 200, answer.text
                    collectors.append(collector)
        return collectors

    return made_in_the_last(asyncio.run(answer()))


def classes_of_the_device(program_cache: str) -> set[str]:
    """Value classes made for one launch, and for the tracing of its programs."""
    member = Member("r", 0, 0, PROMPT, is_sampling=True, new_blocks=(range(8),), sampling=GREEDY)
    collectors = []
    with small_executor(program_cache) as executor:
        executor.collect(executor.submit(plan(member)))  # once before: the first launch compiles
        for _ in range(2):
            with Collector() as collector:
                executor.collect(executor.submit(plan(member)))
                lower(executor)
            collectors.append(collector)
    return made_in_the_last(collectors)


@pytest.mark.parametrize("path", MAX_FORMS)
def test_a_call_has_few_forms(path: str, program_cache: str) -> None:
    forms = FORMS_OF[path]
    assert len(forms) <= MAX_FORMS[path]
    made = classes_of_the_host(path) | (
        classes_of_the_device(program_cache) if path == COMPLETION else set()
    )
    host = {form for form in forms if form[0] != "'"} & {
        "CompletionRequest",
        "MessagesRequest",
        "ResponsesRequest",
    }
    assert {*host, "Submit", "Request", "Member", "MemberResult", "RequestUpdate"} <= made
    known = {
        name for form, containers in forms.items() for name in (form, *containers)
    } | ABOUT_A_CALL
    new = sorted(made - known)
    assert not new, f"new forms: merge them with one of FORMS, or say what they are: {new}"
