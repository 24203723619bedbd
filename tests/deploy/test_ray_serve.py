"""Two replicas of the toy model in Ray Serve, started as a user starts them; one dies under load."""

import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.deploy.ray_serving import BODY, CALLERS, TOKENS, Cluster, Load, outcome, started
from tests.serve.running import parse_events, wait_until

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started("--replicas", "2") as running:
        yield running


def test_the_application_is_the_servers(cluster: Cluster) -> None:
    whole = cluster.http.post("/v1/completions", json=BODY).json()
    assert whole["usage"]["completion_tokens"] == TOKENS
    with cluster.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        events = list(parse_events(response.iter_lines()))
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    wrong = cluster.http.post("/v1/completions", json={**BODY, "max_tokens": -7})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "max_tokens"
    assert len(wrong.headers.get_list("x-request-id")) == 1
    assert cluster.http.get("/health").json()["status"] == "ready"


def test_both_replicas_answer(cluster: Cluster) -> None:
    assert len(cluster.engines()) == 2
    assert len(cluster.starts(20)) == 2, "all calls went to one replica"


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_a_replica_dies_under_load(cluster: Cluster, victim: str) -> None:
    """Each call ends with its whole answer or with an error, and two replicas serve again."""
    wait_until(lambda: len(cluster.engines()) == 2, 60)
    before = cluster.engines()
    with Load(cluster) as load:
        process = before[0] if victim == "engine" else before[0].parent()
        assert process is not None
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: len(cluster.engines()) == 2 and before[0] not in cluster.engines(), 90)
        wait_until(lambda: len(cluster.starts(8)) == 2, 60)  # both answer
        mark = load.await_more()
    kinds, late = load.kinds(), load.kinds(mark)
    assert late["error"] == 0, f"calls still fail after the recovery: {late}"
    assert kinds["whole"] > 8 * CALLERS
    assert kinds["error"] < kinds["whole"], kinds


def test_replicas_follow_the_calls_and_sessions_stay() -> None:
    """The end is orderly, too: an open stream is finished."""
    last: list[str] = []
    with started(
        "--max-replicas", "2", "--target-ongoing-requests", "1", "--routing", "session"
    ) as cluster:
        assert len(cluster.engines()) == 1
        stop = threading.Event()
        callers = [
            threading.Thread(target=keep_calling, args=(cluster.http, stop)) for _ in range(CALLERS)
        ]
        for caller in callers:
            caller.start()
        try:
            wait_until(lambda: len(cluster.starts(8)) == 2, 120)
        finally:
            stop.set()
            for caller in callers:
                caller.join(60)
        for session in "abcd":
            assert len(cluster.starts(6, **{"x-session-id": session})) == 1
        stream = threading.Thread(
            target=lambda: last.append(outcome(cluster.http, is_stream=True, num_tokens=1500))
        )
        stream.start()
        wait_until(lambda: any(body["running"] for body in cluster.bodies(4)))
    stream.join(10)
    assert last == ["whole"]


def keep_calling(http: httpx.Client, stop: threading.Event) -> None:
    while not stop.is_set():
        http.post("/v1/completions", json={**BODY, "max_tokens": 400})
