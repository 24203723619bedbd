"""`POST /v1/embeddings`. Its requests end after their prompts, and share iterations with requests for text."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from orca_jax.link.admission import Deadlines
from orca_jax.link.errors import LinkError
from orca_jax.link.wire import Rejected, Submit
from orca_jax.serve.openai.errors import ApiError, api_error
from orca_jax.serve.openai.generation import Receive, end_reason, failure_of, watching
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import (
    check_ids,
    check_urgency,
    prompt_parts,
    salt_of,
    urgency_of,
)
from orca_jax.serve.openai.schema.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from orca_jax.serve.telemetry.observer import RequestRecord
from orca_jax.text.embedding import embedding_of, in_base64
from orca_jax.values.request import RequestUpdate, SamplingParams

EMBEDDINGS = "/v1/embeddings"


class EmbeddingJob(NamedTuple):
    """A prepared call: one engine request for each input."""

    id: str
    call: EmbeddingRequest
    requests: Sequence[Submit]
    deadlines: Deadlines


class EmbeddingAnswer(NamedTuple):
    """The JSON of an answer, and the version of the weights that made it."""

    body: bytes
    weight_version: int


async def prepare(
    service: Service, call: EmbeddingRequest, name: str, caller: str | None = None
) -> EmbeddingJob:
    """Check a call, and make its requests. Raises ApiError.

    Args:
        service: the served model.
        call: its fields.
        name: id of the HTTP call.
        caller: digest of the API key; None on a server without keys.
    """
    model = service.model
    check_urgency(service, call)
    _check_dimensions(call.dimensions, model.dimensions)
    parts = prompt_parts(call.input, "input")
    texts = [part for part in parts if isinstance(part, str)]
    inputs = await service.encode_all(texts, "input", call.add_special_tokens is not False)
    inputs += [part for part in parts if not isinstance(part, str)]
    for ids in inputs:
        if not ids:
            raise ApiError(400, "input must contain at least one token", "input")
        if len(ids) > model.context:
            message = f"this model's maximum context length is {model.context} tokens, and an input has {len(ids)}"
            raise ApiError(400, message, "input", code="context_length_exceeded")
        check_ids(model, ids, "input")
    salt = salt_of(service, call, caller)
    urgency = urgency_of(call, caller)
    params = SamplingParams(max_tokens=1, pooling=call.pooling or "last", cache_salt=salt)
    adapter = service.adapter_of(call.model)
    requests = [
        Submit(service.client.new_request_id(), ids, params, urgency, adapter) for ids in inputs
    ]
    deadlines = Deadlines(call.queue_timeout, call.timeout)
    return EmbeddingJob(
        f"embd-{call.request_id or name or uuid.uuid4().hex}", call, requests, deadlines
    )


def _check_dimensions(wanted: int | None, known: Sequence[int] | None) -> None:
    """Check `dimensions`. `known` are those of the model: None for no choice, empty for any up to its own."""
    if wanted is None:
        return
    if known is None:
        message = "dimensions must be left out: this model was not trained for fewer dimensions (is_matryoshka)"
        raise ApiError(400, message, "dimensions", code="unsupported_parameter")
    if known and wanted not in known:
        raise ApiError(
            400,
            f"dimensions must be one of {', '.join(map(str, known))}, got {wanted}",
            "dimensions",
        )


async def run(service: Service, job: EmbeddingJob, receive: Receive) -> EmbeddingAnswer:
    """Run a call to its end, and return its answer.

    Raises:
        ApiError: the engine refused the call or failed, or a deadline passed.
        ClientGone: the client has disconnected.
    """
    records = {
        request.request_id: service.observer.begin(
            f"{job.id}-{index}", EMBEDDINGS, len(request.prompt_ids)
        )
        for index, request in enumerate(job.requests)
    }
    vectors: dict[str, bytes] = {}
    try:
        async with (
            service.client.open(job.requests, job.deadlines) as call,
            watching(receive, call),
        ):
            while len(vectors) < len(records):
                vectors |= _vectors(await call.receive(), records)
            version = call.weight_version
    except LinkError as error:
        _end_all(records.values(), error)
        raise api_error(error, service.config.overload_status) from None
    except BaseException as error:
        _end_all(records.values(), error)
        raise
    return EmbeddingAnswer(_answer(service, job, [vectors[name] for name in records]), version)


def _vectors(
    updates: Iterable[RequestUpdate | Rejected], records: Mapping[str, RequestRecord]
) -> dict[str, bytes]:
    """The vectors in the messages of the engine, by the ids of their requests. Raises ApiError."""
    return {update.request_id: _vector(update, records[update.request_id]) for update in updates}


def _vector(update: RequestUpdate | Rejected, record: RequestRecord) -> bytes:
    if isinstance(update, Rejected):
        raise ApiError(
            400,
            update.message,
            "input" if update.param in ("prompt", "max_tokens") else update.param,
        )
    if update.pooled is None or update.finish_reason != "stop":
        raise failure_of(update.error)
    record.take_update(update)
    record.end("stop")
    return update.pooled


def _end_all(records: Iterable[RequestRecord], error: BaseException) -> None:
    for record in records:
        record.end(end_reason(error))


def _answer(service: Service, job: EmbeddingJob, vectors: Sequence[bytes]) -> bytes:
    call = job.call
    data = []
    for index, pooled in enumerate(vectors):
        size = len(pooled) // 4
        if call.dimensions is not None and call.dimensions > size:
            raise ApiError(
                400, f"dimensions must be at most {size}, got {call.dimensions}", "dimensions"
            )
        vector = embedding_of(
            pooled, normalize=call.normalize is not False, dimensions=call.dimensions
        )
        form = in_base64(vector) if call.encoding_format == "base64" else vector.tolist()
        data.append(Embedding("embedding", index, form))
    count = sum(len(request.prompt_ids) for request in job.requests)
    answer = EmbeddingList(
        "list", data, call.model or service.names[0], EmbeddingUsage(count, count), job.id
    )
    return msgspec.json.encode(answer)
