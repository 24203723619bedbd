"""The path prefix of the server behind a reverse proxy."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware: makes routes work for proxies that keep `prefix` in the path and for those that strip it.

    Behind it every path begins with the prefix and `root_path` is the prefix, as ASGI specifies.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = self._prefix
        if scope["type"] == "http":
            path = scope["path"]
            scope = {**scope, "root_path": prefix}
            if path != prefix and not path.startswith(f"{prefix}/"):
                scope["path"] = prefix + path
                scope["raw_path"] = prefix.encode() + scope["raw_path"]
        await self._app(scope, receive, send)
