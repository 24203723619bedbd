"""The routes of decisions, and those of rerankers, classifiers and scores, which are answered by the same reads."""

from collections.abc import Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from orca_jax.serve.handlers import answer_single, read_request
from orca_jax.serve.openai.decisions import call as calls
from orca_jax.serve.openai.decisions import neighbours, scoring, systemone, wires
from orca_jax.serve.openai.decisions.call import AskedDecisions, Decided, DecisionJob
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
from orca_jax.serve.openai.single import SingleAnswer


async def decide(service: Service, request: Request) -> Response:
    """Answer a call in the form of OpenAI or of SGLang. Raises ApiError."""
    read = await read_request(request, decision_parser, service)
    return await answered(service, request, read, partial(wires.understood, service), wires.answer)


async def system_one(service: Service, request: Request) -> Response:
    """Answer a call in the form of TypeSafe, whose unknown fields are ignored. Raises ApiError."""
    call, ignored, num_bytes = await read_request(
        request, system_parser, service, ignores_unknown=True
    )
    if call.model == systemone.LATEST:
        call = msgspec.structs.replace(call, model=None)
    read = (call, ignored, num_bytes)
    return await answered(service, request, read, systemone.understood, systemone.answer)


async def rerank(service: Service, request: Request) -> Response:
    """Answer with the relevance of documents. Raises ApiError."""
    read = await read_request(request, rerank_parser, service)
    return await answered(service, request, read, neighbours.reranking, neighbours.reranked)


async def classify(service: Service, request: Request) -> Response:
    """Answer with a label for each text. Raises ApiError."""
    read = await read_request(request, classify_parser, service)
    return await answered(service, request, read, neighbours.classifying, neighbours.classified)


async def score(service: Service, endpoint: str, request: Request) -> Response:
    """Answer with the probabilities of given tokens, in the form of the route. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, score_parser, service)
    service.check_model(call.model)
    state = request.scope["state"]
    prepared = partial(
        scoring.prepare, service, call, endpoint, state["request_id"], state["caller"]
    )
    job = await service.work.prepare(num_bytes, prepared)
    return await answer_single(service, ignored, scoring.run(service, call, job, request.receive))


async def answered[Call: ReadFields](
    service: Service,
    request: Request,
    read: tuple[Call, Ignored, int],
    understand: Callable[[Call, str], AskedDecisions],
    render: Callable[[Call, DecisionJob, Decided, str], bytes],
) -> Response:
    """Understand a call, run it, and render its answer.

    Args:
        service: the served model.
        request: the HTTP call.
        read: the call, its ignored fields, and its bytes.
        understand: takes the call and its id.
        render: takes the call, its job, the answers, and the name of the model.

    Raises:
        ApiError: a field is wrong, or the engine has no answer.
    """
    call, ignored, num_bytes = read
    service.check_model(call.model)
    state = request.scope["state"]

    async def prepared() -> DecisionJob:
        asked = understand(call, state["request_id"])
        return await calls.prepare(service, asked, state["caller"])

    job = await service.work.prepare(num_bytes, prepared)

    async def answer() -> SingleAnswer:
        decided = await calls.run(service, job, request.receive)
        body = render(call, job, decided, service.answering(call.model))
        return SingleAnswer(body, decided.weight_version)

    return await answer_single(service, ignored, answer())
