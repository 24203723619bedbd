"""The files of the page. They need no key: they hold no data.

The drawing code is that of the page of a recorded run, and lies in the folder of timelines. The style sheet of colours
is made from the table of colours.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.timeline.palette import PAGE_FOLDER, palette_css

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
SHARED = ("chart.css", "chart.js", "draw.js", "scale.js", "words.js")
PALETTE = "palette.css"
PREFIX = "/playground/"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Scripts, styles and calls of this server only; nothing inline, so that no text of a model can become a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_BASE = '<base href="/">'


def page_routes() -> list[Route]:
    """Build a route for each file."""
    return [
        Route(path, _handler(name), methods=["GET"], include_in_schema=False)
        for path, name in _files().items()
    ]


def page_paths() -> frozenset[str]:
    """The paths of the files, which are open to callers without a key."""
    return frozenset(_files())


@cache
def _files() -> dict[str, str]:
    """Names of files by their paths."""
    names = sorted(
        file.name for file in FOLDER.iterdir() if file.suffix in MEDIA_TYPES and file.name != INDEX
    )
    return {"/": INDEX, **{PREFIX + name: name for name in (*names, *SHARED, PALETTE)}}


def file_text(name: str) -> str:
    """The text of a file of the page."""
    if name == PALETTE:
        return palette_css()
    return ((PAGE_FOLDER if name in SHARED else FOLDER) / name).read_text(encoding="utf-8")


def _handler(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = file_text(name)
    media_type = MEDIA_TYPES[Path(name).suffix]

    async def handle(request: Request) -> Response:
        text = content
        if name == INDEX:  # all other addresses of the page are relative to this one
            root = request.scope.get("root_path", "")
            text = content.replace(_BASE, f'<base href="{escape(root)}/">')
        body = text.encode()
        tag = f'"{sha256(body).hexdigest()[:16]}"'
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)

    return handle
