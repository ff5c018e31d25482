"""The page in a real Chromium, over a scripted server: what it shows, how it is used, what it never
does.

Not run by default; conftest.py says how.
"""

import json
import re
import time

import pytest
from quire.tests.browser.mock_server import Mock, serving

pytestmark = pytest.mark.browser
PATIENCE_MS = 10_000


@pytest.fixture
def mock():
    return Mock()


@pytest.fixture
def address(mock):
    with serving(mock) as address:
        yield address


@pytest.fixture
def open_page(chromium, address):
    """Opens the page as `open_page(width, height, ...)`.

    Whatever a test does: no error in the console, no request to another origin.
    """
    contexts, problems = [], []

    def open_one(width: int = 1280, height: int = 860, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        # A refusal that the page expects is noted by the browser itself; everything else there is
        # the page's own.
        page.on(
            "console",
            lambda m: (
                m.type in ("error", "warning")
                and "Failed to load resource" not in m.text
                and problems.append(m.text)
            ),
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda r: (
                r.url.startswith((address, "data:", "blob:")) or problems.append(f"asked {r.url}")
            ),
        )
        page.goto(address)
        page.wait_for_selector("#health[data-is]", state="attached")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(open_page):
    return open_page()


def say(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_until(page, holds) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not holds():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def wait_for(page, expression: str) -> None:
    """Asked again and again from here: the page's policy forbids what playwright's own
    wait_for_function does.
    """
    wait_until(page, lambda: page.evaluate(expression))


def last_answer(page) -> str:
    return page.locator(".answer .text").last.inner_text()


# ---------------------------------------------------------------- chat


def test_an_answer_streams_and_tells_its_times(page, mock) -> None:
    say(page, "Why?")
    wait_for(page, "document.querySelector('.answer .text')?.textContent.length > 5")
    early = last_answer(page)
    assert page.inner_text("#send") == "Stop"
    page.wait_for_selector(".answer .meta button")
    assert last_answer(page).startswith(early[:-2].strip()) and last_answer(page).endswith(
        "computed once and shared."
    )
    meta = page.inner_text(".answer .meta")
    for words in (
        r"\d\s?m?s to first token",
        r"\d+ tokens/s",
        "212 prompt tokens, 128 cached",
        r"\d+ output tokens",
        "in all",
        "Time line",
    ):
        assert re.search(words, meta), meta
    assert page.inner_text("#send") == "Send"
    assert mock.bodies[0]["stream"] is True and mock.bodies[0]["messages"] == [
        {"role": "user", "content": "Why?"}
    ]


def test_reasoning_is_shown_apart(page, mock) -> None:
    say(page, "think")
    page.wait_for_selector(".answer .meta button")
    assert page.locator(
        ".thinking div"
    ).text_content() == "One moment." and "One moment" not in last_answer(page)
    say(page, "short")
    wait_until(page, lambda: len(mock.bodies) == 2)
    assert "One moment" not in json.dumps(mock.bodies[1])


@pytest.mark.parametrize("way", ["click", "Escape"])
def test_stop_ends_the_request_and_keeps_what_was_said(page, mock, way: str) -> None:
    say(page, "long")
    wait_for(page, "document.querySelector('.answer .text')?.textContent.length > 20")
    page.click("#send") if way == "click" else page.keyboard.press("Escape")
    page.wait_for_selector(".answer .meta :text('stopped')")
    wait_until(page, lambda: mock.num_aborted == 1)
    assert last_answer(page).startswith("The rain began") and page.inner_text("#send") == "Send"


def test_turns_follow_each_other_and_can_be_edited_and_answered_anew(page, mock) -> None:
    for text in ("short", "code"):
        say(page, text)
        page.wait_for_selector(".answer:last-child .meta button")
    assert [m["role"] for m in mock.bodies[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ] and mock.bodies[1]["messages"][1]["content"] == "Yes."
    assert (
        page.locator(".block pre code").inner_text().startswith("def total")
        and page.locator(".text strong").inner_text() == "Python"
    )
    page.click(".answer:last-child :text('Regenerate')")
    page.wait_for_selector(".answer:last-child .meta button")
    assert mock.bodies[2] == mock.bodies[1]
    page.locator(".turn.user :text('Edit')").first.click()
    assert page.input_value("#prompt") == "short"
    say(page, "Another")
    page.wait_for_selector(".answer:last-child .meta button")
    assert (
        mock.bodies[3]["messages"] == [{"role": "user", "content": "Another"}]
        and page.locator(".turn").count() == 2
    )
    page.click("#clear")
    assert page.locator(".turn").count() == 0 and page.is_visible("#welcome")


def test_parameters_are_sent_and_checked(page, mock) -> None:
    page.click("#parameters-open")
    for name, value in {
        "temperature": "0.5",
        "max_tokens": "40",
        "seed": "7",
        "stop": "END",
        "system": "Be brief.",
    }.items():
        page.fill(f"[name={name}]", value)
    say(page, "short")
    page.wait_for_selector(".answer .meta button")
    sent = mock.bodies[0]
    assert {name: sent[name] for name in ("temperature", "max_tokens", "seed", "stop")} == {
        "temperature": 0.5,
        "max_tokens": 40,
        "seed": 7,
        "stop": "END",
    }
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."} and "top_p" not in sent
    page.fill("[name=temperature]", "9")
    say(page, "short")
    page.wait_for_timeout(200)
    assert len(mock.bodies) == 1 and page.input_value("#prompt") == "short"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("refuse", "temperature: must be between 0 and 2, got 9"),
        ("busy", "The queue is full. Try again in 3 seconds."),
        ("break", "The engine failed in the middle."),
    ],
)
def test_errors_are_told_in_words(page, asked: str, words: str) -> None:
    say(page, asked)
    assert page.locator("[role=alert]").inner_text() == words
    assert page.inner_text("#send") == "Send"


def test_text_of_a_model_stays_text(page) -> None:
    say(page, "xss")
    page.wait_for_selector(".answer .meta button")
    text = last_answer(page)
    assert (
        '<img src=x onerror="window.hacked=1">' in text
        and "<script>" in text
        and "<b>not bold</b>" in text
    )
    assert page.locator("#log img, #log script, #log b:not(.meta b), #log a").count() == 0
    assert page.evaluate("window.hacked") is None


# ---------------------------------------------------------------- the engine at work


def test_the_engine_is_seen_at_work(page, mock) -> None:
    page.wait_for_selector("#no-rows :text('Nothing runs.')")
    before = page.evaluate("document.getElementById('cache').toDataURL()")
    mock.advance()
    for i in range(12):
        mock.add(700, 0 if i == 0 else 64, 300)
    page.wait_for_selector(".request")
    wait_for(
        page,
        "document.getElementById('running').textContent === '10' && "
        "document.getElementById('waiting').textContent === '2'",
    )
    width = "parseFloat(document.querySelector('.request .s-{}').style.width)"
    wait_for(page, f"{width.format('used')} > 20")
    wait_for(page, f"{width.format('output')} > 1")
    early = page.evaluate(width.format("output"))
    wait_for(page, f"{width.format('output')} > {early} + 1")
    wait_for(page, "Number(document.getElementById('rate').textContent.replace(',', '')) > 50")
    assert page.evaluate("document.getElementById('cache').toDataURL()") != before
    assert re.search(r"KV cache: [1-9]\d* used", page.get_attribute("#cache", "aria-label"))
    assert re.search(
        r"schedule .*ms, execute .*ms, process .*ms", page.get_attribute("#steps", "aria-label")
    )
    assert page.inner_text("#hits").endswith("%") and page.locator("#n-used").inner_text() != "0"
    page.hover("#steps", position={"x": 3, "y": 60})
    assert "prefill and" in page.inner_text("#steps-tip")
    page.click("#counters-box summary")
    page.wait_for_selector("#counters dd")


def test_a_finished_request_has_a_time_line_and_a_trace(page, mock) -> None:
    say(page, "short")
    page.click(".answer :text('Time line')")
    page.wait_for_selector("#life-picture svg")
    assert (
        re.search("128 of them from the cache", page.inner_text("#life-told"))
        and page.locator("#life-events tr").count() >= 6
    )
    with page.expect_download() as download:
        page.click("#life-trace")
    assert "traceEvents" in json.loads(
        download.value.path().read_text()
    ) and download.value.suggested_filename.endswith(".trace.json")
    page.keyboard.press("Escape")
    assert not page.is_visible("#life")


def test_a_running_request_tells_where_it_is_and_later_how_it_went(page, mock) -> None:
    mock.add(96, 0, 300)
    page.locator(".request").click()
    page.wait_for_selector("#life-told:has-text('Still here')")
    page.wait_for_selector("#life-picture svg")
    assert "300 output tokens" in page.inner_text("#life-told")


def test_a_burst_of_requests_can_be_sent_and_stopped(page, mock) -> None:
    page.click("#burst")
    wait_until(page, lambda: sum(len(body["prompt"]) for body in mock.bodies) == 12)
    # the view is not cut off by the requests it shows
    wait_for(page, "document.getElementById('running').textContent === '10'")
    page.click("#burst:has-text('Stop them')")
    wait_until(page, lambda: mock.num_aborted == 12 and not mock.jobs)
    page.wait_for_selector("#no-rows :text('Nothing runs.')")


def test_polling_stops_while_the_tab_is_hidden(page, mock) -> None:
    hide = """(hidden) => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(200)  # one that was under way
    polls = mock.num_polls
    page.wait_for_timeout(1500)
    assert mock.num_polls == polls
    page.evaluate(hide, False)
    wait_until(page, lambda: mock.num_polls > polls)


# ---------------------------------------------------------------- not ready


def test_loading_is_shown_until_it_is_over(open_page, mock) -> None:
    mock.mode = "loading"
    page = open_page()
    page.wait_for_selector(
        "#notice:has-text('The model is loading: load weights, 42%, about 7 s to go.')"
    )
    assert page.evaluate("document.getElementById('notice-bar').value") == 42
    mock.percent = 80.0
    wait_for(page, "document.getElementById('notice-bar').value === 80")
    mock.mode = "ready"
    page.wait_for_selector("#health[data-is=ready]")
    assert not page.is_visible("#notice")


def test_a_dead_engine_and_a_silent_server_are_told_in_words(page, mock, address) -> None:
    mock.mode = "dead"
    page.wait_for_selector("#notice:has-text('The engine has stopped')")
    mock.mode = "ready"
    page.wait_for_selector("#health[data-is=ready]")
    page.route("**/v1/**", lambda route: route.abort())
    page.wait_for_selector("#notice:has-text('The server does not answer.')")


def test_a_key_is_asked_for_and_kept_in_this_tab(open_page, mock) -> None:
    mock.mode = "locked"
    page = open_page()
    page.wait_for_selector("#health:has-text('asks for a key')")
    page.click("#key-open")
    page.fill("#key", "secret")
    with page.expect_request("**/v1/engine/state*") as asked:
        page.press("#key", "Enter")
    assert asked.value.headers["authorization"] == "Bearer secret"
    assert page.evaluate(
        "[sessionStorage.getItem('quire-key'), localStorage.getItem('quire-key')]"
    ) == ["secret", None]


# ---------------------------------------------------------------- forms


def brightness(page) -> float:
    return (
        sum(
            int(n)
            for n in re.findall(
                r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")
            )[:3]
        )
        / 765
    )


@pytest.mark.parametrize(("scheme", "dark"), [("dark", True), ("light", False)])
def test_colours_follow_the_system_and_the_toggle(open_page, scheme: str, dark: bool) -> None:
    page = open_page(color_scheme=scheme)
    assert (brightness(page) < 0.2) is dark
    for _ in range(2 if not dark else 1):  # auto -> light -> dark
        page.click("#theme")
    assert (brightness(page) < 0.2) is not dark
    page.reload()
    assert (brightness(page) < 0.2) is not dark


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_scrolls_sideways_on_a_phone(open_page, mock, width: int) -> None:
    page = open_page(width, 780, has_touch=True)
    fits = "document.documentElement.scrollWidth <= innerWidth && document.getElementById('{}').scrollWidth <= document.getElementById('{}').clientWidth"
    say(page, "code")
    page.wait_for_selector(".answer .meta button")
    page.fill("#prompt", "x" * 300)
    page.click("#parameters-open")
    assert page.evaluate(fits.format("log", "log"))
    for _ in range(9):
        mock.add(1900, 0, 1900)
    page.click("#tab-engine")
    page.wait_for_selector(".request")
    assert page.evaluate(fits.format("engine", "engine")) and not page.is_visible("#chat")
    page.locator("#recent-rows button").first.click()
    page.wait_for_selector("#life-picture svg")
    assert page.evaluate(fits.format("life", "life"))


def test_the_keyboard_is_enough(page, mock) -> None:
    mock.add(300, 0, 2000)
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .meta button")
    assert mock.bodies[0]["messages"][0]["content"] == "one\ntwo"
    seen = []
    for _ in range(14):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        is_visible = "(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2; })()"
        assert page.evaluate(is_visible), seen
        if seen[-1] == "request":
            break
    assert [name for name in seen if name in ("parameters-open", "clear", "engine", "request")] == [
        "parameters-open",
        "clear",
        "engine",
        "request",
    ]
    page.keyboard.press("Enter")
    page.wait_for_selector("#life[open]")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "request"


def test_less_motion_where_that_is_asked_for(open_page, mock) -> None:
    page = open_page(reduced_motion="reduce")
    mock.add(300, 0, 200)
    say(page, "long")
    page.wait_for_selector(".answer.streaming .text")
    page.wait_for_selector(".request")
    assert page.evaluate("document.getAnimations().length") == 0


def test_every_control_has_a_name(page, mock) -> None:
    mock.add(300, 0, 2000)
    page.click("#parameters-open")
    page.wait_for_selector(".request")
    nameless = """[...document.querySelectorAll('button, input, textarea, canvas, [role=img], dialog, progress')].filter((e) =>
        !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
