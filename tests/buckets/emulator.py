"""A store of objects on this machine: it speaks as Google Cloud Storage, as S3, and as a plain web server."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from tests.hub.fake_hub import answering

BUCKET = "bucket"
TOKEN = "token-of-tests"
SECRET = "secret-of-tests"

Fault = Literal["reset", "cut", "moved", "whole"] | int
"""A connection that ends, a body that ends, a part from another place, all bytes instead of a part, or a status."""


@dataclass
class Emulator:
    """The state of the store.

    Attributes:
        url: its address.
        objects: the bytes by their keys, in one bucket.
        generations: the versions of objects, of which each write makes another.
        requests: the keys of all requests, in order.
        sent: the bytes sent of each object.
        fault: gives the fault of a request by its key and the number of requests for the key before; None for none.
        latency: seconds before each answer.
        keys_seen: credentials that came with requests.
    """

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    generations: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    fault: Callable[[str, int], Fault | None] = lambda key, number: None
    latency: float = 0.0
    keys_seen: set[str] = field(default_factory=set)

    def write(self, key: str, content: bytes) -> None:
        """Put an object in place of an earlier one."""
        self.objects[key] = content
        self.generations[key] += 1

    def put(self, folder: Path, prefix: str) -> None:
        """Copy a folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.write(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def forget(self) -> None:
        """Begin to count anew."""
        self.requests.clear()
        self.sent.clear()


@contextmanager
def running(store: Emulator) -> Iterator[Emulator]:
    """Serve until the end of the block."""

    class Handler(_Handler):
        state = store

    with answering(_Server(("127.0.0.1", 0), Handler)) as store.url:
        yield store


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections at once


class _Handler(BaseHTTPRequestHandler):
    state: Emulator
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    timeout = 5

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *words: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        state = self.state
        state.keys_seen.add(self.headers.get("Authorization", ""))
        url = urlsplit(self.path)
        *_, key = unquote(url.path).split(f"/{BUCKET}/", 1)
        key = key.removeprefix("o/") if url.path.startswith("/storage/") else key
        number = state.requests.count(key)
        state.requests.append(key)
        time.sleep(state.latency)
        fault = state.fault(key, number)
        if fault == "reset":
            self.close_connection = True
        elif isinstance(fault, int):
            self._send(
                fault,
                f"<Error><Message>{self.headers.get('Authorization')}</Message></Error>".encode(),
            )
        elif key not in state.objects:
            self._send(404, b"")
        elif "alt=json" in url.query:
            size = str(len(state.objects[key]))
            described = {"name": key, "bucket": BUCKET, "size": size}
            self._send(
                200, json.dumps(described | {"generation": str(state.generations[key])}).encode()
            )
        else:
            self._object(key, fault)

    def _object(self, key: str, fault: Fault | None) -> None:
        content = self.state.objects[key]
        headers = {
            "ETag": f'"{self.state.generations[key]}"',
            "x-goog-generation": str(self.state.generations[key]),
        }
        asked = self.headers.get("Range")
        if asked is None or fault == "whole":
            return self._send(200, content, headers, key, fault)
        first, last = asked.removeprefix("bytes=").split("-")
        begin = int(first)
        end = min(int(last) + 1, len(content)) if last else len(content)
        if begin >= len(content):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        shift = int(fault == "moved")
        place = f"bytes {begin + shift}-{end - 1 + shift}/{len(content)}"
        self._send(206, content[begin:end], headers | {"Content-Range": place}, key, fault)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        key: str = "",
        fault: Fault | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            body = b""
        if fault == "cut":
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)
        self.state.sent[key] += len(body)
