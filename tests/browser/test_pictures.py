"""Pictures in the chat of the page: chosen, pasted, dropped, sent, kept.

Must not know: how the page does it.
"""

import base64
import io

import pytest
from PIL import Image
from quire.tests.browser.steps import send, wait_for, wait_until

pytestmark = pytest.mark.browser


def png(width: int = 40, height: int = 30, *, noise: bool = False) -> bytes:
    image = Image.effect_noise((width, height), 90) if noise else Image.new("RGB", (width, height))
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


@pytest.fixture
def seeing(open_page, mock):
    mock.reads_images = True
    page = open_page()
    page.wait_for_selector("#attach:visible")
    return page


def choose(page, *files: bytes) -> None:
    named = [
        {"name": f"{i}.png", "mimeType": "image/png", "buffer": data}
        for i, data in enumerate(files)
    ]
    page.set_input_files("#attach-file", named)


GIVE = """([kind, data, type]) => {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], 'a.png', { type }));
    const event = kind === 'paste'
        ? new ClipboardEvent('paste', { clipboardData: transfer, bubbles: true, cancelable: true })
        : new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
    document.getElementById('prompt').dispatchEvent(event);
    return event.defaultPrevented;
}"""


def give(page, kind: str, data: bytes, media_type: str = "image/png") -> bool:
    """Dispatch a paste or a drop of a file. Return whether the page took it."""
    return page.evaluate(GIVE, [kind, base64.b64encode(data).decode(), media_type])


def attached(page) -> int:
    return page.locator("#attached li").count()


def test_chosen_pasted_and_dropped_pictures_are_sent_in_order(seeing, mock) -> None:
    page = seeing
    given = [png(40), png(50), png(60)]
    choose(page, given[0])
    wait_until(page, lambda: attached(page) == 1)
    assert give(page, "paste", given[1])
    wait_until(page, lambda: attached(page) == 2)
    assert give(page, "dragover", given[2]) and give(page, "drop", given[2])
    wait_until(page, lambda: attached(page) == 3)
    send(page, "What are they?")
    page.wait_for_selector(".answer .meta button")
    [message] = mock.bodies[0]["messages"]
    *images, text = message["content"]
    assert text == {"type": "text", "text": "What are they?"}
    urls = [image["image_url"]["url"] for image in images]
    assert urls == [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in given]
    assert page.locator(".turn.user .thumbnails img").count() == 3 and attached(page) == 0
    assert page.locator("#attached").is_hidden()


def test_a_picture_alone_is_a_message_and_is_kept(seeing, mock) -> None:
    page = seeing
    choose(page, png())
    wait_until(page, lambda: attached(page) == 1)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".answer .meta button")
    assert [part["type"] for part in mock.bodies[0]["messages"][0]["content"]] == ["image_url"]
    page.reload()
    page.wait_for_selector(".turn.user .thumbnails img")
    assert page.inner_text("#title") == "Picture"
    send(page, "short")
    wait_until(page, lambda: len(mock.bodies) == 2)
    assert mock.bodies[1]["messages"][0] == mock.bodies[0]["messages"][0]
    page.click(".turn.user >> nth=0 >> text=Edit")
    assert attached(page) == 1
    page.click("#attached button")
    assert attached(page) == 0


def test_a_large_picture_becomes_small(seeing, mock) -> None:
    page = seeing
    choose(page, png(3000, 1500, noise=True))
    wait_until(page, lambda: attached(page) == 1)
    send(page, "short")
    wait_until(page, lambda: len(mock.bodies) == 1)
    url = mock.bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,") and len(url) <= 1_000_000
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
    assert image.width <= 2048 and abs(image.width / image.height - 2) < 0.01


def test_what_is_no_picture_is_refused_in_words(seeing, mock) -> None:
    page = seeing
    for data, media_type in ((b"hello", "image/png"), (b"hello", "text/plain")):
        give(page, "drop", data, media_type)
        wait_for(page, "document.getElementById('attached-told').textContent !== ''")
        assert page.inner_text("#attached-told") == "a.png is not a picture that can be read."
        assert attached(page) == 0
        page.evaluate("tellAttached('')")
    choose(page, *[png()] * 9)
    wait_until(page, lambda: attached(page) == 8)
    assert page.inner_text("#attached-told") == "A message takes 8 pictures."


def test_a_model_that_reads_text_takes_no_pictures(page, mock) -> None:
    assert page.locator("#attach").is_hidden()
    assert give(page, "drop", png())  # the file does not replace the page
    assert page.inner_text("#attached-told") == "This model reads text only."
    assert attached(page) == 0
