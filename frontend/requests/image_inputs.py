"""ImageInputs: the images of prompts, counted, prepared for the encoder and given their tokens.

Must not know: messages, the engine, how an image is read or resized (frontend/images).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...ipc.checks import require
from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidParameterError
from ...ipc.messages import ImageItem
from ..text.chat_images import PlacedImage
from ..text.tokenizer import Tokenizer
from .prompts import IMAGES, GivenImages

if TYPE_CHECKING:
    from ..images.media import ImageSource

MAX_IMAGES = 16  # in a prompt, unless limit_mm_per_prompt says otherwise
Prepared = tuple[list[int], list[ImageItem]]


class Preparer(Protocol):
    """frontend.images.ImagePreparer, or what takes its place."""

    @property
    def placeholder(self) -> str: ...

    @property
    def places(self) -> dict[int, str]: ...

    def prepare(
        self,
        prompt: str | list[int],
        sources: Sequence[ImageSource],
        *,
        add_special_tokens: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Prepared: ...

    async def prepare_async(
        self,
        prompt: str | list[int],
        sources: Sequence[ImageSource],
        *,
        add_special_tokens: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Prepared: ...


class ImageInputs:
    """One instance per frontend. Threads may share it.

    `make_preparer` is called for a model that reads images, so that what is wrong with its files is
    found at start-up.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        make_preparer: Callable[[EngineConfig, Tokenizer | None], Preparer] | None = None,
    ):
        self._limits = config.multimodal_config.limit_mm_per_prompt
        self._preparer: Preparer | None = None
        if config.model_config.vision is not None:
            self._preparer = (make_preparer or _own_preparer)(config, tokenizer)

    @property
    def reads_images(self) -> bool:
        return self._preparer is not None

    @property
    def placeholder(self) -> str | None:
        """What stands for an image in the text of a prompt; None: the model reads text only."""
        return None if self._preparer is None else self._preparer.placeholder

    def require_vision(self, name: str) -> None:
        """Raises InvalidParameterError that names `name` for a model that reads text only."""
        require(self.reads_images, name, "must be empty: this model reads text only")

    def check_number(self, images: Sequence[PlacedImage]) -> None:
        """Raises InvalidParameterError for more images than a prompt may have, naming the first of
        those, or for one that the model does not read.
        """
        if not images:
            return
        self.require_vision(IMAGES)
        most = self._limits.get("image", MAX_IMAGES)
        if len(images) > most:
            raise InvalidParameterError(
                images[most].place,
                f"is one image too many: a prompt can have {most} (limit_mm_per_prompt), this one "
                f"has {len(images)}",
            )

    def refuse_places(self, name: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidParameterError that names `name` if a prompt without images has a token
        that stands for one: the model would read it in the place of pixels.
        """
        places = {} if self._preparer is None else self._preparer.places
        for token_id, text in places.items():
            require(
                token_id not in token_ids,
                name,
                f"has {text} (the token {token_id}), which stands for an image, but no image comes "
                f"with the prompt ({IMAGES})",
            )

    def prepare(self, prompt: str | list[int], given: GivenImages) -> Prepared:
        """Returns the ids of a prompt, which has a placeholder for each image, with those of the
        images, and the items for the engine.

        Blocks while images are fetched, read and resized. Raises InvalidParameterError.
        """
        preparer = self._checked(given)
        return preparer.prepare(prompt, _sources(given), **_options(given))

    async def prepare_async(self, prompt: str | list[int], given: GivenImages) -> Prepared:
        """Does the same in threads."""
        preparer = self._checked(given)
        return await preparer.prepare_async(prompt, _sources(given), **_options(given))

    def _checked(self, given: GivenImages) -> Preparer:
        self.check_number(given.images)
        assert self._preparer is not None  # check_number refuses images without it
        return self._preparer


def _sources(given: GivenImages) -> list[ImageSource]:
    from ..images.media import ImageSource

    return [ImageSource(image.picture, image.place) for image in given.images]


def _options(given: GivenImages) -> dict[str, Any]:
    return {"add_special_tokens": given.add_special_tokens, "kwargs": given.processor_kwargs}


def _own_preparer(config: EngineConfig, tokenizer: Tokenizer | None) -> Preparer:
    from ..images.images import ImagePreparer

    assert config.model_config.vision is not None  # of a model that reads images
    return ImagePreparer(config, config.model_config.vision, tokenizer)
