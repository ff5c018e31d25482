"""/: the page on which one sees the engine work.

Must not know: what the page shows or asks for.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..state import ServerState

FILE = Path(__file__).parent.parent / "page" / "index.html"


def routes(state: ServerState) -> list[Route]:
    if not state.server_config.page:
        return []
    body = FILE.read_bytes()
    headers = {
        "content-security-policy": content_security_policy(body.decode()),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }

    async def page(request: Request) -> Response:
        """Also while the model loads, which is what it then shows.

        It holds no secret: its requests need a key like all others.
        """
        return Response(body, media_type="text/html", headers=headers)

    return [Route("/", page)]


def content_security_policy(html: str) -> str:
    """Nothing runs but the file's own script and style, known by their digests, and nothing is
    fetched but from this server.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_digests(html, 'script')}",
            f"style-src {_digests(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _digests(html: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in texts
    )
