"""An exception in any thread of the engine, of a worker or of the front end ends the process with its reason."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.messages import WorkerFailed
from orca_jax.helpers.logs import end_at_failed_threads
from orca_jax.link import worker
from orca_jax.link.wire import (
    Abort,
    Failed,
    FrameReader,
    Heartbeat,
    Start,
    decode_from_engine,
    encode,
)
from orca_jax.values.config import EngineConfig
from tests.serve.running import spawn

SECONDS = 60
HEARTBEAT = """
def heartbeat(self): raise TypeError('Encoding objects of type numpy.int64 is unsupported')
process.EngineStatus.heartbeat = heartbeat
"""
GRAMMAR = """
from orca_jax.link.prepare import GRAMMARS, Preparation
def report(result): raise OSError('no')
def build_engine(*values, **named):
    Preparation(GRAMMARS).submit(lambda: None, report)
    time.sleep(60)
process.build_engine = build_engine
"""
LATE_GRAMMAR = """
from orca_jax.link.prepare import GRAMMARS, Preparation
def report(result): raise OSError('no')
def build_engine(*values, **named):
    Preparation(GRAMMARS, limit=0.1, tick=0.05).submit(lambda: time.sleep(60), report)
    time.sleep(60)
process.build_engine = build_engine
"""
EVENTS = """
from orca_jax.link import kv_events
from orca_jax.server_config import KvEvents
def build_engine(*values, **named):
    publisher = kv_events.KvEventPublisher(KvEvents('tcp://127.0.0.1:*', ''))
    publisher._queue.put(object())
    time.sleep(60)
process.build_engine = build_engine
"""
REPLAY = """
from orca_jax.link import kv_events
from orca_jax.server_config import KvEvents
class Kept:
    def append(self, each): pass
    def __iter__(self): raise ValueError('no')
import zmq
def build_engine(*values, **named):
    publisher = kv_events.KvEventPublisher(KvEvents('tcp://127.0.0.1:*', '', 'inproc://replay'))
    publisher._kept = Kept()
    asks = publisher._context.socket(zmq.DEALER)
    asks.connect('inproc://replay')
    asks.send_multipart([b'', (0).to_bytes(8, 'big')])
    time.sleep(60)
process.build_engine = build_engine
"""


class TriedEngine:
    """An engine process with a changed part, and the socket to it."""

    def __init__(self, change: str) -> None:
        self.ours, theirs = socket.socketpair()
        number = theirs.fileno()
        code = f"import sys, time\nfrom orca_jax.link import process\n{change}\n"
        code += f"sys.exit(process.main(['', '{number}', 'text']))"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=(number,), stderr=subprocess.PIPE, text=True
            )

    def messages(self) -> Iterator[Any]:
        """All messages until the end."""
        frames = FrameReader()
        self.ours.settimeout(SECONDS)
        while data := self.ours.recv(1 << 16):
            yield from map(decode_from_engine, frames.feed(data))

    def end(self) -> tuple[str, int, str]:
        """The first reason that the front end gets, the exit status, and the log."""
        with self.ours:
            reasons = [each.message for each in self.messages() if isinstance(each, Failed)]
        _, log = self.process.communicate(timeout=SECONDS)
        return next(iter(reasons), ""), self.process.returncode, log


@pytest.mark.parametrize(
    ("change", "thread", "error"),
    [
        (HEARTBEAT, "heartbeat", "TypeError"),
        (GRAMMAR, "prepare grammar", "OSError"),
        (LATE_GRAMMAR, "prepare grammar", "OSError"),
        (EVENTS, "kv-events", "TypeError"),
        (REPLAY, "kv-replay", "ValueError"),
    ],
)
def test_a_failed_thread_of_the_engine_ends_it_with_the_reason(
    change: str, thread: str, error: str
) -> None:
    tried = TriedEngine(change)
    tried.ours.sendall(encode(Start(EngineConfig("preset:toy"), 0.0)))
    reason, code, log = tried.end()
    assert reason == f"the engine failed: its thread '{thread}' ended with {error}"
    assert code == ExitStatus.ENGINE_FAILED and f"the thread {thread} failed" in log


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"\x92\xa5Hello\xa2\xff\xf1", "ValidationError"),
        (encode(Abort("abc"))[4:].replace(b"abc", b"\xff\xfe\xfd"), "UnicodeDecodeError"),
        (b"", "DecodeError"),
    ],
)
def test_a_message_that_cannot_be_read_ends_the_engine_with_the_reason(
    payload: bytes, error: str
) -> None:
    tried = TriedEngine("")
    tried.ours.sendall(len(payload).to_bytes(4, "big") + payload)
    reason, code, _ = tried.end()
    assert (
        reason == f"the engine failed: its thread 'inbox' ended with {error}"
        and code == ExitStatus.ENGINE_FAILED
    )


def test_a_failed_thread_of_a_worker_is_reported_to_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Link:
        sent: list[WorkerFailed] = []  # noqa: RUF012

        def fail(self, message: WorkerFailed) -> None:
            self.sent.append(message)

    ended: list[int] = []
    link: Any = Link()
    monkeypatch.setattr(worker, "exit_now", ended.append)
    monkeypatch.setattr(worker, "_ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    end_at_failed_threads(partial(worker._end_failed, link))

    def leave() -> None:
        raise SystemExit(0)  # no silence either

    thread = threading.Thread(target=leave, name="leaving")
    thread.start()
    thread.join()
    assert link.sent == [WorkerFailed("its thread 'leaving' ended with SystemExit")]
    assert ended == [ExitStatus.ENGINE_FAILED]


FRONT_END = """
import sys, threading, time
from orca_jax.serve import server
class Failing(server.Service):
    async def set_ready(self, ready):
        def fail(): raise RuntimeError('no')
        threading.Thread(target=fail, name='encoding').start()
server.Service = Failing
from orca_jax.serve.__main__ import main
sys.exit(main(['--model', 'preset:toy', '--port', '0']))
"""


def test_a_failed_thread_of_the_front_end_ends_the_server_with_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRONT_END], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert (
        "error: the server failed: its thread 'encoding' ended with RuntimeError"
        in done.stderr.splitlines()
    )
    assert "the thread encoding failed" in done.stderr


SPY = """
import numpy as np
from orca_jax.policy import API, Decision
class Numpy:
    api, reads, may_starve = API, frozenset(), True
    def decide(self, view):
        jobs = [job for job in [*view.residents, *view.waiting] if job.num_left]
        return Decision([(job, np.int64(min(job.num_left, 8))) for job in jobs[:1]])
    def started(self, job, num_tokens): pass
    def ended(self, job): pass
class Exits(Numpy):
    def decide(self, view):
        raise SystemExit(0)
"""


@pytest.mark.parametrize(("name", "code"), [("Exits", 1)])
def test_a_policy_that_exits_ends_the_server_with_its_name(
    tmp_path: Any, name: str, code: int
) -> None:
    import httpx

    path = tmp_path / "spy.py"
    path.write_text(SPY)
    process = spawn("--model", "preset:toy", "--port", "0", "--scheduler", f"{path}:{name}")
    assert process.stdout is not None
    url = (
        next(line for line in process.stdout if "http://" in line)
        .split("http://")[1]
        .split("/")[0]
        .strip()
    )
    with pytest.raises((httpx.HTTPError, AssertionError)):
        body = {"model": "preset:toy", "prompt": "a", "max_tokens": 2}
        assert (
            httpx.post(f"http://{url}/v1/completions", json=body, timeout=SECONDS).status_code
            == 200
        )
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == code
    assert f"the engine failed: {name}, a class from outside, has a fault" in errors
    assert f"{name}: decide raised SystemExit: 0 at line" in errors


@pytest.mark.parametrize("content", [None, b"ab"])
def test_a_wrong_file_of_the_model_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    """The front end may notice it first, and the engine process then has no reader of its reason."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    process = spawn("--model", str(path), "--port", "0")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 2 and errors.count("\n") == 1
    assert errors.startswith(f"error: --model: {path} ") and ("download" in errors) is (
        content is not None
    )


def test_the_engine_ends_quietly_if_the_front_end_has_ended_before(tmp_path: Path) -> None:
    hold = (
        "build = process.build_engine\ndef build_engine(*values, **named):\n    time.sleep(0.5)\n"
    )
    tried = TriedEngine(
        f"{hold}    return build(*values, **named)\nprocess.build_engine = build_engine"
    )
    tried.ours.sendall(encode(Start(EngineConfig(str(tmp_path / "model.gguf")), 0.0)))
    assert isinstance(next(tried.messages()), Heartbeat)
    tried.ours.close()
    _, log = tried.process.communicate(timeout=SECONDS)
    assert "Traceback" not in log
