"""Health checks for load balancers and orchestrators: liveness, readiness, and a probe that generates a token."""

import asyncio

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.errors import EngineError
from orca_jax.link.admission import Deadlines
from orca_jax.link.errors import LinkError
from orca_jax.link.wire import Submit
from orca_jax.openai.model import Service
from orca_jax.request import SamplingParams
from orca_jax.telemetry.observer import ServerObserver

GENERATE_SECONDS = 5.0  # for one token, time in the queue included
NO_STORE = {"cache-control": "no-store"}

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def health_routes(service: Service) -> list[Route]:
    """`/live`, `/ready`, `/health`, `/health_generate` and `/load`."""

    def answer(body: dict[str, object]) -> Response:
        return _json(body, 200 if service.is_ready else 503)

    async def live(request: Request) -> Response:
        return _json({"status": "live"})

    async def health(request: Request) -> Response:
        return answer(_health(service))

    async def ready(request: Request) -> Response:
        summary = service.client.summary
        details = {} if summary is None or not service.is_ready else {"engine": summary}
        return answer({**_health(service), **details})

    async def generate(request: Request) -> Response:
        try:
            await _generate(service)
        except (LinkError, EngineError) as error:
            return _json({"status": _state(service), "error": str(error)}, 503)
        return _json({"status": _state(service)})

    async def load(request: Request) -> Response:
        return _json({"server_load": service.client.num_calls})

    return [
        Route("/live", live, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/health_generate", generate, methods=["GET"]),
        Route("/load", load, methods=["GET"]),
    ]


def metrics_route(observer: ServerObserver) -> Route:
    """`/metrics`, in Prometheus's text format."""

    async def metrics(request: Request) -> Response:
        observer.metrics.http.tasks.set(len(asyncio.all_tasks()))
        return Response(observer.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Route("/metrics", metrics, methods=["GET"])


def root_route() -> Route:
    """`HEAD /`, by which some clients look for a server, for servers without a page there."""

    async def root(request: Request) -> Response:
        if request.method != "HEAD":
            raise HTTPException(404)
        return Response()

    return Route("/", root, methods=["GET"], include_in_schema=False)


def _health(service: Service) -> dict[str, object]:
    client = service.client
    body: dict[str, object] = {"status": _state(service), "running": client.running, "waiting": client.waiting}
    details = {"attention_self_test": client.self_tests, "lost_adapters": client.adapters.lost}
    return body | {name: value for name, value in details.items() if value}


def _state(service: Service) -> str:
    state = service.client.state
    return "loading" if state == "ready" and not service.is_ready else state


async def _generate(service: Service) -> None:
    """Generate one token.

    Raises:
        LinkError: the engine does not answer.
        EngineError: the engine ends the request without a token.
    """
    probe = Submit(service.client.new_request_id(), [0], _ONE_TOKEN)
    async with service.client.open([probe], Deadlines(total=GENERATE_SECONDS)) as call:
        while True:
            for message in await call.receive():
                reason = getattr(message, "finish_reason", "error")
                if reason in ("stop", "length"):
                    return
                if reason is not None:
                    raise EngineError("the engine generated nothing")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, NO_STORE, media_type="application/json")
