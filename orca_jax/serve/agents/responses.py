"""The routes of `/v1/responses`: create, count, read and delete."""

import contextlib

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.openai.errors import TOO_LONG, ApiError
from orca_jax.openai.generation import ClientGone, Generation
from orca_jax.openai.model import Service
from orca_jax.openai.responses.api import (
    ENDPOINT,
    ResponseCall,
    ResponseStore,
    StoredResponse,
    find_response,
    no_response,
)
from orca_jax.openai.responses.items import DeletedResponse, InputTokens, ResponseItemList, shown_item
from orca_jax.openai.responses.renderer import ResponseRenderer
from orca_jax.openai.schema import responses_parser
from orca_jax.openai.schema.tolerant import Ignored
from orca_jax.serve.handlers import EventStream, Silence, headers_of, read_request, report_ignored, version_header
from orca_jax.serve.models import json_response

DEFAULT_PAGE, MAX_PAGE = 20, 100  # input items in an answer, as OpenAI has them


def response_routes(service: Service, max_bytes: int) -> tuple[list[Route], list[Route]]:
    """Build the routes with work for the engine or the tokenizer, and the others.

    `max_bytes` is the most memory for stored responses.
    """
    api = _Responses(service, ResponseStore(max_bytes))
    one = f"{ENDPOINT}/{{response_id}}"
    work = [
        Route(ENDPOINT, api.create, methods=["POST"]),
        Route(f"{ENDPOINT}/input_tokens", api.count, methods=["POST"]),
    ]
    others = [
        Route(ENDPOINT, _no_list, methods=["GET"], include_in_schema=False),
        Route(f"{ENDPOINT}/compact", _no_route, methods=["POST"], include_in_schema=False),
        Route(one, api.one, methods=["GET", "DELETE"]),
        Route(f"{one}/input_items", api.input_items, methods=["GET"]),
    ]
    return work, others


class _Responses:
    """The handlers, with the store. All raise ApiError."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    async def create(self, request: Request) -> Response:
        """Answer a call, whole or as a stream."""
        asked, ignored = await self._read(request)
        try:
            job = await asked.job(request.scope["state"]["request_id"])
        except ApiError as error:
            if not asked.call.stream or error.code != TOO_LONG:
                raise
            return Response(asked.renderer().failure(error), media_type="text/event-stream")
        headers = headers_of(self._service, job, ignored)
        generation = Generation(self._service, job)
        renderer = asked.renderer(job, generation.usage)
        if asked.call.stream:
            return EventStream(generation, renderer, None, headers)
        try:
            answer = await _whole(generation, renderer, request)
        except ClientGone:
            return Silence()
        return Response(answer, headers=headers | version_header(generation), media_type="application/json")

    async def count(self, request: Request) -> Response:
        """Answer with the number of tokens of an input."""
        asked, ignored = await self._read(request)
        headers = report_ignored(self._service, ignored)
        return json_response(InputTokens(await asked.num_tokens()), headers=headers)

    async def one(self, request: Request) -> Response:
        """Answer with a stored response, or remove it."""
        if request.method == "DELETE":
            return self._delete(request)
        if request.query_params.get("stream") == "true":
            message = "stream must be false or left out: a stored response is returned whole"
            raise ApiError(400, message, "stream", code="unsupported_parameter")
        return Response(self._found(request).answer, media_type="application/json")

    def _delete(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        if not self._store.delete(request.scope["state"]["caller"], name):
            raise no_response(self._store, name)
        return json_response(DeletedResponse(name))

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of a response's own input items."""
        items = self._found(request).input_items()
        query = request.query_params
        limit, order, after = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_PAGE:
            raise ApiError(400, f"limit must be in 1..{MAX_PAGE}, got {limit[:20]!r}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f'order must be "asc" or "desc", got {order[:20]!r}', "order")
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [place for place, item in enumerate(items) if item.id == after]
            if not places:
                raise ApiError(400, f"after: the response has no input item {after[:100]!r}", "after")
            items = items[places[0] + 1 :]
        page = [shown_item(item) for item in items[: int(limit)]]
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        return json_response(ResponseItemList(page, first, last, len(items) > len(page)))

    async def _read(self, request: Request) -> tuple[ResponseCall, Ignored]:
        call, ignored = await read_request(request, responses_parser, self._service)
        self._service.check_model(call.model)
        return ResponseCall(self._service, self._store, call, request.scope["state"]["caller"]), ignored

    def _found(self, request: Request) -> StoredResponse:
        return find_response(self._store, request.scope["state"]["caller"], request.path_params["response_id"])


async def _whole(generation: Generation, renderer: ResponseRenderer, request: Request) -> bytes:
    """Run a call to its end and return the response as JSON. Raises ApiError and ClientGone."""
    async with contextlib.aclosing(generation.pieces(request.receive)) as batches:
        async for pieces in batches:
            for piece in pieces:
                renderer.chunk(piece, None)
    return renderer.answer(generation.usage())


async def _no_route(request: Request) -> Response:
    raise HTTPException(404)


async def _no_list(request: Request) -> Response:
    """Refuse the form with WebSockets, and the list of responses."""
    if "websocket" in request.headers.get("upgrade", "").lower():
        raise HTTPException(404)
    raise HTTPException(405, headers={"allow": "POST"})
