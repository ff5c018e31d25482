"""The page's presentation: colours, widths, the keyboard, reduced motion, a path prefix.

Must not know: how the page does it.

Not run by default; conftest.py says how.
"""

import re

import pytest
from quire.tests.browser.steps import send, send_and_wait, wait_until

pytestmark = pytest.mark.browser


def brightness(page) -> float:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(n) for n in re.findall(r"\d+", colour)[:3]) / 765


@pytest.mark.parametrize(("scheme", "dark"), [("dark", True), ("light", False)])
def test_colours_follow_the_system_and_the_toggle(open_page, scheme: str, dark: bool) -> None:
    page = open_page(color_scheme=scheme)
    assert (brightness(page) < 0.2) is dark
    for _ in range(2 if not dark else 1):  # auto -> light -> dark
        page.click("#theme")
    assert (brightness(page) < 0.2) is not dark
    page.reload()
    assert (brightness(page) < 0.2) is not dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(open_page, scheme: str) -> None:
    """Contrast as defined by WCAG 2: at least 4.5 for text, 3 for graphics."""
    page = open_page(color_scheme=scheme)
    colours = page.evaluate("""(() => {
        const probe = document.body.appendChild(document.createElement('i'));
        const names = 'paper raised sunken ink soft good bad prompt output cached used shared ' +
            'schedule execute process';
        return Object.fromEntries(names.split(' ').map((name) => {
            probe.style.color = `var(--${name})`;
            return [name, getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number)];
        }));
    })()""")

    def luminance(name: str) -> float:
        parts = [part / 255 for part in colours[name]]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(p * weight for p, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for paper in ("paper", "raised", "sunken"):
        assert min(contrast("ink", paper), contrast("soft", paper), contrast("bad", paper)) >= 4.5
    drawn = ["good", "prompt", "output", "cached", "used", "shared", "schedule", "process"]
    assert {name: contrast(name, "paper") for name in drawn if contrast(name, "paper") < 3} == {}


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_scrolls_sideways_on_a_phone(open_page, mock, width: int) -> None:
    page = open_page(width, 780, has_touch=True)

    def fits(name: str) -> bool:
        return page.evaluate(
            """(name) => {
            const part = document.getElementById(name);
            const isNarrow = document.documentElement.scrollWidth <= innerWidth;
            return isNarrow && part.scrollWidth <= part.clientWidth;
        }""",
            name,
        )

    for text in ("code", "markdown", "hostile"):
        send_and_wait(page, text)
    page.fill("#prompt", "x" * 300)
    page.click("#parameters-open")
    assert fits("log")
    page.click("#list-open")
    assert fits("list")
    page.keyboard.press("Escape")
    for _ in range(9):
        mock.add(1900, 0, 1900)
    page.click("#tab-engine")
    page.wait_for_selector("#rows .request")
    assert fits("engine") and not page.is_visible("#chat")
    page.locator("#recent-rows button").first.click()
    page.wait_for_selector("#life-picture svg")
    assert fits("life")


def test_the_page_works_with_the_keyboard_alone(page, mock) -> None:
    mock.add(300, 0, 2000)
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .meta button")
    assert mock.bodies[0]["messages"][0]["content"] == "one\ntwo"
    seen = []
    is_seen = """(() => {
        const style = getComputedStyle(document.activeElement);
        return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    })()"""
    for _ in range(14):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert page.evaluate(is_seen), seen
        if seen[-1].startswith("request"):
            break
    wanted = ["parameters-open", "mode", "engine", "burst", "request request-grid"]
    assert [name for name in seen if name in wanted] == wanted
    page.keyboard.press("Enter")
    page.wait_for_selector("#life[open]")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className").startswith("request")


def test_conversations_are_reachable_with_the_keyboard(page) -> None:
    send_and_wait(page, "short")
    page.locator("#list-open").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.className") == "pick"
    for _ in ("Rename", "Export", "Delete"):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # "Delete"
    assert page.evaluate("document.activeElement.id") == "undo" and page.is_visible("#welcome")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.className") == "pick"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "list-open"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # "New conversation"
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_reduced_motion(open_page, mock) -> None:
    page = open_page(reduced_motion="reduce")
    mock.add(300, 0, 200)
    send(page, "long")
    page.wait_for_selector(".answer.streaming .text")
    page.wait_for_selector("#rows .request")
    assert page.evaluate("document.getAnimations().length") == 0


def test_every_control_has_a_name(page, mock) -> None:
    send_and_wait(page, "markdown")
    mock.add(300, 0, 2000)
    page.click("#parameters-open")
    page.click("#list-open")
    page.wait_for_selector("#rows .request")
    controls = "button, input, textarea, canvas, [role=img], [role=group], dialog, progress"
    nameless = f"""[...document.querySelectorAll('{controls}')].filter((e) =>
        !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') ||
            e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []


@pytest.mark.parametrize("path", ["/some/prefix/", "/some/prefix"])
def test_the_page_works_below_a_path_prefix(open_page, mock, path: str) -> None:
    """As behind a proxy, or with --root-path: every request goes to a path below the page's own
    address.
    """
    page = open_page(path=path)
    send_and_wait(page, "short")
    page.click(".answer :text('Time line')")
    page.wait_for_selector("#life-picture svg")
    wait_until(page, lambda: any(one.endswith("/v1/requests") for one in mock.paths))
    assert [one for one in mock.paths if not one.startswith("/some/prefix")] == []
