"""`GET /playground/iterations`: the iterations of the engine as server-sent events.

Each event holds lines of JSON: `start`, `arrival`, `iteration` or `end`, as in a `LiveTimeline`. An event `dropped` has
the number of lines that the engine sent faster than the client read them; a `start` follows. Requests are numbers.
"""

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from orca_jax.link.feed import FeedFull, Watcher
from orca_jax.openai.errors import ApiError
from orca_jax.openai.model import Service

KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


async def watch_iterations(service: Service, request: Request) -> Response:
    """Answer with the stream. Raises ApiError if too many clients watch."""
    if request.method == "HEAD":  # it has no body, so nothing may be watched for it
        return Response(headers=HEADERS, media_type="text/event-stream")
    try:
        watcher = service.client.feed.watch()
    except FeedFull:
        message = "too many pages watch the engine; close one of them"
        raise ApiError(503, message, code="too_many_watchers") from None
    return StreamingResponse(_events(watcher), headers=HEADERS, media_type="text/event-stream")


async def _events(watcher: Watcher) -> AsyncGenerator[bytes]:
    with watcher:
        yield KEEP_ALIVE  # the headers leave at once, also of an idle engine
        while (news := await watcher.receive(KEEP_ALIVE_SECONDS)) is not None:
            dropped = b"event: dropped\ndata: %d\n\n" % news.num_dropped if news.num_dropped else b""
            yield dropped + (_event(news.lines) or KEEP_ALIVE)


def _event(lines: bytes) -> bytes:
    return b"".join([b"data: " + line + b"\n" for line in lines.splitlines()]) + b"\n" if lines else b""
