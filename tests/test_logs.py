"""Log lines: exactly one per record, for any content."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_jax.helpers.logs import make_formatter, printable
from orca_jax.serve.request_context import RequestContext
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from tests.serve.asgi import call

FORGED = "fine\n2026-01-01T00:00:00.000000Z error orca_jax: forged"
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class Log:
    """A new logger in the format of the server."""

    def __init__(self, log_format: Any) -> None:
        self.stream = io.StringIO()
        self.logger = logging.Logger("orca_jax.test", logging.DEBUG)
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(make_formatter(log_format, "server"))
        self.logger.addHandler(handler)

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def json_log() -> tuple[Log, Any]:
    log = Log("json")
    return log, lambda: [json.loads(line) for line in log.text.splitlines()]


def test_json_line() -> None:
    log, lines = json_log()
    log.logger.warning("%d of %s", 3, "x", extra={"request_id": "req_1", "ttft_ms": 1.5})
    (line,) = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("timestamp"))
    assert line == {
        **{"event": "3 of x", "level": "warning", "logger": "orca_jax.test"},
        **{"process": "server", "request_id": "req_1", "ttft_ms": 1.5},
    }


def test_text_line() -> None:
    log = Log("text")
    log.logger.info(
        "request ended", extra={"request_id": "req_1", "reason": "a b", "empty": "", "ms": 2.5}
    )
    head, _, rest = log.text.partition(" ")
    assert head.endswith("Z")
    assert (
        rest == 'info orca_jax.test: request ended request_id=req_1 reason="a b" empty="" ms=2.5\n'
    )


@pytest.mark.parametrize("log_format", ["text", "json"])
@settings(deadline=None)
@given(
    said=st.text(), field=st.text() | st.sampled_from([FORGED, LINE_ENDS, "\x1b[2J", "\u202etxt"])
)
def test_nothing_makes_a_line(log_format: Any, said: str, field: str) -> None:
    log = Log(log_format)
    log.logger.info("%s", said, extra={"model": field})
    assert log.text.endswith("\n")
    line = log.text[:-1]
    assert line.isprintable(), "a terminal would interpret the line"
    if log_format == "json":
        assert json.loads(line)["model"] == field


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_traceback_forges_nothing(log_format: Any) -> None:
    log = Log(log_format)
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.logger.exception("it failed")
    first, *rest = log.text.splitlines()
    if log_format == "json":
        assert not rest and FORGED in json.loads(first)["exception"]
    else:
        assert "it failed" in first and any("forged" in line for line in rest)
        assert all(line.startswith("    | ") for line in rest)


@settings(deadline=None)
@given(st.text())
def test_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


def test_every_line_of_a_call_has_its_id() -> None:
    log, lines = json_log()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        log.logger.info("within")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    wrapped: ASGIApp = RequestContext(app, ServerObserver(ServerConfig()))
    for name in ("one", "two"):
        call(wrapped, "/x", headers=[(b"x-request-id", name.encode())])
    log.logger.info("outside")
    assert [line.get("request_id") for line in lines()] == ["one", "two", None]


def test_own_id_wins_over_the_calls() -> None:
    log, lines = json_log()
    with structlog.contextvars.bound_contextvars(request_id="call"):
        log.logger.info("x", extra={"request_id": "engine's"})
    assert lines()[0]["request_id"] == "engine's"


PROGRAM = """
import logging, sys, warnings
from orca_jax.helpers.logs import install_handler
for log_format in ("text", "json"):
    install_handler(log_format)
    logging.getLogger("orca_jax.serve.x").info("ours")
    logging.getLogger("orca_jax.serve.x").debug("too much")
    logging.getLogger("uvicorn.error").info("too much")
    logging.getLogger("uvicorn.error").error("theirs")
    warnings.warn("a warning")
"""


@pytest.fixture(scope="module")
def configured() -> Iterator[list[str]]:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "", "standard output is for the address"
    yield done.stderr.splitlines()


def test_libraries_look_the_same(configured: list[str]) -> None:
    text, json_lines = configured[:3], [json.loads(line) for line in configured[3:]]
    said = [line.partition(" ")[2] for line in text]
    assert said[:2] == ["info orca_jax.serve.x: ours", "error uvicorn.error: theirs"]
    assert said[2].startswith("warning py.warnings:") and "a warning" in said[2]
    assert [line["event"] for line in json_lines[:2]] == ["ours", "theirs"]
    assert "a warning" in json_lines[2]["event"] and len(json_lines) == 3
