"""`POST /playground/page`: the page of a timeline for a burst that a client has watched, as one HTML file."""

from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orca_jax.config import CacheConfig
from orca_jax.errors import ConfigError
from orca_jax.openai.errors import ApiError
from orca_jax.openai.model import Service
from orca_jax.playground.burst import MAX_BURST
from orca_jax.timeline.html import html_page
from orca_jax.timeline.live import LiveArrival, LiveEnd
from orca_jax.timeline.read import Timeline
from orca_jax.timeline.writer import TIMELINE_VERSION, Arrival, End, IterationRecord, TimelineHeader

MAX_PAGE_BYTES = 8 * 2**20
_NO_CACHE = CacheConfig((), (0,), 1, "float32")  # the page does not show the KV cache


class WatchedBurst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body: lines of the stream of iterations, by kind, from the first arrival to the last end."""

    arrivals: Annotated[list[LiveArrival], Meta(min_length=1, max_length=MAX_BURST)]
    iterations: list[IterationRecord]
    ends: Annotated[list[LiveEnd], Meta(max_length=MAX_BURST)]


def saved_page(service: Service, body: bytes) -> Response:
    """Answer with the file. Raises ApiError."""
    try:
        burst = msgspec.json.decode(body, type=WatchedBurst)
        text = html_page(_timeline(service, burst))
    except (msgspec.DecodeError, ConfigError, ArithmeticError, LookupError, ValueError) as error:
        raise ApiError(400, f"the body is not a watched burst: {error}", code="invalid_burst") from None
    headers = {"content-disposition": 'attachment; filename="burst.html"', "cache-control": "no-store"}
    return Response(text, headers=headers, media_type="text/html")


def _timeline(service: Service, burst: WatchedBurst) -> Timeline:
    """The burst alone: members of other requests are left out. Raises ValueError for more tokens than the context."""
    if any(end.generated > service.model.context for end in burst.ends):
        raise ValueError(f"an answer has more tokens than the context of {service.model.context}")
    config = replace(service.config.engine, model=service.names[0])
    head = TimelineHeader(TIMELINE_VERSION, config, _NO_CACHE, service.model.max_model_len, 0, (), 0.0)
    arrivals = {
        each.n: Arrival(each.n, f"burst {each.n}", each.at, each.prompt, each.max_tokens) for each in burst.arrivals
    }
    iterations = [
        replace(
            each,
            increments=[member for member in each.increments if member[0] in arrivals],
            chunks=[member for member in each.chunks if member[0] in arrivals],
            repeats=[member for member in each.repeats if member[0] in arrivals],
            preempted=[n for n in each.preempted if n in arrivals],
        )
        for each in burst.iterations
    ]
    ends = {each.n: End(each.n, each.at, each.reason, each.generated, 0, []) for each in burst.ends}
    return Timeline(head, arrivals, iterations, ends)
