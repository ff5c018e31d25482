"""The page over a real server with the bundled model: what it asks for is what the server gives.

Must not know: what the model says.

Not run by default; conftest.py says how.
"""

import json

import pytest
from quire.tests.browser.steps import say, wait_for
from quire.tests.frontend.server.conftest import running_server

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address():
    with running_server("--kv-cache-memory-bytes", "24000000", wait=False) as client:
        yield str(client.base_url)


@pytest.fixture
def page(chromium, address):
    context, problems = chromium.new_context(viewport={"width": 1280, "height": 860}), []
    page = context.new_page()
    page.on(
        "console",
        lambda m: (
            m.type in ("error", "warning") and "503" not in m.text and problems.append(m.text)
        ),
    )  # 503: while it loads
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#health[data-is=ready]", timeout=90_000)
    yield page
    context.close()
    assert problems == []


def test_an_answer_with_its_times_and_its_time_line(page) -> None:
    say(page, "What is 12 + 30?")
    page.wait_for_selector(".answer .meta button")
    assert (
        "prompt tokens" in page.inner_text(".answer .meta")
        and page.inner_text(".answer .text").strip()
    )
    assert page.locator("[role=alert]").count() == 0
    page.click(".answer :text('Time line')")
    page.wait_for_selector("#life-picture svg")
    assert page.locator("#life-picture .f-output").count() > 1 and "step 0: " in page.inner_text(
        "#life-events"
    )
    with page.expect_download() as download:
        page.click("#life-trace")
    trace = json.loads(download.value.path().read_text())
    assert {"queued", "prefill", "decode", "prefill_chunk", "decode_step"} <= {
        event["name"] for event in trace["traceEvents"]
    }


def test_the_engine_is_seen_at_work_and_stopped(page) -> None:
    page.click("#burst")
    wait_for(page, "Number(document.getElementById('running').textContent) >= 6")
    wait_for(page, "parseFloat(document.querySelector('.request .s-output')?.style.width) > 10")
    wait_for(page, "/[1-9]\\d* used/.test(document.getElementById('cache').ariaLabel)")
    wait_for(page, "/execute .*s, process/.test(document.getElementById('steps').ariaLabel)")
    page.click("#burst:has-text('Stop them')")
    wait_for(page, "document.getElementById('health').textContent === 'idle'")
    cells = "[...document.querySelectorAll('#recent-rows .request > :last-child')]"
    wait_for(page, f"{cells}.some((cell) => cell.textContent === 'abort')")
