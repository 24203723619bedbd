"""How log lines look. Modules log with the standard library, and what they say is rendered here, once for all.

Fields go into `extra={...}`, and structlog's context variables are fields of every line within a call. What clients
send may stand in a line and never makes one.
"""

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TextIO

import structlog

from orca_jax.server_config import ServerConfig

Format = Literal["text", "json"]
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}  # of records, beside `extra`


def configure_logging(config: ServerConfig) -> None:
    """Send the front end's log to standard error, as `--log-format` says. Replaces what was there."""
    install_handler(config.log_format)


def install_handler(log_format: Format, *, process: str = "server", stream: TextIO | None = None) -> None:
    """Render all that this process logs, of libraries warnings and errors. `process` is a field of each line."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(make_formatter(log_format, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("orca_jax").setLevel(logging.INFO)
    # No line shows these, and each would cost a system call or more.
    logging.logProcesses = logging.logThreads = logging.logMultiprocessing = False


def make_formatter(log_format: Format, process: str) -> logging.Formatter:
    """A formatter of one line for each record, with the call's id where one is being answered."""
    return _Formatter(_json_line if log_format == "json" else _text_line, process)


def printable(text: str) -> str:
    """The text with escapes for whatever moves a cursor, ends a line or is not seen."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Formatter(logging.Formatter):
    """Not structlog's own, which copies each record: every request has two lines."""

    def __init__(self, render: Callable[[dict[str, object]], str], process: str) -> None:
        super().__init__()
        self._render = render
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The whole line, or with a traceback lines, without the last end."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "timestamp": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "event": record.getMessage(),
            **structlog.contextvars.get_contextvars(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return self._render(line)


def _json_line(line: dict[str, object]) -> str:
    # ensure_ascii escapes all line ends that Unicode knows, and the terminals' control characters.
    return json.dumps(line, default=str, ensure_ascii=True)


def _text_line(line: dict[str, object]) -> str:
    """`2026-01-31T12:00:00.000000Z info orca_jax.serve.x: what happened name=value`, then a traceback, indented."""
    fields = dict(line)
    trace = str(fields.pop("exception", ""))
    del fields["process"]  # one terminal, and the engine's loggers have names of their own
    head = [printable(str(fields.pop(name))) for name in ("timestamp", "level", "logger", "event")]
    parts = ["{} {} {}: {}".format(*head), *(f"{name}={_value(value)}" for name, value in fields.items())]
    return "".join([" ".join(parts), *(f"\n    | {printable(row)}" for row in trace.splitlines())])


def _value(value: object) -> str:
    text = str(value)
    is_plain = text and text.isprintable() and not (" " in text or '"' in text or "=" in text)
    return text if is_plain else json.dumps(printable(text), ensure_ascii=False)
