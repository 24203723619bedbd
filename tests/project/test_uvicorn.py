"""The internals of uvicorn and h11 on which `serve/connection.py` and `serve/http_server.py` build.

A failure here after an upgrade names the change. Adapt those modules, then the table, and then the bounds in
pyproject.toml.
"""

import asyncio
import inspect
import re
import tomllib
from importlib.metadata import version
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from tests.project.source import ROOT

SIGNATURES: dict[Any, str] = {
    H11Protocol.__init__: "self, config, server_state, app_state, _loop",
    H11Protocol.connection_made: "self, transport",
    H11Protocol.connection_lost: "self, exc",
    H11Protocol.data_received: "self, data",
    H11Protocol.eof_received: "self",
    H11Protocol.shutdown: "self",
    H11Protocol.pause_writing: "self",
    H11Protocol.resume_writing: "self",
    H11Protocol.on_response_complete: "self",
    H11Protocol.send_400_response: "self, msg",
    H11Protocol._unset_keepalive_if_required: "self",
    H11Protocol._unsupported_upgrade_warning: "self",
    uvicorn.Server.__init__: "self, config",
    uvicorn.Server.serve: "self, sockets",
    uvicorn.Server.startup: "self, sockets",
    uvicorn.Server.shutdown: "self, sockets",
    uvicorn.Server.capture_signals: "self",
    h11.Connection.__init__: "self, our_role, max_incomplete_event_size",
    h11.Connection.next_event: "self",
}
# The code that calls our methods: (method, the calls in its source).
CALLS: list[tuple[Any, tuple[str, ...]]] = [
    (H11Protocol.data_received, ("self.conn.receive_data(data)", "self.handle_events()")),
    (
        H11Protocol.handle_events,
        ("self.conn.next_event()", "except h11.RemoteProtocolError:", "send_400_response("),
    ),
    (H11Protocol.connection_made, ("self.connections.add(self)",)),
    (
        H11Protocol.connection_lost,
        ("self.connections.discard(self)", "self.cycle.disconnected = True"),
    ),
    (RequestResponseCycle.send, ("self.on_response()", "if self.disconnected:")),
    (RequestResponseCycle.receive, ("await self.message_event.wait()", "if self.disconnected")),
    (
        uvicorn.Server._serve,
        ("await self.startup(sockets=sockets)", "await self.shutdown(sockets=sockets)"),
    ),
    (
        uvicorn.Server.shutdown,
        ("for server in self.servers:", "connection.shutdown()", "timeout_graceful_shutdown"),
    ),
]


@pytest.mark.parametrize("method", SIGNATURES, ids=lambda method: method.__qualname__)
def test_signatures(method: Any) -> None:
    assert ", ".join(inspect.signature(method).parameters) == SIGNATURES[method]


@pytest.mark.parametrize(
    ("method", "calls"), CALLS, ids=lambda value: getattr(value, "__qualname__", None)
)
def test_calls(method: Any, calls: tuple[str, ...]) -> None:
    source = inspect.getsource(method)
    assert [call for call in calls if call not in source] == []


def test_attributes() -> None:
    """The attributes that are read or set on instances."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)
    config.load()
    loop = asyncio.new_event_loop()
    protocol = H11Protocol(config, ServerState(), {}, loop)
    loop.close()
    assert isinstance(protocol.conn, h11.Connection) and protocol.loop is loop
    assert {"conn", "cycle", "flow", "loop", "server_state", "transport"} <= vars(protocol).keys()
    assert {"connections", "default_headers"} <= vars(ServerState()).keys()
    assert {"config", "server_state", "should_exit", "started"} <= vars(
        uvicorn.Server(config)
    ).keys()
    assert STATUS_PHRASES[431] == b"Request Header Fields Too Large"
    assert protocol.conn.their_state is h11.IDLE and protocol.conn.trailing_data == (b"", False)
    cycle = inspect.getsource(RequestResponseCycle.__init__)
    assert all(
        f"self.{name} = " in cycle
        for name in ("disconnected", "message_event", "response_complete")
    )


@pytest.mark.parametrize("name", ["uvicorn", "h11"])
def test_the_version_has_an_upper_bound(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (bound,) = re.findall(
        rf"{name}>=[0-9.]+,<0\.([0-9]+)\b", " ".join(project["project"]["dependencies"])
    )
    assert version(name).split(".")[0] == "0" and int(version(name).split(".")[1]) < int(bound)
