"""A preparer of images that reads no image: each takes two tokens of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from quire.frontend.images.media import ImageSource
from quire.frontend.requests.image_inputs import ImageInputs
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.config import EngineConfig
from quire.ipc.errors import InvalidParameterError
from quire.ipc.messages import Array, ImageItem, digest_of
from quire.ipc.models.vision_config import VisionConfig

ROWS = 2  # of an image
UNREADABLE = "data:image;base64,unreadable"


class FakePreparer:
    """`sources` and `kwargs` are those of the last prompt. UNREADABLE is refused."""

    def __init__(self, tokenizer: Tokenizer, image_token_id: int):
        self.sources: list[ImageSource] = []
        self.kwargs: dict[str, Any] | None = None
        self.placeholder = tokenizer.id_to_token(image_token_id) or ""
        self.places = {image_token_id: self.placeholder}
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id

    def prepare(
        self,
        prompt: str | list[int],
        sources: Sequence[ImageSource],
        *,
        add_special_tokens: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[list[int], list[ImageItem]]:
        self.sources, self.kwargs = [*sources], kwargs
        for source in sources:
            if source.value == UNREADABLE:
                raise InvalidParameterError(source.parameter, "is not base64")
        encode = self._tokenizer.encode
        given = encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        if given.count(self._image_token_id) != len(sources):
            raise InvalidParameterError("prompt", "must have one placeholder for each image")
        token_ids: list[int] = []
        items = []
        for token_id in given:
            if token_id == self._image_token_id:
                pixels = Array("u1", (2, 4, 3), bytes([len(items)]) * 24)
                grid, spans = (1, ROWS), [(len(token_ids), ROWS)]
                items.append(ImageItem(pixels, spans, grid, digest_of(pixels, grid)))
                token_ids += [token_id] * (ROWS - 1)
            token_ids.append(token_id)
        return token_ids, items

    async def prepare_async(
        self, prompt: str | list[int], sources: Sequence[ImageSource], **options: Any
    ) -> tuple[list[int], list[ImageItem]]:
        return self.prepare(prompt, sources, **options)


def with_vision(config: EngineConfig, image_token_id: int, **settings: Any) -> EngineConfig:
    """The configuration of a model that reads images. `settings` are of MultiModalConfig."""
    vision = VisionConfig(family="qwen3_vl", hidden_size=8, image_token_id=image_token_id, unit=32)
    replace = msgspec.structs.replace
    return replace(
        config,
        model_config=replace(config.model_config, vision=vision),
        multimodal_config=replace(config.multimodal_config, **settings),
    )


def fake_inputs(config: EngineConfig, tokenizer: Tokenizer) -> tuple[ImageInputs, FakePreparer]:
    """What takes the place of the images of a frontend, and what they use."""
    vision = config.model_config.vision
    assert vision is not None
    preparer = FakePreparer(tokenizer, vision.image_token_id)
    return ImageInputs(config, tokenizer, lambda *_: preparer), preparer
