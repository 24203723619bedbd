"""A worker of a cluster is killed, and `--restart-workers` goes on with the open calls in new processes."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from orca_jax.cluster.keys import make_key_file
from tests.chaos.world import SEEDED, expected_text, wait_calm
from tests.cluster.hosts import hosts, start_worker
from tests.cluster.test_namespaces import LEADER, Cable, cable, ip
from tests.outlive.test_engine_lost import TOKENS, kill, text_of
from tests.serve.running import MODEL, running, wait_until

__all__ = ["cable"]
pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def child_of(pid: int) -> psutil.Process:
    """The worker that serves, of the process that starts it again."""
    (child,) = psutil.Process(pid).children()
    return child


@pytest.mark.parametrize("lost", ["worker", "stopped worker", "engine"])
def test_a_stream_goes_on_in_another_cluster(lost: str) -> None:
    with hosts(3, "--restart-workers", "--control-timeout", "2") as found:
        server = found.server
        before = [child_of(worker.pid).pid for worker in found.workers]
        with server.stream("abc", max_tokens=TOKENS, ignore_eos=True, **SEEDED) as events:
            begin = next(events)["choices"][0]["text"]
            if lost == "engine":
                kill(server)
            else:
                child = child_of(found.workers[1].pid)
                child.send_signal(signal.SIGKILL if lost == "worker" else signal.SIGSTOP)
                wait_until(lambda: server.health().status_code == 503)
                if lost == "stopped worker":  # it finds that its leader has gone
                    child.resume()
            assert begin + text_of(events) == expected_text("abc", TOKENS)
        wait_until(lambda: server.health().status_code == 200)
        assert server.complete("again", max_tokens=5, ignore_eos=True).status_code == 200
        after = [child_of(worker.pid).pid for worker in found.workers]
        assert not set(before) & set(after)
        wait_calm(server)
        server.process.terminate()
        assert found.leader_status() == 0 and found.statuses() == [0, 0]


def test_a_worker_ends_with_the_process_that_starts_it_again() -> None:
    with hosts(2, "--restart-workers") as found:
        parent = found.workers[0]
        child = child_of(parent.pid)
        parent.kill()
        psutil.wait_procs([child], timeout=20)
        assert not child.is_running()
        found.server.process.terminate()
        assert found.leader_status() == 0


def test_a_signal_ends_the_worker_and_its_parent() -> None:
    """The worker waits for its leader after the first signal, as without the setting."""
    with hosts(2, "--restart-workers") as found:
        parent = found.workers[0]
        parent.terminate()
        time.sleep(1)
        assert (
            parent.poll() is None and found.server.complete("on", max_tokens=3).status_code == 200
        )
        found.server.process.terminate()
        assert found.leader_status() == 0 and found.statuses() == [0]


def test_a_cable_that_is_unplugged_for_a_while(cable: Cable, tmp_path: Path) -> None:
    """Both sides find the silence, and meet again when the worker can be reached."""
    key = tmp_path / "key"
    make_key_file(key)
    shared = (
        *("--model", MODEL, "--nnodes=2", f"--master-addr={LEADER}", f"--cluster-key-file={key}"),
        *("--control-timeout=2", "--restart-workers"),
    )
    worker = start_worker(*shared, "--node-rank=1", prefix=cable.inside(cable.worker))
    with (
        worker,
        running(*shared, uds=tmp_path / "http", prefix=cable.inside(cable.leader)) as server,
    ):
        with server.stream("abc", max_tokens=TOKENS, ignore_eos=True, **SEEDED) as events:
            begin = next(events)["choices"][0]["text"]
            cable.unplug()
            wait_until(lambda: server.health().status_code == 503)
            time.sleep(2)
            ip("-n", cable.leader, "link", "set", "end", "up")
            assert begin + text_of(events) == expected_text("abc", TOKENS)
        server.process.terminate()
        assert server.process.wait(30) == 0 and worker.wait(30) == 0
