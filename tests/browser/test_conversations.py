"""Conversations in the browser's storage: what survives a reload, the list, deletion.

Must not know: how the page stores them.

Not run by default; conftest.py says how.
"""

import json
from pathlib import Path

import pytest
from quire.tests.browser.steps import last_answer, send, send_and_wait, wait_for, wait_until

pytestmark = pytest.mark.browser


def titles(page) -> list[str]:
    if not page.is_visible("#list"):
        page.click("#list-open")
    found = page.locator("#list-rows .name").all_inner_texts()
    page.keyboard.press("Escape")
    return found


def test_a_conversation_survives_a_reload(page, mock) -> None:
    send_and_wait(page, "markdown")
    send_and_wait(page, "short")
    before = page.inner_text("#log")
    page.reload()
    page.wait_for_selector("#health[data-is=ready]")
    assert page.inner_text("#log") == before and "212 prompt tokens" in before
    assert page.inner_text("#title") == "markdown" and page.locator(".answer table").count() == 1
    send_and_wait(page, "and now?")
    assert len(mock.bodies[2]["messages"]) == 5


def test_an_answer_that_streams_during_a_reload_is_kept_partially(page, mock) -> None:
    send(page, "long")
    wait_for(page, "document.querySelector('.answer .text')?.textContent.length > 50")
    page.reload()
    page.wait_for_selector(".answer .meta :text('stopped')")
    wait_until(page, lambda: mock.num_aborted == 1)
    assert last_answer(page).startswith("The rain began")
    page.click(":text('Regenerate')")
    page.wait_for_selector(".answer.streaming")


def test_conversations_are_listed_opened_and_deleted(page, mock) -> None:
    for text in ("first", "second", "third"):
        send_and_wait(page, text)
        page.click("#new")
        assert page.locator(".turn").count() == 0 and page.is_visible("#welcome")
    assert titles(page) == ["third", "second", "first"]
    page.click("#list-open")
    page.click(".pick:has-text('first')")
    assert page.inner_text(".turn.user .text") == "first" and not page.is_visible("#list")
    send_and_wait(page, "more")
    assert len(mock.bodies[3]["messages"]) == 3 and titles(page) == ["first", "third", "second"]
    page.click("#list-open")
    page.click("[aria-label='Delete “third”']")
    assert page.locator("#list-rows .name").all_inner_texts() == ["first", "second"]
    page.click("#undo")
    assert page.locator("#list-rows .name").all_inner_texts() == ["first", "third", "second"]
    page.click("[aria-label='Delete “first”']")  # the one that is open
    assert page.is_visible("#welcome") and page.inner_text("#title") == ""
    page.keyboard.press("Escape")
    page.reload()
    assert titles(page) == ["third", "second"]
    page.click("#list-open")
    page.click("#delete-all")
    stored = "Object.keys(localStorage).filter((name) => name.startsWith('quire-conversation'))"
    assert page.evaluate(stored) == [] and page.locator("#list-rows li").count() == 0
    page.click("#undo")
    assert titles(page) == ["third", "second"]


def test_a_new_conversation_ends_the_answer_that_streams(page, mock) -> None:
    send(page, "long")
    wait_for(page, "document.querySelector('.answer .text')?.textContent.length > 20")
    page.click("#new")
    wait_until(page, lambda: mock.num_aborted == 1)
    send_and_wait(page, "short")
    assert page.locator(".turn").count() == 2 and last_answer(page) == "Yes."
    assert titles(page) == ["short", "long"]


def test_tabs_show_separate_conversations(open_page) -> None:
    page = open_page()
    send_and_wait(page, "first")
    other = open_page(context=page.context)
    assert other.is_visible("#welcome")
    send_and_wait(other, "second")
    send_and_wait(page, "short")
    for tab in (page, other):
        assert sorted(titles(tab)) == ["first", "second"]
    page.reload()
    assert page.locator(".turn").count() == 4


@pytest.mark.parametrize("forbidden", [["localStorage"], ["localStorage", "sessionStorage"]])
def test_the_page_works_without_storage(open_page, mock, forbidden: list[str]) -> None:
    """Without localStorage a tab uses its sessionStorage; without that, memory."""
    deny = "".join(
        f"Object.defineProperty(window, '{name}', {{ get() {{ throw new Error('no') }} }});"
        for name in forbidden
    )
    page = open_page(before=deny)
    send_and_wait(page, "short")
    page.click("#new")
    assert titles(page) == ["short"]
    page.reload()
    page.wait_for_selector("#health[data-is=ready]")
    assert titles(page) == (["short"] if len(forbidden) == 1 else [])


def test_a_full_storage_drops_the_oldest(page) -> None:
    for text in ("first", "second"):
        send_and_wait(page, text)
        page.click("#new")
    fill = """(() => {
        const names = Object.keys(localStorage).filter((name) => name.startsWith('quire-conv'));
        const old = JSON.parse(localStorage.getItem(names.find((name) =>
            JSON.parse(localStorage.getItem(name)).title === 'first')));
        old.turns[0].reasoning = 'x'.repeat(1000000);
        localStorage.setItem('quire-conversation-' + old.id, JSON.stringify(old));
        for (let size = 1 << 22; size >= 1; size >>= 1)
            for (let i = 0; i < 4; i++)
                try { localStorage.setItem(`fill-${size}-${i}`, 'x'.repeat(size)); } catch {}
    })()"""
    page.evaluate(fill)
    send_and_wait(page, "third")
    assert titles(page) == ["third", "second"]


def test_unreadable_entries_are_skipped(page) -> None:
    send_and_wait(page, "short")
    entries = {"broken": "{", "empty": "null", "other": '{"id": "x", "turns": []}', "bare": "[]"}
    for name, text in entries.items():
        page.evaluate(
            "([n, t]) => localStorage.setItem(n, t)", [f"quire-conversation-{name}", text]
        )
    page.reload()
    page.wait_for_selector(".answer .meta button")
    assert titles(page) == ["short"]


def test_a_stored_conversation_is_sanitized_like_an_answer(page) -> None:
    """Another program of the same origin may have written it."""
    send_and_wait(page, "short")
    page.evaluate("""(() => {
        const name = Object.keys(localStorage).find((one) => one.startsWith('quire-conversation-'));
        const hostile = '<img src=x onerror=window.hacked=1>';
        const entry = { ...JSON.parse(localStorage.getItem(name)), title: hostile, turns: [
            { role: hostile, content: hostile, told: { id: hostile, total: hostile } },
            { role: 'user', content: 7 } ] };
        localStorage.setItem(name, JSON.stringify(entry));
    })()""")
    page.reload()
    page.wait_for_selector(".answer .meta button")
    page.click("#list-open")
    assert page.evaluate("window.hacked") is None and page.locator("#chat img").count() == 0


def test_conversations_are_renamed_searched_and_exported(page, mock) -> None:
    for message in ("short", "story"):
        send_and_wait(page, message)
        page.click("#new")
    page.click("#list-open")
    names = page.locator("#list-rows .name")
    assert names.all_inner_texts() == ["story", "short"]
    page.click("[aria-label='Rename “short”']")
    page.fill("#list-rows input", "Yes or no?")
    page.press("#list-rows input", "Enter")
    assert names.all_inner_texts() == ["story", "Yes or no?"]
    page.click("[aria-label='Rename “story”']")
    page.press("#list-rows input", "Escape")
    assert names.all_inner_texts() == ["story", "Yes or no?"] and page.is_visible("#list")
    page.fill("#list-search", "YES.")  # the answer's text
    assert names.all_inner_texts() == ["Yes or no?"]
    assert page.inner_text("#list-told") == "1 of 2 match."
    with page.expect_download() as download:
        page.click("[aria-label='Export “Yes or no?”']")
    assert download.value.suggested_filename == "Yes-or-no-.md"
    text = Path(download.value.path()).read_text()
    assert text.startswith("# Yes or no?\n\n")
    assert text.endswith("## You\n\nshort\n\n## Answer\n\nYes.\n")
    with page.expect_download() as download:
        page.click("#export-all")
    exported = json.loads(Path(download.value.path()).read_text())
    assert [one["title"] for one in exported] == ["story", "Yes or no?"]
    # the name stays when the conversation goes on
    page.click("#list-rows .pick")
    send_and_wait(page, "short")
    assert page.inner_text("#title") == "Yes or no?"
