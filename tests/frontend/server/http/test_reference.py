"""/docs: every route, and nothing that a browser would load or run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import httpx2 as httpx
from quire.frontend.server.http.reference import reference_page


class Reader(HTMLParser):
    """Collects the tags with their attributes, and fails on an unclosed tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing(server: httpx.Client) -> None:
    answer = server.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    reader = Reader()
    reader.feed(answer.text)
    assert reader.open == []
    assert {tag for tag, _ in reader.tags}.isdisjoint({"script", "link", "img", "iframe", "form"})
    links = [attributes["href"] for tag, attributes in reader.tags if tag == "a"]
    assert links == ["openapi.json"]  # relative, so it works behind a path prefix
    assert not re.search(r"https?://", answer.text)
    policy = answer.headers["content-security-policy"]
    [style] = re.findall("<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"style-src 'sha256-{digest}'" in policy


def test_every_route_and_schema_is_on_it(server: httpx.Client) -> None:
    page, description = server.get("/docs").text, server.get("/openapi.json").json()
    for path, methods in description["paths"].items():
        for method in methods:
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in page
    for name in description["components"]["schemas"]:
        assert f'id="{name}"' in page


def test_text_is_escaped() -> None:
    operation = {"summary": "<script>1</script>", "responses": {"200": {}}}
    page = reference_page(
        {
            "info": {"title": "<T>", "version": "1", "description": "a & b"},
            "paths": {"/<p>": {"get": operation}},
            "components": {"schemas": {}},
        }
    )
    assert "<script>" not in page and "&lt;script&gt;" in page and "/&lt;p&gt;" in page
