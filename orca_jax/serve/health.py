"""Health checks for load balancers and orchestrators: liveness, readiness, and a probe that generates a token."""

import asyncio

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.link.admission import Deadlines
from orca_jax.link.errors import LinkError
from orca_jax.link.wire import Rejected, Submit
from orca_jax.serve.openai.model import Service
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.values.errors import EngineError
from orca_jax.values.request import RequestUpdate, SamplingParams

GENERATE_SECONDS = 5.0  # for one token, time in the queue included
NO_STORE = {"cache-control": "no-store"}

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def health_routes(service: Service, *, has_keys: bool) -> list[Route]:
    """`/live`, `/ready`, `/health`, `/health_generate` and `/load`. With keys, `/health` shows nothing of files."""

    def answer(body: dict[str, object]) -> Response:
        return _json(body, 200 if service.is_ready else 503)

    async def live(request: Request) -> Response:
        return _json({"status": "live"})

    async def health(request: Request) -> Response:
        return answer(_health(service, shows_reasons=not has_keys))

    async def ready(request: Request) -> Response:
        summary = service.client.summary
        state = _health(service, shows_reasons=True)
        if summary is not None and service.is_ready:
            state["engine"] = summary
        return answer(state)

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


def _health(service: Service, *, shows_reasons: bool) -> dict[str, object]:
    """The state of the engine. Reasons of lost adapters have paths of files."""
    client = service.client
    body: dict[str, object] = {
        "status": _state(service),
        "running": client.running,
        "waiting": client.waiting,
    }
    lost = client.adapters.lost
    shown = lost if shows_reasons else dict.fromkeys(lost, "see /ready, with a key")
    details = {"attention_self_test": client.self_tests, "lost_adapters": shown}
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
        is_done = False
        while not is_done:
            is_done = any([_is_last(message) for message in await call.receive()])


def _is_last(message: RequestUpdate | Rejected) -> bool:
    """True for the end of a request that generated something. Raises EngineError for another end."""
    reason = getattr(message, "finish_reason", "error")
    if reason not in (None, "stop", "length"):
        raise EngineError("the engine generated nothing")
    return reason is not None


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, NO_STORE, media_type="application/json")
