"""Admission: bounds of the queue, deadlines, and readers that do not read."""

import asyncio
import collections
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.link.admission import Admission, Deadlines
from orca_jax.link.client import MAX_UNREAD, EngineClient
from orca_jax.link.errors import CallTooLarge, LinkError, Overloaded, TimedOut, Unavailable
from orca_jax.link.open_files import raise_file_limit
from orca_jax.link.process_link import EngineLink
from orca_jax.link.wire import Abort, Message, Ready, Rejected, Submit, Updates
from orca_jax.serve.openai.errors import ApiError, api_error
from orca_jax.server_config import ServerConfig
from orca_jax.values.request import RequestUpdate, SamplingParams
from tests.openai.test_bad_input import check_error
from tests.serve.running import MODEL, Server, running, wait_until

LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True}
READY = Ready("", "byte", vocab_size=257, max_model_len=64, n_slots=1000, num_rows=2)


class FakeLink(EngineLink):
    """A link without a process; it keeps the messages sent."""

    def __init__(self) -> None:
        super().__init__(lambda message: None)
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


def serving(**settings: Any) -> tuple[EngineClient, FakeLink]:
    client, link = EngineClient(ServerConfig(**settings)), FakeLink()
    client.attach(link)
    client.serve(READY)
    return client, link


def asked(client: EngineClient, *lengths: int) -> list[Submit]:
    return [Submit(client.new_request_id(), [1] * length, SamplingParams(4)) for length in lengths]


def as_answer(error: LinkError, overload_status: int = 503) -> ApiError:
    """The answer that an HTTP client gets."""
    return api_error(error, overload_status)


def update(request_id: str, finish: Any = None, ids: tuple[int, ...] = (7,)) -> Updates:
    return Updates([RequestUpdate(request_id, ids, finish)], running=1, waiting=0)


def submitted(link: FakeLink) -> list[str]:
    return [message.request_id for message in link.sent if isinstance(message, Submit)]


def aborted(link: FakeLink) -> list[str]:
    return [message.request_id for message in link.sent if isinstance(message, Abort)]


@given(
    st.lists(
        st.one_of(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 20)),
        max_size=60,
    ),
    st.integers(0, 4),
    st.integers(1, 25),
)
def test_admission_counts(events: list[list[int] | int], max_queued: int, max_tokens: int) -> None:
    """A call is admitted if and only if it fits. A number makes a request start, or later end."""
    admission = Admission(
        ServerConfig(max_num_queued_reqs=max_queued, max_num_queued_tokens=max_tokens)
    )
    admission.num_rows = 2
    waiting: list[int] = []
    started = 0
    for event in events:
        if isinstance(event, list):
            fits = (
                len(waiting) + started + len(event) <= 2 + max_queued
                and sum(waiting) + sum(event) <= max_tokens
            )
            try:
                admission.admit(event)
            except LinkError as error:
                assert not fits
                never = len(event) > 2 + max_queued or sum(event) > max_tokens
                assert isinstance(error, CallTooLarge if never else Overloaded)
                answer = as_answer(error)
                assert (answer.status, "retry-after" in answer.headers) == (
                    (400, False) if never else (503, True)
                )
            else:
                assert fits
                waiting += event
        elif waiting and event % 2:
            admission.started(waiting.pop(event % len(waiting)))
            started += 1
        elif waiting and event % 3:
            admission.left(waiting.pop(event % len(waiting)))
        elif started:
            admission.left(0)
            started -= 1
        assert (admission.open_requests, admission.waiting_tokens) == (
            len(waiting) + started,
            sum(waiting),
        )


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.anyio
async def test_calls_are_admitted_whole_or_not_at_all(status: Any) -> None:
    client, link = serving(max_num_queued_reqs=2, overload_status=status)
    async with client.open(asked(client, 3, 3, 3)) as first:
        with pytest.raises(Overloaded) as caught:
            client.open(asked(client, 1, 1))
        answer = as_answer(caught.value, status)
        assert (answer.status, answer.code) == (status, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert len(submitted(link)) == 3
        client.take_message(update(submitted(link)[0], "length"))
        async with client.open(asked(client, 1)) as second:
            assert client.num_calls == 2
            second.abort(submitted(link)[3])
            client.take_message(Rejected(submitted(link)[1], "no", "prompt"))
            assert [message.request_id for message in await first.receive()] == submitted(link)[:2]
    assert client.num_calls == 0 and client.idle.is_set()
    assert sorted(aborted(link)) == sorted([submitted(link)[2], submitted(link)[3]]), (
        "the open ones, once each"
    )
    async with client.open(asked(client, 1, 1, 1, 1)):
        assert client.num_calls == 1, "rows and queue are free again"


@pytest.mark.anyio
async def test_prompts_wait_within_a_budget_of_tokens() -> None:
    client, link = serving(max_num_queued_tokens=10)
    async with client.open(asked(client, 6)), client.open(asked(client, 4)):
        with pytest.raises(Overloaded) as caught:
            client.open(asked(client, 1))
        assert (as_answer(caught.value).status, caught.value.code) == (503, "overloaded")
        client.take_message(update(submitted(link)[1]))
        async with client.open(asked(client, 4)):
            with pytest.raises(Overloaded, match="too many prompt tokens"):
                client.open(asked(client, 1))
    with pytest.raises(CallTooLarge) as refused:
        client.open(asked(client, 11))
    assert as_answer(refused.value).status == 400, "a call larger than the queue"


@pytest.mark.anyio
async def test_a_reader_that_does_not_read_loses_its_requests() -> None:
    client, link = serving()
    async with client.open(asked(client, 1, 1)) as call:
        one, other = submitted(link)
        for _ in range(2 * MAX_UNREAD):
            client.take_message(update(one))
        assert aborted(link) == []
        client.take_message(update(one))
        assert sorted(aborted(link)) == [one, other], "aborts are sent before the reader wakes up"
        client.take_message(update(other))
        with pytest.raises(TimedOut) as caught:
            await call.receive()
        assert caught.value.code == "client_too_slow"


@pytest.mark.parametrize(
    ("asked_for", "limits", "code"),
    [
        (Deadlines(queue=0.05), {}, "queue_timeout"),
        (Deadlines(), {"queue_timeout": 0.05}, "queue_timeout"),
        (Deadlines(queue=60), {"queue_timeout": 0.05}, "queue_timeout"),
        (Deadlines(total=0.05), {"request_timeout": 60}, "timeout"),
        (Deadlines(queue=60, total=60), {"request_timeout": 0.05}, "timeout"),
    ],
)
@pytest.mark.anyio
async def test_the_stricter_deadline_counts(
    asked_for: Deadlines, limits: dict[str, Any], code: str
) -> None:
    client, link = serving(**limits)
    async with client.open(asked(client, 1, 1), asked_for) as call:
        client.take_message(update(submitted(link)[0]))
        assert [message.request_id for message in await call.receive()] == submitted(link)[:1]
        with pytest.raises(TimedOut) as caught:
            await asyncio.wait_for(call.receive(), 60)
    assert caught.value.code == code
    assert ("retry-after" in as_answer(caught.value).headers) == (code == "queue_timeout")
    assert len(aborted(link)) == 2


@pytest.mark.anyio
async def test_a_request_with_an_update_waits_no_more() -> None:
    client, link = serving()
    async with client.open(asked(client, 1), Deadlines(queue=0.05)) as call:
        client.take_message(update(submitted(link)[0]))
        await call.receive()
        await asyncio.sleep(0.15)
        client.take_message(update(submitted(link)[0], "stop"))
        (message,) = await call.receive()
        assert isinstance(message, RequestUpdate) and message.finish_reason == "stop"


@pytest.mark.anyio
async def test_states_and_what_they_refuse() -> None:
    client, link = serving()
    async with client.open(asked(client, 1)) as call:
        client.drain()
        with pytest.raises(Unavailable, match="shutting down"):
            client.open(asked(client, 1))
        client.take_message(update(submitted(link)[0]))
        assert len(await call.receive()) == 1, "the open call continues"
        client.lose("hung")
        with pytest.raises(Unavailable, match="does not respond"):
            await call.receive()
        client.lose("dead")
        assert state_of(client) == "hung", "hung is the cause, dead the consequence"
        client.attach(FakeLink())
        assert state_of(client) == "loading"
    client.stop()
    client.serve(READY)
    assert state_of(client) == "stopping"


def state_of(client: EngineClient) -> str:
    return client.state


async def one_of_many(
    server: Server, body: bytes, writers: list[asyncio.StreamWriter]
) -> tuple[int, str | None]:
    """Send a call; return status and error code as soon as they arrive. The connection stays open."""
    url = server.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writers.append(writer)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n"
    writer.write(head.encode() + b"\r\n" + body)
    status = int((await reader.readline()).split()[1])
    headers = httpx.Headers([line.split(b": ", 1) async for line in _lines(reader)])
    if status == 200:
        return status, None
    error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
    assert headers["retry-after"] and error["type"] == "server_error"
    return status, error["code"]


async def _lines(reader: asyncio.StreamReader) -> Any:
    while (line := (await reader.readline()).rstrip(b"\r\n")) != b"":
        yield line


@pytest.mark.slow
@pytest.mark.chaos
def test_the_queue_is_exact_under_a_thousand_clients() -> None:
    """Rows and queue are full, and all other calls are refused at once."""
    with running("--max-num-seqs", "4", "--max-num-queued-reqs", "16") as server:
        body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True, "n": 2, **LONG}).encode()

        raise_file_limit()

        async def ask() -> None:
            writers: list[asyncio.StreamWriter] = []
            tasks = [asyncio.create_task(one_of_many(server, body, writers)) for _ in range(1000)]
            pending = set(tasks)
            while len(pending) > 8:  # the queued ones get their headers with their first token
                _, pending = await asyncio.wait(
                    pending, return_when=asyncio.FIRST_COMPLETED, timeout=60
                )
            results = [task.result() for task in tasks if task.done()]
            assert len(results) == 992
            assert collections.Counter(results) == {(200, None): 2, (503, "queue_full"): 990}
            health = await asyncio.to_thread(lambda: server.health().json())
            assert (health["running"], health["waiting"]) == (4, 16)
            assert server.http.get("/load").json() == {"server_load": 10}
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)
            for writer in writers:
                writer.close()
            await asyncio.gather(
                *(writer.wait_closed() for writer in writers), return_exceptions=True
            )

        asyncio.run(ask())
        server.wait_idle()


def test_deadlines_in_queue_and_running() -> None:
    limits = ("--queue-timeout", "1", "--request-timeout", "3", "--overload-status", "429")
    with running("--max-num-seqs", "2", *limits) as server, ThreadPoolExecutor(2) as threads:
        with server.stream("running", **LONG) as events:
            next(events)
            plain = threads.submit(server.complete, "plain", **LONG)
            wait_until(lambda: server.health().json()["running"] == 2)
            queued = threads.submit(server.complete, "queued")
            *_, last = events
        assert (last["error"]["code"], last["error"]["type"]) == (
            "timeout",
            "invalid_request_error",
        )
        waited, late = queued.result(), plain.result()
        assert check_error(waited, 503)["code"] == "queue_timeout" and waited.headers["retry-after"]
        assert (
            check_error(late, 408)["code"] == "timeout"
            and late.headers["x-should-retry"] == "false"
        )
        wait_until(lambda: server.health().json()["running"] == 0)
