"""`GET /v1/models`, `GET /v1/models/{id}`, `GET /v1/cache_explanations` and `GET /version`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.messages.errors import has_version
from orca_jax.serve.openai.messages.models import messages_model, messages_models
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema.answers import (
    CacheExplanations,
    ModelCard,
    ModelList,
    NamedModel,
    Version,
)


def model_routes(service: Service) -> list[Route]:
    """Build the routes about the served model and the server's version."""

    def card(name: str) -> ModelCard:
        length = service.model.max_model_len
        labels = service.model.decision_labels
        place = service.adapters.get(name)
        if place is None or name in service.names:
            return ModelCard(name, service.started, length, decision_labels=labels)
        return ModelCard(
            name,
            place.created,
            length,
            root=place.path,
            parent=service.names[0],
            decision_labels=labels,
        )

    def named(card: ModelCard) -> NamedModel:
        day = datetime.fromtimestamp(card.created, UTC).date().isoformat()
        return NamedModel(card.id, f"{card.max_model_len} tokens of context", day)

    async def models(request: Request) -> Response:
        cards = [card(name) for name in (*service.names, *service.adapters)]
        return json_response(
            messages_models(cards)
            if has_version(request.scope)
            else ModelList(cards, models=[named(card) for card in cards])
        )

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_model(name)
        return json_response(
            messages_model(card(name)) if has_version(request.scope) else card(name)
        )

    async def version(request: Request) -> Response:
        return json_response(Version(metadata.version("orca-jax")))

    async def explanations(request: Request) -> Response:
        if service.seen is None:
            message = "this server keeps no explanations; start it with --explain-cache"
            raise ApiError(404, message, code="not_found")
        return json_response(
            CacheExplanations(service.seen.of_key(request.scope["state"]["caller"]))
        )

    return [
        Route("/v1/cache_explanations", explanations, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),  # names may hold slashes
        Route("/version", version, methods=["GET"]),
    ]


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer with `value` as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
