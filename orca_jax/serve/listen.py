"""The listening socket, on a port or a Unix path, and its TLS context."""

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError, reason_of

BACKLOG = 2048
# bytes per client in the kernel (Linux doubles them): how far a slow client may lag
SEND_BUFFER = 128 * 2**10
KEEP_ALIVE_SECONDS = 60  # without traffic, after which the kernel probes the peer


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Open the listening socket, before anything slow starts. The file of a Unix socket is removed at the end.

    Raises:
        ConfigError: the address is in use, forbidden, or not an address of this machine.
    """
    if config.uds is None:
        with _listen_on_port(config) as listener:
            yield listener
        return
    path = Path(config.uds)
    with _listen_on_path(path) as listener:
        inode = path.stat().st_ino
        try:
            yield listener
        finally:
            _remove(path, inode)


def _remove(path: Path, inode: int) -> None:
    """Remove the file of a socket, unless another process has replaced it."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The TLS context for HTTPS; None for HTTP. With `ssl_ca_certs` clients must present a certificate.

    Raises:
        ConfigError: a file cannot be read or used, or the key does not fit the certificate.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for param in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        _check_readable(getattr(config, param), param)
    try:
        # Without this password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        message = (
            f"cannot be used with --ssl-keyfile: {error.strerror or error}; the key must fit and "
            "must not be encrypted"
        )
        raise ConfigError(message, param="ssl_certfile") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"cannot be used: {error.strerror or error}", param="ssl_ca_certs"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """The URL for clients on this machine."""
    if config.uds is not None:
        return url_at(config, "localhost")
    host, port = listener.getsockname()[:2]
    return url_at(config, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def url_at(config: ServerConfig, host: str, port: int | None = None) -> str:
    """The URL of a host, without a path."""
    scheme = "http" if config.ssl_certfile is None else "https"
    place = f"[{host}]" if ":" in host else host
    return f"{scheme}://{place}" if port is None else f"{scheme}://{place}:{port}"


def _listen_on_port(config: ServerConfig) -> socket.socket:
    host = config.host
    port = config.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"{host!r} is not an address of this machine: {error.strerror}", param="host"
        ) from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _limit_peers(listener, config.write_timeout)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is already in use; use --port to choose another one"
            raise ConfigError(message, param="port") from None
        param = "port" if error.errno == errno.EACCES else "host"
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror}", param=param
        ) from None
    return listener


def _limit_peers(listener: socket.socket, write_timeout: float) -> None:
    """Limit the memory of slow peers and the time until vanished peers are dropped, for all accepted connections."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE") and hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS)
        milliseconds = min(max(1, int(write_timeout * 1000)), 2**31 - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _listen_on_path(path: Path) -> socket.socket:
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # only the owner may open it, also before a chmod could run
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {reason_of(error)}", param="uds") from None
    finally:
        os.umask(mask)
    return listener


def _clear(path: Path) -> None:
    """Remove a socket file left behind by a server that was killed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {reason_of(error)}", param="uds") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"{path} exists and is not a socket; remove it or choose another path", param="uds"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        except OSError as error:
            raise ConfigError(f"{path} is in use: {error.strerror or error}", param="uds") from None
        else:
            raise ConfigError(
                f"{path} is already in use by another server; choose another path", param="uds"
            )


def _check_readable(name: str | None, param: str) -> None:
    if name is None:
        return
    try:
        with Path(name).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {reason_of(error)}", param=param) from None
