"""Prepares the images of a request beside the event loop: read, resized, and given their tokens.

Must not know: the API of the request, how an image is read.
"""

from __future__ import annotations

from typing import Any

from ....ipc.messages import ImageItem
from ...requests.prompts import GivenImages
from ...text.chat_images import PlacedImage
from ..http.call import HttpCall
from ..http.errors import renaming
from ..state import ServerState
from .tokenizing import check_num_characters


async def prepare_images(
    state: ServerState,
    call: HttpCall,
    text: str,
    images: list[PlacedImage],
    names: dict[str, str],
    *,
    add_special_tokens: bool,
    processor_kwargs: dict[str, Any] | None = None,
) -> tuple[list[int], list[ImageItem]]:
    """Returns the ids of a text, which has a placeholder for each image, with the tokens of the
    images, and the items for the engine. The keys take turns.

    `names` are the fields of the body, for errors. processor_kwargs: keys that replace those of the
    model's preprocessor_config.json. Raises ApiError, which names the place of an
    image.
    """
    check_num_characters(len(text), names["prompt"], state.max_model_len)
    given = GivenImages(images, processor_kwargs or {}, add_special_tokens)
    async with state.image_turns.slot(call.tenant, id(call), deadline=call.deadline):
        with renaming(names):
            return await state.ready_engine().images.prepare_async(text, given)
