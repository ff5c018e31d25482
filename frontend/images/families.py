"""How each family of models resizes and cuts a picture, and the tokens that stand for it.

Must not know: files, pixels, token ids. The rules are those of the processors in transformers 5;
their settings have the names of preprocessor_config.json. A class of FAMILIES makes the Layout of a
picture of given sides. Errors name the sides, not the image: the caller adds its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ...ipc.checks import shown
from ...ipc.errors import InvalidParameterError, ModelLoadError
from ...ipc.models.vision_config import VisionConfig
from .layout import Crop, Layout, Part, Resize, Run, tiles

MAX_SIDE = 8192
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]  # of a picture or a patch, in pixels
Area = Annotated[int, Meta(ge=1, le=2**26)]  # in pixels
Tokens = Annotated[int, Meta(ge=1, le=2**16)]
Tiles = Annotated[int, Meta(ge=1, le=64)]
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # members of PIL.Image.Resampling
Filter = Annotated[int, Meta(ge=LANCZOS, le=BICUBIC)]


# fields that other keys of a processor's file state, too
SOURCES = {
    **dict.fromkeys(("min_pixels", "max_pixels", "longest_edge"), "size"),
    "tile": "max_image_size",
}


class CannotResize(ValueError):
    """The family has no rule for a picture of these sides."""


class MalformedSetting(ValueError):
    """A value of a processor's file, or of mm_processor_kwargs, is not what its key needs."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a family. Each row of the encoder covers a square of `unit` pixels on each
    side. `resample`: the filter of resizing, as PIL numbers it.
    """

    placeholder: ClassVar[str]  # what a chat template writes for an image
    image_token: ClassVar[str]  # the text of VisionConfig.image_token_id
    FIXED: ClassVar[tuple[str, ...]] = ("unit",)  # fields that follow from the encoder
    unit: Side
    resample: Filter = BICUBIC

    @classmethod
    def fixed(cls, vision: VisionConfig) -> dict[str, Any]:
        """The fields of FIXED; None: the default."""
        return {"unit": vision.unit}

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The settings of preprocessor_config.json or of mm_processor_kwargs by the names of the
        fields.
        """
        return given

    @classmethod
    def settable(cls) -> list[str]:
        return [name for name in cls.__struct_fields__ if name not in cls.FIXED]

    def layout(self, height: int, width: int) -> Layout:
        """Raises CannotResize."""
        raise NotImplementedError

    def _part(self, *steps: Resize | Crop) -> Part:
        last = steps[-1]
        return Part(steps, (last.height // self.unit, last.width // self.unit))


def _present(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if values.get(name) is not None}


def _square_side(vision: VisionConfig, key: str) -> Any:
    """The side of the pictures that the encoder's table of positions is made for; key: of the
    processor's settings, where config.json does not say.
    """
    side = vision.tower.get("image_size")
    if side:
        return side[0] if isinstance(side, list) else side
    stated = vision.processor.get(key)
    return None if stated is None else _edge(key, stated, "height", "longest_edge")


def _edge(key: str, value: Any, *names: str) -> int:
    """A length that is a number, or a dict with one of the keys `names`. Raises MalformedSetting
    that names `key`.
    """
    found = value
    if isinstance(value, dict):
        found = next((value[name] for name in names if value.get(name) is not None), None)
    if type(found) is not int or not 1 <= found <= MAX_SIDE:
        keys = " or ".join(names)
        raise MalformedSetting(
            f"{key}: must be a number from 1 to {MAX_SIDE}, or an object with such a {keys}, got "
            f"{shown(value)}"
        )
    return found


# ---------------------------------------------------------------- Qwen


class Qwen(Family, frozen=True, kw_only=True):
    """Sides become multiples of the unit, and the area one between min_pixels and
    max_pixels: Qwen2-VL and its successors (qwen2_vl/image_processing_qwen2_vl.py).
    """

    placeholder: ClassVar[str] = "<|image_pad|>"
    image_token: ClassVar[str] = "<|image_pad|>"
    min_pixels: Area = 256 * 256
    max_pixels: Area = 4096 * 4096

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}"
            )

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        size = given.get("size")
        if size is None:
            return given
        if not isinstance(size, dict) or not size.keys() & {"shortest_edge", "longest_edge"}:
            wanted = "an object with shortest_edge and longest_edge, which are areas in pixels"
            raise MalformedSetting(f"size: must be {wanted}, got {shown(size)}")
        areas = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        others = {name: value for name, value in given.items() if name != "size"}
        return _present(areas, areas) | others

    def layout(self, height: int, width: int) -> Layout:
        if max(height, width) > 200 * min(height, width):
            raise CannotResize("one side can be 200 times as long as the other")
        side, area = self.unit, height * width
        new_height, new_width = round(height / side) * side, round(width / side) * side
        if new_height * new_width > self.max_pixels:
            scale = math.sqrt(area / self.max_pixels)
            new_height = max(side, math.floor(height / scale / side) * side)
            new_width = max(side, math.floor(width / scale / side) * side)
        elif new_height * new_width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
            new_height = math.ceil(height * scale / side) * side
            new_width = math.ceil(width * scale / side) * side
        part = self._part(Resize(new_height, new_width))
        return Layout([part], self.image_token, [[Run(0, part.num_rows)]])


class Qwen25(Qwen, frozen=True, kw_only=True):
    """The defaults of Qwen2.5-VL."""

    min_pixels: Area = 56 * 56
    max_pixels: Area = 28 * 28 * 16384


# ---------------------------------------------------------------- Gemma


class Gemma3(Family, frozen=True, kw_only=True):
    """A square, whatever the sides were. With do_pan_and_scan, crops of a long picture follow."""

    placeholder: ClassVar[str] = "<start_of_image>"
    image_token: ClassVar[str] = "<image_soft_token>"
    FIXED: ClassVar[tuple[str, ...]] = ("unit", "size")
    resample: Filter = BILINEAR
    size: Side = 896
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: Side = 256
    pan_and_scan_max_num_crops: Annotated[int, Meta(ge=2, le=64)] = 4
    pan_and_scan_min_ratio_to_activate: Annotated[float, Meta(ge=1.0)] = 1.2

    @classmethod
    def fixed(cls, vision: VisionConfig) -> dict[str, Any]:
        return {"unit": vision.unit, "size": _square_side(vision, "size")}

    def layout(self, height: int, width: int) -> Layout:
        square = Resize(self.size, self.size)
        crops = self._crops(height, width) if self.do_pan_and_scan else []
        parts = [self._part(square), *(self._part(crop, square) for crop in crops)]
        text = f"\n\n<start_of_image>{self.image_token}<end_of_image>\n\n"
        runs = [[Run(i, part.num_rows)] for i, part in enumerate(parts)]
        if crops:
            text = (
                f"Here is the original image {text} and here are some crops to help you see "
                f"better {' '.join([text] * len(crops))}"
            )
        return Layout(parts, text, runs)

    def _crops(self, height: int, width: int) -> list[Crop]:
        """Along the longer side; none where the picture is not long or not large enough."""
        long, short = max(height, width), min(height, width)
        if long / short < self.pan_and_scan_min_ratio_to_activate:
            return []
        least = self.pan_and_scan_min_crop_size
        number = max(2, min(long // least, math.floor(long / short + 0.5)))
        number = min(self.pan_and_scan_max_num_crops, number)
        step = math.ceil(long / number)
        if min(step, short) < least:
            return []
        if width >= height:
            return [Crop(0, step * i, height, step) for i in range(number)]
        return [Crop(step * i, 0, step, width) for i in range(number)]


class Gemma4(Family, frozen=True, kw_only=True):
    """Scaled up or down to as many patches as max_soft_tokens allows."""

    placeholder: ClassVar[str] = "<|image|>"
    image_token: ClassVar[str] = "<|image|>"
    max_soft_tokens: Annotated[int, Meta(ge=1, le=1120)] = 280

    def layout(self, height: int, width: int) -> Layout:
        side = self.unit
        scale = math.sqrt(self.max_soft_tokens * side**2 / (height * width))
        new_height = math.floor(scale * height / side) * side
        new_width = math.floor(scale * width / side) * side
        longest = self.max_soft_tokens * side
        if not new_height and not new_width:
            raise CannotResize(f"max_soft_tokens={self.max_soft_tokens} leave it no pixels")
        if not new_height:
            new_height, new_width = side, min(width // height * side, longest)
        elif not new_width:
            new_height, new_width = min(height // width * side, longest), side
        part = self._part(Resize(new_height, new_width))
        text = f"<|image>{self.image_token}<image|>"
        return Layout([part], text, [[Run(0, part.num_rows)]])


# ---------------------------------------------------------------- Mistral


class Pixtral(Family, frozen=True, kw_only=True):
    """Only scaled down, to the longest edge; sides are rounded up to whole patches. A mark ends
    each row.
    """

    placeholder: ClassVar[str] = "[IMG]"
    image_token: ClassVar[str] = "[IMG]"
    longest_edge: Side = 1024

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("size") is None:
            return given
        found = {name: value for name, value in given.items() if name != "size"}
        return found | {"longest_edge": _edge("size", given["size"], "longest_edge", "height")}

    def layout(self, height: int, width: int) -> Layout:
        side = self.unit
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise CannotResize(f"with longest_edge={self.longest_edge} one side has no pixels")
        rows, columns = (height - 1) // side + 1, (width - 1) // side + 1
        part = self._part(Resize(rows * side, columns * side))
        text = f"{self.image_token}[IMG_BREAK]" * (rows - 1) + f"{self.image_token}[IMG_END]"
        return Layout([part], text, [[Run(0, columns)] for _ in range(rows)])


# ---------------------------------------------------------------- tiles


class Idefics3(Family, frozen=True, kw_only=True):
    """The longest side is always scaled to longest_edge; then tiles, and the whole in one tile.
    SmolVLM states other sizes.
    """

    placeholder: ClassVar[str] = "<image>"
    image_token: ClassVar[str] = "<image>"
    FIXED: ClassVar[tuple[str, ...]] = ("unit", "tile")
    LARGEST: ClassVar[int] = 4096
    resample: Filter = LANCZOS
    longest_edge: Side | None = None  # four tiles
    tile: Annotated[int, Meta(ge=16, le=4096)] = 364
    do_image_splitting: bool = True

    @classmethod
    def fixed(cls, vision: VisionConfig) -> dict[str, Any]:
        return {"unit": vision.unit, "tile": _square_side(vision, "max_image_size")}

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("size") is None:
            return given
        found = {name: value for name, value in given.items() if name != "size"}
        return found | {"longest_edge": _edge("size", given["size"], "longest_edge")}

    def layout(self, height: int, width: int) -> Layout:
        first, tile = self._scaled(height, width), self.tile
        whole = Resize(tile, tile)
        rows = columns = 0
        if self.do_image_splitting:
            second = self._whole_tiles(first)
            rows, columns = second.height // tile, second.width // tile
            steps = [(first, second, crop) for crop in tiles(second.height, second.width, tile)]
            steps = [*steps, (first, second, whole)] if len(steps) > 1 else [(first, second)]
        else:
            steps = [(first, whole)]
        parts = [self._part(*one) for one in steps]
        runs = [[Run(i, part.num_rows)] for i, part in enumerate(parts)]
        fake, text = "<fake_token_around_image>", ""
        if len(parts) > 1:
            for row in range(1, rows + 1):
                for column in range(1, columns + 1):
                    text += f"{fake}<row_{row}_col_{column}>{self.image_token}"
                text += "\n"
            text += "\n"
        return Layout(parts, f"{text}{fake}<global-img>{self.image_token}{fake}", runs)

    def _scaled(self, height: int, width: int) -> Resize:
        """The longer side becomes longest_edge, the other one an even number."""
        ratio, longest = width / height, self.longest_edge or 4 * self.tile
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio, longest = width / height, self.LARGEST
        if width >= height and width > longest:
            width, height = longest, int(longest / ratio)
        elif height > width and height > longest:
            height, width = longest, int(longest * ratio)
        return Resize(max(height, 1), max(width, 1))

    def _whole_tiles(self, size: Resize) -> Resize:
        height, width, tile = size.height, size.width, self.tile
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return Resize(max(height, tile), max(width, tile))


def nearest_grid(height: int, width: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """(rows, columns) of the grid with `least` to `most` tiles whose shape is nearest to the
    picture's. Among equal shapes a larger grid is taken while it has less than twice the picture's
    area.
    """
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= rows * columns <= most
    ]
    best, nearest = (1, 1), math.inf
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        is_larger = distance == nearest and height * width > 0.5 * tile**2 * rows * columns
        if distance < nearest or is_larger:
            best, nearest = (rows, columns), distance
    return best


class InternVl(Family, frozen=True, kw_only=True):
    """The grid of tiles whose shape is nearest, and the whole in one tile."""

    placeholder: ClassVar[str] = "<IMG_CONTEXT>"
    image_token: ClassVar[str] = "<IMG_CONTEXT>"
    FIXED: ClassVar[tuple[str, ...]] = ("unit", "size")
    size: Side = 448
    crop_to_patches: bool = True
    min_patches: Tiles = 1
    max_patches: Tiles = 12

    def __post_init__(self) -> None:
        if self.min_patches > self.max_patches:
            raise ValueError(
                f"min_patches={self.min_patches} is more than max_patches={self.max_patches}"
            )

    @classmethod
    def fixed(cls, vision: VisionConfig) -> dict[str, Any]:
        return {"unit": vision.unit, "size": _square_side(vision, "size")}

    def layout(self, height: int, width: int) -> Layout:
        tile, rows, columns = self.size, 1, 1
        if self.crop_to_patches:
            rows, columns = nearest_grid(height, width, tile, self.min_patches, self.max_patches)
        grid = Resize(rows * tile, columns * tile)
        steps = [(grid, crop) for crop in tiles(grid.height, grid.width, tile)]
        steps = [*steps, (Resize(tile, tile),)] if len(steps) > 1 else [(grid,)]
        parts = [self._part(*one) for one in steps]
        text = f"<img>{self.image_token}</img>"
        return Layout(parts, text, [[Run(i, part.num_rows) for i, part in enumerate(parts)]])


class Lfm2Vl(Family, frozen=True, kw_only=True):
    """Sides keep their ratio (NaFlex); a large picture becomes tiles, and a small one of its own
    shape.
    """

    placeholder: ClassVar[str] = "<image>"
    image_token: ClassVar[str] = "<image>"
    FIXED: ClassVar[tuple[str, ...]] = ("unit", "downsample_factor")
    resample: Filter = BILINEAR
    downsample_factor: Annotated[int, Meta(ge=1, le=16)] = 2
    do_image_splitting: bool = True
    min_tiles: Tiles = 2
    max_tiles: Tiles = 10
    use_thumbnail: bool = True
    min_image_tokens: Tokens = 64
    max_image_tokens: Tokens = 256
    tile_size: Side = 512
    max_pixels_tolerance: Annotated[float, Meta(gt=0)] = 2.0

    @classmethod
    def fixed(cls, vision: VisionConfig) -> dict[str, Any]:
        stated = vision.processor.get("downsample_factor", vision.whole.get("downsample_factor"))
        return {"unit": vision.unit, "downsample_factor": stated}

    def __post_init__(self) -> None:
        if self.min_tiles > self.max_tiles:
            raise ValueError(f"min_tiles={self.min_tiles} is more than max_tiles={self.max_tiles}")
        if self.min_image_tokens > self.max_image_tokens:
            raise ValueError(
                f"min_image_tokens={self.min_image_tokens} is more than "
                f"max_image_tokens={self.max_image_tokens}"
            )
        if self.tile_size % self.unit:
            raise ValueError(f"tile_size={self.tile_size} is no multiple of {self.unit}")

    def layout(self, height: int, width: int) -> Layout:
        side, tile = self.unit, self.tile_size
        whole = self._resized(height, width, side)
        is_cut = self.do_image_splitting and not self.min_tiles == self.max_tiles == 1
        rows = columns = 1
        steps: list[tuple[Resize | Crop, ...]] = [(whole,)]
        if is_cut and self._is_large(height, width, side):
            rows, columns = nearest_grid(height, width, tile, self.min_tiles, self.max_tiles)
            grid = Resize(rows * tile, columns * tile)
            steps = [(grid, crop) for crop in tiles(grid.height, grid.width, tile)]
            if self.use_thumbnail and len(steps) > 1:
                steps.append((whole,))
        parts = [self._part(*one) for one in steps]
        runs = [[Run(i, part.num_rows)] for i, part in enumerate(parts)]
        marks = [""]
        if rows * columns > 1:
            marks = [
                f"<|img_row_{row}_col_{column}|>"
                for row in range(1, rows + 1)
                for column in range(1, columns + 1)
            ]
            marks += ["<|img_thumbnail|>"] * self.use_thumbnail
        body = "".join(mark + self.image_token for mark in marks)
        return Layout(parts, f"<|image_start|>{body}<|image_end|>", runs)

    def _resized(self, height: int, width: int, side: int) -> Resize:
        most, least = self.max_image_tokens * side**2, self.min_image_tokens * side**2
        new_height = max(side, round(height / side) * side)
        new_width = max(side, round(width / side) * side)
        if new_height * new_width > most:
            scale = math.sqrt(height * width / most)
            new_height = max(side, math.floor(height / scale / side) * side)
            new_width = max(side, math.floor(width / scale / side) * side)
        elif new_height * new_width < least:
            scale = math.sqrt(least / (height * width))
            new_height = math.ceil(height * scale / side) * side
            new_width = math.ceil(width * scale / side) * side
        return Resize(new_height, new_width)

    def _is_large(self, height: int, width: int, side: int) -> bool:
        least = side // self.downsample_factor
        rounded = [max(least, round(length / side) * side) for length in (height, width)]
        return math.prod(rounded) > self.max_image_tokens * side**2 * self.max_pixels_tolerance


# ---------------------------------------------------------------- the table

FAMILIES: dict[str, type[Family]] = {
    "qwen2_5_vl": Qwen25,
    "qwen3_vl": Qwen,
    "qwen3_5": Qwen,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "gemma4_unified": Gemma4,
    "pixtral": Pixtral,
    "mistral3": Pixtral,
    "idefics3": Idefics3,
    "internvl": InternVl,
    "lfm2_vl": Lfm2Vl,
}


def make_family(vision: VisionConfig, kwargs: dict[str, Any]) -> Family:
    """The settings of the model's files, replaced by those of mm_processor_kwargs.

    Raises ModelLoadError for files, InvalidParameterError for kwargs.
    """
    family = FAMILIES.get(vision.family)
    if family is None:
        problem = f"no processor of images is known for {vision.family}; known are"
        raise ModelLoadError(f"{problem} {', '.join(FAMILIES)}")
    try:
        _check_flags(vision.processor, family)
        # the processor of transformers cuts tiles, whatever preprocessor_config.json says
        stated = {n: v for n, v in vision.processor.items() if n != "crop_to_patches"}
        fixed = family.fixed(vision)
        found = _present(family.renamed(stated), family.settable()) | _present(fixed, fixed)
        settings = msgspec.convert(found, family)
    except (msgspec.ValidationError, MalformedSetting) as error:
        problem = _readable(error, vision.processor)
        raise ModelLoadError(f"{vision.processor_file}: {problem}") from error
    return with_settings(settings, kwargs)


def _check_flags(processor: dict[str, Any], family: type[Family]) -> None:
    """Requires that pictures are resized, and not cut at their center. Raises MalformedSetting."""
    needed = {"do_center_crop": False, "do_resize": True}
    if family is Lfm2Vl:  # which ignores it
        del needed["do_resize"]
    for name, value in needed.items():
        if processor.get(name) not in (None, value):
            problem = f"{name}: must be {str(value).lower()}, got {shown(processor[name])}"
            raise MalformedSetting(problem)


def with_settings(family: Family, kwargs: dict[str, Any]) -> Family:
    """The family with the settings of `kwargs`. Raises InvalidParameterError."""
    if not kwargs:
        return family
    try:
        given = family.renamed(kwargs)
    except MalformedSetting as error:
        raise InvalidParameterError("mm_processor_kwargs", str(error)) from error
    for name in given:
        if name not in family.settable():
            raise InvalidParameterError(
                "mm_processor_kwargs",
                f"has the unknown key {shown(name)}; this model's processor has "
                f"{', '.join(family.settable())}",
            )
    try:
        return msgspec.convert(msgspec.structs.asdict(family) | given, type(family))
    except msgspec.ValidationError as error:
        raise InvalidParameterError("mm_processor_kwargs", _readable(error, kwargs)) from error


def _readable(error: Exception, stated: dict[str, Any]) -> str:
    """msgspec's "Expected `int` <= 8192 - at `$.max_pixels`" as "max_pixels: expected `int` <=
    8192", with the key of `stated` that it comes from.
    """
    text, _, path = str(error).partition(" - at `$.")
    name = path.rstrip("`")
    if (source := SOURCES.get(name)) is not None and name not in stated and source in stated:
        name = f"{source} ({name})"
    return f"{name}: {text[:1].lower()}{text[1:]}" if path else text
