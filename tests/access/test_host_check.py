"""The names of the server: no web page reaches a local server by DNS rebinding."""

from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_jax.serve.access import with_host_check
from orca_jax.serve.args import parse_args
from orca_jax.server_config import ServerConfig
from orca_jax.tools.deploy import ray_serve
from orca_jax.values.errors import ConfigError
from tests.serve.asgi import Answer, Pairs, call
from tests.serve.played import Stage, on_stage, saying


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def guarded(*, has_keys: bool = False, **settings: Any) -> ASGIApp:
    return with_host_check(inner, ServerConfig(**settings), has_keys=has_keys)


def asked(app: ASGIApp, host: str | None, origin: str | None = None) -> Answer:
    headers: Pairs = [] if host is None else [(b"host", host.encode("latin-1"))]
    return call(
        app,
        "/v1/models",
        headers=headers + ([] if origin is None else [(b"origin", origin.encode("latin-1"))]),
    )


def refused(answer: Answer, flag: str = "--allowed-hosts") -> bool:
    if answer.status == 200:
        return False
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    assert flag in answer.error["message"]
    return True


OWN = (
    *("localhost", "localhost:8000", "LOCALHOST:1", "localhost.", "localhost.:8000", "localhost:"),
    *(
        "127.0.0.1:8000",
        "127.0.0.1",
        "127.8.8.8",
        "192.168.1.7:80",
        "[::1]",
        "[::1]:8000",
        "[fe80::1%25eth0]:1",
    ),
)
FOREIGN = (
    *(
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "evil.localhost",
        "127.0.0.1.evil.example",
    ),
    *(
        "",
        ":8000",
        ".",
        "local host",
        "localhost@evil.example",
        "evil.example/localhost",
        "localhost:80:80",
        "::1",
    ),
    *(
        "[::1",
        "::1]",
        "[evil.example]",
        "[localhost",
        "localhost..",
        "127.1",
        "\xb9.2.3.4",
        "localhost,evil.example",
    ),
)


@pytest.mark.parametrize("host", OWN)
def test_own_names_in_every_spelling(host: str) -> None:
    assert not refused(asked(guarded(), host))
    assert not refused(asked(guarded(), "127.0.0.1", f"http://{host}"))
    assert not refused(asked(guarded(), "127.0.0.1", f"HTTPS://{host}"))


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names(host: str) -> None:
    assert refused(asked(guarded(), host))
    assert refused(asked(guarded(), "127.0.0.1:8000", f"http://{host}"), "--allowed-origins")


def test_no_host_and_several() -> None:
    assert not refused(asked(guarded(), None)), "HTTP/1.0, which browsers do not speak"
    assert refused(asked(guarded(), None, "http://evil.example"))
    twice = call(guarded(), "/", headers=[(b"Host", b"localhost"), (b"host", b"evil.example")])
    assert refused(twice)


@pytest.mark.parametrize("origin", ["null", "file://", "", "localhost", "http://", "//localhost"])
def test_origins_without_a_name(origin: str) -> None:
    """Every page can make its origin `null`, by a frame in a sandbox."""
    assert refused(asked(guarded(), "localhost", origin))
    assert not refused(asked(guarded(allowed_origins=("*",)), "localhost", origin))
    assert not origin or not refused(asked(guarded(allowed_origins=(origin,)), "localhost", origin))


def test_allowed_origins_open_no_host() -> None:
    app = guarded(allowed_origins=("https://page.example",))
    assert not refused(asked(app, "localhost", "https://page.example"))
    assert refused(asked(app, "localhost", "https://page.example:8000"))
    assert refused(asked(app, "page.example"))
    assert refused(asked(guarded(allowed_origins=("*",)), "evil.example"))


def test_allowed_hosts() -> None:
    app = guarded(allowed_hosts=("LLM.example", "box."))
    for name in ("llm.example:1", "llm.EXAMPLE.", "box", "localhost"):
        assert not refused(asked(app, name, f"https://{name}"))
    assert refused(asked(app, "www.llm.example"))


@pytest.mark.parametrize(
    ("settings", "has_keys", "is_checked"),
    [
        ({}, False, True),
        ({"host": "localhost"}, False, True),
        ({"host": "::1"}, False, True),
        ({"host": "127.0.0.2"}, False, True),
        ({}, True, False),
        ({"host": "0.0.0.0"}, False, False),
        ({"host": "::"}, False, False),
        ({"host": "10.0.0.1"}, False, False),
        ({"host": "name.invalid"}, False, False),
        ({"uds": "orca.sock"}, False, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("a",)}, False, True),
        ({"allowed_hosts": ("a",)}, True, True),
    ],
)
def test_which_servers_check(settings: dict[str, Any], has_keys: bool, is_checked: bool) -> None:
    assert refused(asked(guarded(has_keys=has_keys, **settings), "evil.example")) == is_checked


def test_a_name_of_a_loopback_address_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr("orca_jax.serve.access.socket.getaddrinfo", lambda *_, **__: found)
    app = guarded(host="thismachine")
    assert not refused(asked(app, "ThisMachine:8000")) and refused(asked(app, "evil.example"))


def test_the_whole_server_refuses_before_everything_else() -> None:
    """A refusal has a request id and is counted; neither a preflight nor a probe gets through."""

    async def calls(stage: Stage) -> None:
        async with stage.http() as http:
            for method, path in (
                ("GET", "/health"),
                ("OPTIONS", "/v1/completions"),
                ("GET", "/"),
                ("GET", "/nowhere"),
            ):
                answer = await http.request(method, path, headers={"host": "evil.example:8000"})
                assert answer.status_code == 403 and "x-request-id" in answer.headers
                assert "access-control-allow-origin" not in answer.headers
            own = await http.get("/", headers={"host": "[::1]:8000", "origin": "http://[::1]:8000"})
            assert own.status_code == 200, "the playground calls its own server"
            assert (await http.get("/health")).status_code == 200
        assert 'status="403"' in stage.observer.render().decode()

    on_stage(saying("x"), calls, ServerConfig(allowed_origins=("*",)))


@pytest.mark.parametrize(
    "name", ["http://llm.example", "llm.example:80", "a/b", "a b", "[::1]", "é", "*", "."]
)
def test_wrong_names(name: str) -> None:
    with pytest.raises(ConfigError, match="without scheme and port") as raised:
        parse_args(["--allowed-hosts", name])
    assert raised.value.param == "allowed_hosts"


def test_no_names_on_a_socket() -> None:
    with pytest.raises(ConfigError, match="no effect with --uds"):
        parse_args(["--uds", "x.sock", "--allowed-hosts", "llm.example"])


def test_replicas_of_a_file_do_not_know_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(ray_serve, "application", lambda config, settings: built.append(config))
    ray_serve.app({"model": "preset:toy"})
    ray_serve.app({"model": "preset:toy", "allowed_hosts": ["llm"]})
    built.append(ray_serve.read_settings([])[0])
    checks = [
        refused(asked(with_host_check(inner, one, has_keys=False), "evil.example")) for one in built
    ]
    assert checks == [False, True, True]
