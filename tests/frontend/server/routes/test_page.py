"""The page's file and how it is served: small, self-contained, confined by its headers. What it
does is in tests/browser.
"""

import base64
import hashlib
import re
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from quire.frontend.server.routes.page import FILE, content_security_policy, routes

HTML = FILE.read_text()
WITHOUT_NAMESPACES = HTML.replace("http://www.w3.org/2000/svg", "")


def test_it_is_one_small_file() -> None:
    assert len(HTML.encode()) <= 100_000
    assert re.findall(r"<script\b[^>]*>", HTML) == ["<script>"] and re.findall(
        r"<style\b[^>]*>", HTML
    ) == ["<style>"]


def test_it_names_nothing_outside() -> None:
    assert re.findall(r"(?:https?:)?//[\w-]+\.\w+\S*|@import|url\(", WITHOUT_NAMESPACES) == []
    assert [
        link
        for link in re.findall(r"""(?:src|href)=["']([^"']*)""", HTML)
        if not link.startswith("data:")
    ] == []


@pytest.mark.parametrize(
    "way",
    [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "createContextualFragment",
        "eval(",
        "Function(",
        "srcdoc",
    ],
)
def test_text_cannot_become_markup_or_code(way: str) -> None:
    assert way not in HTML


def test_nothing_in_it_breaks_its_own_policy() -> None:
    """Inline handlers and style attributes would be refused by the browser, silently."""
    markup = re.sub(r"<(script|style)>.*?</\1>", "", HTML, flags=re.DOTALL)
    assert re.findall(r"\s(?:on\w+|style)\s*=", markup) == []
    assert 'setAttribute("style"' not in HTML


def test_it_is_served_with_a_policy_that_fits(server: httpx.Client) -> None:
    answer = server.get("/")
    assert (
        answer.status_code == 200
        and answer.headers["content-type"] == "text/html; charset=utf-8"
        and answer.text == HTML
    )
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    script = HTML.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        policy["script-src"] == f"'sha256-{digest}'"
        and policy["default-src"] == "'none'"
        and policy["connect-src"] == "'self'"
    )
    assert "unsafe" not in str(policy) and policy["frame-ancestors"] == "'none'"


def test_the_policy_is_that_of_the_text() -> None:
    assert content_security_policy("<script>a</script><style>b</style>") != content_security_policy(
        "<script>A</script><style>b</style>"
    )


def test_it_can_be_left_out() -> None:
    assert routes(SimpleNamespace(server_config=SimpleNamespace(page=False))) == []
