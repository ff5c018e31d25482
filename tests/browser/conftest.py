"""The browser of these tests, driven by playwright, and the page in it over a scripted server.

Must not know: how the page works.

`pip install -e '.[test,browser]' && pytest -m browser` runs the tests of this folder; the
environment variable CHROMIUM names a browser that is not on the path.
"""

import os
import shutil

import pytest
from quire.tests.browser.mock_server import Mock, serving
from quire.tests.browser.steps import PATIENCE_MS


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def chromium():
    reason = "playwright is not installed: pip install -e '.[browser]'"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    if (path := find_chromium()) is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium); CHROMIUM can name one")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def mock():
    return Mock()


@pytest.fixture
def address(mock):
    with serving(mock) as address:
        yield address


@pytest.fixture
def open_page(chromium, address):
    """`open_page(width, height, path, context=..., before=..., ...)` opens the page. Every test
    also checks that the console has no errors and that no request goes to another origin.
    """
    contexts, problems = [], []

    def note(message) -> None:
        # The browser itself logs failed requests that the page expects; other errors are the page's
        # own.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            problems.append(message.text)

    def note_request(request) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            problems.append(f"asked {request.url}")

    def open_one(width=1280, height=860, path="/", *, context=None, before="", **options):
        if context is None:
            viewport = {"width": width, "height": height}
            context = chromium.new_context(viewport=viewport, **options)
            contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", note_request)
        if before:
            page.add_init_script(before)
        page.goto(address + path)
        page.wait_for_selector("#health[data-is]:not([data-is=''])")
        return page

    open_one.problems = problems  # a test that causes an error removes it from the list
    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(open_page):
    return open_page()
