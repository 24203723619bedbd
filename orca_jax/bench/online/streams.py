"""Runs many streaming clients in one thread. Received bytes are stored with their times, and parsed afterwards."""

import asyncio
import functools
import itertools
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from orca_jax.errors import OrcaError
from orca_jax.sim.clock import NUM_DIGITS, age_of


@dataclass(frozen=True)
class Stream:
    """One answer: the times (seconds, monotonic) and texts of its events, and its finish reason."""

    times: Sequence[float]
    texts: Sequence[str]
    finish_reason: str | None

    def ages(self) -> Iterator[tuple[float, float]]:
        """Yield for each group of the clock model the time of its first byte, and its age then, both in seconds."""
        ends = list(itertools.accumulate(map(len, self.texts)))
        text = "".join(self.texts)
        at = text.find(" ")
        while 0 <= at < len(text) - NUM_DIGITS:
            seen = self.times[bisect_left(ends, at + 1)]
            yield seen, age_of(text[at + 1 : at + 1 + NUM_DIGITS], seen)
            at = text.find(" ", at + 1)


class _Client(asyncio.Protocol):
    """One connection with one request; the server closes it after the answer."""

    def __init__(self, request: bytes) -> None:
        self.arrivals: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def run_streams(url: str, bodies: Sequence[dict[str, object]]) -> list[list[tuple[float, bytes]]]:
    """Post all bodies to `/v1/completions` at once. Return the received bytes of each, with their times."""
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    loop = asyncio.get_running_loop()
    requests = [_request(address.netloc, body) for body in bodies]
    connections = await asyncio.gather(
        *(loop.create_connection(functools.partial(_Client, request), host, port) for request in requests)
    )
    clients = [client for _, client in connections]
    await asyncio.gather(*(client.closed for client in clients))
    return [client.arrivals for client in clients]


def read_stream(arrivals: Sequence[tuple[float, bytes]]) -> Stream:
    """Parse the bytes received by one client.

    Raises:
        OrcaError: they are not a complete stream of events.
    """
    times, texts, reason = [], [], None
    done = False
    for moment, event in _events(arrivals):
        if event == b"[DONE]":
            done = True
            continue
        value = json.loads(event)
        if "error" in value:
            raise OrcaError(f"a stream ended with an error: {value['error']['message']}")
        (choice,) = value["choices"]
        times.append(moment)
        texts.append(choice["text"])
        reason = choice["finish_reason"] or reason
    if not done:
        raise OrcaError("a stream ended without [DONE]")
    return Stream(times, texts, reason)


def _request(netloc: str, body: dict[str, object]) -> bytes:
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + payload


def _events(arrivals: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of every event, with the time of its last byte."""
    rest = b""
    for moment, body in _body(arrivals):
        *events, rest = (rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):  # others are comments that keep the connection alive
                yield moment, event.removeprefix(b"data: ")


def _body(arrivals: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the chunks of a chunked answer, with the time of the last byte of each."""
    raw = b"".join(data for _, data in arrivals)
    ends = list(itertools.accumulate(len(data) for _, data in arrivals))
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 ") or b"chunked" not in head.lower():
        raise OrcaError(f"the server answered: {raw[:300].decode(errors='replace') or 'nothing'}")
    at = len(head) + len(separator)
    while (line := raw.find(b"\r\n", at)) >= 0 and (size := int(raw[at:line], 16)):
        at = line + 2 + size + 2
        if at > len(raw):
            return
        yield arrivals[bisect_left(ends, at)][0], raw[line + 2 : at - 2]
