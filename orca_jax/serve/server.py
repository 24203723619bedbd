"""The front-end process: builds the server, runs it, and ends it after a signal or the engine's end."""

import asyncio
import gc
import signal
import socket
import ssl
import sys
from typing import TYPE_CHECKING

from orca_jax.helpers.logs import end_at_failed_threads, install_handler
from orca_jax.link.client import EngineClient
from orca_jax.link.open_files import raise_file_limit
from orca_jax.link.restarts.workers import become_worker
from orca_jax.link.supervisor import Supervisor
from orca_jax.link.wire import Ready
from orca_jax.serve.announcement import announcement
from orca_jax.serve.listen import listening, tls_context, url_of
from orca_jax.serve.openai.model import Service, downloaded
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.serve.telemetry.otel import start_tracing
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ClusterLostError, EngineDeadError
from orca_jax.values.startup import RARE_COLLECTIONS

if TYPE_CHECKING:
    from orca_jax.serve.http_server import HttpServer

EXIT_ENGINE_DIED = 1
EXIT_SERVER_FAILED = 1
EXIT_CLUSTER_LOST = 3
SHORT_DRAIN_SECONDS = 1  # the same after a second signal
# between the engine's end and the server's; /health reports the state "dead" or "hung"
DEAD_STATE_SECONDS = 1.0


def serve(config: ServerConfig, begun: float) -> int:
    """Serve until a signal or the engine's end.

    Args:
        config: the settings.
        begun: begin of the start in seconds of `time.monotonic`, for the reported times.

    Returns:
        The exit status, as `__main__.main`.

    Raises:
        ConfigError: a setting is wrong.
    """
    if config.node_rank > 0:
        if config.restart_workers:
            become_worker()
        from orca_jax.link.worker import run_worker

        run_worker(config)
    install_handler(config.log_format)
    context = tls_context(config)
    config = downloaded(config)
    raise_file_limit()
    with listening(config) as listener:
        gc.set_threshold(*RARE_COLLECTIONS)
        return asyncio.run(_serve(config, listener, context, begun))


class _Signals:
    """Events for SIGINT and SIGTERM: the first signal drains, the second ends."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _serve(
    config: ServerConfig, listener: socket.socket, context: ssl.SSLContext | None, begun: float
) -> int:
    return await _ServerRun(config, listener, context, begun).run()


class _ServerRun:
    """One run of the server, from the first connection to the last. Made in the event loop. Raises ConfigError.

    Of the two states, `draining` begins with the first SIGINT or SIGTERM. Every end closes the connections and stops
    the engine.

    | event | serving | draining |
    |---|---|---|
    | first signal | refuse new calls, wait for the open ones | - |
    | no open call | - | end with 0 |
    | `shutdown_timeout` passed | - | fail the open calls, end with 0 |
    | second signal | - | fail the open calls, end with 0 after `SHORT_DRAIN_SECONDS` at most |
    | engine ended, no restart | report, show the state for `DEAD_STATE_SECONDS`, end with 1 | report, end with 1 |
    | a thread failed | report, end with 1 | report, end with 1 |
    | a setting is wrong | raise ConfigError | raise ConfigError |
    | HTTP server ended | raise its exception, or end with 0 | raise its exception, or end with 0 |
    """

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        begun: float,
    ) -> None:
        self._config = config
        self._begun = begun
        self._listener = listener
        self._context = context
        self._tracing = start_tracing(config)
        self._observer = ServerObserver(config, self._tracing)
        self._client = EngineClient(config, self._observer.heartbeat)
        self._observer.follow(self._client)
        self._service = Service(self._client, config, self._observer)
        self._has_announced = False
        loop = asyncio.get_running_loop()
        # the reason, once a thread has failed
        self._failure: asyncio.Future[str] = loop.create_future()
        self._forget_threads = end_at_failed_threads(
            lambda reason: loop.call_soon_threadsafe(self._end_failed, reason)
        )

    def _end_failed(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)

    async def run(self) -> int:
        """Serve until an event of the table ends the run; return the exit code. Raises ConfigError."""
        signals = _Signals()
        engine = asyncio.create_task(self._run_engines())
        try:
            # beside the engine, which takes longer to import
            server = await asyncio.to_thread(self._http_server)
            http = asyncio.create_task(server.serve(sockets=[self._listener]))
            try:
                return await self._wait_for_end(engine, http, signals)
            finally:
                self._client.stop()
                if signals.second.is_set():
                    server.config.timeout_graceful_shutdown = SHORT_DRAIN_SECONDS
                server.should_exit = True
                await http
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            self._forget_threads()
            self._service.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    def _http_server(self) -> "HttpServer":
        from orca_jax.serve.http_server import HttpServer

        return HttpServer(self._service, self._config, self._observer, self._context)

    async def _run_engines(self) -> None:
        """Run engines, as `Supervisor.run_engines`, and read the texts of the model meanwhile. Raises ConfigError."""
        supervisor = Supervisor(self._config, self._client, self._engine_ready, begun=self._begun)
        engines = asyncio.create_task(supervisor.run_engines())
        try:
            await self._service.read_texts()
            # cancelled once, below: a second time would interrupt the end of the engine
            await asyncio.shield(engines)
        finally:
            engines.cancel()
            await asyncio.gather(engines, return_exceptions=True)

    async def _wait_for_end(
        self, engine: asyncio.Task[None], http: asyncio.Task[None], signals: _Signals
    ) -> int:
        first, second = (
            asyncio.create_task(event.wait()) for event in (signals.first, signals.second)
        )
        idle: asyncio.Task[bool] | None = None
        try:
            ends = (engine, http, self._failure)
            await asyncio.wait((*ends, first), return_when=asyncio.FIRST_COMPLETED)
            if signals.first.is_set():
                self._client.drain()
                idle = asyncio.create_task(self._client.idle.wait())
                timeout = self._config.shutdown_timeout
                await asyncio.wait(
                    (*ends, second, idle), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
            if self._failure.done():
                print(f"error: the server failed: {self._failure.result()}", file=sys.stderr)
                return EXIT_SERVER_FAILED
            if http.done():
                http.result()
            if not engine.done():
                return 0
            return await self._report_engine_death(engine, first)
        finally:
            for task in (first, second, idle):
                if task is not None:
                    task.cancel()

    async def _report_engine_death(
        self, engine: asyncio.Task[None], signalled: asyncio.Task[bool]
    ) -> int:
        """Print the reason, and let /health show the state for a moment; return the exit code. Raises ConfigError."""
        code = EXIT_ENGINE_DIED
        try:
            engine.result()
        except ClusterLostError as error:
            print(f"error: the cluster is lost: {error}", file=sys.stderr)
            code = EXIT_CLUSTER_LOST
        except EngineDeadError as error:
            print(f"error: {error}", file=sys.stderr)
        if not signalled.done():
            await asyncio.wait((signalled,), timeout=DEAD_STATE_SECONDS)
        return code

    async def _engine_ready(self, ready: Ready) -> None:
        await self._service.set_ready(ready)
        if not self._has_announced:
            self._has_announced = True
            gc.collect()
            gc.freeze()  # walking what stays until the end would stop all calls for 0.1 s
            print(
                announcement(self._config, url_of(self._config, self._listener), ready.summary),
                flush=True,
            )
