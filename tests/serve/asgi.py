"""Calls an ASGI application as an HTTP server does, with paths that client libraries would normalise."""

import asyncio
import json
from typing import Any, NamedTuple
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

Pairs = list[tuple[bytes, bytes]]


class Answer(NamedTuple):
    status: int
    headers: Pairs
    body: bytes

    def header(self, name: str) -> str | None:
        """The only value of a header; None if the header is missing."""
        values = [value.decode() for key, value in self.headers if key.decode().lower() == name]
        assert len(values) <= 1, f"{name} is there twice"
        return values[0] if values else None

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert isinstance(error, dict)
        return error


def http_scope(
    target: str, method: str = "GET", headers: Pairs | None = None, root_path: str = ""
) -> dict[str, Any]:
    """The scope that uvicorn makes of a request line; `target` is the raw path."""
    raw, _, query = target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": root_path + unquote(raw),
        "raw_path": (root_path + raw).encode(),
        "query_string": query.encode(),
        "root_path": root_path,
        "headers": headers or [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }


def call(
    app: ASGIApp,
    target: str,
    method: str = "GET",
    headers: Pairs | None = None,
    *,
    root_path: str = "",
) -> Answer:
    """Make one call; return its whole answer."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await app(http_scope(target, method, headers, root_path), receive, send)

    asyncio.run(run())
    start, *rest = sent
    return Answer(
        start["status"],
        list(start["headers"]),
        b"".join(message.get("body", b"") for message in rest),
    )


def bearer(key: str) -> Pairs:
    return [(b"authorization", f"Bearer {key}".encode())]
