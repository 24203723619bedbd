"""`POST /playground/page`: the page of a timeline for a burst that a client has watched, as one HTML file."""

from collections.abc import Set
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.model import Service
from orca_jax.serve.playground.burst import MAX_BURST
from orca_jax.timeline.html import html_page
from orca_jax.timeline.live import LiveArrival, LiveEnd
from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.writer import TIMELINE_VERSION, Arrival, End, IterationRecord, TimelineHeader
from orca_jax.values.config import CacheConfig
from orca_jax.values.errors import UNREADABLE, ConfigError

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
    except (*UNREADABLE, ConfigError, ArithmeticError, LookupError) as error:
        raise ApiError(
            400, f"the body is not a watched burst: {error}", code="invalid_burst"
        ) from None
    headers = {
        "content-disposition": 'attachment; filename="burst.html"',
        "cache-control": "no-store",
    }
    return Response(text, headers=headers, media_type="text/html")


def _timeline(service: Service, burst: WatchedBurst) -> Timeline:
    """The burst alone: members of other requests are left out. Raises ValueError for more tokens than the context."""
    if any(end.generated > service.model.context for end in burst.ends):
        raise ValueError(f"an answer has more tokens than the context of {service.model.context}")
    config = replace(service.config.engine, model=service.names[0])
    head = TimelineHeader(
        TIMELINE_VERSION, config, _NO_CACHE, service.model.max_model_len, 0, (), 0.0
    )
    numbers = {each.n for each in burst.arrivals}
    start = min([each.at for each in burst.arrivals] + [each.selected for each in burst.iterations])
    arrivals = {
        each.n: Arrival(each.n, f"burst {each.n}", each.at - start, each.prompt, each.max_tokens)
        for each in burst.arrivals
    }
    iterations = [
        _in_burst(each, index, start, numbers) for index, each in enumerate(burst.iterations)
    ]
    ends = {
        each.n: End(each.n, each.at - start, each.reason, each.generated, 0, [])
        for each in burst.ends
    }
    return Timeline(head, arrivals, iterations, ends)


def _in_burst(
    record: IterationRecord, index: int, start: float, numbers: Set[int]
) -> IterationRecord:
    """An iteration as the burst sees it: numbers and times begin with the burst, and others are left out."""
    return replace(
        record,
        iteration=index,
        selected=record.selected - start,
        planned=record.planned - start,
        submitted=record.submitted - start,
        collected=record.collected - start,
        increments=[member for member in record.increments if member[0] in numbers],
        chunks=[member for member in record.chunks if member[0] in numbers],
        repeats=[member for member in record.repeats if member[0] in numbers],
        preempted=[n for n in record.preempted if n in numbers],
    )
