"""The images of a prompt: their places, limits, the cache, threads, and their way to the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from quire.frontend.images import images as module
from quire.frontend.images.images import ImagePreparer
from quire.frontend.images.item_cache import ItemCache, PreparedImage, PreparedPart
from quire.frontend.images.layout import Layout, Part, Resize, Run
from quire.frontend.images.media import ImageSource, Media
from quire.frontend.images.pictures import EncodedPicture
from quire.ipc.codec import MessageDecoder, MessageEncoder
from quire.ipc.config import MultiModalConfig
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.messages import Array, ClientMessage, EngineCoreRequest, digest_of
from quire.ipc.params import SamplingParams
from quire.tests.fakes import make_config
from quire.tests.image_processors import tokenizer, vision_config
from quire.tests.pictures import encoded, make_picture

PAD = "<|image_pad|>"
SMALL = {"min_pixels": 32 * 32, "max_pixels": 32 * 32 * 16}


def make_preparer(
    family: str = "qwen3_5",
    *,
    media: Media | None = None,
    processor: dict[str, Any] = SMALL,
    with_tokenizer: bool = True,
    max_model_len: int = 1000,
    max_message_bytes: int = 2**28,
    **settings: Any,
) -> ImagePreparer:
    config = make_config(max_model_len=max_model_len, max_message_bytes=max_message_bytes)
    config = msgspec.structs.replace(config, multimodal_config=MultiModalConfig(**settings))
    vision = vision_config(family, 32, processor=processor)
    return ImagePreparer(config, vision, tokenizer() if with_tokenizer else None, media)


def source(width: int = 64, height: int = 96, name: str = "image") -> ImageSource:
    return ImageSource(encoded(make_picture(width, height)), name)


def refused(preparer: ImagePreparer, prompt: Any, sources: list[ImageSource], **kwargs: Any) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        preparer.prepare(prompt, sources, **kwargs)
    return str(caught.value)


def test_places() -> None:
    preparer, encode = make_preparer(), tokenizer().encode
    [pad] = encode(PAD)
    token_ids, items = preparer.prepare(f"a{PAD}b{PAD}", [source(), source(32, 33)])
    assert token_ids == [*encode("a"), *[pad] * 6, *encode("b"), pad]
    assert [item.spans for item in items] == [[(1, 6)], [(8, 1)]]
    assert [item.grid for item in items] == [(3, 2), (1, 1)]
    first = items[0]
    assert first.pixels.shape == (96, 64, 3) and first.digest == digest_of(first.pixels, (3, 2))
    pixels = np.frombuffer(first.pixels.data, first.pixels.dtype).reshape(first.pixels.shape)
    assert np.array_equal(pixels, np.asarray(make_picture(64, 96)))
    assert preparer.prepare("no image", []) == (encode("no image"), [])


def test_rows_of_pixtral() -> None:
    """Each row of an image is a span, and a mark ends it."""
    preparer, encode = make_preparer("pixtral", processor={}), tokenizer().encode
    token_ids, [item] = preparer.prepare("a[IMG]", [source()])
    assert token_ids == encode("a" + "[IMG][IMG][IMG_BREAK]" * 2 + "[IMG][IMG][IMG_END]")
    assert item.spans == [(1, 2), (4, 2), (7, 2)]


def test_special_tokens_are_the_callers_choice() -> None:
    added = []

    class Recording:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            added.append(add_special_tokens)
            return tokenizer().encode(text)

    vision = vision_config("qwen3_5", 32, processor=SMALL)
    preparer = ImagePreparer(make_config(), vision, Recording())  # type: ignore[arg-type]
    added.clear()
    preparer.prepare(PAD, [source()])
    preparer.prepare(PAD, [source()], add_special_tokens=False)
    assert added == [True, False]


@pytest.mark.parametrize("number", [0, 2, 3])
def test_number_of_placeholders(number: int) -> None:
    problem = f"for each image: 1 times, got {number}"
    preparer = make_preparer()
    text = refused(preparer, f"a{PAD * number}", [source()])
    assert text.startswith(f"prompt: must have {PAD} once") and text.endswith(problem)
    token_ids = tokenizer().encode(f"a{PAD * number}")
    text = refused(preparer, token_ids, [source()])
    assert text.startswith("prompt_token_ids: must have the id") and text.endswith(problem)


def test_text_that_holds_the_token_of_images() -> None:
    """The placeholder of Gemma 3 is another one."""
    preparer = make_preparer("gemma3", processor={}, max_model_len=2000)
    text = refused(preparer, "<start_of_image> and <image_soft_token>", [source()])
    assert text.startswith("prompt: must have the token") and "1 times, got 2" in text


def test_without_a_tokenizer() -> None:
    [pad] = tokenizer().encode(PAD)
    preparer = make_preparer(with_tokenizer=False)
    token_ids, [item] = preparer.prepare([5, pad, 7], [source()])
    assert token_ids == [5, *[pad] * 6, 7] and item.spans == [(1, 6)]
    assert "images need the tokenizer" in refused(preparer, PAD, [source()])
    preparer = make_preparer("pixtral", processor={}, with_tokenizer=False)
    [pad] = tokenizer().encode("[IMG]")
    assert "images need the tokenizer" in refused(preparer, [pad], [source()])


# ---------------------------------------------------------------- limits


def test_number_of_tokens() -> None:
    preparer = make_preparer(max_model_len=20)
    preparer.prepare(PAD * 3, [source()] * 3)
    sources = [source(name=f"image {i}") for i in range(4)]
    text = refused(preparer, PAD * 4, sources)
    assert text == "image 3: takes 6 tokens; max_model_len=20 leaves 2"


def test_bytes_after_resizing() -> None:
    """96 x 64 x 3 bytes each."""
    preparer = make_preparer(max_message_bytes=50_000)
    preparer.prepare(PAD * 2, [source()] * 2)
    text = refused(preparer, PAD * 3, [source()] * 3)
    assert text.startswith("image: takes 18,432 bytes after resizing") and "45,000" in text


def test_picture_that_cannot_be_resized() -> None:
    text = refused(make_preparer(), PAD, [source(201, 1)])
    assert text.startswith("image: is 201 x 1 pixels large: one side can be 200 times")


def test_settings_of_one_prompt() -> None:
    preparer = make_preparer(mm_processor_kwargs={"max_pixels": 32 * 32 * 4})
    large = [source(128, 128)]
    assert preparer.prepare(PAD, large)[1][0].grid == (2, 2)
    assert preparer.prepare(PAD, large, kwargs={"max_pixels": 32 * 32 * 9})[1][0].grid == (3, 3)
    assert preparer.prepare(PAD, large)[1][0].grid == (2, 2)
    text = refused(preparer, PAD, large, kwargs={"max_pixels": -1})
    assert text.startswith("mm_processor_kwargs: max_pixels: expected `int` >= 1")
    assert refused(preparer, PAD, large, kwargs=5) == "mm_processor_kwargs: must be a dict, got 5"  # type: ignore[arg-type]


# ---------------------------------------------------------------- cache


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    decode = EncodedPicture.decode

    def counted(self: EncodedPicture) -> Any:
        found.append(self.parameter)
        return decode(self)

    monkeypatch.setattr(EncodedPicture, "decode", counted)
    return found


def test_cache(decodings: list[str]) -> None:
    """The second prompt with an image does not decode it."""
    preparer = make_preparer()
    made = [preparer.prepare(f"{text}{PAD}", [source(name=text)]) for text in ("a", "b")]
    assert decodings == ["a"]
    [[first], [second]] = (items for _, items in made)
    assert first.pixels is second.pixels
    preparer.prepare(PAD, [source(name="c")], kwargs={"max_pixels": 32 * 32 * 4})
    preparer.prepare(PAD, [source(65, 96, name="d")])
    assert decodings == ["a", "c", "d"]


def test_no_cache(decodings: list[str]) -> None:
    preparer = make_preparer(mm_processor_cache_gb=0)
    for name in ("a", "b"):
        preparer.prepare(PAD, [source(name=name)])
    assert decodings == ["a", "b"]


def make_image(num_pixels: int) -> PreparedImage:
    layout = Layout([Part((Resize(1, num_pixels),), (1, 1))], "", [[Run(0, 1)]])
    pixels = Array("u1", (1, num_pixels, 3), bytes(3 * num_pixels))
    return PreparedImage(layout, [PreparedPart(pixels, (1, 1), b"")])


def test_least_recently_used_images_leave() -> None:
    cache = ItemCache(max_bytes=90)
    images = {name: make_image(10) for name in "abcd"}
    for name in "abc":
        cache.put(name, images[name])
    cache.put("a", make_image(10))  # another thread was faster
    assert cache.get("a") is images["a"]
    cache.put("d", images["d"])
    assert [cache.get(name) for name in "abcd"] == [images["a"], None, images["c"], images["d"]]
    cache.put("large", make_image(31))
    assert cache.get("large") is None and cache.get("d") is images["d"]
    cache.put("half", make_image(20))
    assert [cache.get(name) is not None for name in ("a", "c", "d", "half")] == [
        False,
        False,
        True,
        True,
    ]


# ---------------------------------------------------------------- threads


def test_same_in_threads() -> None:
    preparer = make_preparer()
    expected = preparer.prepare(f"a{PAD}", [source()])
    assert asyncio.run(preparer.prepare_async(f"a{PAD}", [source()])) == expected
    with pytest.raises(InvalidParameterError, match="image: must be PNG"):
        asyncio.run(preparer.prepare_async(PAD, [ImageSource(b"", "image")]))


def test_slow_servers_do_not_hold_up_decoding() -> None:
    """The loop runs on, and images that came with their request are prepared meanwhile."""
    released, waiting = threading.Event(), threading.Semaphore(0)
    png = encoded(make_picture(64, 96))

    class Slow:
        def fetch(self, url: str, parameter: str, max_bytes: int) -> bytes:
            waiting.release()
            assert released.wait(20)
            return png

    async def run() -> None:
        slow = ImageSource("http://example.com/", "image")
        tasks = [
            asyncio.create_task(preparer.prepare_async(PAD, [slow]))
            for _ in range(module.NUM_FETCHERS)
        ]
        for _ in tasks:
            await asyncio.to_thread(waiting.acquire)
        expected = await asyncio.wait_for(preparer.prepare_async(PAD, [source()]), 20)
        assert not any(task.done() for task in tasks)
        released.set()
        assert await asyncio.gather(*tasks) == [expected] * len(tasks)

    preparer = make_preparer(media=Media(MultiModalConfig(), Slow()))  # type: ignore[arg-type]
    asyncio.run(run())


def test_few_pictures_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, now, most = threading.Lock(), [0], [0]
    decode = EncodedPicture.decode

    def counted(self: EncodedPicture) -> Any:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return decode(self)

    async def run() -> None:
        sources = [source(32 + i, 40) for i in range(12)]
        await asyncio.gather(*(preparer.prepare_async(PAD, [one]) for one in sources))

    monkeypatch.setattr(EncodedPicture, "decode", counted)
    monkeypatch.setattr(module, "available_cores", lambda: 64)
    preparer = make_preparer()
    asyncio.run(run())
    assert most[0] == 2


# ---------------------------------------------------------------- the wire


def test_pixels_travel_as_frames_without_a_copy() -> None:
    processor = {"min_pixels": 2**18, "max_pixels": 2**20}
    preparer = make_preparer(processor=processor)
    token_ids, items = preparer.prepare(PAD * 2, [source(512, 512), source(600, 512)])
    request = EngineCoreRequest("a", token_ids, SamplingParams(), images=items)
    frames = MessageEncoder(2**28).encode(request)
    assert len(frames) == 3
    for frame, item in zip(frames[1:], items):
        assert isinstance(frame, memoryview) and frame.obj is item.pixels.data
    assert len(frames[0]) < 20_000
    received = MessageDecoder(ClientMessage, 2**28).decode(frames)
    assert received.images == items
    assert received.images[0].pixels.data.obj is items[0].pixels.data


def test_a_tokenizer_without_the_token_of_images() -> None:
    """It is found at start-up, not by the first image."""
    vision = msgspec.structs.replace(vision_config("qwen3_5", 32), image_token_id=5)
    with pytest.raises(ModelLoadError, match=r"<\|image_pad\|> must be the token 5 of config.json"):
        ImagePreparer(make_config(), vision, tokenizer())
