"""Hostile images over HTTP: each is a 400 that names its place, and others are answered."""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from quire.frontend.requests.image_inputs import ImageInputs
from quire.frontend.server.app import App
from quire.ipc.config import MultiModalConfig
from quire.tests.frontend.server.scripted import ScriptedEngine, post, scripted_app, talk
from quire.tests.image_processors import tokenizer, vision_config
from quire.tests.pictures import encoded, make_picture

PAD = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + PAD + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
CHAT = "/v1/chat/completions"
SMALL = {"min_pixels": 32 * 32, "max_pixels": 32 * 32 * 16}
PNG = encoded(make_picture(64, 96))


class SeeingEngine(ScriptedEngine):
    """A scripted engine whose images are really read."""

    def __init__(self, **settings: Any):
        super().__init__(["A ", "cat."])
        replace = msgspec.structs.replace
        vision = vision_config("qwen3_5", 32, processor=SMALL)
        self.tokenizer = tokenizer()
        self.config = replace(
            self.config,
            model_config=replace(self.config.model_config, vision=vision),
            multimodal_config=MultiModalConfig(**settings),
        )
        self.images = ImageInputs(self.config, self.tokenizer)
        self.items: list[Any] = []

    async def generate(self, prompt: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        images = prompt.get("multi_modal_data")
        self.items += images.items if images is not None else []
        async for output in super().generate(prompt, *arguments, **options):
            yield output


def seeing_app(**settings: Any) -> tuple[App, SeeingEngine]:
    engine = SeeingEngine(**settings)
    return scripted_app(engine, TEMPLATE), engine


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def ask(*urls: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]}


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose header states a large picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IEND", b"")


HOSTILE = {
    "no base64": ("data:image/png;base64,!!!", "is not base64"),
    "no data": ("data:image/png;base64,", "its first bytes are no image's"),
    "not in base64": ("data:image/png,abc", "must be a data URL in base64"),
    "text": (url_of(b"hello"), "its first bytes are no image's"),
    "svg": (url_of(b"<svg/>", "image/svg+xml"), "its first bytes are no image's"),
    "truncated": (url_of(PNG[: len(PNG) // 2]), "cannot be decoded"),
    "bomb": (url_of(bomb(60_000, 60_000)), "60000 x 60000 pixels large"),
    "nothing": ("", "must be a URL that begins with"),
    "a path": ("/etc/passwd", "must be a URL that begins with"),
    "a file": ("file:///etc/passwd", "runs without allowed_local_media_path"),
    "loopback": ("http://127.0.0.1/a.png", "from which no images may be fetched"),
    "metadata": ("http://169.254.169.254/latest", "from which no images may be fetched"),
    "another scheme": ("gopher://127.0.0.1/", "must be a URL that begins with"),
    "null byte": ("http://exa\0mple/", "from which no images may be fetched"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_by_its_place(name) -> None:
    url, words = HOSTILE[name]
    app, engine = seeing_app()
    answer = post(app, CHAT, ask(url_of(PNG), url))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[2].image_url.url"
    assert words in error["message"] and len(error["message"]) < 500
    assert not engine.prompts


def test_a_wrong_media_type_does_not_matter() -> None:
    app, engine = seeing_app()
    assert post(app, CHAT, ask(url_of(PNG, "image/webp"))).status_code == 200
    [item] = engine.items
    assert item.pixels.shape == (96, 64, 3)


def test_a_private_address_is_not_fetched_though_its_name_is_allowed() -> None:
    app, _ = seeing_app(allowed_media_domains=["localhost"])
    for url in ("http://localhost/a.png", "http://localhost:80/a.png"):
        answer = post(app, CHAT, ask(url))
        assert answer.status_code == 400
        assert "an address that is not public" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            ask(*[url_of(PNG)] * 1000),
            "a prompt can have 16 (limit_mm_per_prompt), this one has 1000",
        ),
        (ask(url_of(b"\x89PNG\r\n\x1a\n" + bytes(33 * 2**20))), "33,"),
        ({"messages": [{"role": "user", "content": [PAD, PAD]}]}, "content[0]"),
    ],
    ids=["1000 images", "a large file", "placeholders"],
)
def test_bodies(body, words) -> None:
    app, engine = seeing_app()
    answer = post(app, CHAT, body)
    assert answer.status_code in (400, 413), answer.text[:300]
    assert not engine.prompts


@pytest.mark.slow
def test_others_are_answered_while_images_are_read() -> None:
    """Six requests with large pictures, and one of text beside them."""
    large = url_of(encoded(make_picture(3000, 2000)))
    app, engine = seeing_app()

    async def speak(client: httpx.AsyncClient) -> float:
        asked = [asyncio.ensure_future(client.post(CHAT, json=ask(large))) for _ in range(6)]
        await asyncio.sleep(0.05)
        began = time.perf_counter()
        answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}]})
        took_s = time.perf_counter() - began
        assert answer.status_code == 200 and not all(task.done() for task in asked)
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200, answer.text
        return took_s

    assert talk(app, speak) < 5
    assert len({item.digest for item in engine.items}) == 1  # the same image: the same pixels
