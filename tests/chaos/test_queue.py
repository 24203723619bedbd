"""The limits of the queue under a thousand clients at once, and queue deadlines."""

import asyncio
import contextlib
import time
from collections import Counter

import pytest

from tests.chaos.world import (
    APIS,
    LONG,
    call_of,
    check_error,
    connect,
    request,
    usage,
    wait_calm,
    watched,
)
from tests.serve.running import MODEL, Server, running, wait_until

CALLERS = 1000
ROWS, QUEUE = 8, 50
OTHERS = tuple(path for path in APIS if path != "/v1/completions")
KEY = "sk-a-key-with-a-quota"


async def statuses(server: Server, until: int) -> tuple[Counter[int], list[tuple[str, bytes]]]:
    """Open all calls at once, wait for exactly `until` refusals, and hang up; return statuses and refusals."""
    url = server.http.base_url
    writers: list[asyncio.StreamWriter] = []
    answered: Counter[int] = Counter()
    refusals: list[tuple[str, bytes]] = []

    async def call(number: int) -> None:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writers.append(writer)
        path = list(APIS)[number // 2 % len(APIS)]
        writer.write(request(call_of(path, stream=bool(number % 2)), path))
        first = await reader.read(65536)
        status = int(first.split(b" ", 2)[1])
        answered[status] += 1
        if status != 200:
            while not first.endswith(b"}"):
                first += await reader.read(65536)
            refusals.append((path, first))

    calls = [asyncio.create_task(call(number)) for number in range(CALLERS)]
    deadline = time.monotonic() + 60
    while len(refusals) < until and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for writer in writers:
        writer.close()
    return answered, refusals


@pytest.mark.parametrize("overload", [503, 429])
def test_the_cap_is_exact(overload: int) -> None:
    """Rows and queue are full of calls of all APIs; all other calls get a refusal with `retry-after` at once.

    Calls that find too many conversations to be rendered before them get 503.
    """
    flags = (
        "--max-num-seqs",
        str(ROWS),
        "--max-num-queued-reqs",
        str(QUEUE),
        "--overload-status",
        str(overload),
    )
    with running(*flags, "--max-model-len", "16384") as server:
        for _ in range(2):  # the second wave finds rows and queue free again
            answered, refusals = asyncio.run(statuses(server, CALLERS - ROWS - QUEUE))
            assert set(answered) <= {200, overload, 503}
            assert answered[overload] > 0 and len(refusals) == CALLERS - ROWS - QUEUE
            for path, refusal in refusals:
                head, _, body = refusal.partition(b"\r\n\r\n")
                named = b'"request_id"' if path == "/v1/messages" else b'"code"'
                assert b"retry-after: " in head.lower() and named in body
            wait_calm(server)


def test_a_call_fits_whole_or_not_at_all() -> None:
    with running("--max-num-seqs", "2", "--max-num-queued-reqs", "3") as server:
        assert (
            check_error(server.complete(["x"] * 6, max_tokens=2), 400)["code"] == "call_too_large"
        )
        assert len(server.complete(["x"] * 5, max_tokens=2).json()["choices"]) == 5
        with server.stream("x", **LONG) as events:
            next(events)
            check_error(server.complete("x", n=5, max_tokens=2), 503)
            assert len(server.complete(["x"] * 4, max_tokens=2).json()["choices"]) == 4
        wait_calm(server)


def test_tokens_in_the_queue_are_bounded() -> None:
    with running("--max-num-seqs", "1", "--max-num-queued-tokens", "1000") as server:
        with server.stream("x", **LONG) as events, connect(server) as waiting:
            next(events)
            waiting.sendall(request({"prompt": [65] * 900, "max_tokens": 2}))
            wait_until(lambda: usage(server).waiting == 1)
            check_error(server.complete([65] * 200, max_tokens=2), 503)
        wait_calm(server)


def test_waiting_has_a_deadline() -> None:
    with running("--max-num-seqs", "1", "--queue-timeout", "0.5") as server:
        with server.stream("x", **LONG) as events:
            next(events)
            start = time.monotonic()
            response = server.complete("too late", max_tokens=2)
            check_error(response, 503)
            for path in OTHERS:
                check_error(server.http.post(path, json=call_of(path, 2)), 503)
            assert 0.4 < time.monotonic() - start < 8 and response.headers["retry-after"]
            wait_until(lambda: usage(server).waiting == 0, 2)
        wait_calm(server)


def test_calls_have_a_deadline() -> None:
    with running(
        "--max-num-seqs", "4", "--max-model-len", "16384", "--request-timeout", "1"
    ) as server:
        start = time.monotonic()
        check_error(server.complete("slow", max_tokens=16000, ignore_eos=True), 408)
        with server.stream(["a", "b"], max_tokens=16000, ignore_eos=True) as events:
            *_, last = events
        assert "error" in last
        for path, end in (("/v1/messages", "error\n"), ("/v1/responses", "response.failed\n")):
            check_error(server.http.post(path, json=call_of(path, 16000)), 408)
            streamed = server.http.post(path, json=call_of(path, 16000, stream=True))
            assert streamed.text.rpartition("event: ")[2].startswith(end)
        assert time.monotonic() - start < 12
        wait_calm(server)


def test_a_key_has_a_quota_in_all_apis() -> None:
    """Two open calls of any API; a third one is refused until one of them ends."""
    flags = ("--max-num-seqs", "8", "--api-key", KEY, "sk-another-key", "--max-calls-per-key", "2")
    with running(*flags) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        other = {"authorization": "Bearer sk-another-key"}
        for path in APIS:
            bodies = [call_of(path, stream=True)] * 2
            with contextlib.ExitStack() as stack:
                for body in bodies:
                    opened = stack.enter_context(
                        server.http.stream("POST", path, json={"model": MODEL, **body})
                    )
                    assert opened.status_code == 200
                for third in APIS:
                    refused = server.http.post(third, json=call_of(third, 2))
                    check_error(refused, 429)
                    assert refused.headers["retry-after"]
                    assert (
                        server.http.post(third, json=call_of(third, 2), headers=other).status_code
                        == 200
                    )
            wait_calm(server)


def test_the_server_stays_good_after_a_storm(server: Server) -> None:
    with watched(server):
        asyncio.run(statuses(server, 0))
    assert server.complete("after it", max_tokens=3).status_code == 200
