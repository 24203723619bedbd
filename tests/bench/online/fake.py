"""A server that answers as a test says: streams with pauses, errors and cuts."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CUT = "cut"
Step = bytes | float | str
Play = Callable[[int, dict[str, Any]], tuple[int, bytes] | Iterable[Step]]
"""(number of earlier calls, body) -> status and body, or steps of a stream: bytes, seconds to wait, or CUT."""


@dataclass
class FakeServer:
    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def event(value: object, end: bytes = b"\n\n") -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + end


def token(text: str = "a", reason: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": reason}]})


def usage(num_input: int, num_output: int) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": num_input, "completion_tokens": num_output}}
    )


DONE = event(b"[DONE]")


def complete(body: dict[str, Any]) -> list[Step]:
    """A whole answer with as many tokens as requested."""
    count = body["max_tokens"]
    tokens: list[Step] = [token() for _ in range(count - 1)]
    return [*tokens, token("z", "length"), usage(len(body["prompt"]), count), DONE]


@contextmanager
def fake_server(play: Play, models: tuple[str, ...] = ("m",)) -> Iterator[FakeServer]:
    seen = FakeServer("")
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = json.dumps(
                {"object": "list", "data": [{"id": name} for name in models]}
            ).encode()
            self.whole(200 if models else 404, data)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(seen.bodies)
                seen.bodies.append(body)
                seen.times.append(time.monotonic())
                seen.keys.append(self.headers["authorization"])
            answer = play(number, body)
            if isinstance(answer, tuple):
                self.whole(*answer)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for step in answer:
                if isinstance(step, float):
                    time.sleep(step)
                elif isinstance(step, bytes):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(step), step))
                else:
                    self.close_connection = True
                    return
            self.wfile.write(b"0\r\n\r\n")

        def whole(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *details: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, *details: object) -> None:
            """Clients that hang up are expected."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        seen.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()
