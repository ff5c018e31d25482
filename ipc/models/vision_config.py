"""The encoder of a model that reads images, as the model's files describe it.

Must not know: pixels, tensors' values, requests, torch.
"""

from __future__ import annotations

from typing import Any

import msgspec


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the resolved configuration (ModelConfig.vision), so that frontend, core and executor
    read one statement.
    """

    family: str  # such as "qwen3_vl", "gemma3", "pixtral": one processor and one encoder each
    hidden_size: int  # of the text model: the width of a row
    tower: dict[str, Any] = {}  # vision_config of config.json
    # keys of the whole config.json beside its parts, such as those of a projector
    whole: dict[str, Any] = {}
    processor: dict[str, Any] = {}  # preprocessor_config.json, or its part of processor_config.json
    processor_file: str = "preprocessor_config.json"  # the name of that one
    image_token_id: int  # the placeholder that a row of the encoder replaces
    unit: int  # pixels on each side of the square that one row stands for
    # how many vectors a row has: one for the embedding, and one for each of the first layers of the
    # text model whose input it is added to (deepstack)
    num_vectors: int = 1
    # rotary pairs that turn by time, row and column; empty: positions have one component
    mrope_section: tuple[int, ...] = ()
    # whether the pairs of the components alternate; otherwise each component has consecutive ones
    has_interleaved_mrope: bool = True
    # tokens of one image see each other, so that a step computes all of them or none
    sees_whole_images: bool = False
    only_windows_see_whole_images: bool = False  # in layers with a sliding window, not in others
    # the token that the model computes in the place of a placeholder, where layers get inputs of
    # their own by token ids; None: the placeholder
    row_token_id: int | None = None
    file: str = ""  # the encoder's GGUF file; "": its tensors are beside the text model's


def grid_of(vision: VisionConfig, height: int, width: int) -> tuple[int, int]:
    """The rows and columns of what the encoder returns for an image, whose sides are multiples of
    `unit`.
    """
    return height // vision.unit, width // vision.unit


def components_of(vision: VisionConfig, num_pairs: int) -> list[int]:
    """For each of the rotary pairs the component of the position by which it turns: 0 time, 1 row,
    2 column. Empty where positions have one component. Pairs that no component has turn by time.
    """
    if not vision.mrope_section:
        return []
    components, first = [0] * num_pairs, 0
    for component, count in enumerate(vision.mrope_section):
        pairs = range(first, first + count)
        first += count
        if vision.has_interleaved_mrope and component:
            pairs = range(component, 3 * count, 3)
        for pair in pairs:
            if pair < num_pairs:
                components[pair] = component
    return components
