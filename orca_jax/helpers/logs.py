"""The format of log lines. Modules log with the standard library; the formatters here render all records.

Fields go into `extra={...}`, and structlog's context variables are fields of every line within a call. Text of clients
may appear in a line, but cannot add a line.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TextIO

import structlog

logger = logging.getLogger(__name__)

Format = Literal["text", "json"]
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
}  # the standard fields of records, all others are from `extra`


def install_handler(
    log_format: Format, *, process: str = "server", stream: TextIO | None = None
) -> None:
    """Send the log of this process to standard error in a format, and replace earlier handlers.

    Libraries log warnings and errors only. `process` is a field of each line.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(make_formatter(log_format, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("orca_jax").setLevel(logging.INFO)
    # No line shows these, and each of them costs at least a system call.
    logging.logProcesses = logging.logThreads = logging.logMultiprocessing = False


def end_at_failed_threads(end: Callable[[str], object]) -> Callable[[], None]:
    """Log each exception that leaves a thread of this process, SystemExit too, and pass its reason to `end`.

    By default such a thread ends alone, and its process goes on without heartbeats or messages.

    Args:
        end: ends the process; called in the thread that failed. The reason has no texts of callers.

    Returns:
        A function that restores the former handling of exceptions.
    """
    before = threading.excepthook

    def failed(args: threading.ExceptHookArgs) -> None:
        name = getattr(args.thread, "name", "without a name")
        error = args.exc_value or args.exc_type()
        logger.error("the thread %s failed", name, exc_info=error)
        end(f"its thread {name!r} ended with {args.exc_type.__name__}")

    def restore() -> None:
        threading.excepthook = before

    threading.excepthook = failed
    return restore


def make_formatter(log_format: Format, process: str) -> logging.Formatter:
    """A formatter that renders a record as one line, with the id of the current call."""
    return _Formatter(_json_line if log_format == "json" else _text_line, process)


def printable(text: str) -> str:
    """The text with escapes for invisible characters, line ends and cursor movements."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Formatter(logging.Formatter):
    """Renders records. structlog's own formatter copies each record, and every request logs two."""

    def __init__(self, render: Callable[[dict[str, object]], str], process: str) -> None:
        super().__init__()
        self._render = render
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the lines of a traceback, without a final line end."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "timestamp": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "event": record.getMessage(),
            **structlog.contextvars.get_contextvars(),
        }
        line |= {name: value for name, value in vars(record).items() if not _is_own(name)}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return self._render(line)


def _is_own(name: str) -> bool:
    """True for attributes of a record that are no fields; libraries add some that begin with an underscore."""
    return name in _OWN or name.startswith("_")


def _json_line(line: dict[str, object]) -> str:
    # ensure_ascii escapes all line ends of Unicode, and control characters of terminals.
    return json.dumps(line, default=str, ensure_ascii=True)


def _text_line(line: dict[str, object]) -> str:
    """`2026-01-31T12:00:00.000000Z info orca_jax.serve.x: what happened name=value`, then a traceback, indented."""
    fields = dict(line)
    trace = str(fields.pop("exception", ""))
    del fields["process"]  # the names of the loggers tell the engine from the server
    head = [printable(str(fields.pop(name))) for name in ("timestamp", "level", "logger", "event")]
    parts = [
        "{} {} {}: {}".format(*head),
        *(f"{name}={_value(value)}" for name, value in fields.items()),
    ]
    return "".join([" ".join(parts), *(f"\n    | {printable(row)}" for row in trace.splitlines())])


def _value(value: object) -> str:
    text = str(value)
    is_plain = text and text.isprintable() and not (" " in text or '"' in text or "=" in text)
    if is_plain:
        return text
    return json.dumps(printable(text), ensure_ascii=False)
