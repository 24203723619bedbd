"""The routes of `/v1/responses`: create, count, read and delete."""

from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.serve.handlers import read_response_call, report_ignored, respond
from orca_jax.serve.models import json_response
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.responses.api import ENDPOINT
from orca_jax.serve.openai.responses.items import (
    DeletedResponse,
    InputTokens,
    ResponseItemList,
    shown_item,
)
from orca_jax.serve.openai.responses.store import (
    ResponseStore,
    StoredResponse,
    find_response,
    no_response,
)
from orca_jax.text.work_threads import STORED
from orca_jax.values.checks import whole_number

# input items in an answer, as OpenAI has them
DEFAULT_PAGE = 20
MAX_PAGE = 100


def response_routes(service: Service, max_bytes: int) -> tuple[list[Route], list[Route]]:
    """Build the routes with work for the engine or the tokenizer, and the others.

    `max_bytes` is the most memory for stored responses.
    """
    store = ResponseStore(max_bytes)
    api = _Responses(service, store)
    one = f"{ENDPOINT}/{{response_id}}"
    work = [
        Route(ENDPOINT, partial(respond, service, store), methods=["POST"]),
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

    async def count(self, request: Request) -> Response:
        """Answer with the number of tokens of an input."""
        asked, ignored = await read_response_call(self._service, self._store, request)
        headers = report_ignored(self._service, ignored)
        count = await self._service.work.prepare(asked.num_bytes, asked.num_tokens)
        return json_response(InputTokens(count), headers=headers)

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
        stored = self._found(request)
        query = request.query_params
        asked = query.get("limit", str(DEFAULT_PAGE))
        limit = whole_number(asked)
        order = query.get("order", "desc")
        after = query.get("after")
        if limit is None or not 1 <= limit <= MAX_PAGE:
            raise ApiError(400, f"limit must be in 1..{MAX_PAGE}, got {asked[:20]!r}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f'order must be "asc" or "desc", got {order[:20]!r}', "order")
        page = await self._service.work.run_work(
            STORED, partial(_page, stored, limit, order, after)
        )
        return json_response(page)

    def _found(self, request: Request) -> StoredResponse:
        return find_response(
            self._store, request.scope["state"]["caller"], request.path_params["response_id"]
        )


def _page(stored: StoredResponse, limit: int, order: str, after: str | None) -> ResponseItemList:
    """A page of the input items of a response. Raises ApiError."""
    items = stored.input_items()
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(400, f"after: the response has no input item {after[:100]!r}", "after")
        items = items[places[0] + 1 :]
    page = [shown_item(item) for item in items[:limit]]
    if not page:
        return ResponseItemList([], "", "", has_more=False)
    return ResponseItemList(page, page[0]["id"], page[-1]["id"], len(items) > len(page))


async def _no_route(request: Request) -> Response:
    raise HTTPException(404)


async def _no_list(request: Request) -> Response:
    """Refuse the form with WebSockets, and the list of responses."""
    if "websocket" in request.headers.get("upgrade", "").lower():
        raise HTTPException(404)
    raise HTTPException(405, headers={"allow": "POST"})
