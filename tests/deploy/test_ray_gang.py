"""One replica of two ranks in Ray Serve: if one rank dies, all processes of the replica end, and another one serves."""

import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.deploy.ray_serving import BODY, TOKENS, Cluster, Load, outcome, started
from tests.serve.running import wait_until

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]

GRACE_SECONDS = 20  # for all processes of a replica, after the loss of one


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started("--nnodes", "2") as running:  # also checks that no process is left
        yield running


def gang_of(cluster: Cluster) -> dict[str, psutil.Process]:
    """The processes of the replica."""
    (engine,), (rank,) = cluster.engines(), cluster.ranks()
    replica = engine.parent()
    assert replica is not None
    return {"replica": replica, "engine": engine, "rank": rank}


def test_two_ranks_are_one_replica(cluster: Cluster) -> None:
    assert len(cluster.starts(8)) == 1
    assert len(set(gang_of(cluster).values())) == 3
    whole = cluster.http.post("/v1/completions", json=BODY).json()
    assert whole["usage"]["completion_tokens"] == TOKENS
    assert outcome(cluster.http, is_stream=True) == "whole"


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("rank", signal.SIGKILL),
        ("rank", signal.SIGSTOP),
        ("engine", signal.SIGKILL),
        ("replica", signal.SIGKILL),
    ],
)
def test_a_process_is_lost_under_load(
    cluster: Cluster, victim: str, number: signal.Signals
) -> None:
    """Each call ends with its whole answer or with an error, and a replica of new processes serves."""
    gang = gang_of(cluster)
    with Load(cluster) as load:
        gang[victim].send_signal(number)
        _, left = psutil.wait_procs(list(gang.values()), timeout=GRACE_SECONDS)
        assert not left, "processes of the lost replica are left"
        wait_until(
            lambda: cluster.engines() and cluster.ranks() and len(cluster.starts(1)) == 1, 60
        )
        mark = load.await_more()
    kinds, late = load.kinds(), load.kinds(mark)
    assert kinds["error"] > 0
    assert late["error"] == 0, f"calls still fail after the recovery: {late}"
