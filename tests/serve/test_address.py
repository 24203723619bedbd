"""Unix sockets and certificates."""

import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from orca_jax.serve.__main__ import main
from orca_jax.serve.listen import listening, tls_context
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError
from tests.serve.running import running

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates"
)


@pytest.mark.slow
def test_unix_socket(tmp_path: Path) -> None:
    """Only the owner can open the socket, nothing else listens, and the file is removed with the server."""
    path = tmp_path / "server.sock"
    with running(uds=path) as server:
        assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f"--unix-socket {path}" in server.lines[1]
        assert server.complete("hi", max_tokens=3).status_code == 200
        for process in (psutil.Process(server.process.pid), server.engine()):
            assert process.net_connections("inet") == []
        assert main(["--model", "preset:toy", "--uds", str(path)]) == 2, "the path is in use"
        assert server.health().status_code == 200
    assert not path.exists() and server.process.returncode == 0


def left_behind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def in_use(path: Path) -> socket.socket:
    alive = socket.socket(socket.AF_UNIX)
    alive.bind(str(path))
    alive.listen()
    return alive


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left_behind(path)
    with listening(ServerConfig(uds=str(path))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


@pytest.mark.parametrize("make", [in_use, Path.touch, Path.mkdir])
def test_what_is_not_ours_is_left_alone(
    tmp_path: Path, make: Callable[[Path], socket.socket | None]
) -> None:
    path = tmp_path / "s"
    made = make(path)
    with pytest.raises(ConfigError) as caught, listening(ServerConfig(uds=str(path))):
        pass
    assert caught.value.param == "uds" and path.exists()
    if made is not None:
        made.close()


def test_a_foreign_socket_is_not_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(ServerConfig(uds=str(path))):
        path.unlink()
        left_behind(path)
    assert path.exists()


@pytest.mark.parametrize("name", ["missing/s", "x" * 200])
def test_paths_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught, listening(ServerConfig(uds=str(tmp_path / name))):
        pass
    assert caught.value.param == "uds"


def make_certificate(directory: Path, name: str, *options: str) -> tuple[str, str]:
    """Paths of a self-signed certificate for this machine, and of its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    command = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-days",
        "2",
    )
    out = ("-keyout", str(key), "-out", str(certificate), *(options or ("-nodes",)))
    subprocess.run([*command, *subject, *out], check=True, capture_output=True)
    return str(certificate), str(key)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    directory = tmp_path_factory.mktemp("tls")
    yield {name: make_certificate(directory, name) for name in ("server", "client", "stranger")}


@needs_openssl
def test_tls(certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    trusting = ssl.create_default_context(cafile=certificate)
    with running(
        "--ssl-certfile", certificate, "--ssl-keyfile", key, "--write-timeout", "1", tls=trusting
    ) as server:
        assert server.url.startswith("https://") and f"--cacert {certificate}" in server.lines[1]
        with server.stream("hi", max_tokens=50, ignore_eos=True) as events:
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/live")  # this client does not trust the certificate
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/live".replace("https", "http"))


@needs_openssl
@pytest.mark.slow
@pytest.mark.chaos
def test_who_takes_nothing_is_cut_off_in_tls_too(certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    trusting = ssl.create_default_context(cafile=certificate)
    body = b'{"model":"preset:toy","prompt":"hi","stream":true,"max_tokens":8000,"ignore_eos":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with running(
        "--ssl-certfile", certificate, "--ssl-keyfile", key, "--write-timeout", "1", tls=trusting
    ) as server:
        url = server.http.base_url
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((url.host, url.port or 443))
            with trusting.wrap_socket(raw, server_hostname=url.host) as client:
                client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                assert client.recv(12) == b"HTTP/1.1 200"
                server.wait_idle()


@needs_openssl
@pytest.mark.slow
@pytest.mark.chaos
def test_client_certificates(certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    known, stranger = (ssl.create_default_context(cafile=certificate) for _ in range(2))
    known.load_cert_chain(*certificates["client"])
    stranger.load_cert_chain(*certificates["stranger"])
    flags = (
        "--ssl-certfile",
        certificate,
        "--ssl-keyfile",
        key,
        "--ssl-ca-certs",
        certificates["client"][0],
    )
    with running(*flags, tls=known) as server:
        assert server.health().status_code == 200
        for context in (stranger, ssl.create_default_context(cafile=certificate)):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/live", verify=context)


@needs_openssl
def test_certificates_that_do_not_fit(
    certificates: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    (server, server_key), (_, client_key) = certificates["server"], certificates["client"]
    encrypted = make_certificate(tmp_path, "encrypted", "-passout", "pass:secret")
    for certificate, key, authorities, param in (
        (server, client_key, None, "ssl_certfile"),
        (server, server, None, "ssl_certfile"),
        (*encrypted, None, "ssl_certfile"),
        (server, str(tmp_path / "missing"), None, "ssl_keyfile"),
        (str(tmp_path / "missing"), server_key, None, "ssl_certfile"),
        (server, server_key, server_key, "ssl_ca_certs"),
    ):
        config = ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=authorities)
        with pytest.raises(ConfigError) as caught:
            tls_context(config)
        assert caught.value.param == param
