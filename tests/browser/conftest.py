"""The browser of these tests: one that the machine has, driven by playwright.

`pip install -e '.[test,browser]' && pytest -m browser` runs what is here; CHROMIUM names a browser
that is not on the path.
"""

import os
import shutil

import pytest


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def chromium():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install -e '.[browser]'"
    )
    if (path := find_chromium()) is None:
        pytest.skip(
            "no Chromium is installed (Debian: apt-get install chromium); CHROMIUM can name one"
        )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
