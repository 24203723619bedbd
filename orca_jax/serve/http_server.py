"""The HTTP server around the application. Its imports take as long as all others of the front end together."""

import contextlib
import socket
import ssl
from collections.abc import Generator
from functools import partial

import uvicorn

from orca_jax.serve.accept import Acceptor, connection_limit
from orca_jax.serve.app import create_app
from orca_jax.serve.connection import MAX_HEADER_BYTES, IdleConnections, connection_class
from orca_jax.serve.openai.model import Service
from orca_jax.serve.root_path import RootPath
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig

DRAIN_SECONDS = 5  # for clients to read the bytes already written


class HttpServer(uvicorn.Server):
    """uvicorn with its own `Acceptor`, and without its signal handlers, since the owner decides about the end.

    Raises:
        ConfigError: keys, folders or origins of the settings cannot be used, or the limit of open files is too low.
    """

    def __init__(
        self,
        service: Service,
        config: ServerConfig,
        observer: ServerObserver,
        context: ssl.SSLContext | None,
    ) -> None:
        connection_limit()  # raises if it is too low
        app = create_app(service, config, observer)
        made = uvicorn.Config(
            RootPath(app, config.root_path) if config.root_path else app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        made.load()
        super().__init__(made)
        self._settings = config
        self._context = context

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of the one socket."""
        assert sockets is not None
        (listener,) = sockets
        idle = IdleConnections()
        settings = self._settings
        make_connection = connection_class(settings.read_timeout, settings.write_timeout, idle)
        self._acceptor = Acceptor(
            listener,
            partial(make_connection, self.config, self.server_state, {}),
            idle,
            self.server_state.connections,
            limit=connection_limit(),
            context=self._context,
            handshake_timeout=settings.read_timeout,
        )
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.close()
        await super().shutdown(sockets)
