"""`POST /v1/embeddings`. Its requests end after their prompts, and share iterations with requests for text."""

import uuid
from collections.abc import Sequence

import msgspec

from orca_jax.link.admission import Deadlines
from orca_jax.link.wire import Submit
from orca_jax.serve.openai import single
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Receive
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
from orca_jax.serve.openai.single import SingleAnswer, SingleJob
from orca_jax.text.embedding import embedding_of, in_base64
from orca_jax.values.request import SamplingParams

EMBEDDINGS = "/v1/embeddings"


async def prepare(
    service: Service, call: EmbeddingRequest, name: str, caller: str | None = None
) -> SingleJob[bytes]:
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
    name = f"embd-{call.request_id or name or uuid.uuid4().hex}"
    return SingleJob(name, EMBEDDINGS, requests, deadlines, lambda update: update.pooled)


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


async def run(
    service: Service, call: EmbeddingRequest, job: SingleJob[bytes], receive: Receive
) -> SingleAnswer:
    """Run a call to its end, and return its answer. Errors as in `single.run`."""
    finished = await single.run(service, job, receive)
    return SingleAnswer(_answer(service, call, job, finished.results), finished.weight_version)


def _answer(
    service: Service, call: EmbeddingRequest, job: SingleJob[bytes], vectors: Sequence[bytes]
) -> bytes:
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
