"""ImagePreparer: the images of a prompt as inputs of the encoder, and the prompt's token ids with
their places.

Must not know: the engine, chat templates, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from ...ipc.checks import require, require_kind
from ...ipc.config import EngineConfig, resolved
from ...ipc.errors import InvalidParameterError, ModelLoadError
from ...ipc.machine import available_cores
from ...ipc.messages import Array, ImageItem, digest_of
from ...ipc.models.vision_config import VisionConfig
from ..text.tokenizer import Tokenizer
from .families import CannotResize, Family, make_family, with_settings
from .item_cache import ItemCache, PreparedImage, PreparedPart
from .layout import Layout, Part, cut
from .media import ImageSource, Media
from .pictures import Picture

MAX_DECODERS = 2  # threads; each takes up to 600 MiB for a picture of the largest size
NUM_FETCHERS = 8  # threads that wait for servers
MESSAGE_PART = 0.9  # of max_message_bytes that pixels may take
Prepared = tuple[list[int], list[ImageItem]]
Result = TypeVar("Result")


class Room(NamedTuple):
    """What is left for the images of a prompt."""

    rows: int
    num_bytes: int  # of pixels


class ImagePreparer:
    """One per frontend and model. `tokenizer`: None where the engine runs without one; prompts are
    then token ids, and the family must need no marks. Raises ModelLoadError for files of the model
    that it cannot read, and InvalidParameterError for mm_processor_kwargs.
    """

    def __init__(
        self,
        config: EngineConfig,
        vision: VisionConfig,
        tokenizer: Tokenizer | None,
        media: Media | None = None,
    ):
        settings = config.multimodal_config
        self._image_token_id = vision.image_token_id
        self._tokenizer = tokenizer
        self._family = make_family(vision, settings.mm_processor_kwargs)
        self._media = media or Media(settings)
        self._max_rows = resolved(config.model_config.max_model_len)
        self._max_bytes = int(config.service_config.max_message_bytes * MESSAGE_PART)
        self._cache = ItemCache(int(settings.mm_processor_cache_gb * 2**30))
        self._threads = _Threads()
        if tokenizer is not None:
            self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        text, wanted = self._family.image_token, self._image_token_id
        if (found := self._tokens(text)) != [wanted]:
            raise ModelLoadError(
                f"{text} must be the token {wanted} of config.json, but the tokenizer makes "
                f"{found} of it; language_model_only=True reads text alone"
            )

    @property
    def placeholder(self) -> str:
        """What stands for an image in the text of a prompt."""
        return self._family.placeholder

    @property
    def places(self) -> dict[int, str]:
        return self._places

    @cached_property
    def _places(self) -> dict[int, str]:
        """The tokens that stand for images, with their texts: the placeholder, and the one whose
        place a row of the encoder takes.
        """
        found = {self._image_token_id: self._family.image_token}
        if self._tokenizer is not None:
            [placeholder] = self._tokens(self._family.placeholder)
            found[placeholder] = self._family.placeholder
        return found

    def prepare(
        self,
        prompt: str | list[int],
        sources: Sequence[ImageSource],
        *,
        add_special_tokens: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Prepared:
        """The prompt's token ids, and its images in the order of their placeholders.

        `prompt` has one placeholder for each image, in text or as a token id. `kwargs`: as
        mm_processor_kwargs, of this prompt. Blocks while images are fetched and decoded. Raises
        InvalidParameterError.
        """
        _check_kwargs(kwargs)
        return self._prepare(prompt, self._media.open_all([*sources]), add_special_tokens, kwargs)

    async def prepare_async(
        self,
        prompt: str | list[int],
        sources: Sequence[ImageSource],
        *,
        add_special_tokens: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Prepared:
        """As prepare, in threads: some that wait for servers, and few that decode."""
        _check_kwargs(kwargs)
        waits = any(source.needs_network for source in sources)
        run = self._threads.fetch if waits else self._threads.decode
        pictures = await run(self._media.open_all, [*sources])
        return await self._threads.decode(
            self._prepare, prompt, pictures, add_special_tokens, kwargs
        )

    def _prepare(
        self,
        prompt: str | list[int],
        pictures: Sequence[Picture],
        add_special_tokens: bool,
        kwargs: dict[str, Any] | None,
    ) -> Prepared:
        family = with_settings(self._family, kwargs or {})
        images: list[PreparedImage] = []
        room = Room(self._max_rows, self._max_bytes)
        for picture in pictures:
            images.append(self._prepared(family, picture, room))
            room = self._less(room, picture, images[-1].layout)
        if isinstance(prompt, str):
            token_ids = self._encode_text(family, prompt, images, add_special_tokens)
        else:
            token_ids = self._splice(family, prompt, images)
        return place(token_ids, self._image_token_id, images)

    # ------------------------------------------------------------ pixels

    def _prepared(self, family: Family, picture: Picture, room: Room) -> PreparedImage:
        key = (picture.key, family)
        image = self._cache.get(key)
        if image is None:
            image = self._make(family, picture, room)
            self._cache.put(key, image)
        return image

    def _make(self, family: Family, picture: Picture, room: Room) -> PreparedImage:
        image = picture.decode()
        try:
            layout = family.layout(image.height, image.width)
        except CannotResize as error:
            problem = f"is {image.width} x {image.height} pixels large: {error}"
            raise InvalidParameterError(picture.parameter, problem) from error
        self._less(room, picture, layout)  # before it is resized
        pieces = cut(image, [part.steps for part in layout.parts], family.resample)
        return PreparedImage(layout, [_part(*pair) for pair in zip(pieces, layout.parts)])

    def _less(self, room: Room, picture: Picture, layout: Layout) -> Room:
        """What an image leaves of the room. Raises InvalidParameterError if there is too little."""
        require(
            layout.num_rows <= room.rows,
            picture.parameter,
            f"takes {layout.num_rows} tokens; max_model_len={self._max_rows} leaves {room.rows}",
        )
        require(
            layout.num_bytes <= room.num_bytes,
            picture.parameter,
            f"takes {layout.num_bytes:,} bytes after resizing; the images of a prompt can have "
            f"{self._max_bytes:,} (max_message_bytes)",
        )
        return Room(room.rows - layout.num_rows, room.num_bytes - layout.num_bytes)

    # ------------------------------------------------------------ tokens

    def _encode_text(
        self,
        family: Family,
        prompt: str,
        images: Sequence[PreparedImage],
        add_special_tokens: bool,
    ) -> list[int]:
        """The ids of the text with each placeholder replaced, and one id for each run of places.

        The text is replaced, not the ids, because a mark such as a line end may become one token
        with the text beside it.
        """
        before, *after = prompt.split(family.placeholder)
        _check_number("prompt", family.placeholder, len(after), len(images))
        pairs = zip(images, after, strict=True)
        text = before + "".join(image.layout.text + part for image, part in pairs)
        return self._tokens(text, add_special_tokens=add_special_tokens)

    def _splice(
        self, family: Family, prompt: list[int], images: Sequence[PreparedImage]
    ) -> list[int]:
        """The ids with each placeholder replaced, and one id for each run of places."""
        placeholder = self._image_token_id
        if family.placeholder != family.image_token:
            [placeholder] = self._tokens(family.placeholder)
        places = [i for i, token_id in enumerate(prompt) if token_id == placeholder]
        _check_number("prompt_token_ids", f"the id {placeholder}", len(places), len(images))
        token_ids, end = [], 0
        for start, image in zip(places, images, strict=True):
            text = image.layout.text
            marks = [placeholder] if text == family.image_token else self._tokens(text)
            token_ids += [*prompt[end:start], *marks]
            end = start + 1
        return token_ids + prompt[end:]

    def _tokens(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if self._tokenizer is None:
            problem = "images need the tokenizer: this engine runs with skip_tokenizer_init=True"
            raise InvalidParameterError("images", problem)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def place(
    token_ids: Sequence[int], image_token_id: int, images: Sequence[PreparedImage]
) -> Prepared:
    """Repeats the ids that stand for runs of places, and says which places each item has.

    token_ids: with one image_token_id for each run of the images.
    """
    runs = [
        (image_index, run) for image_index, image in enumerate(images) for run in image.layout.runs
    ]
    where = [i for i, token_id in enumerate(token_ids) if token_id == image_token_id]
    _check_number("prompt", f"the token {image_token_id} of images", len(where), len(runs))
    placed: list[int] = []
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    end = 0
    for start, (image_index, run) in zip(where, runs, strict=True):
        placed += token_ids[end:start]
        for part, length in run:
            spans.setdefault((image_index, part), []).append((len(placed), length))
            placed += [image_token_id] * length
        end = start + 1
    placed += token_ids[end:]
    items = [
        ImageItem(part.pixels, spans[image_index, i], part.grid, part.digest)
        for image_index, image in enumerate(images)
        for i, part in enumerate(image.parts)
    ]
    return placed, items


def _check_kwargs(kwargs: dict[str, Any] | None) -> None:
    is_kind = kwargs is None or isinstance(kwargs, dict)
    require_kind(is_kind, "mm_processor_kwargs", "a dict", kwargs)


def _check_number(parameter: str, what: str, found: int, wanted: int) -> None:
    problem = f"must have {what} once for each image: {wanted} times, got {found}"
    require(found == wanted, parameter, problem)


def _part(piece: Any, part: Part) -> PreparedPart:
    pixels = Array("u1", (piece.height, piece.width, 3), piece.tobytes())
    return PreparedPart(pixels, part.grid, digest_of(pixels, part.grid))


class _Threads:
    """Threads are started when they are first needed."""

    @cached_property
    def _decoders(self) -> ThreadPoolExecutor:
        number = max(1, min(MAX_DECODERS, available_cores()))
        return ThreadPoolExecutor(number, thread_name_prefix="quire-image")

    @cached_property
    def _fetchers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="quire-fetch")

    async def decode(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, work, *args)

    async def fetch(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._fetchers, work, *args)
