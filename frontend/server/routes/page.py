"""The page at /: joins its files into one HTML document and serves it under a strict policy.

Must not know: what the page shows, or which requests it sends.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from ..http.openapi import ApiRoute
from ..state import ServerState

FOLDER = Path(__file__).parent.parent / "page"
STYLE_SHEET = re.compile(r'<link rel="stylesheet" href="([\w./-]+)" />')
SCRIPT = re.compile(r'<script src="([\w./-]+)"></script>')


def routes(state: ServerState) -> list[ApiRoute]:
    if not state.server_config.page:
        return []
    html = join_page()
    body = html.encode()
    compressed = gzip.compress(body, mtime=0)
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {
        "content-security-policy": content_security_policy(html),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
        "vary": "accept-encoding",
        "etag": etag,
    }

    async def page(request: Request) -> Response:
        """Serves the page, also while the model loads. It contains no secret: its requests need a
        key like all others.
        """
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if not _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(body, media_type="text/html", headers=headers)
        gzipped = headers | {"content-encoding": "gzip"}
        return Response(compressed, media_type="text/html", headers=gzipped)

    return [ApiRoute("/", page)]


def join_page(folder: Path = FOLDER) -> str:
    """Returns page.html with each style sheet and script inlined in place of its reference."""

    def style(match: re.Match[str]) -> str:
        return f"<style>{(folder / match[1]).read_text(encoding='utf-8')}</style>"

    def script(match: re.Match[str]) -> str:
        return f"<script>{(folder / match[1]).read_text(encoding='utf-8')}</script>"

    html = (folder / "page.html").read_text(encoding="utf-8")
    return SCRIPT.sub(script, STYLE_SHEET.sub(style, html))


def content_security_policy(html: str) -> str:
    """Allows the document's own scripts and style sheets, by digest, and requests to its server.

    With Trusted Types, only DOMPurify can turn a string into markup, and no string becomes a
    script.
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
            "require-trusted-types-for 'script'",
            "trusted-types dompurify",
        ]
    )


def _digests(html: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _takes_gzip(accept_encoding: str) -> bool:
    """Tells whether gzip is listed with a weight other than 0."""
    for coding in accept_encoding.lower().split(","):
        name, _, weight = coding.partition(";")
        if name.strip() == "gzip":
            return re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight) is None
    return False
