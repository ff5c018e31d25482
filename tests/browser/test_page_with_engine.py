"""The page with a real server and the bundled model: its requests match the server's API.

Must not know: what the model answers.

Not run by default; conftest.py says how.
"""

import json
import shutil
from pathlib import Path

import pytest
from quire.frontend import bundled_model
from quire.tests.browser.steps import send, wait_for
from quire.tests.frontend.server.conftest import running_server

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address():
    with running_server("--kv-cache-memory-bytes", "24000000", wait=False) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def address_without_template(tmp_path_factory):
    """The bundled model without its chat template."""
    directory = tmp_path_factory.mktemp("model") / "plain"
    source = Path(bundled_model.__file__).parent
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with running_server(str(directory), wait=False) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def two_models():
    with running_server("first=bundled", "second=bundled", "--memory-limit", "4GiB") as client:
        yield client


@pytest.fixture(scope="module")
def address_with_admin():
    with running_server("--kv-cache-memory-bytes", "24000000", "--admin", wait=False) as client:
        yield str(client.base_url)


@pytest.fixture
def open_page(chromium):
    contexts, problems = [], []

    def note(message) -> None:
        if message.type in ("error", "warning") and "503" not in message.text:  # while it loads
            problems.append(message.text)

    def open_one(address: str):
        contexts.append(chromium.new_context(viewport={"width": 1280, "height": 860}))
        page = contexts[-1].new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#health[data-is=ready]", timeout=90_000)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(open_page, address):
    return open_page(address)


def test_a_model_without_a_template_continues_a_text(open_page, address_without_template) -> None:
    page = open_page(address_without_template)
    page.wait_for_selector("#mode:disabled:text('Mode: completion')")
    page.click("#parameters-open")
    page.fill("[name=max_tokens]", "8")
    send(page, "Once upon a time")
    page.wait_for_selector(".answer .meta :text('cut at its limit')")
    first = page.locator(".answer .text").text_content()
    page.click(".answer :text('Continue')")
    page.wait_for_selector(".answer.streaming", state="detached")
    page.wait_for_selector(".answer .meta :text('Continue')")
    assert first and page.locator(".answer .text").text_content().startswith(first)
    assert page.locator("[role=alert]").count() == 0


def test_an_answer_with_its_times_and_timeline(page) -> None:
    send(page, "What is 12 + 30?")
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


def test_a_running_engine_is_shown_and_stopped(page) -> None:
    page.click("#burst")
    wait_for(page, "Number(document.getElementById('running').textContent) >= 6")
    wait_for(page, "parseFloat(document.querySelector('.request .s-output')?.style.width) > 10")
    wait_for(page, "/[1-9]\\d* used/.test(document.getElementById('cache').ariaLabel)")
    wait_for(page, "/execute .*s, process/.test(document.getElementById('steps').ariaLabel)")
    page.click("#burst:has-text('Stop them')")
    wait_for(page, "document.getElementById('health').textContent === 'idle'")
    cells = "[...document.querySelectorAll('#recent-rows .request > :last-child')]"
    wait_for(page, f"{cells}.some((cell) => cell.textContent === 'abort')")


def test_a_traced_step_is_a_flame_chart(open_page, address_with_admin) -> None:
    page = open_page(address_with_admin)
    page.click("#trace-step")
    page.wait_for_selector(".flame button[aria-label*='gate_up_proj']", timeout=30_000)
    for name in ("step: execute", "stages: model"):
        assert page.locator(f".flame button[aria-label='{name}']").count() == 1
    rows = page.locator(".flame .row > span")
    assert rows.all_inner_texts()[:3] == ["step", "stages", "thread 0"]
    kinds = page.locator(".flame .kinds li").all_inner_texts()
    assert any(kind.startswith("linear ") and kind.endswith(" µs") for kind in kinds)
    colours = page.locator(".flame .kinds i").evaluate_all("es => es.map(e => e.style.background)")
    assert len(set(colours)) == min(len(kinds), 18)
    # a bar never reaches beyond its row, and its text never beyond the bar
    for where in (".flame .lane", ".flame button"):
        hidden = "es => es.map((e) => getComputedStyle(e).overflowX)"
        assert set(page.locator(where).evaluate_all(hidden)) == {"hidden"}
    page.locator(".flame button[aria-label*='gate_up_proj']").first.dispatch_event("click")
    shown = page.inner_text(".flame dl")
    assert "· [1280, 256]ᵀ" in shown and "weights: " in shown and " allows" in shown
    assert "executor/models/blocks.py:" in shown


def test_the_second_of_two_models_is_chosen(open_page, two_models) -> None:
    """It is loaded by its first message; the engine's half and a reload keep to it."""
    page = open_page(str(two_models.base_url))
    failed: list[str] = []
    page.on("response", lambda one: failed.append(one.url) if one.status >= 400 else None)
    names = page.locator("#models option").all_text_contents()
    assert names == ["first", "second"] and page.input_value("#models") == "first"
    page.select_option("#models", "second")
    page.wait_for_selector("#health[data-is=absent]")
    assert page.input_value("#models") == "second"
    page.wait_for_timeout(2500)  # two polls more
    assert failed == []  # each would be an error in the browser's console
    send(page, "What is 12 + 30?")
    page.wait_for_selector(".answer .meta button", timeout=90_000)
    assert page.inner_text(".answer .text").strip()
    page.wait_for_selector("#health[data-is=ready]")
    page.wait_for_selector("#recent-rows .request")
    answered = {
        name: two_models.get("/v1/requests", params={"model": name}).json()["data"]
        for name in names
    }
    assert [request["model"] for request in answered["second"]] == ["second"]
    assert answered["first"] == []
    page.reload()
    page.wait_for_selector("#health[data-is=ready]")
    assert page.input_value("#models") == "second"
    page.select_option("#models", "first")
    page.wait_for_selector("#health[data-is=ready]")
    assert page.input_value("#models") == "first"
    assert page.locator("#recent-rows .request").count() == 0
