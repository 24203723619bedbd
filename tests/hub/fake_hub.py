"""A server of this machine with the protocol of the Hub, as far as downloads need it, for one model."""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

NAME = "some-org/small-model"
COMMIT = "1" * 40
BRANCH = "main"


@dataclass
class FakeHub:
    """The state of the server. `requests` are the paths of all files and of the API, in their order.

    `cuts` has the file whose next download ends in the middle, with the number of times. A file in `lost` cannot be
    downloaded beyond its middle at all. `is_gated` refuses files without the token. A hostile server has other
    `headers` of files, other `lists` by the kind, a `next_page` after each list, or a `body` without a length for each
    file.
    """

    files: Mapping[str, bytes]
    url: str = ""
    cuts: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    is_gated: bool = False
    token: str = "hf_right"
    commits: dict[str, str] = field(default_factory=lambda: {BRANCH: COMMIT, COMMIT: COMMIT})
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    lists: dict[str, object] = field(default_factory=dict)
    next_page: str = ""
    body: Iterable[bytes] | None = None

    @property
    def downloads(self) -> list[str]:
        """Names of the files of which bytes were sent."""
        return [path.removeprefix("GET ") for path in self.requests if path.startswith("GET ")]


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve until the end of the block."""

    class Handler(_Handler):
        state = hub

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as hub.url:
        yield hub


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[str]:
    """Let a server answer until the end of the block; its URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub

    def do_HEAD(self) -> None:
        self._file(is_head=True)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if "/resolve/" in path:
            return self._file(is_head=False)
        if not path.startswith("/api/models/"):
            return self._refuse(404, "EntryNotFound")
        self.state.requests.append(f"API {path}")
        prefix = f"/api/models/{NAME}"
        if not path.startswith(f"{prefix}/"):
            return self._refuse(401, "RepoNotFound")
        kind, _, revision = path.removeprefix(f"{prefix}/").partition("/")
        commit = self.state.commits.get(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = self.state.files.items()
        if kind in self.state.lists:
            return self._json(self.state.lists[kind])
        if kind == "tree":
            return self._json(
                [{"type": "file", "path": n, "size": len(b), "oid": _etag(b)} for n, b in files]
            )
        return self._json(
            {"id": NAME, "sha": commit, "siblings": [{"rfilename": name} for name, _ in files]}
        )

    def _file(self, *, is_head: bool) -> None:
        hub, (_, rest) = self.state, self.path.split("/resolve/", 1)
        revision, name = rest.split("/", 1)
        if hub.is_gated and self.headers.get("authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "GatedRepo")
        content = hub.files[name]
        begin = 0
        if not is_head:
            hub.requests.append(f"GET {name}")
            if wanted := self.headers.get("range"):
                hub.ranges.append(wanted)
                begin = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if begin else 200)
        known = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": hub.commits[revision]}
        for header, value in (known | hub.headers).items():
            self.send_header(header, value)
        if hub.body is not None and not is_head:
            return self._endless(hub.body)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if is_head:
            return
        end = len(content)
        if hub.cuts.get(name):
            hub.cuts[name] -= 1
            end //= 2
        if name in hub.lost:
            end = min(end, max(begin, len(content) // 2))
        self.wfile.write(content[begin:end])
        if end < len(content):
            self.close_connection = True

    def _endless(self, parts: Iterable[bytes]) -> None:
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):  # the client ends the connection
            for part in parts:
                self.wfile.write(part)

    def _json(self, value: object) -> None:
        payload = json.dumps(value).encode()
        self.send_response(200)
        if self.state.next_page:
            self.send_header("Link", f'<{self.state.url}{self.state.next_page}>; rel="next"')
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
