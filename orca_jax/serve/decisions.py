"""The routes of decisions: `POST /v1/decisions` and `POST /v1/systemone`."""

from collections.abc import Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from orca_jax.serve.handlers import Silence, read_request, report_ignored, weight_header
from orca_jax.serve.openai.decisions import call as calls
from orca_jax.serve.openai.decisions import systemone, wires
from orca_jax.serve.openai.decisions.call import AskedDecisions, Decided, DecisionJob
from orca_jax.serve.openai.generation import ClientGone
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema import decision_parser, system_parser
from orca_jax.serve.openai.schema.decisions.bodies import DecisionFields
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


async def answered(
    service: Service,
    request: Request,
    call: DecisionFields,
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
