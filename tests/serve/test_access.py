"""API keys guard every route but two, in every spelling of the path; CORS."""

import asyncio
import hmac
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from orca_jax.serve.access import Access, read_keys, with_cors
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError
from tests.serve.asgi import Answer, Pairs, bearer, call, http_scope

KEYS = ("sk-one", "sk-two-which-is-longer", "z")
PAGE = "https://page.example"
ROUTES = {
    "/live": "GET",
    "/health": "GET",
    "/ready": "GET",
    "/health_generate": "GET",
    "/load": "GET",
    "/metrics": "GET",
    "/version": "GET",
    "/openapi.json": "GET",
    "/v1/models": "GET",
    "/v1/models/{name:path}": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/completions/render": "POST",
    "/v1/chat/completions/render": "POST",
}
OPEN = {"/live", "/health"}


def router() -> ASGIApp:
    """Answers with the path of the route taken."""

    async def handle(request: Request) -> Response:
        return PlainTextResponse(request.scope["route"].path)

    routes = {**ROUTES, "/": "GET"}
    return Starlette(
        routes=[Route(path, handle, methods=[method]) for path, method in routes.items()]
    )


def closed() -> ASGIApp:
    return Access(router(), KEYS)


def refused(answer: Answer) -> bool:
    if answer.status != 401:
        return False
    assert answer.header("www-authenticate") == "Bearer"
    assert answer.error["type"] == "authentication_error"
    # of Anthropic's format, which has neither param nor code
    if b'"request_id"' not in answer.body:
        assert (
            set(answer.error) == {"message", "type", "param", "code"}
            and answer.error["code"] == "invalid_api_key"
        )
    return True


@pytest.mark.parametrize(("path", "method"), ROUTES.items())
def test_route_needs_a_key(path: str, method: str) -> None:
    app = closed()
    target = path.replace("{name:path}", "m/x")
    assert refused(call(app, target, method)) == (path not in OPEN)
    for key in KEYS:
        answer = call(app, target, method, bearer(key))
        assert (answer.status, answer.body.decode()) == (200, path)


SPELLINGS = (
    *(
        "//live",
        "/live/",
        "/live//",
        "/LIVE",
        "/Live",
        "/live/x",
        "/live/../v1/models",
        "/live/..%2fv1/models",
        "/.",
    ),
    *(
        "/%2e/live",
        "/live%2f",
        "/live%00",
        "/live%20",
        "/live;x",
        "/./live",
        "/health/../metrics",
        "/health/%2e%2e/metrics",
    ),
    *(
        "/v1/../live",
        "/v1/models/../../live",
        "/live%0a",
        "/health\\..\\metrics",
        "live",
        "",
        "*",
        "/%6cive/",
        "/live%23",
    ),
    *(
        "http://evil/live",
        "/metrics?path=/live",
        "/metrics#/live",
        "/metrics;/live",
        "/nowhere",
        "/docs",
        "/favicon.ico",
    ),
)


@pytest.mark.parametrize("root_path", ["", "/api", "/live", "/api/"])
@pytest.mark.parametrize("target", SPELLINGS)
def test_spelling_opens_nothing(target: str, root_path: str) -> None:
    assert refused(call(closed(), target, root_path=root_path))


@pytest.mark.parametrize("target", ["/live", "/health", "/live?x=/metrics", "/%6cive", "/liv%65"])
@pytest.mark.parametrize("root_path", ["", "/api"])
def test_probes_are_open(target: str, root_path: str) -> None:
    answer = call(closed(), target, root_path=root_path)
    assert answer.status == 200 and answer.body.decode() in OPEN


@settings(deadline=None)
@given(
    path=st.lists(
        st.sampled_from(
            [
                "/",
                ".",
                "live",
                "health",
                "metrics",
                "v1",
                "%2e",
                "%2f",
                "models",
                "//",
                "..",
                "L",
                "?",
                ";",
            ]
        ),
        max_size=7,
    ).map("".join),
    root=st.sampled_from(["", "/", "/live", "/health/live", "/api", "live"]),
    method=st.sampled_from(["GET", "HEAD", "POST", "OPTIONS"]),
)
def test_without_a_key_the_router_takes_nothing_but_the_probes(
    path: str, root: str, method: str
) -> None:
    answer = call(closed(), path, method, root_path=root)
    if answer.status != 401:
        assert answer.body.decode() in (OPEN | {"/"} if method == "HEAD" else OPEN)


@pytest.mark.parametrize("method", ["OPTIONS", "POST", "PUT", "DELETE", "PROPFIND", "get"])
def test_probes_open_for_reading_only(method: str) -> None:
    assert refused(call(closed(), "/live", method))


WRONG: list[Pairs] = [
    [],
    bearer(""),
    bearer("sk-on"),
    bearer("sk-one2"),
    bearer("SK-ONE"),
    bearer("sk-one z"),
    bearer("sk-one,z"),
    [(b"authorization", b"sk-one")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearersk-one")],
    [(b"authorization", b"Basic sk-one")],
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer \xff\xfe")],
    [(b"authorization", b"Bearer " + b"x" * 60_000)],
    [*bearer("wrong"), *bearer("sk-one")],
    [*bearer("sk-one"), *bearer("wrong")],
    [(b"x-api-key", b"wrong")],
    [(b"x-api-key", b"")],
    [(b"x-api-key", b"sk-one"), (b"x-api-key", b"wrong")],
    [(b"x-api-key", b"sk-one"), (b"api-key", b"wrong")],
    [(b"x-api-key", b"sk-one"), *bearer("wrong")],
    [(b"x-key", b"sk-one")],
    [(b"cookie", b"authorization=Bearer sk-one")],
]


@pytest.mark.parametrize("headers", WRONG, ids=range(len(WRONG)))
def test_wrong_key(headers: Pairs) -> None:
    answer = call(closed(), "/v1/models", headers=headers)
    assert refused(answer)
    assert not any(key in answer.body.decode() for key in KEYS[:2]), "an error shows a key"


@pytest.mark.parametrize(
    "value", [b"Bearer sk-one", b"bearer sk-one", b"BEARER   sk-one ", b" Bearer sk-one"]
)
def test_right_key(value: bytes) -> None:
    assert call(closed(), "/v1/models", headers=[(b"Authorization", value)]).status == 200


@pytest.mark.parametrize("name", [b"x-api-key", b"X-Api-Key", b"api-key"])
def test_key_in_the_headers_of_other_clients(name: bytes) -> None:
    assert call(closed(), "/v1/models", headers=[(name, b" sk-one ")]).status == 200
    assert (
        call(closed(), "/v1/models", headers=[(name, b"wrong"), *bearer("sk-one")]).status == 200
    ), "the first counts"


def test_query_is_no_place_for_a_key() -> None:
    assert refused(call(closed(), "/v1/models?api_key=sk-one&key=z&authorization=Bearer%20sk-one"))


def test_without_keys_all_is_open() -> None:
    assert call(Access(router(), ()), "/metrics").status == 200


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    app = closed()
    for key in (*KEYS, "wrong", ""):
        compared.clear()
        call(app, "/metrics", headers=bearer(key))
        assert compared == [(32, 32)] * len(KEYS), (
            "otherwise the time would reveal which key matches, or its length"
        )


def test_websockets_are_refused_and_lifespan_passes() -> None:
    taken: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        taken.append(scope["type"])

    async def run(scope: dict[str, Any]) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "websocket.connect"}

        await Access(inner, KEYS)(scope, receive, send)
        return sent

    socket = {**http_scope("/live"), "type": "websocket"}
    assert [message["type"] for message in asyncio.run(run(socket))] == ["websocket.close"]
    assert asyncio.run(run({"type": "lifespan"})) == []
    assert taken == ["lifespan"]


def test_objects_do_not_show_keys() -> None:
    app = closed()
    assert isinstance(app, Access)
    shown = repr(app) + repr(vars(app))
    assert not any(key in shown for key in KEYS[:2])
    assert "sk-one" not in repr(ServerConfig(api_key=KEYS))


# Keys from flags and files.


def keys_of(path: Path, *flags: str) -> tuple[str, ...]:
    return read_keys(ServerConfig(api_key=flags, api_key_file=str(path)))


def key_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (b"a", ("a",)),
        (b"a\nb\n", ("a", "b")),
        (b"a\r\nb\r\n", ("a", "b")),
        (b"# who\n\n  a  \n\t\n#b\nc#d\n", ("a", "c#d")),
        (b"\xef\xbb\xbfa\n", ("a",)),
        (b"a\na\nflag\n", ("a",)),
    ],
)
def test_key_file(tmp_path: Path, content: bytes, keys: tuple[str, ...]) -> None:
    assert keys_of(key_file(tmp_path, content), "flag") == ("flag", *keys)


def test_no_keys() -> None:
    assert read_keys(ServerConfig()) == ()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no key"),
        (b"\n# only words\n\r\n", "holds no key"),
        (b"hunter2 words\n", "printable ASCII"),
        ("schlüssel".encode(), "printable ASCII"),
        (b"hunter2\xff", "not valid UTF-8"),
    ],
    ids=range(5),  # the test's name is part of the directory's name, and must not show keys either
)
def test_bad_key_file(tmp_path: Path, content: bytes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        keys_of(key_file(tmp_path, content), "flag")
    assert raised.value.param == "api_key_file"
    assert "hunter2" not in raised.value.message


@pytest.mark.parametrize("name", ["missing", "."])
def test_unreadable_key_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file .* cannot be read: "):
        keys_of(tmp_path / name)


@pytest.mark.parametrize("key", ["", " ", "a b", "tab\t", "é", "a\nb"])
def test_bad_key_flag(key: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key: .* printable ASCII") as raised:
        read_keys(ServerConfig(api_key=("fine", key)))
    assert raised.value.param == "api_key"


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)]
)
def test_readable_to_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    with caplog.at_level(logging.INFO):
        keys_of(key_file(tmp_path, b"hunter2", mode))
    assert ("chmod 600" in caplog.text) == warned
    assert "hunter2" not in caplog.text


# Web pages.


def with_pages(*origins: str, credentials: bool = False) -> ASGIApp:
    return with_cors(closed(), ServerConfig(allowed_origins=origins, allow_credentials=credentials))


def from_page(origin: str = PAGE, method: str | None = None) -> Pairs:
    asked = [] if method is None else [(b"access-control-request-method", method.encode())]
    return [
        (b"origin", origin.encode()),
        *asked,
        (b"access-control-request-headers", b"authorization,x-stainless-os"),
    ]


def test_cors_is_off_unless_asked() -> None:
    app = closed()
    assert with_cors(app, ServerConfig()) is app
    for answer in (
        call(app, "/v1/models", headers=[*bearer("z"), *from_page()]),
        call(app, "/v1/completions", "OPTIONS", from_page(method="POST")),
    ):
        assert answer.header("access-control-allow-origin") is None


def test_preflight() -> None:
    app = with_pages(PAGE)
    answer = call(app, "/v1/completions", "OPTIONS", from_page(method="POST"))
    assert (answer.status, answer.header("access-control-allow-origin")) == (200, PAGE)
    assert "authorization" in (answer.header("access-control-allow-headers") or "")
    assert answer.header("access-control-allow-credentials") is None
    stranger = call(app, "/v1/completions", "OPTIONS", from_page("https://evil.example", "POST"))
    assert (stranger.status, stranger.header("access-control-allow-origin")) == (400, None)


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE", "nonsense"])
def test_preflight_reaches_no_route(method: str) -> None:
    """Preflight calls are answered without a key, so the answer must not come from the application."""
    answer = call(with_pages("*"), "/metrics", "OPTIONS", from_page(method=method))
    assert answer.body.decode() not in ROUTES


def test_options_without_preflight_needs_a_key() -> None:
    assert refused(call(with_pages(PAGE), "/v1/models", "OPTIONS", [(b"origin", PAGE.encode())]))


def test_page_can_read_the_refusal() -> None:
    answer = call(with_pages(PAGE), "/v1/models", headers=from_page())
    assert refused(answer)
    assert answer.header("access-control-allow-origin") == PAGE
    assert "x-request-id" in (answer.header("access-control-expose-headers") or "")


def test_stranger_cannot_read() -> None:
    answer = call(
        with_pages(PAGE), "/v1/models", headers=[*bearer("z"), *from_page("https://evil.example")]
    )
    assert answer.header("access-control-allow-origin") is None


def test_credentials_for_named_pages_only() -> None:
    answer = call(
        with_pages(PAGE, credentials=True), "/v1/models", headers=[*bearer("z"), *from_page()]
    )
    assert answer.header("access-control-allow-credentials") == "true"
