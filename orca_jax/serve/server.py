"""The front-end process: flags, the socket, the life of the engine process, and the end of both."""

import argparse
import asyncio
import contextlib
import errno
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import msgspec
import uvicorn

from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, EngineDeadError
from orca_jax.serve.app import create_app
from orca_jax.serve.engine_args import add_engine_args, engine_config_from_args
from orca_jax.serve.engine_client import EngineClient
from orca_jax.serve.service import Service

EXIT_ENGINE_DIED = 1
EXIT_CONFIG = 2
GOODBYE_SECONDS = 5  # for open connections to take their last bytes
OBITUARY_SECONDS = 1.0  # between the engine's end and ours, in which /health says so


@dataclass(frozen=True)
class ServerConfig:
    """What the front end needs to know."""

    engine: EngineConfig
    names: tuple[str, ...]  # of the model
    host: str
    port: int


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal or the engine's end.

    Returns:
        0 after SIGINT or SIGTERM, 1 when the engine process died, 2 when a setting is wrong.
    """
    config = parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s server: %(message)s")
    logging.getLogger("orca_jax").setLevel(logging.INFO)  # libraries: warnings only
    try:
        listener = bind(config.host, config.port)
        return asyncio.run(_serve(config, listener))
    except ConfigError as error:
        flag = f"--{error.param.replace('_', '-')}: " if error.param else ""
        print(f"error: {flag}{error.message}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:  # before the handlers below were in place
        return 0


def parse_args(argv: Sequence[str] | None) -> ServerConfig:
    """Read the flags; argparse ends the process with code 2 where they are wrong."""
    parser = argparse.ArgumentParser("python -m orca_jax.serve", description=__doc__, allow_abbrev=False)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", default=8000, type=_port, help="0 takes a free one (default: %(default)s)")
    names_help = "names of the model in the API, the first of them in answers; default: what --model says"
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help=names_help)
    add_engine_args(parser)
    args = parser.parse_args(argv)
    engine = engine_config_from_args(args)
    return ServerConfig(engine, tuple(args.served_model_name or (engine.model,)), args.host, args.port)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow starts.

    Raises:
        ConfigError: the port is taken or forbidden, or the host is not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"{host!r} is no address of this machine: {error.strerror}", param="host") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken; stop what listens there or choose another port"
            raise ConfigError(message, param="port") from None
        param = "port" if error.errno == errno.EACCES else "host"
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}", param=param) from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the engine's end is as much a reason to stop as a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _serve(config: ServerConfig, listener: socket.socket) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    client = EngineClient()
    service = Service(client, config.names)
    server = _Server(_uvicorn_config(service))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    signalled = asyncio.create_task(stopped.wait())
    try:
        await client.start(config.engine)
        await asyncio.wait((client.ready, signalled), return_when=asyncio.FIRST_COMPLETED)
        if stopped.is_set():
            return 0
        await service.set_ready(await client.ready)
        print(_greeting(config, listener), flush=True)
        died = asyncio.create_task(client.dead.wait())
        await asyncio.wait((died, signalled), return_when=asyncio.FIRST_COMPLETED)
        if stopped.is_set():
            return 0
        died.cancel()
        print(f"error: {await client.exit_reason()}", file=sys.stderr)
        await asyncio.wait((signalled,), timeout=OBITUARY_SECONDS)
        return EXIT_ENGINE_DIED
    except EngineDeadError:
        print(f"error: {await client.exit_reason()}", file=sys.stderr)
        return EXIT_ENGINE_DIED
    finally:
        client.stop()
        server.should_exit = True
        await http
        await client.close()


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        http="h11",  # closes at 64 KiB of headers, where httptools takes hundreds of megabytes
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=64 * 2**10,
        timeout_graceful_shutdown=GOODBYE_SECONDS,
    )


def _greeting(config: ServerConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # what a client on this machine can call
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    body = {"model": config.names[0], "prompt": "Once upon a time", "max_tokens": 64, "stream": True}
    data = shlex.quote(msgspec.json.encode(body).decode())
    return (
        f"Serving {config.names[0]} on {url}\n"
        f"curl -gN {url}/v1/completions -H 'content-type: application/json' -d {data}"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port in 0..65535")
    return int(text)
