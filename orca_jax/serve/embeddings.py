"""The handler of embeddings."""

from starlette.requests import Request
from starlette.responses import Response

from orca_jax.openai.embeddings import prepare, run
from orca_jax.openai.generation import ClientGone
from orca_jax.openai.model import Service
from orca_jax.openai.schema import embedding_parser
from orca_jax.serve.events import WEIGHT_VERSION, Silence
from orca_jax.serve.handlers import read_request, report_ignored


async def embed(service: Service, request: Request) -> Response:
    """Answer with the embeddings of the inputs of a call. Raises ApiError."""
    call, ignored = await read_request(request, embedding_parser, service)
    service.check_model(call.model)
    state = request.scope["state"]
    job = await prepare(service, call, state["request_id"], state["caller"])
    headers = report_ignored(service, ignored)
    try:
        answer = await run(service, job, request.receive)
    except ClientGone:
        return Silence()
    if service.config.admin_key_file is not None:
        headers = headers | {WEIGHT_VERSION: str(answer.weight_version)}
    return Response(answer.body, headers=headers, media_type="application/json")
