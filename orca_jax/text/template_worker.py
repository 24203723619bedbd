"""The process that renders chat templates. A template is a program of the author of the model, and is not trusted.

`template.py` starts this file as a script, and exchanges frames with it over a socket on file descriptor 0. The sandbox
of Jinja protects the internals of Python; this process protects everything else. It cannot open files or sockets, its
memory and processor time are limited, and `template.py` kills it after a timeout. It exits when the other end of the
socket closes.

It imports only Jinja and the standard library, so that it starts in a tenth of a second.
"""

import codecs
import html  # noqa: F401 - Jinja imports it late, when this process cannot open files any more
import json
import pprint  # noqa: F401 - the same
import re
import resource
import socket
import struct
import sys
import textwrap  # noqa: F401 - the same
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
import jinja2.constants  # noqa: F401
import jinja2.debug  # noqa: F401 - needed by every error
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_OUTPUT = 4 * 2**20  # characters of a rendered prompt
MAX_FRAME = 64 * 2**20  # bytes; larger than any request body and any output within their limits
MAX_MESSAGE = 500  # characters of an error
MEMORY = 512 * 2**20  # bytes of address space in addition to those at the start
CPU_SECONDS = 5  # per answer; a correct template needs less than 1

_LENGTH = struct.Struct(">I")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Frame = dict[str, Any]


def send_frame(connection: socket.socket, value: Frame) -> None:
    """Send the length of a JSON object, then the object.

    Raises:
        ValueError: the object is larger than `MAX_FRAME`, or cannot be encoded as JSON; nothing was sent.
        RecursionError: the object is nested too deeply; nothing was sent.
        OSError: the other end is closed.
    """
    payload = json.dumps(value, ensure_ascii=False, check_circular=False).encode(
        "utf-8", "surrogatepass"
    )
    if len(payload) > MAX_FRAME:
        raise ValueError(f"more than {MAX_FRAME} bytes")
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(
    connection: socket.socket, budget: Callable[[], float | None] = lambda: None
) -> Frame | None:
    """Receive a JSON object, or None if the other end is closed.

    Args:
        connection: a stream socket.
        budget: returns the remaining seconds, or None for no limit; called before each read.

    Raises:
        TimeoutError: no data arrived within the budget.
        ValueError: the data are not a frame.
    """
    header = _receive(connection, _LENGTH.size, budget)
    if header is None:
        return None
    (size,) = _LENGTH.unpack(header)
    if size > MAX_FRAME:
        raise ValueError(f"a frame has {size} bytes, more than {MAX_FRAME}")
    payload = _receive(connection, size, budget)
    if payload is None:
        return None
    frame = json.loads(payload.decode("utf-8", "surrogatepass"))
    if not isinstance(frame, dict):
        raise ValueError("a frame is not a JSON object")
    return frame


def _receive(
    connection: socket.socket, size: int, budget: Callable[[], float | None]
) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(budget())
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            return None
        received += piece
    return bytes(received)


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; it does not change the rendering."""

    tags = {"generation"}  # noqa: RUF012 - declared like this in the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block as a call that renders its contents, in its own scope as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return Jinja's environment with the settings of transformers for chat templates."""
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
    # The filter of Jinja escapes for HTML, and a prompt is not HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class TooLong(jinja2.TemplateError):
    """The rendered prompt has more than `MAX_OUTPUT` characters."""


class TemplateRefusal(jinja2.TemplateError):
    """The template rejects the conversation; the message is that of the template."""


def _raise(message: object) -> None:
    raise TemplateRefusal(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def render(template: jinja2.Template, context: Frame) -> Frame:
    """Return the answer to one frame: the text, an error, or `is_too_long`."""
    try:
        return {"text": "".join(_limited(template.generate(context)))}
    except TooLong:
        return {"is_too_long": True}
    except TemplateRefusal as error:
        return {"error": _words(error)}
    except Exception as error:  # a template may fail in any way
        return {"error": f"{type(error).__name__}: {_words(error)}".removesuffix(": ")}


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_OUTPUT:
            raise TooLong
        if piece:
            yield piece


def _words(error: Exception) -> str:
    """Return the message of an error, without paths and addresses."""
    text = str(error.strerror) if isinstance(error, OSError) else str(error)
    return _ADDRESS.sub("", text[: 2 * MAX_MESSAGE])[:MAX_MESSAGE]


def compile_all(sources: dict[str, str]) -> dict[str, jinja2.Template]:
    """Compile templates by name.

    Raises:
        ValueError: a template is wrong; the message names the line if it is known.
    """
    made = environment()
    compiled = {}
    for name, source in sources.items():
        try:
            compiled[name] = made.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {_words(Exception(error.message))}") from error
        except Exception as error:  # recursion, memory, or too deeply nested blocks
            raise ValueError(f"{type(error).__name__}: {_words(error)}") from error
    return compiled


def _enclose() -> None:
    """Give up the rights to files, sockets and most of the memory."""
    time.localtime()  # reads the file of the time zone while files can be read
    codecs.lookup("unicode_escape")  # imports a module, for strings in templates
    limit = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS does not limit address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space() -> int:
    """Return the bytes of address space in use, or a safe guess if the system does not report them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return MEMORY


def _renew_cpu_limit() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_SECONDS, hard)
    )


def main() -> int:
    """Answer frames until the other end of the socket closes. The first frame holds the templates."""
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
        except MemoryError:  # perhaps in the middle of a frame, so a new process is needed
            return 1
        except (ValueError, RecursionError) as error:
            answer = {"error": _words(error)}
        send_frame(connection, answer)


if __name__ == "__main__":
    sys.exit(main())
