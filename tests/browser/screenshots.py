"""Makes the README's pictures of the page: a real server, the bundled model, a real Chromium.

python -m quire.tests.browser.screenshots      # into tests/browser/screenshots, at most 150 KB each
"""

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from quire.tests.browser.conftest import find_chromium
from quire.tests.frontend.server.conftest import running_server

FOLDER = Path(__file__).parent / "screenshots"
MAX_BYTES = 150_000


def make_busy(page: Page) -> None:
    """Create a finished answer in the chat, and twelve requests that are running."""
    page.wait_for_selector("#health[data-is=ready]", timeout=90_000)
    for question in ("Tell me a story about the sea.", "What is 12 + 30?"):
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".answer:last-child .meta button", timeout=60_000)
    if page.is_visible("#tab-engine"):
        page.click("#tab-engine")
    lengths = """[...document.querySelectorAll('#rows .s-output')].map(
        (bar) => parseFloat(bar.style.width))"""
    for _ in range(20):  # the model is small: twelve requests may finish between two polls
        if page.inner_text("#burst") != "Stop them":
            page.click("#burst")
        for _ in range(100):
            shown = page.evaluate(lengths)
            if len(shown) >= 8 and max(shown) >= 35:
                return
            page.wait_for_timeout(10)
    raise AssertionError("the twelve requests were never seen at work")


def take(page: Page, name: str) -> None:
    path = FOLDER / name
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    num_bytes = path.stat().st_size
    print(f"{path.name}: {num_bytes / 1000:.0f} KB")
    assert num_bytes <= MAX_BYTES


def main() -> int:
    chromium = find_chromium()
    if chromium is None:
        print("no Chromium is installed", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    # A cache of some hundred blocks, of which the requests use a part.
    with (
        running_server(
            "--max-model-len", "1024", "--kv-cache-memory-bytes", "64000000", wait=False
        ) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        forms = {
            "desktop-dark.png": {
                "viewport": {"width": 1440, "height": 900},
                "color_scheme": "dark",
            },
            "phone-light.png": {
                "viewport": {"width": 390, "height": 844},
                "color_scheme": "light",
                "device_scale_factor": 2,
                "has_touch": True,
            },
        }
        for name, form in forms.items():
            page = browser.new_context(**form).new_page()
            page.goto(str(server.base_url))
            make_busy(page)
            take(page, name)
            page.context.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
