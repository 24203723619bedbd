"""The prefix under which a proxy publishes the server."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Pure ASGI: routes are found whether the proxy leaves `prefix` in a path or takes it away.

    Behind this, every path begins with the prefix, and `root_path` says so, which is how ASGI has it.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        prefix = self._prefix
        if scope["type"] == "http":
            path = scope["path"]
            scope = {**scope, "root_path": prefix}
            if path != prefix and not path.startswith(f"{prefix}/"):
                scope["path"] = prefix + path
                scope["raw_path"] = prefix.encode() + scope["raw_path"]
        await self._app(scope, receive, send)
