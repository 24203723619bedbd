"""The process that renders chat templates: a model's template is a program that somebody else wrote.

`template.py` starts it as a script and talks to it over a socket on file descriptor 0. Jinja's sandbox keeps templates
from Python's insides; this process keeps them from everything else. It cannot open a file or a socket, its memory and
processor time are limited, and it is killed where it takes too long. It ends when the other end of the socket closes.

It imports Jinja and the standard library only, so that it starts in a tenth of a second.
"""

import codecs
import json
import pprint  # noqa: F401 - for Jinja, which imports some modules late, when this process cannot open files any more
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug  # needed by every error
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_OUTPUT = 4 * 2**20  # characters of a rendered prompt
MAX_FRAME = 64 * 2**20  # bytes; more than any body and any output that passes its own limit
MAX_MESSAGE = 500  # characters of an error
MEMORY = 512 * 2**20  # bytes of address space beyond those of the start
CPU_SECONDS = 6  # for one answer: a little more than the parent's clock allows, for when the parent has gone

_LENGTH = struct.Struct(">I")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Frame = dict[str, Any]


def send_frame(connection: socket.socket, value: Frame) -> None:
    """Write a JSON object, its length first.

    Raises:
        ValueError: it is larger than `MAX_FRAME`, or cannot be written as JSON; nothing was sent.
        RecursionError: it is nested too deeply; nothing was sent.
        OSError: the other end has gone.
    """
    payload = json.dumps(value, ensure_ascii=False, check_circular=False).encode("utf-8", "surrogatepass")
    if len(payload) > MAX_FRAME:
        raise ValueError(f"more than {MAX_FRAME} bytes")
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket, budget: Callable[[], float | None] = lambda: None) -> Frame | None:
    """Read a JSON object; None where the other end has gone.

    Args:
        connection: a stream socket.
        budget: the seconds that are left, asked before each read; None for no limit.

    Raises:
        TimeoutError: nothing came within the budget.
        ValueError: what came is no frame.
    """
    header = _receive(connection, _LENGTH.size, budget)
    if header is None:
        return None
    (size,) = _LENGTH.unpack(header)
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    payload = _receive(connection, size, budget)
    if payload is None:
        return None
    frame = json.loads(payload.decode("utf-8", "surrogatepass"))
    if not isinstance(frame, dict):
        raise ValueError("a frame that is no object")
    return frame


def _receive(connection: socket.socket, size: int, budget: Callable[[], float | None]) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(budget())
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            return None
        received += piece
    return bytes(received)


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's words for training; rendering is not changed."""

    tags = {"generation"}  # noqa: RUF012 - so it is declared in the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call that returns its contents, with a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes what HTML cannot hold, and a prompt is no HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Refused(jinja2.TemplateError):
    """The template refuses the conversation, in its own words."""


def _raise(message: object) -> None:
    raise Refused(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def render(template: jinja2.Template, context: Frame) -> Frame:
    """The answer to one request: the text, or why there is none."""
    try:
        return {"text": "".join(_limited(template.generate(context)))}
    except Refused as error:
        return {"error": _words(error)}
    except Exception as error:  # a template may fail in any way
        return {"error": f"{type(error).__name__}: {_words(error)}".removesuffix(": ")}


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_OUTPUT:
            raise Refused(f"the rendered prompt has more than {MAX_OUTPUT} characters")
        if piece:
            yield piece


def _words(error: Exception) -> str:
    """What an error says, without paths and addresses."""
    text = str(error.strerror) if isinstance(error, OSError) else str(error)
    return _ADDRESS.sub("", text[: 2 * MAX_MESSAGE])[:MAX_MESSAGE]


def compile_all(sources: dict[str, str]) -> dict[str, jinja2.Template]:
    """The templates by name.

    Raises:
        ValueError: one of them is wrong; says where.
    """
    made, compiled = environment(), {}
    for name, source in sources.items():
        try:
            compiled[name] = made.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {_words(Exception(error.message))}") from error
        except Exception as error:  # recursion, memory, blocks that Python cannot nest
            raise ValueError(f"{type(error).__name__}: {_words(error)}") from error
    return compiled


def _enclose() -> None:
    """Give up files, sockets and most of the memory, for good."""
    time.localtime()  # reads the time zone's file while files can be read
    codecs.lookup("unicode_escape")  # and this one a module, for strings in templates
    limit = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS does not limit address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space() -> int:
    """Bytes of address space in use; a guess on the safe side where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return MEMORY


def _renew_cpu_limit() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_SECONDS, hard))


def main() -> int:
    """Answer until the other end of the socket closes; the first frame holds the templates."""
    connection = socket.socket(fileno=0)
    _enclose()
    templates: dict[str, jinja2.Template] = {}
    while True:
        _renew_cpu_limit()
        try:
            frame = receive_frame(connection)
            if frame is None:
                return 0
            if "templates" in frame:
                templates = compile_all(frame["templates"])
                answer: Frame = {"text": ""}
            else:
                answer = render(templates[frame["template"]], frame["context"])
        except MemoryError:  # in the middle of a frame, perhaps: a new process is the way back
            return 1
        except (ValueError, RecursionError) as error:
            answer = {"error": _words(error)}
        send_frame(connection, answer)


if __name__ == "__main__":
    sys.exit(main())
