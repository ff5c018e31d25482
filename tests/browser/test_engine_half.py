"""The engine half of the page in a real Chromium: lists, KV map, steps, time lines, polling.

Must not know: how the page does it.

Not run by default; conftest.py says how.
"""

import json
import re

import pytest
from quire.tests.browser.steps import hide, send, send_and_wait, wait_for, wait_until

pytestmark = pytest.mark.browser


def test_a_running_engine_is_shown(page, mock) -> None:
    page.wait_for_selector("#no-rows:text('No requests.')")
    before = page.evaluate("document.getElementById('cache').toDataURL()")
    mock.advance()
    for i in range(12):
        mock.add(700, 0 if i == 0 else 64, 300)
    page.wait_for_selector(".request")
    wait_for(page, "document.getElementById('running').textContent === '10'")
    assert page.inner_text("#waiting") == "2" and page.inner_text("#num-requests") == "12"
    width = "parseFloat(document.querySelector('.request .s-{}').style.width)"
    wait_for(page, f"{width.format('prompt')} > 20")
    wait_for(page, f"{width.format('output')} > 1")
    early = page.evaluate(width.format("output"))
    wait_for(page, f"{width.format('output')} > {early} + 1")
    wait_for(page, "Number(document.getElementById('rate').textContent.replace(',', '')) > 50")
    assert page.evaluate("document.getElementById('cache').toDataURL()") != before
    assert re.search(r"KV cache: .*[1-9]\d* used", page.get_attribute("#cache", "aria-label"))
    label = page.get_attribute("#steps", "aria-label")
    assert re.search(r"schedule .*ms, execute .*ms, process .*ms", label)
    assert page.inner_text("#hits").endswith("%") and page.inner_text("#n-used") != "0"
    page.hover("#steps", position={"x": 3, "y": 60})
    assert "output tokens" in page.inner_text("#steps-tip")
    page.click("#counters-box summary")
    page.wait_for_selector("#counters dd")


def test_restarts_and_the_standby_are_shown(page, mock) -> None:
    page.wait_for_selector("#no-rows:text('No requests.')")
    assert page.is_hidden("#restarts")
    mock.restarts = {"standby_is_ready": False}
    page.wait_for_selector("#restarts:text('The standby is starting.')")
    mock.counters["num_requests_resumed"] = 3
    mock.restarts = {
        "restarts": {"SIGKILL": 2, "hang": 1},
        "last_gap_s": 0.0352,
        "standby_is_ready": True,
    }
    words = (
        "Engine restarts: SIGKILL 2, hang 1; 3 requests resumed, the last after 0.04 s. "
        "A standby is ready."
    )
    page.wait_for_selector(f"#restarts:text('{words}')")


def test_adapters_are_shown(page, mock) -> None:
    page.wait_for_selector("#no-rows:text('No requests.')")
    assert "adapters" not in page.inner_text("#about")
    mock.loras = ["sql", "law", "poems"]
    mock.adapters = {
        "max_loras": 1,
        "max_cpu_loras": 8,
        "num_in_memory": 2,
        "running": ["sql"],
        "waiting": ["law"],
    }
    words = "2 of 8 adapters in memory; served: sql, law, poems; running: sql; waiting: law."
    page.wait_for_selector(f"#about:text('{words}')")
    mock.advance()
    mock.add(700, 0, 300).lora_name = "sql"
    page.wait_for_selector(".request .state:text('sql, ')")


# ---------------------------------------------------------------- lists


def visible_rows(page, box: str) -> list[str]:
    """Return the titles of the visible rows, from top to bottom."""
    return page.evaluate(
        """(box) => {
        const { top, bottom } = document.querySelector(box).getBoundingClientRect();
        const place = (row) => row.getBoundingClientRect();
        return [...document.querySelectorAll(`${box} .request`)]
            .filter((row) => place(row).bottom > top + 1 && place(row).top < bottom - 1)
            .sort((a, b) => place(a).top - place(b).top).map((row) => row.title);
    }""",
        box,
    )


def test_a_list_of_thousands_scrolls_and_counts(page, mock) -> None:
    mock.advance()
    for i in range(2500):
        mock.add(100, 0, 100_000, f"r{i:04d}")
    mock.num_queued = 17
    wait_for(page, "document.getElementById('num-requests').textContent === '2,517'")
    assert page.inner_text("#running") == "10" and page.inner_text("#waiting") == "2,507"
    assert page.inner_text("#no-rows") == "17 more wait in the server's queue."
    assert visible_rows(page, "#rows")[:3] == ["r0000", "r0001", "r0002"]
    assert page.locator("#rows .request").count() < 40
    rows = page.locator("#rows")
    for part in (0.5, 1):
        rows.evaluate("(box, part) => { box.scrollTop = part * box.scrollHeight }", part)
        page.wait_for_timeout(100)
        seen = visible_rows(page, "#rows")
        first = int(seen[0][1:])
        assert seen == [f"r{first + i:04d}" for i in range(len(seen))] and len(seen) >= 6
        assert page.locator("#rows .request").count() < 40
    assert seen[-1] == "r2499"
    page.wait_for_timeout(600)  # a poll does not move the list
    assert visible_rows(page, "#rows") == seen
    del mock.jobs[5:]
    wait_for(page, "document.querySelectorAll('#rows .request').length === 5")
    assert page.inner_text("#num-requests") == "22"


def test_a_list_is_navigable_by_keyboard(page, mock) -> None:
    mock.advance()
    for i in range(300):
        mock.add(100, 0, 100_000, f"r{i:03d}")
    page.wait_for_selector("#rows .request")
    page.locator("#rows .request >> nth=0").focus()
    focused = "document.activeElement.title"
    keys = ["ArrowDown", "ArrowDown", "ArrowUp", "End", "PageUp", "Home", "ArrowUp"]
    seen = []
    for key in keys:
        page.keyboard.press(key)
        seen.append(page.evaluate(focused))
        assert seen[-1] in visible_rows(page, "#rows")
    assert seen[:4] == ["r001", "r002", "r001", "r299"] and "r28" < seen[4] < "r299"
    assert seen[5:] == ["r000", "r000"]
    page.locator("#rows").evaluate("(box) => { box.scrollTop = box.scrollHeight }")
    page.wait_for_timeout(600)
    assert page.evaluate(focused) == "r000"  # scrolled out of view, but still focused
    assert page.locator("#rows [tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    page.wait_for_selector("#life[open]")


def test_all_finished_requests_are_listed_and_counted(page, mock) -> None:
    for i in range(1500):
        mock.note(mock.add(10, 0, 5, f"f{i:04d}"), "stop")
    mock.jobs.clear()
    wait_for(page, "document.getElementById('num-finished').textContent === '1,500'")
    wait_for(page, "document.querySelector('#recent-rows .request')")
    assert page.inner_text("#finished") == "1,500"
    assert page.inner_text("#recent-told") == "the last 1,024 are listed"
    assert visible_rows(page, "#recent-rows")[0] == "f1499"
    last = """(box) => {
        box.scrollTop = box.scrollHeight;
        return box.querySelector('.long').offsetHeight;
    }"""
    rows = page.locator("#recent-rows")
    wait_until(page, lambda: rows.evaluate(last) == 1024 * 28)
    page.wait_for_timeout(100)
    assert visible_rows(page, "#recent-rows")[-1] == "f0476"  # 1,024, newest first
    mock.note(mock.add(10, 0, 5, "newest"), "stop")
    mock.jobs.clear()
    wait_for(page, "document.getElementById('num-finished').textContent === '1,501'")
    rows.evaluate("(box) => { box.scrollTop = 0 }")
    wait_until(page, lambda: visible_rows(page, "#recent-rows")[0] == "newest")


# ---------------------------------------------------------------- KV map, colours


def test_the_map_is_as_large_as_the_blocks_in_use(page, mock) -> None:
    """For a large cache the map shows only the blocks in use, and says which they are."""
    mock.num_blocks = 65_000
    mock.blocks = list("-" + "u" * 90 + "c" * 10)
    page.wait_for_selector("#cache-told:text-is('first 128 of 65,000 blocks')")
    counts = [page.inner_text(f"#n-{name}") for name in ("used", "shared", "cached", "free")]
    assert counts == ["90", "0", "10", "64,899"]
    page.hover("#cache", position={"x": 3 * 28 + 5, "y": 5})
    assert page.inner_text("#cache-tip") == "block 3: used"
    high = page.locator("#cache").bounding_box()["height"]
    mock.blocks = list("-" + "u" * 3000)
    page.wait_for_selector("#cache-told:text-is('first 4,096 of 65,000 blocks')")
    page.wait_for_timeout(100)
    assert page.locator("#cache").bounding_box()["height"] < 1.6 * high


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_colour_has_one_meaning(open_page, mock, scheme: str) -> None:
    """Swatches of two different words differ, and those of the same word are equal. A control has
    none.
    """
    page = open_page(color_scheme=scheme)
    found = page.evaluate("""[...document.querySelectorAll('.legend i')].map((swatch) => [
        swatch.parentElement.textContent.replace(/[\\d.,]+.*/, '').trim(),
        getComputedStyle(swatch).backgroundColor])""")
    meanings = {}
    for word, colour in found:
        meanings.setdefault(colour, set()).add(word)
    assert all(len(words) == 1 for words in meanings.values()), meanings
    assert len(meanings) == len({word for word, _ in found}) == 10
    controls = page.evaluate("""[...document.querySelectorAll('button')].flatMap((button) => {
        const style = getComputedStyle(button);
        return [style.color, style.backgroundColor, style.borderTopColor];
    })""")
    assert not set(controls) & set(meanings)


# ---------------------------------------------------------------- experts


def test_models_without_experts_have_no_picture_of_them(page, mock) -> None:
    mock.add(10, 0, 5)
    wait_until(page, lambda: mock.num_finished == 1)
    page.wait_for_timeout(1200)
    assert not page.is_visible("#experts-box")
    assert mock.paths.count("/v1/engine/experts") == 1


def test_the_load_of_experts_is_a_picture(open_page, mock) -> None:
    mock.experts = {"layers": [1, 3], "tokens": [[0, 10, 20, 70], [5, 5, 5, 5]]}
    page = open_page()
    page.wait_for_selector("#experts-box")
    most = "expert 3 of layer 1 has most, 70 %, 2.8 times an even share; 1 without tokens"
    wait_for(page, f"document.getElementById('experts').ariaLabel === 'Tokens by expert: {most}'")
    assert page.inner_text("#experts-told") == "4 in each of 2 layers"
    page.hover("#experts", position={"x": 26 + 40 + 5, "y": 5})
    assert page.inner_text("#experts-tip") == (
        "layer 1, expert 1: 10 tokens\n10 %, 0.4 times an even share"
    )
    opacities = """(() => {
        const { width, height } = document.getElementById('experts');
        const pen = document.getElementById('experts').getContext('2d');
        const { data } = pen.getImageData(0, 0, width, height);
        const at = (expert, row) => data[4 * (26 + 40 * expert + 8 + (3 + 20 * row) * width) + 3];
        return [at(0, 0), at(1, 0), at(2, 0), at(3, 0), at(0, 1), at(3, 1)];
    })()"""
    none, few, some, most_of_all, even, also_even = page.evaluate(opacities)
    assert none == 0 < few < some < even == also_even < most_of_all == 255
    mock.experts["tokens"][1] = [0, 0, 0, 20]
    mock.add(10, 0, 5)  # it is asked again only after a step
    wait_for(page, "document.getElementById('experts').ariaLabel.includes('layer 3 has most')")


# ---------------------------------------------------------------- one request


def test_a_finished_request_has_a_timeline_and_a_trace(page) -> None:
    send_and_wait(page, "short")
    page.click(".answer :text('Time line')")
    page.wait_for_selector("#life-picture svg")
    assert "128 of them from the cache" in page.inner_text("#life-told")
    assert page.locator("#life-events tr").count() >= 6
    with page.expect_download() as download:
        page.click("#life-trace")
    assert "traceEvents" in json.loads(download.value.path().read_text())
    assert download.value.suggested_filename.endswith(".trace.json")
    page.keyboard.press("Escape")
    assert not page.is_visible("#life")


def test_a_running_request_shows_its_state_and_later_its_timings(page, mock) -> None:
    mock.add(96, 0, 300)
    page.locator("#rows .request").click()
    page.wait_for_selector("#life-told:has-text('In the engine')")
    page.wait_for_selector("#life-picture svg")
    assert "300 output tokens" in page.inner_text("#life-told")


def test_a_burst_of_requests_can_be_sent_and_stopped(page, mock) -> None:
    page.click("#burst")
    wait_until(page, lambda: sum(len(body["prompt"]) for body in mock.bodies) == 12)
    wait_for(page, "document.getElementById('running').textContent === '10'")  # polling continues
    page.click("#burst:has-text('Stop them')")
    wait_until(page, lambda: mock.num_aborted == 12 and not mock.jobs)
    page.wait_for_selector("#no-rows:text('No requests.')")


# ---------------------------------------------------------------- polling, and not ready


def test_a_hidden_tab_does_not_poll(page, mock) -> None:
    mock.add(100, 0, 10_000)
    page.wait_for_selector("#rows .request")
    hide(page, True)
    page.wait_for_timeout(200)  # one request was already in flight
    asked = len(mock.paths)
    page.wait_for_timeout(1500)
    assert mock.paths[asked:] == []
    hide(page, False)
    wait_until(page, lambda: len(mock.paths) > asked)


def test_a_tab_opened_hidden_polls_when_it_becomes_visible(open_page, mock) -> None:
    hidden = """Object.defineProperty(document, 'visibilityState',
        { value: 'hidden', configurable: true });"""
    context = open_page().context
    other = context.new_page()
    other.add_init_script(hidden)
    first = context.pages[0]
    first.close()
    asked = len(mock.paths)
    other.goto(first.url)
    other.wait_for_timeout(1000)
    assert mock.paths[asked:] == ["/", "/v1/models"]  # asked once
    hide(other, False)
    other.wait_for_selector("#health[data-is=ready]")


def test_an_answer_continues_while_the_tab_is_hidden(page, mock) -> None:
    send(page, "Why?")
    page.wait_for_selector(".answer.streaming")
    hide(page, True)
    wait_until(page, lambda: mock.num_finished == 1)
    hide(page, False)
    page.wait_for_selector(".answer .meta button")
    assert page.inner_text(".answer .text").endswith("computed once and shared.")


def test_loading_is_shown_until_it_is_over(open_page, mock) -> None:
    mock.mode = "loading"
    page = open_page()
    words = "The model is loading: load weights, 42%, about 7 s to go."
    page.wait_for_selector(f"#notice:has-text('{words}')")
    assert page.evaluate("document.getElementById('notice-bar').value") == 42
    mock.percent = 80.0
    wait_for(page, "document.getElementById('notice-bar').value === 80")
    mock.mode = "ready"
    page.wait_for_selector("#health[data-is=ready]")
    assert not page.is_visible("#notice")


def test_a_dead_engine_and_a_silent_server_are_reported(page, mock) -> None:
    mock.mode = "dead"
    page.wait_for_selector("#notice:has-text('The engine has stopped')")
    mock.mode = "ready"
    page.wait_for_selector("#health[data-is=ready]")
    page.route("**/v1/**", lambda route: route.abort())
    page.wait_for_selector("#notice:has-text('The server does not answer.')")


def test_an_api_key_is_requested_and_kept_in_this_tab(open_page, mock) -> None:
    mock.mode = "locked"
    page = open_page()
    page.wait_for_selector("#health:has-text('asks for a key')")
    page.click("#key-open")
    page.fill("#key", "secret")
    with page.expect_request("**/v1/engine/state*") as asked:
        page.press("#key", "Enter")
    assert asked.value.headers["authorization"] == "Bearer secret"
    stores = "[sessionStorage.getItem('quire-key'), localStorage.getItem('quire-key')]"
    assert page.evaluate(stores) == ["secret", None]
    # a wrong key says so, and opens its form again
    page.wait_for_selector("#health:has-text('wrong API key')")
    assert "The server does not accept this key." in page.inner_text("#key-told")
    assert page.is_visible("#key-form") and page.get_attribute("#key", "aria-invalid") == "true"
    mock.mode = "ready"
    page.press("#key", "Enter")
    page.wait_for_selector("#health[data-is=ready]")
    assert page.locator("#key-told").is_hidden()
