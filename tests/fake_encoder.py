"""Images for fake executors: pictures, prompts with them, and a table of encoded rows. The contents
of a row are a number that stands in the place of a token.
"""

from __future__ import annotations

from typing import Any

from quire.ipc.messages import Array, EngineCoreRequest, ImageItem, digest_of
from quire.ipc.models.encoder_memory import encoder_cache_tokens
from quire.ipc.models.vision_config import VisionConfig
from quire.ipc.step_messages import SchedulerOutput

PLACEHOLDER = 90
VISION = VisionConfig(family="fake", hidden_size=8, image_token_id=PLACEHOLDER, unit=2)
WHOLE = VisionConfig(
    family="fake", hidden_size=8, image_token_id=PLACEHOLDER, unit=2, sees_whole_images=True
)


def picture(number: int, grid: tuple[int, int]) -> Array:
    shape = (2 * grid[0], 2 * grid[1], 3)
    size = shape[0] * shape[1] * 3
    return Array("u1", shape, bytes((number * 7 + i) % 251 for i in range(size)))


def item(number: int, grid: tuple[int, int], *spans: tuple[int, int]) -> ImageItem:
    pixels = picture(number, grid)
    return ImageItem(pixels, list(spans), grid, digest_of(pixels, grid))


def encoded(pixels: Array, num_rows: int) -> list[int]:
    """What the fake encoder returns: a number for each row."""
    digest = int.from_bytes(digest_of(pixels, (num_rows, 1))[:5])
    return [1000 + digest + row for row in range(num_rows)]


def read_prompt(request: EngineCoreRequest) -> list[int]:
    """The prompt's tokens, and numbers of rows in the places that images take."""
    tokens = list(request.prompt_token_ids)
    for one in request.images:
        rows = iter(encoded(one.pixels, one.num_rows))
        for start, count in one.spans:
            tokens[start : start + count] = [next(rows) for _ in range(count)]
    return tokens


def with_images(tokens: list[int], most: int, may_split: bool) -> tuple[list[int], list[ImageItem]]:
    """Images in the places of tokens below 8, so that equal beginnings have equal images.
    may_split: some have a token within, as between rows.
    """
    prompt: list[int] = []
    images: list[ImageItem] = []
    for index, token_id in enumerate(tokens):
        grid = 1 + token_id % 3, 1 + token_id % 4
        count = grid[0] * grid[1]
        if token_id >= 8 or len(prompt) + count + len(tokens) - index > most:
            prompt.append(token_id)
            continue
        start, half = len(prompt), count // 2
        spans = [(start, count)]
        if may_split and token_id % 2 and half:
            spans = [(start, half), (start + half + 1, count - half)]
            prompt += [PLACEHOLDER] * half + [40] + [PLACEHOLDER] * (count - half)
        else:
            prompt += [PLACEHOLDER] * count
        images.append(item(token_id, grid, *spans))
    return prompt, images


class FakeImages:
    """The table of encoded images, and the tokens that read it."""

    def __init__(self, config: Any):
        self.sees_whole = config.model_config.vision.sees_whole_images
        self.table: list[int | None] = [None] * encoder_cache_tokens(config)
        self.most_rows = config.multimodal_config.max_encoder_tokens
        self.has_chunks = config.scheduler_config.enable_chunked_prefill
        self.num_encoded = 0

    def begin(self, step: SchedulerOutput, slots: dict[int, Any]) -> None:
        """Encodes the step's images. The tokens of slots that read rows become their contents."""
        written: set[int] = set()
        for image in step.images_to_encode:
            rows = range(image.first_row, image.first_row + image.num_rows)
            assert written.isdisjoint(rows) and rows.stop <= len(self.table), "rows written twice"
            written.update(rows)
            self.table[rows.start : rows.stop] = encoded(image.pixels, image.num_rows)
            self.num_encoded += 1
        if len(step.images_to_encode) > 1 and self.has_chunks:  # else a prompt is never too large
            assert len(written) <= self.most_rows, "more than the budget"
        ends = dict(
            zip(step.slots, map(sum, zip(step.num_computed_tokens, step.num_scheduled_tokens)))
        )
        for slot, position, count, row in step.image_rows:
            assert position + count <= ends[slot], "rows of tokens that are not computed"
            slots[slot].token_ids[position : position + count] = self.table[row : row + count]
        if self.sees_whole:
            for slot, end in ends.items():
                for place in slots[slot].request.images:
                    assert not place.start < end < place.end, "a chunk that ends within an image"
