"""Cors: lets web pages of other origins call the server from a browser, where the configuration
says so.

Must not know: routes, keys.
"""

from __future__ import annotations

from typing import Any

from .call import new_request_id
from .errors import ApiError
from .sse import Json

METHODS = b"GET, POST, DELETE, OPTIONS"
EXPOSED = b"x-request-id, x-unknown-params, retry-after"
MAX_AGE_S = b"86400"  # browsers keep a preflight's answer as long as they like, two hours at most


class Cors:
    """Around the app.

    An origin that is not allowed gets its answer without the headers: it is the browser that keeps
    the page from it.
    """

    def __init__(self, app: Any, allowed_origins: list[str]):
        self._app = app
        self._allows_all = "*" in allowed_origins
        self._allowed = frozenset(origin.rstrip("/").encode() for origin in allowed_origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None:
            return await self._app(scope, receive, send)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            return await self._preflight(headers, origin, scope, receive, send)
        extra = self._headers(origin)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _headers(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        vary = (b"vary", b"Origin")
        if not self._allows_all and origin not in self._allowed:
            return [vary]
        return [
            vary,
            (b"access-control-allow-origin", b"*" if self._allows_all else origin),
            (b"access-control-expose-headers", EXPOSED),
        ]

    async def _preflight(
        self, headers: dict[bytes, bytes], origin: bytes, scope: Any, receive: Any, send: Any
    ) -> None:
        """Browsers send no key with it, so it is answered before keys are asked for."""
        request_id = {"x-request-id": new_request_id(scope["headers"])}
        if not self._allows_all and origin not in self._allowed:
            error = ApiError(
                403,
                "This origin may not call the server from a browser; --allowed-origins names those "
                "that may.",
                code="origin_not_allowed",
            )
            return await Json(
                error.body(scope["path"]), error.status, request_id | {"vary": "Origin"}
            )(scope, receive, send)
        wanted = headers.get(b"access-control-request-headers", b"")
        granted = [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", MAX_AGE_S),
        ]
        start = [
            *self._headers(origin),
            *granted,
            *((name.encode(), value.encode()) for name, value in request_id.items()),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": start})
        await send({"type": "http.response.body", "body": b""})
