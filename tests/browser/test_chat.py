"""The chat in a real Chromium: answers, Markdown, hostile text, completions.

Must not know: how the page does it.

Not run by default; conftest.py says how.
"""

import json
import re
from pathlib import Path

import pytest
from quire.tests.browser.steps import last_answer, send, send_and_wait, wait_for, wait_until

pytestmark = pytest.mark.browser


def test_an_answer_streams_and_shows_its_times(page, mock) -> None:
    send(page, "Why?")
    wait_for(page, "document.querySelector('.answer .text')?.textContent.length > 5")
    early = last_answer(page)
    assert page.inner_text("#send") == "Stop"
    page.wait_for_selector(".answer .meta button")
    assert last_answer(page).startswith(early[:-2].strip())
    assert last_answer(page).endswith("computed once and shared.")
    meta = page.inner_text(".answer .meta")
    patterns = [r"\d\s?m?s to first token", r"\d+ tokens/s", "212 prompt tokens, 128 cached"]
    for words in (*patterns, r"\d+ output tokens", "in all", "Time line"):
        assert re.search(words, meta), meta
    assert page.inner_text("#send") == "Send"
    assert mock.bodies[0]["stream"] is True
    assert mock.bodies[0]["messages"] == [{"role": "user", "content": "Why?"}]


def test_an_answer_that_arrives_at_once_has_no_rate(page, mock) -> None:
    """The browser may receive the whole answer at once. Its clock then says nothing about the
    engine.
    """
    mock.token_s = 0
    send_and_wait(page, "short")
    meta = page.inner_text(".answer .meta")
    assert "1 output tokens" in meta and "tokens/s" not in meta
    send_and_wait(page, "Why?")
    rate = re.search(r"([\d,]+) tokens/s", page.inner_text(".answer:last-child .meta"))
    assert rate is None or int(rate[1].replace(",", "")) < 100 / 0.05


def test_reasoning_is_shown_separately(page, mock) -> None:
    send_and_wait(page, "think")
    assert page.locator(".thinking div").text_content() == "One moment."
    assert "One moment" not in last_answer(page)
    send(page, "short")
    wait_until(page, lambda: len(mock.bodies) == 2)
    assert "One moment" not in json.dumps(mock.bodies[1])


@pytest.mark.parametrize("way", ["click", "Escape"])
def test_stop_ends_the_request_and_keeps_the_partial_answer(page, mock, way: str) -> None:
    send(page, "long")
    wait_for(page, "document.querySelector('.answer .text')?.textContent.length > 20")
    page.click("#send") if way == "click" else page.keyboard.press("Escape")
    page.wait_for_selector(".answer .meta :text('stopped')")
    wait_until(page, lambda: mock.num_aborted == 1)
    assert last_answer(page).startswith("The rain began") and page.inner_text("#send") == "Send"


def test_turns_can_be_continued_edited_and_regenerated(page, mock) -> None:
    for text in ("short", "code"):
        send_and_wait(page, text)
    messages = mock.bodies[1]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "Yes."
    page.click(".answer:last-child :text('Regenerate')")
    page.wait_for_selector(".answer:last-child .meta button")
    assert mock.bodies[2] == mock.bodies[1]
    page.locator(".turn.user :text('Edit')").first.click()
    assert page.input_value("#prompt") == "short"
    send(page, "Another")
    page.wait_for_selector(".answer:last-child .meta button")
    assert mock.bodies[3]["messages"] == [{"role": "user", "content": "Another"}]
    assert page.locator(".turn").count() == 2


def test_parameters_are_sent_and_checked(page, mock) -> None:
    page.click("#parameters-open")
    values = {"temperature": 0.5, "max_tokens": 40, "seed": 7, "stop": "END"}
    for name, value in (values | {"system": "Be brief."}).items():
        page.fill(f"[name={name}]", str(value))
    send_and_wait(page, "short")
    sent = mock.bodies[0]
    assert {name: sent[name] for name in values} == values and "top_p" not in sent
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    page.fill("[name=temperature]", "9")
    send(page, "short")
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
def test_errors_are_shown_as_text(page, asked: str, words: str) -> None:
    send(page, asked)
    assert page.locator("[role=alert]").inner_text() == words
    assert page.inner_text("#send") == "Send"


# ---------------------------------------------------------------- Markdown


def test_markdown_is_complete(page) -> None:
    send_and_wait(page, "markdown")
    answer = page.locator(".answer .text")
    texts = {
        "h4": "Bread", "em": "water", "strong": "kneaded", "del": "quickly", "p code": "salt",
        "ol > li > ul > li >> nth=1": "water", "th >> nth=0": "Flour", "td >> nth=1": "500",
        "a >> nth=0": "the notes", "a >> nth=1": "https://example.org/a?b=1&c=2",
    }  # fmt: skip
    for where, text in texts.items():
        assert answer.locator(where).inner_text() == text, where
    assert answer.locator("ol > li").count() == 2 and answer.locator("hr").count() == 1
    assert answer.locator("blockquote").inner_text() == "A quotation\nof two lines."
    assert "☑ done" in last_answer(page) and "☐ not done" in last_answer(page)
    assert answer.locator("td >> nth=1").evaluate("e => getComputedStyle(e).textAlign") == "right"
    assert answer.locator(".block header span").inner_text() == "python"
    code = answer.locator(".block pre code").inner_text()
    assert code == 'def bake(minutes: int) -> str:\n    return "<b>bread</b>"'
    link = answer.locator("a").first
    assert link.get_attribute("href") == "https://example.org/notes"
    assert link.get_attribute("target") == "_blank" and "noopener" in link.get_attribute("rel")
    picture = answer.locator("a:text-is('a loaf')")  # a link: nothing is loaded
    assert picture.get_attribute("href") == "https://example.org/loaf.png"
    assert answer.locator("img").count() == 0


def test_formulas_and_code_are_set(page) -> None:
    send_and_wait(page, "math")
    answer = page.locator(".answer .text")
    assert answer.locator("math").count() == 6
    assert answer.locator(".formula.display math mfrac").count() >= 2
    # on a line of their own, in a list, in a cell of a table; money and code are none
    assert answer.locator("li .formula.display math").count() == 1
    assert answer.locator("td .formula math").text_content() == "π"
    text = last_answer(page)
    assert "It costs $5 or $6, and \\(not math\\) is code." in text
    # what is no formula, and what a formula may not do, stays as it is written
    assert "\\(\\frac{1\\)" in text and "\\(\\href{javascript:alert(1)}{x}\\)" in text
    assert answer.locator("a").count() == 0
    code = answer.locator(".block pre code")
    source = (Path(__file__).parent / "answers" / "math.md").read_text()
    assert code.inner_text() == source.split("```python\n")[1].split("\n```")[0]
    assert code.locator(".t-keyword").all_inner_texts() == ["def", "return"]
    assert code.locator(".t-comment").inner_text() == "# a comment"
    colours = {
        code.locator(where).first.evaluate("e => getComputedStyle(e).color")
        for where in (".t-keyword", ".t-comment", ".t-function", ".t-string")
    }
    assert len(colours) == 4


def test_empty_fields_show_what_applies(page, mock) -> None:
    page.click("#parameters-open")
    shown = {
        name: page.get_attribute(f"#fields [name={name}]", "placeholder")
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    }
    assert shown == {
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "all",
        "min_p": "0",
        "repetition_penalty": "1.1",
        "max_tokens": "≤ 2,048",
    }
    page.click("#mode")  # completion
    assert page.get_attribute("#fields [name=max_tokens]", "placeholder") == "256"


def test_a_stream_keeps_the_blocks_that_are_complete(page, mock) -> None:
    mock.token_s = 0.05
    send(page, "markdown")
    page.wait_for_selector(".answer ol")
    page.evaluate("window.first = document.querySelector('.answer .text').firstElementChild")
    page.wait_for_selector(".answer .meta button")
    assert page.evaluate("first.isConnected && first.textContent === 'Bread'")
    whole = page.inner_html(".answer .text")
    page.reload()  # at once, without a stream
    page.wait_for_selector(".answer .meta button")
    assert page.inner_html(".answer .text") == whole


def test_hostile_text_stays_text(page, mock) -> None:
    """No element, event handler, attribute or request is created from a tag or URL in the
    answer.
    """
    send_and_wait(page, "hostile")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    text = last_answer(page)
    for shown in ('<img src=x onerror="window.hacked=1">', "<script>", "<iframe", "<b>nested</b>"):
        assert shown in text, shown
    found = page.evaluate("""[...document.querySelectorAll('.answer .text *')].map((element) =>
        [element.localName, [...element.attributes].map((a) => [a.name, a.value])])""")
    tags = {"p", "br", "a", "div", "header", "span", "button", "pre", "code", "ul", "li"}
    tags |= {"table", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, _ in found} <= tags
    attributes = {name for _, some in found for name, _ in some}
    assert attributes <= {"class", "type", "tabindex", "href", "target", "rel", "title"}
    classes = {value for _, some in found for name, value in some if name == "class"}
    assert classes <= {"block", "plain", "table"}
    links = [value for _, some in found for name, value in some if name == "href"]
    assert links and all(link.startswith("https://evil.example") for link in links)
    assert page.locator("#send").count() == 1


def test_no_string_becomes_markup_without_the_sanitizer(open_page) -> None:
    """With Trusted Types even a script that runs in the page cannot write HTML."""
    attempt = "try { document.body.innerHTML = '<b>x</b>'; 'written' } catch (e) { e.name }"
    assert open_page().evaluate(attempt) == "TypeError"
    assert "TrustedHTML" in open_page.problems.pop()


# ---------------------------------------------------------------- completion mode


def test_a_model_without_a_template_completes_before_it_is_loaded(open_page, chromium) -> None:
    context = chromium.new_context()
    card = {"id": "base", "has_chat_template": False}
    context.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    absent = {"error": {"code": "model_not_loaded", "message": "It is not loaded."}}
    context.route("**/v1/engine/state*", lambda route: route.fulfill(json=absent))
    page = open_page(context=context)
    page.wait_for_selector("#mode:disabled:text('Mode: completion')")
    assert page.get_attribute("#health", "data-is") == "absent"
    context.close()


def test_a_model_without_a_template_completes(open_page, mock) -> None:
    mock.has_chat_template = False
    page = open_page()
    page.wait_for_selector("#mode:disabled:text('Mode: completion')")
    assert page.inner_text("#send") == "Complete" and "continues it" in page.inner_text("#welcome")
    send_and_wait(page, "Once upon a time ")
    assert mock.bodies[0]["prompt"] == "Once upon a time " and mock.bodies[0]["max_tokens"] == 256
    assert "messages" not in mock.bodies[0]
    # the prompt is unchanged
    assert page.locator(".answer .text").text_content() == " and so *it* went on."
    page.click(".answer :text('Continue')")
    wait_until(page, lambda: len(mock.bodies) == 2)
    page.wait_for_selector(".answer .meta button")
    assert mock.bodies[1]["prompt"] == "Once upon a time  and so *it* went on."
    assert page.locator(".answer .text").text_content() == 2 * " and so *it* went on."
    send_and_wait(page, "Another")
    assert mock.bodies[2]["prompt"] == "Another"
    page.click(".answer >> nth=0 >> text=Continue")  # the text after it is removed
    page.wait_for_selector(".answer .meta button")
    assert page.locator(".turn").count() == 2


def test_the_mode_can_be_selected_and_is_remembered(page, mock) -> None:
    page.click("#parameters-open")
    assert page.is_visible("[name=system]")
    page.click("#mode")
    assert page.inner_text("#mode") == "Mode: completion" and not page.is_visible("[name=system]")
    page.fill("[name=max_tokens]", "12")
    send_and_wait(page, "A text")
    assert mock.bodies[0]["prompt"] == "A text" and mock.bodies[0]["max_tokens"] == 12
    page.reload()
    page.wait_for_selector("#mode:text('Mode: completion')")
    page.click("#mode")
    assert page.inner_text("#mode") == "Mode: chat" and page.inner_text("#send") == "Send"
