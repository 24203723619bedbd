"""How log lines look. Modules log with the standard library; structlog renders what all of them say, once, here.

Fields go into `extra={...}`. What clients send may stand in a line and never makes one.
"""

import json
import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from orca_jax.serve.config import ServerConfig

Format = Literal["text", "json"]


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


def make_formatter(log_format: Format, process: str) -> logging.Formatter:
    """A formatter of one line for each record, with the request's id where one is being answered."""

    def add_process(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**event, "process": process}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
        structlog.processors.format_exc_info,
    ]
    return structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _json_line if log_format == "json" else _text_line,
        ],
        foreign_pre_chain=shared,
        keep_exc_info=False,
    )


def printable(text: str) -> str:
    """The text with escapes for whatever moves a cursor, ends a line or is not seen."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _json_line(logger: WrappedLogger, method: str, event: EventDict) -> str:
    # ensure_ascii escapes all line ends that Unicode knows, and the terminals' control characters.
    return json.dumps(event, default=str, ensure_ascii=True)


def _text_line(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """`2026-01-31T12:00:00.000000Z info orca_jax.serve.x: what happened name=value`, then a traceback, indented."""
    fields = dict(event)
    head = [printable(str(fields.pop(name, "-"))) for name in ("timestamp", "level", "logger", "event")]
    trace = str(fields.pop("exception", ""))
    fields.pop("process")  # one terminal, and the engine's loggers have names of their own
    line = f"{head[0]} {head[1]} {head[2]}: {head[3]}"
    line += "".join(f" {name}={_value(value)}" for name, value in sorted(fields.items()))
    return line + "".join(f"\n    | {printable(row)}" for row in trace.splitlines())


def _value(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(printable(text))
