"""What must hold of the images of a request.

Must not know: steps, what an encoder computes. The frontend makes these images; the checks are for
clients that have made them otherwise, since kernels do not check.
"""

from __future__ import annotations

from typing import NamedTuple

from ..ipc.config import EngineConfig, resolved
from ..ipc.messages import Array, EngineCoreRequest, ImageItem, digest_of
from ..ipc.models.encoder_memory import encoder_cache_tokens
from ..ipc.models.vision_config import VisionConfig, grid_of


class ImageLimits(NamedTuple):
    """What an image may be, from the configuration."""

    vision: VisionConfig
    most_rows: int  # that the table of encoded images has
    # of an image whose tokens see each other: one step computes them, and in layers with a window
    # each sees all of them. By the name of the setting; empty: of other models
    most_tokens: dict[str, int]
    has_chunks: bool  # otherwise a step needs all images of a prompt

    @classmethod
    def of(cls, config: EngineConfig) -> ImageLimits | None:
        """None: the model reads no images."""
        vision = config.model_config.vision
        if vision is None:
            return None
        most_tokens = {}
        if vision.sees_whole_images:
            budget = resolved(config.scheduler_config.max_num_batched_tokens)
            window = config.model_config.hf_config.get("sliding_window") or budget
            most_tokens = {"max_num_batched_tokens": budget, "sliding_window": window}
        has_chunks = config.scheduler_config.enable_chunked_prefill
        return cls(vision, encoder_cache_tokens(config), most_tokens, has_chunks)


def image_problem(request: EngineCoreRequest, limits: ImageLimits | None) -> str:
    """Why the request's images cannot be used, or \"\"."""
    if limits is None:
        return "must be empty: this model reads text only"
    end, ids = 0, request.prompt_token_ids
    for number, item in enumerate(request.images):
        problem = _problem_of_places(item, end, ids, limits) or _problem_of_pixels(item, limits)
        if problem:
            return f"[{number}].{problem}"
        end = item.end
    num_rows = sum({item.digest: item.num_rows for item in request.images}.values())
    if not limits.has_chunks and num_rows > limits.most_rows:
        return (
            f"must have at most encoder_cache_tokens={limits.most_rows} rows together with "
            f"enable_chunked_prefill=False, got {num_rows}"
        )
    return ""


def _problem_of_places(item: ImageItem, end: int, ids: list[int], limits: ImageLimits) -> str:
    """Why its spans cannot be used; `end`: of the image before."""
    if not item.spans:
        return "spans: must not be empty"
    for start, count in item.spans:
        if count < 1 or not end <= start <= len(ids) - count:
            return (
                f"spans: must ascend, and lie between {end} and the {len(ids)} tokens of the "
                f"prompt, got ({start}, {count})"
            )
        end = start + count
        placeholder = limits.vision.image_token_id
        if any(token_id != placeholder for token_id in ids[start:end]):
            return f"spans: the prompt must have the token {placeholder} there"
    needs_one = limits.vision.mrope_section or limits.vision.sees_whole_images
    if needs_one and len(item.spans) != 1:
        return f"spans: must be 1 of this model, got {len(item.spans)}"
    num_tokens = sum(count for _, count in item.spans)
    if num_tokens != item.num_rows:
        return f"spans: must have {item.num_rows} tokens, as many as the grid, got {num_tokens}"
    if item.num_rows > limits.most_rows:
        return (
            f"grid: must have at most encoder_cache_tokens={limits.most_rows} rows, got "
            f"{item.num_rows}"
        )
    for name, most in limits.most_tokens.items():
        if item.end - item.start > most:
            return (
                f"spans: must have at most {name}={most} tokens, since they see each other, got "
                f"{item.end - item.start}"
            )
    return ""


def _problem_of_pixels(item: ImageItem, limits: ImageLimits) -> str:
    """Why its pixels cannot be encoded."""
    pixels: Array = item.pixels
    shape = list(pixels.shape)
    if pixels.dtype != "u1" or len(shape) != 3 or shape[2] != 3 or min(shape) < 1:
        return f"pixels: must be u1 [height, width, 3], got {pixels.dtype} {shape}"
    num_bytes = memoryview(pixels.data).nbytes
    if num_bytes != shape[0] * shape[1] * 3:
        return f"pixels: must have {shape[0] * shape[1] * 3} bytes, got {num_bytes}"
    unit = limits.vision.unit
    if shape[0] % unit or shape[1] % unit:
        return f"pixels: height and width must be multiples of {unit}, got {shape[:2]}"
    grid = grid_of(limits.vision, shape[0], shape[1])
    if tuple(item.grid) != grid:
        return f"grid: must be {grid} for these pixels, got {tuple(item.grid)}"
    if item.digest != digest_of(pixels, item.grid):
        return "digest: must be that of pixels and grid"
    return ""
