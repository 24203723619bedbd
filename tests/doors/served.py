"""The application of `orca-jax serve` over an engine in a thread of this process, made from a command line."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx

from orca_jax.assembly.engine import build_engine
from orca_jax.batch.local import LocalEngine
from orca_jax.serve.app import create_app
from orca_jax.serve.args import parse_args
from tests.text.lasting import lasting_template


def on_server[T](words: Sequence[str], act: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Start the application with the flags `words`, and return what `act` makes of its client."""
    config = parse_args(words)

    async def run() -> T:
        with build_engine(config.engine) as built, lasting_template():
            async with LocalEngine(built, config) as engine:
                service = engine._service
                app = create_app(service, config, service.observer)
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://localhost"
                ) as http:
                    return await act(http)

    return asyncio.run(asyncio.wait_for(run(), 60))
