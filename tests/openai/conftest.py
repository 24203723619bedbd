"""The shared server of tests/serve, for the tests of the API."""

from tests.serve.conftest import anyio_backend, idle_server, server

__all__ = ["anyio_backend", "idle_server", "server"]
