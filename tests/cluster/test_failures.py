"""A process is lost under load: open requests end with an error, health is 503, and every process ends."""

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from orca_jax.cluster.exits import ExitStatus
from tests.cluster.hosts import DIVERGING, FAILING, STUCK, Hosts, hosts
from tests.covering import slow
from tests.serve.running import wait_until

pytestmark = pytest.mark.chaos

TIMEOUT = 2.0  # --control-timeout of these tests
LONG = {"max_tokens": 15000, "ignore_eos": True}


class Callers:
    """Two open calls: a stream and a plain one. `errors` has their errors. Without one they end by their lengths."""

    def __init__(self, hosts: Hosts, fields: Mapping[str, Any]) -> None:
        self.errors: dict[str, str] = {}
        self.num_events = 0
        self._server = hosts.server
        self._fields = {**LONG, **fields}
        self._threads = [threading.Thread(target=each) for each in (self._stream, self._plain)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.num_events > 20 or self.errors.get("stream"))

    def _stream(self) -> None:
        with self._server.stream("a", **self._fields) as events:
            for event in events:
                self.num_events += 1
                self.errors["stream"] = event.get("error", {}).get("message", "")

    def _plain(self) -> None:
        answer = self._server.complete("b", **self._fields)
        assert answer.status_code in (500, 503)
        self.errors["plain"] = answer.json()["error"]["message"]

    def join(self) -> None:
        """Wait for the ends, each with an error."""
        for thread in self._threads:
            thread.join(60)
        assert self.errors["stream"] and self.errors["plain"]


def lose(hosts: Hosts, act: Callable[[], object], **fields: Any) -> None:
    """Act under load, and check the calls, the health and the end of the leader. `fields` are of the calls."""
    callers = Callers(hosts, fields)
    act()
    wait_until(lambda: hosts.server.health().status_code == 503)
    callers.join()
    hosts.leader_status()


def test_a_killed_worker_ends_all_processes() -> None:
    with hosts(3, f"--control-timeout={TIMEOUT}") as three:
        lose(three, three.workers[0].kill)
        assert three.leader_status() == ExitStatus.CLUSTER_LOST
        assert three.statuses() == [-signal.SIGKILL, ExitStatus.CLUSTER_LOST]
    assert any(
        "worker 1" in line and "closed its connection" in line for line in three.server.errors
    )


@pytest.mark.slow
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
        slow(STUCK, "worker 1", ExitStatus.CLUSTER_LOST),
        (DIVERGING, "has diverged", ExitStatus.CLUSTER_LOST),
        slow(FAILING, "failed: ValueError", ExitStatus.ENGINE_FAILED),
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
    with hosts(2, f"--control-timeout={TIMEOUT}") as two:
        lose(two, two.server.engine().kill)
        assert two.leader_status() == ExitStatus.ENGINE_FAILED
        assert two.statuses() == [ExitStatus.LEADER_LOST]


@pytest.mark.slow
def test_a_stopped_leader_ends_the_workers() -> None:
    with hosts(2, f"--control-timeout={TIMEOUT}") as two:
        two.server.engine().suspend()
        assert two.statuses() == [ExitStatus.LEADER_LOST]
        assert two.leader_status() == ExitStatus.ENGINE_FAILED, "the front end has noticed it too"


@pytest.mark.slow
def test_the_end_of_the_leaders_front_end_ends_all_processes() -> None:
    with hosts(2, f"--control-timeout={TIMEOUT}") as two:
        engine = two.server.engine()
        two.server.process.kill()
        assert two.statuses() == [ExitStatus.LEADER_LOST], "an orderly end of the server is DONE"
        engine.wait(60)
