"""The routes of decisions, and those of rerankers, classifiers and scores, which are answered by the same reads."""

from collections.abc import Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from orca_jax.serve.handlers import Silence, read_request, report_ignored, weight_header
from orca_jax.serve.openai import single
from orca_jax.serve.openai.decisions import call as calls
from orca_jax.serve.openai.decisions import neighbours, scoring, systemone, wires
from orca_jax.serve.openai.decisions.call import AskedDecisions, Decided, DecisionJob
from orca_jax.serve.openai.generation import ClientGone
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema import (
    classify_parser,
    decision_parser,
    rerank_parser,
    score_parser,
    system_parser,
)
from orca_jax.serve.openai.schema.decisions.bodies import ReadFields
from orca_jax.serve.openai.schema.tolerant import Ignored


async def decide(service: Service, request: Request) -> Response:
    """Answer a call in the form of OpenAI or of SGLang. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, decision_parser, service)
    service.check_model(call.model)
    name = request.scope["state"]["request_id"]
    understand = partial(wires.understood, service, call, name)
    render = partial(wires.answer, call)
    return await answered(service, request, call, understand, render, ignored, num_bytes)


async def system_one(service: Service, request: Request) -> Response:
    """Answer a call in the form of TypeSafe, whose unknown fields are ignored. Raises ApiError."""
    call, ignored, num_bytes = await read_request(
        request, system_parser, service, ignores_unknown=True
    )
    if call.model == systemone.LATEST:
        call = msgspec.structs.replace(call, model=None)
    service.check_model(call.model)
    name = request.scope["state"]["request_id"]
    understand = partial(systemone.understood, call, name)
    render = partial(systemone.answer, call)
    return await answered(service, request, call, understand, render, ignored, num_bytes)


async def rerank(service: Service, request: Request) -> Response:
    """Answer with the relevance of documents. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, rerank_parser, service)
    service.check_model(call.model)
    understand = partial(neighbours.reranking, call, request.scope["state"]["request_id"])
    render = partial(neighbours.reranked, call)
    return await answered(service, request, call, understand, render, ignored, num_bytes)


async def classify(service: Service, request: Request) -> Response:
    """Answer with a label for each text. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, classify_parser, service)
    service.check_model(call.model)
    understand = partial(neighbours.classifying, call, request.scope["state"]["request_id"])
    render = partial(neighbours.classified, call)
    return await answered(service, request, call, understand, render, ignored, num_bytes)


async def score(service: Service, endpoint: str, request: Request) -> Response:
    """Answer with the probabilities of given tokens, in the form of the route. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, score_parser, service)
    service.check_model(call.model)
    state = request.scope["state"]
    prepared = partial(
        scoring.prepare, service, call, endpoint, state["request_id"], state["caller"]
    )
    job = await service.work.prepare(num_bytes, prepared)
    headers = report_ignored(service, ignored)
    try:
        finished = await single.run(service, job.requests, request.receive)
    except ClientGone:
        return Silence()
    model = service.adapter_of(call.model) or service.names[0]
    headers = headers | weight_header(service, finished.weight_version)
    body = scoring.answer(call, job, finished.results, model)
    return Response(body, headers=headers, media_type="application/json")


async def answered(
    service: Service,
    request: Request,
    call: ReadFields,
    understand: Callable[[], AskedDecisions],
    render: Callable[[DecisionJob, Decided, str], bytes],
    ignored: Ignored,
    num_bytes: int,
) -> Response:
    """Understand a call, run it, and render its answer. Raises ApiError."""
    caller = request.scope["state"]["caller"]

    async def prepared() -> DecisionJob:
        return await calls.prepare(service, understand(), caller)

    job = await service.work.prepare(num_bytes, prepared)
    headers = report_ignored(service, ignored)
    try:
        decided = await calls.run(service, job, request.receive)
    except ClientGone:
        return Silence()
    model = service.adapter_of(call.model) or service.names[0]
    headers = headers | weight_header(service, decided.weight_version)
    return Response(render(job, decided, model), headers=headers, media_type="application/json")
