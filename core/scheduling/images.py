"""Which images a step encodes, and which rows of encoded images its tokens read.

Must not know: what an encoder computes, pixels, blocks, queues.

A step encodes an image when a request first computes a token in its place. The chunk of a prompt
ends before an image that cannot be encoded in this step: there is no room in the table, or no
budget left. The first image of a step is always within the budget, and the first request of a step
finds all room it needs, so that it goes on in every step. Where prompts have no chunks, a step
encodes all images that a request needs, or the request waits; the images of one request are then
always within the budget.
"""

from __future__ import annotations

from ...ipc.config import EngineConfig
from ...ipc.counters import EngineCounters
from ...ipc.messages import ImageItem
from ...ipc.models.encoder_memory import encoder_cache_tokens
from ...ipc.models.vision_config import VisionConfig
from ...ipc.step_messages import ImagePlace, ImageToEncode, SchedulerOutput
from ..encoder_cache import EncoderCache
from ..request import Request


class ImagePlanner:
    """Owns the cache of encoded images and the budget of the step being made.

    Of each step: `begin_step`, and for each of its rows `fit` and `place`.
    """

    def __init__(
        self,
        cache: EncoderCache,
        most_rows: int,
        vision: VisionConfig,
        counters: EngineCounters,
        has_chunks: bool = True,
    ):
        """most_rows: that a step encodes. has_chunks: of prompts."""
        self.cache, self._has_chunks = cache, has_chunks
        self._most_rows, self._counters = most_rows, counters
        # tokens of an image see each other, so that no chunk ends within one
        self._sees_whole = vision.sees_whole_images
        self._row_token_id = vision.row_token_id
        self._step = 0  # the number of the step being made
        self._num_rows = 0  # that it encodes
        # by digest: what is in the table if a row of the step needs it
        self._reserved: dict[bytes, ImageToEncode] = {}

    @classmethod
    def of(cls, config: EngineConfig, counters: EngineCounters) -> ImagePlanner | None:
        """None: the model reads no images."""
        vision = config.model_config.vision
        if vision is None:
            return None
        cache = EncoderCache(encoder_cache_tokens(config))
        most_rows = config.multimodal_config.max_encoder_tokens
        has_chunks = config.scheduler_config.enable_chunked_prefill
        return cls(cache, most_rows, vision, counters, has_chunks)

    def begin_step(self, step: int) -> None:
        """What was reserved for rows that the last step does not have is not encoded."""
        for digest in self._reserved:
            self.cache.drop(digest)
        self._reserved.clear()
        self._step, self._num_rows = step, 0

    def fit(self, request: Request, first: int, num_tokens: int, most: int) -> int:
        """How many of `num_tokens` tokens after the first `first` the request may compute in this
        step, where the images that they need are encoded. At most `most` where the end of an image
        must be reached.
        """
        end = first + num_tokens
        if not self._has_chunks:
            needed = [one for one in request.images if first_place(one, first, end) is not None]
            return num_tokens if self._reserve_all(needed) else 0
        for item in request.images:
            if item.start >= end:
                break
            if item.end <= first:
                continue
            if self._sees_whole and end < item.end:
                end = item.end if item.end - first <= most else max(first, item.start)
            needed = first_place(item, first, end)
            if needed is not None and not self._reserve(item):
                return needed - first
        return end - first

    def _reserve(self, item: ImageItem) -> bool:
        """Whether the image is in the table when the step reads it."""
        if self.cache.find(item.digest, self._step) is not None:
            return True
        return self._has_budget(item.num_rows) and self._encode(item)

    def _has_budget(self, num_rows: int) -> bool:
        return not self._num_rows or self._num_rows + num_rows <= self._most_rows

    def _encode(self, item: ImageItem) -> bool:
        """Whether there is room in the table for an image that it lacks."""
        image = self.cache.add(item.digest, item.num_rows, self._step)
        if image is None:
            return False
        self._num_rows += item.num_rows
        self._reserved[item.digest] = ImageToEncode(item.pixels, item.num_rows, image.first_row)
        return True

    def _reserve_all(self, items: list[ImageItem]) -> bool:
        """Whether all images are in the table when the step reads them."""
        missing = {one.digest: one for one in items if self.cache.peek(one.digest) is None}
        if not self._has_budget(sum(item.num_rows for item in missing.values())):
            return False
        may_clear, before = self.cache.is_unused(self._step), len(self._reserved)
        if self._find_or_encode(items):
            return True
        for digest in [*self._reserved][before:]:
            self._num_rows -= self._reserved.pop(digest).num_rows
            self.cache.drop(digest)
        if not may_clear:
            return False
        self.cache.clear()  # the room between images that stay may be too small
        return self._find_or_encode(items)

    def _find_or_encode(self, items: list[ImageItem]) -> bool:
        return all(
            self.cache.find(item.digest, self._step) is not None or self._encode(item)
            for item in items
        )

    def place(self, output: SchedulerOutput, request: Request, first: int, num_tokens: int) -> None:
        """Notes which rows of the table the tokens of a row of the step read, and what it encodes
        for them. `fit` has reserved these.
        """
        end = first + num_tokens
        assert request.slot is not None  # it is running
        for item in request.images:
            if item.end <= first or item.start >= end:
                continue
            if (reserved := self._reserved.pop(item.digest, None)) is not None:
                output.images_to_encode.append(reserved)
                self._counters.num_images_encoded += 1
                self._counters.num_image_rows_encoded += reserved.num_rows
            image = self.cache.peek(item.digest)
            row = 0  # of the item
            for start, count in item.spans:
                begin, stop = max(start, first), min(start + count, end)
                if begin < stop:
                    assert image is not None  # see fit
                    table_row = image.first_row + row + begin - start
                    output.image_rows.append((request.slot, begin, stop - begin, table_row))
                row += count
            if first <= item.start and image is not None:
                self._counters.mm_cache_queries += 1
                self._counters.mm_cache_hits += image.first_step < self._step

    def tokens_of(self, request: Request) -> list[int]:
        """The tokens that the runner gets: see VisionConfig.row_token_id."""
        token_ids, row_token_id = request.token_ids.copy(), self._row_token_id
        if row_token_id is not None:
            for start, count in (span for item in request.images for span in item.spans):
                token_ids[start : start + count] = [row_token_id] * count
        return token_ids

    def clear(self) -> None:
        """Forgets all images, since the executor's table or its encoder changes."""
        self.cache.clear()
        self._reserved.clear()


def first_place(item: ImageItem, first: int, end: int) -> int | None:
    """The first of the tokens [first, end) whose place a row of the image takes."""
    places = (max(start, first) for start, count in item.spans if start + count > first)
    place = next(places, end)
    return place if place < end else None


def places_of(request: Request) -> list[ImagePlace]:
    """Where the images of a request are."""
    return [ImagePlace(item.start, item.end, *item.grid) for item in request.images]
