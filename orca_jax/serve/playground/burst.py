"""`POST /playground/burst`: many requests of given lengths at once. Prompts are random ids, and texts are dropped."""

import contextlib
import random
import time
import uuid
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from orca_jax.link.admission import NO_DEADLINES
from orca_jax.link.errors import LinkError
from orca_jax.link.wire import Submit
from orca_jax.serve.openai.asked import Prompt
from orca_jax.serve.openai.errors import ApiError, api_error
from orca_jax.serve.openai.generation import ClientGone, Generation, Job
from orca_jax.serve.openai.model import Service
from orca_jax.values.errors import UNREADABLE
from orca_jax.values.request import SamplingParams

MAX_BURST = 256  # requests
MAX_BURST_TOKENS = 2**20  # of all prompts; the loop sends them to the engine at once
MAX_BURST_BYTES = 16 * 1024
ENDPOINT = "burst"  # in logs and metrics

Length = Annotated[int, Meta(ge=1)]


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body: the numbers of prompt tokens and of generated tokens of each request."""

    requests: Annotated[list[tuple[Length, Length]], Meta(min_length=1, max_length=MAX_BURST)]
    seed: int = 0


async def run_burst(service: Service, request: Request, body: bytes) -> Response:
    """Run the burst of a body, and answer when all its requests have ended. Raises ApiError."""
    try:
        burst = msgspec.json.decode(body, type=Burst)
    except UNREADABLE as error:
        raise ApiError(400, f"the body is not a burst: {error}", code="invalid_burst") from None
    longest = max(prompt + generated for prompt, generated in burst.requests)
    if longest > service.model.context:
        message = f"requests: {longest} tokens exceed the context of {service.model.context} tokens"
        raise ApiError(400, message, "requests", code="context_length_exceeded")
    lengths = [length for length, _ in burst.requests]
    if sum(lengths) > MAX_BURST_TOKENS:
        message = f"requests: {sum(lengths)} prompt tokens exceed the {MAX_BURST_TOKENS} of a burst; make it smaller"
        raise ApiError(400, message, "requests", code="call_too_large")
    try:
        service.client.check_room(lengths)
    except LinkError as error:
        raise api_error(error, service.config.overload_status) from None
    start = time.monotonic()
    job = await service.work.page(partial(_job, service, burst))
    pieces = Generation(service, job).pieces(request.receive)
    with contextlib.suppress(ClientGone):
        async with contextlib.aclosing(pieces) as batches:
            async for _ in batches:
                pass
    answer = {"requests": len(job.requests), "seconds": time.monotonic() - start}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _job(service: Service, burst: Burst) -> Job:
    """The requests of a burst. The prompts differ from their first token on, so that no prefix is shared."""
    draws = random.Random(burst.seed)
    vocab_size = service.model.vocab_size

    def prompt_of(length: int) -> Prompt:
        return Prompt(None, [draws.randrange(vocab_size) for _ in range(length)])

    prompts = [prompt_of(length) for length, _ in burst.requests]
    requests = [
        Submit(
            service.client.new_request_id(),
            prompt.ids,
            SamplingParams(
                max_tokens=generated,
                temperature=0.0,
                ignore_eos=True,
                cache_salt=f"burst {uuid.uuid4()}",
            ),
        )
        for prompt, (_, generated) in zip(prompts, burst.requests, strict=True)
    ]
    name = f"burst-{uuid.uuid4().hex}"
    return Job(
        id=name,
        created=int(time.time()),
        model=service.names[0],
        endpoint=ENDPOINT,
        name=name,
        prompts=prompts,
        candidates=1,
        requests=requests,
        deadlines=NO_DEADLINES,
    )
