"""The files of the page, and how they are served. tests/browser tests the page itself.

Must not know: a browser.
"""

import base64
import gzip
import hashlib
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from quire.frontend.server.request_log import MAX_REQUESTS
from quire.frontend.server.routes.page import FOLDER, content_security_policy, join_page, routes

HTML = join_page()
VENDOR = FOLDER / "vendor"
LIBRARIES = json.loads((VENDOR / "libraries.json").read_text())
OWN = {path.name: path.read_text() for path in FOLDER.glob("*.*") if path.suffix != ".py"}
SCRIPTS = {name: text for name, text in OWN.items() if name.endswith(".js")}


def elements(tag: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)


def test_every_file_is_in_the_document_once() -> None:
    assert sorted(elements("style")) == sorted(t for n, t in OWN.items() if n.endswith(".css"))
    libraries = [(VENDOR / name).read_text() for name in LIBRARIES]
    assert sorted(elements("script")) == sorted([*SCRIPTS.values(), *libraries])
    assert re.findall(r"<link(?! rel=\"icon\"|\s+rel=\"icon\")|<script[^>]", HTML) == []


def test_the_libraries_are_unchanged_releases() -> None:
    """Each is the text of a release, unchanged, with its licence next to it."""
    assert {path.name for path in VENDOR.glob("*.js")} == set(LIBRARIES)
    packages = {record["package"] for record in LIBRARIES.values()}
    assert packages == {"marked", "dompurify", "temml", "prismjs"}
    for name, record in LIBRARIES.items():
        data = (VENDOR / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == record["sha256"]
        licence = "prism" if record["package"] == "prismjs" else name.removesuffix(".js")
        assert (VENDOR / f"{licence}.LICENSE").stat().st_size > 1000
        if record["package"] in ("marked", "dompurify"):  # the others do not say their version
            assert record["version"] in data[:300].decode()
        assert record["license"] in ("MIT", "MPL-2.0 OR Apache-2.0")


def test_no_text_ends_a_script_early() -> None:
    """An inlined `</script` would, and so would `<script` after an `<!--`."""
    for text in elements("script"):
        assert re.search(r"</?script|</?style", text, re.IGNORECASE) is None


def test_it_is_small() -> None:
    num_bytes = len(HTML.encode())
    # of which formulas take 168 KB, compressed 50 KB, and the colours of code 50 and 16 KB
    assert num_bytes <= 440_000 and len(gzip.compress(HTML.encode())) <= 135_000


def test_it_refers_to_no_other_origin() -> None:
    own = "".join(OWN.values()).replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[\w-]+\.\w+\S*|@import|url\(", own) == []
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", OWN["page.html"])
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*")}
    assert [link for link in links if not link.startswith("data:") and link not in files] == []


def test_its_requests_are_relative() -> None:
    """All go through call(), which prepends the page's own address."""
    scripts = "".join(SCRIPTS.values())
    assert scripts.count("fetch(") == 1 and "fetch(ROOT + path" in scripts
    paths = re.findall(r"""(?:call|post|ofModel)\(\s*["'`]([^"'`$?]+)""", scripts)
    assert len(paths) >= 4 and [path for path in paths if not path.startswith("v1/")] == []
    assert re.findall(r"""["'`]/(?:v1|health|metrics)""", scripts) == []


@pytest.mark.parametrize(
    "way",
    [
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser",
        "createContextualFragment", "eval(", "Function(", "srcdoc", "createPolicy", "setHTML",
    ],
)  # fmt: skip
def test_text_cannot_become_markup_or_code(way: str) -> None:
    """In the page's own scripts, only DOMPurify makes nodes from a string."""
    assert [name for name, text in SCRIPTS.items() if way in text] == []


def test_it_complies_with_its_own_policy() -> None:
    """The browser would silently refuse inline handlers and style attributes."""
    assert re.findall(r"\s(?:on\w+|style)\s*=", OWN["page.html"]) == []
    assert [name for name, text in SCRIPTS.items() if 'setAttribute("style"' in text] == []


def test_it_requests_as_many_requests_as_the_server_keeps() -> None:
    assert f"const KEPT = {MAX_REQUESTS};" in SCRIPTS["requests.js"]


def test_it_is_served_with_a_matching_policy(server: httpx.Client) -> None:
    answer = server.get("/")
    assert answer.status_code == 200 and answer.text == HTML
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"].split("; ")
    policy = dict(part.split(" ", 1) for part in policy)
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        digests = [hashlib.sha256(text.encode()).digest() for text in elements(tag)]
        expected = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert policy[directive].split() == expected
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy) and policy["frame-ancestors"] == "'none'"
    assert policy["trusted-types"] == "dompurify"


def test_it_is_compressed_and_not_sent_twice(server: httpx.Client) -> None:
    plain = server.get("/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.text == HTML
    for refused in ("gzip;q=0, br", "x-gzip", ""):
        answer = server.get("/", headers={"accept-encoding": refused})
        assert "content-encoding" not in answer.headers, refused
    packed = server.get("/", headers={"accept-encoding": "br, GZIP;q=0.5"})
    assert packed.headers["content-encoding"] == "gzip" and packed.text == HTML
    assert int(packed.headers["content-length"]) < 0.4 * int(plain.headers["content-length"])
    again = server.get("/", headers={"if-none-match": plain.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert server.get("/", headers={"if-none-match": '"another"'}).status_code == 200


def test_the_policy_matches_the_text() -> None:
    policies = {content_security_policy(f"<script>{a}</script><style>b</style>") for a in "aA"}
    assert len(policies) == 2


def test_the_package_contains_it() -> None:
    root = Path(__file__).parents[4]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["quire.frontend.server.page"]
    packed = {path for pattern in patterns for path in FOLDER.glob(pattern)}
    code = {*FOLDER.glob("*.py"), *FOLDER.rglob("*.pyc")}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} - code == packed


def test_it_can_be_disabled() -> None:
    assert routes(SimpleNamespace(server_config=SimpleNamespace(page=False))) == []
