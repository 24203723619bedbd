"""A process is lost under load: open requests end with an error, health is 503, and every process ends in time."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from orca_jax.cluster.exits import ExitStatus
from tests.cluster.hosts import DIVERGING, FAILING, STUCK, Hosts, hosts
from tests.serve.running import wait_until

pytestmark = pytest.mark.chaos

SOON = 5.0  # seconds between a loss and the error of open requests
END = 15.0  # seconds between a loss and the end of all processes
TIMEOUT = 2.0  # --control-timeout of these tests
LONG = {"max_tokens": 15000, "ignore_eos": True}


class Callers:
    """Two open calls: a stream and a plain one. `ended` has the time of their ends."""

    def __init__(self, hosts: Hosts) -> None:
        self.ended: dict[str, float] = {}
        self.errors: dict[str, Any] = {}
        self._url = hosts.server.url
        self.num_events = 0
        self._threads = [threading.Thread(target=each) for each in (self._stream, self._plain)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.num_events > 20 or self.ended, 10)

    def _stream(self) -> None:
        body = {"model": "preset:toy", "prompt": "a", "stream": True, **LONG}
        with (
            httpx.Client(base_url=self._url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as got,
        ):
            for line in got.iter_lines():
                self.num_events += 1
                if '"error"' in line:
                    self.errors["stream"] = line
        self.ended["stream"] = time.monotonic()

    def _plain(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            answer = client.post("/v1/completions", json={"model": "preset:toy", "prompt": "b", **LONG})
        self.ended["plain"] = time.monotonic()
        self.errors["plain"] = answer.json()["error"] if answer.status_code in (500, 503) else None

    def join(self) -> None:
        """Wait for the ends."""
        for thread in self._threads:
            thread.join(30)
        assert all(self.errors.get(kind) for kind in ("stream", "plain")), self.errors


def lose(hosts: Hosts, act: Callable[[], object]) -> None:
    """Act under load, and check the calls, the health and the end of the leader."""
    callers = Callers(hosts)
    start = time.monotonic()
    act()
    wait_until(lambda: hosts.server.health().status_code == 503, SOON + 2)
    callers.join()
    assert max(callers.ended.values()) - start < SOON + 1
    hosts.leader_status(END)
    assert time.monotonic() - start < END


def test_a_killed_worker_ends_all_processes() -> None:
    with hosts(3, f"--control-timeout={TIMEOUT}") as three:
        lose(three, three.workers[0].kill)
        assert three.leader_status() == ExitStatus.CLUSTER_LOST
        assert three.statuses() == [-signal.SIGKILL, ExitStatus.CLUSTER_LOST]
    assert any("worker 1" in line and "closed its connection" in line for line in three.server.errors)


def test_a_stopped_worker_is_lost_by_its_silence() -> None:
    with hosts(2, f"--control-timeout={TIMEOUT}") as two:
        (worker,) = two.workers
        lose(two, lambda: worker.send_signal(signal.SIGSTOP))
        assert two.leader_status() == ExitStatus.CLUSTER_LOST
        worker.send_signal(signal.SIGCONT)
        assert two.statuses() == [ExitStatus.CLUSTER_LOST], "it finds the leader's last message"
    assert any("has sent nothing for 2 s" in line for line in two.server.errors)


@pytest.mark.parametrize(
    ("fault", "reason", "status"),
    [
        (STUCK, "worker 1", ExitStatus.CLUSTER_LOST),
        (DIVERGING, "has diverged", ExitStatus.CLUSTER_LOST),
        (FAILING, "failed: ValueError", ExitStatus.ENGINE_FAILED),
    ],
    ids=["stuck", "diverging", "failing"],
)
def test_a_faulty_worker(fault: str, reason: str, status: ExitStatus) -> None:
    """A stuck worker still sends heartbeats, so it is found by its progress."""
    with hosts(2, f"--control-timeout={TIMEOUT}", fault=fault) as two:
        lose(two, lambda: None)
        assert two.leader_status() == ExitStatus.CLUSTER_LOST
        assert two.statuses() == [status]
    assert any(reason in line for line in two.server.errors)


def test_the_end_of_the_leaders_engine_ends_the_workers() -> None:
    with hosts(2, f"--control-timeout={TIMEOUT}", "--restart-engine") as two:
        lose(two, two.server.engine().kill)
        assert two.leader_status() == ExitStatus.ENGINE_FAILED, "an engine that has lost its workers is not restarted"
        assert two.statuses() == [ExitStatus.LEADER_LOST]


def test_a_stopped_leader_ends_the_workers() -> None:
    with hosts(2, f"--control-timeout={TIMEOUT}") as two:
        start = time.monotonic()
        two.server.engine().suspend()
        assert two.statuses() == [ExitStatus.LEADER_LOST]
        assert time.monotonic() - start < SOON
        assert two.leader_status() == ExitStatus.ENGINE_FAILED, "the front end has noticed it too"
