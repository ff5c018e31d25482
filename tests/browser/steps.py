"""Actions of the page's tests: write, wait, read.

Must not know: what a test asserts.
"""

import time

PATIENCE_MS = 10_000


def send(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def send_and_wait(page, text: str) -> None:
    """Send a message and wait for the end of the answer."""
    num_turns = page.locator(".turn").count()
    send(page, text)
    page.wait_for_selector(f".turn:nth-of-type({num_turns + 2}).answer .meta button")


def wait_until(page, holds) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not holds():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def wait_for(page, expression: str) -> None:
    """Evaluate `expression` until it holds. The page's content security policy forbids playwright's
    own wait_for_function.
    """
    wait_until(page, lambda: page.evaluate(expression))


def last_answer(page) -> str:
    return page.locator(".answer .text").last.inner_text()


def hide(page, hidden: bool) -> None:
    """Make the page believe that its tab is hidden, or visible again."""
    script = """(hidden) => {
        const state = hidden ? 'hidden' : 'visible';
        const fixed = (value) => ({ value, configurable: true });
        Object.defineProperty(document, 'visibilityState', fixed(state));
        Object.defineProperty(document, 'hidden', fixed(hidden));
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(script, hidden)
