"""One engine behind the server's ASGI application, for hosts that bring their own HTTP server."""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_jax.helpers.logs import install_handler
from orca_jax.link.client import EngineClient
from orca_jax.link.supervisor import Supervisor
from orca_jax.serve.app import create_app
from orca_jax.serve.openai.model import Service
from orca_jax.serve.root_path import RootPath
from orca_jax.serve.server import DEAD_STATE_SECONDS, EXIT_ENGINE_DIED
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.serve.telemetry.otel import start_tracing
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import EngineDeadError
from orca_jax.values.startup import RARE_COLLECTIONS

logger = logging.getLogger(__name__)


class Replica:
    """An engine process with its supervisor and the application over it. All methods belong to one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._client: EngineClient | None = None
        self._engine: asyncio.Task[None] | None = None
        self._closing = contextlib.AsyncExitStack()

    async def start(self) -> ASGIApp:
        """Start the engine, and return the application when requests are accepted.

        Raises:
            ConfigError: a setting is wrong.
            EngineDeadError: the engine ended while it was loading.
        """
        config = self._config
        tracing = start_tracing(config)
        if tracing is not None:
            self._closing.push_async_callback(asyncio.to_thread, tracing.close)
        observer = ServerObserver(config, tracing)
        client = self._client = EngineClient(config, observer.heartbeat)
        observer.follow(client)
        service = Service(client, config, observer)
        self._closing.callback(service.close)
        self._engine = asyncio.create_task(
            Supervisor(config, client, service.set_ready).run_engines()
        )
        await client.ready
        app = create_app(service, config, observer)
        if not config.root_path:
            return app
        return RootPath(app, config.root_path)

    def check(self) -> None:
        """Raise EngineDeadError if the engine has ended for good, or if it does not respond."""
        if self._engine is not None and self._engine.done():
            self._engine.result()
        if self._client is not None and self._client.state == "hung" and not self._config.restarts:
            raise EngineDeadError("the engine does not respond")

    def stats(self) -> dict[str, int]:
        """The numbers of running and waiting requests, and of open calls."""
        client = self._client
        if client is None:
            return {"running": 0, "waiting": 0, "calls": 0}
        return {"running": client.running, "waiting": client.waiting, "calls": client.num_calls}

    async def stop(self) -> None:
        """Accept no more calls, let the open ones end within `shutdown_timeout`, and stop the engine."""
        client = self._client
        engine = self._engine
        if client is not None and engine is not None:
            client.drain()
            idle = asyncio.create_task(client.idle.wait())
            await asyncio.wait(
                (idle, engine), timeout=self._config.shutdown_timeout, return_when="FIRST_COMPLETED"
            )
            idle.cancel()
            client.stop()
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            self._engine = None
        await self._closing.aclose()

    async def ended(self) -> None:
        """Wait for the end of the engine: without `restart_engine` it ends once, else after too many failures."""
        if self._engine is not None:
            await asyncio.wait((self._engine,))


class EngineReplica(Replica):
    """A replica with the names that Ray Serve calls. Its process ends with its engine, so that no call goes there."""

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application of this replica; Ray Serve calls this once."""
        install_handler(self._config.log_format)
        gc.set_threshold(*RARE_COLLECTIONS)
        app = await (self.start() if self._config.nnodes == 1 else self._start_gang())
        self._end = asyncio.create_task(self._exit_after_engine())
        return _Hosted(app, self._stop_for_good)

    async def _start_gang(self) -> ASGIApp:
        from orca_jax.tools.deploy.gang import (
            Gang,  # with ZeroMQ, which one rank alone does not need
        )

        self._gang = Gang(self._config)
        self._config = self._gang.config
        return await self._gang.join(self.start())

    async def check_health(self) -> None:
        """Raise if the replica must be replaced."""
        self.check()

    def record_routing_stats(self) -> dict[str, int]:
        """The load of this replica, for request routers."""
        return self.stats()

    async def _stop_for_good(self) -> None:
        self._end.cancel()
        await self.stop()

    async def _exit_after_engine(self) -> None:
        """End the process a moment after the engine. Routers notice that at once, and health checks only later."""
        await self.ended()
        await asyncio.sleep(DEAD_STATE_SECONDS)  # for the error answers of the open calls
        logger.error("the engine has ended, and this replica with it")
        os._exit(EXIT_ENGINE_DIED)


class _Hosted:
    """ASGI middleware: calls `stop` at the end of the host, and leaves the header with the request id to the host.

    Ray Serve has given the call its id and adds the header itself.
    """

    def __init__(self, app: ASGIApp, stop: Callable[[], Awaitable[None]]) -> None:
        self._app = app
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    one for one in message["headers"] if one[0].lower() != b"x-request-id"
                ]
            await send(message)

        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send_rest)

    async def _live(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})
