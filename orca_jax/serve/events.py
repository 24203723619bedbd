"""Answers as server-sent events, and the absence of an answer."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.openai.answer import StreamRenderer
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import ClientGone, Generation
from orca_jax.openai.schema.sampling import StreamOptions

WEIGHT_VERSION = "x-orca-weight-version"  # header of an answer, if the weights can be replaced


def version_header(generation: Generation) -> dict[str, str]:
    """The header with the version of the weights, on a server that can replace them."""
    version = generation.weight_version
    return {} if version is None or not generation.has_versions else {WEIGHT_VERSION: str(version)}


class Silence(Response):
    """No answer: the client has gone, and the connection may be closed already."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


class EventStream(Response):
    """Sends the events of a call as they arrive. It reads `receive` itself, so no middleware may read it before.

    The headers are sent with the first message of the engine: until then a refusal is an answer with its own status.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        renderer: StreamRenderer,
        options: StreamOptions | None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._renderer = renderer
        self._has_running_usage = options is not None and bool(options.include_usage and options.continuous_usage_stats)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises ApiError if nothing has been sent yet; later errors are events."""
        has_started = False
        with contextlib.suppress(ClientGone):
            try:
                async with contextlib.aclosing(self._events(receive)) as events:
                    async for event in events:
                        if not has_started:
                            has_started = True
                            self.headers.update(version_header(self._generation))
                            start = {"status": self.status_code, "headers": self.raw_headers}
                            await send({"type": "http.response.start", **start})
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                if not has_started:
                    raise
                event = self._renderer.failure(error)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, receive: Receive) -> AsyncGenerator[bytes]:
        """Yield the events; those that arrived together are joined."""
        generation, chunk, silence = self._generation, self._renderer.chunk, self._renderer.silence
        is_late = False
        async with contextlib.aclosing(generation.pieces(receive)) as batches:
            async for pieces in batches:
                if generation.weight_version is None:
                    is_late = generation.has_versions  # the headers leave before the version is known
                elif is_late:
                    is_late = False
                    yield b": %b: %d\n\n" % (WEIGHT_VERSION.encode(), generation.weight_version)
                if self._has_running_usage:
                    events = [chunk(piece, generation.running_usage(piece)) for piece in pieces]
                    yield b"".join(events) or silence()
                elif len(pieces) == 1:
                    yield chunk(pieces[0], None)
                else:
                    yield b"".join([chunk(piece, None) for piece in pieces]) or silence()
        yield self._renderer.end(generation.usage())
