"""How families resize and cut pictures, and the tokens that they put in their places, beside the
processors of transformers.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from quire.frontend.images.families import (
    FAMILIES,
    CannotResize,
    Family,
    Gemma3,
    Gemma4,
    Idefics3,
    InternVl,
    Lfm2Vl,
    Pixtral,
    Qwen,
    make_family,
    with_settings,
)
from quire.frontend.images.layout import cut
from quire.frontend.images.media import ImageSource
from quire.frontend.images.pictures import DecodedPicture
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.models import vision_families
from quire.tests import image_processors
from quire.tests.image_processors import digest, preparer_of, prompt_of, prompts_of, sample
from quire.tests.pictures import make_picture, pictures

CASES = image_processors.cases()
RECORDED = json.loads(image_processors.RECORD.read_text())


def pixels_of(item: Any) -> np.ndarray:
    return np.frombuffer(item.pixels.data, np.uint8).reshape(item.pixels.shape)


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("name", CASES)
def test_same_prompt_as_transformers(name: str) -> None:
    """The token ids, the sides of each part, and its pixels, as torchvision resizes them."""
    case = CASES[name]
    preparer = preparer_of(case)
    for given, recorded in zip(prompts_of(case), RECORDED[name], strict=True):
        sources = [ImageSource(picture, f"image {i}") for i, picture in enumerate(given)]
        token_ids, items = preparer.prepare(prompt_of(case), sources)
        assert len(token_ids) == recorded["num_tokens"]
        assert digest(token_ids) == recorded["ids"]
        assert len(items) == len(recorded["parts"])
        for item, part in zip(items, recorded["parts"]):
            made = pixels_of(item)
            assert list(made.shape[:2]) == part["shape"]
            assert sample(made) == part["pixels"]


@pytest.mark.parametrize("name", CASES)
def test_spans_hold_the_placeholder(name: str) -> None:
    case = CASES[name]
    given = prompts_of(case)[-1]
    sources = [ImageSource(picture, "image") for picture in given]
    token_ids, items = preparer_of(case).prepare(prompt_of(case), sources)
    places = [
        i for item in items for start, number in item.spans for i in range(start, start + number)
    ]
    token = case.vision.image_token_id
    assert places == [i for i, token_id in enumerate(token_ids) if token_id == token]
    for item in items:
        assert sum(number for _, number in item.spans) == item.num_rows
        height, width, _ = item.pixels.shape
        assert item.grid == (height // case.vision.unit, width // case.vision.unit)


@pytest.mark.parametrize("name", CASES)
def test_token_ids_as_prompt(name: str) -> None:
    """The prompt as ids gives what its text gives, where no mark joins the text beside it."""
    case = CASES[name]
    placeholder, tokenizer = FAMILIES[case.vision.family].placeholder, image_processors.tokenizer()
    prompt = f"One {placeholder} two {placeholder}x"
    sources = [ImageSource(picture, "image") for picture in prompts_of(case)[0]]
    preparer = preparer_of(case)
    of_ids = preparer.prepare(tokenizer.encode(prompt), sources)
    assert of_ids == preparer.prepare(prompt, sources)


# ---------------------------------------------------------------- pixels


def oracle(name: str) -> Any:
    """The processor of transformers that resizes with Pillow, as a function of a picture."""
    module, made, options = {
        "qwen3_vl": ("qwen2_vl", "Qwen2VL", {"patch_size": 16}),
        "gemma3": ("gemma3", "Gemma3", {"size": {"height": 896, "width": 896}}),
        "gemma3 with crops": (
            *("gemma3", "Gemma3"),
            {"size": {"height": 896, "width": 896}} | PAN_AND_SCAN,
        ),
        "gemma4": ("gemma4", "Gemma4", {}),
        "pixtral": ("pixtral", "Pixtral", {}),
        "mistral3": ("pixtral", "Pixtral", {"size": {"longest_edge": 1540}, "patch_size": 28}),
        "idefics3": ("idefics3", "Idefics3", {}),
        "idefics3 whole": ("idefics3", "Idefics3", {"do_image_splitting": False}),
        "smolvlm": (
            *("smolvlm", "SmolVLM"),
            {"size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512}},
        ),
        "internvl": (
            *("got_ocr2", "GotOcr2"),
            {"size": {"height": 448, "width": 448}, "crop_to_patches": True},
        ),
    }[name]
    from importlib import import_module

    models = "transformers.models"
    source = import_module(f"{models}.{module}.image_processing_pil_{module}")
    # identity, so that the pixels come back as they are
    options = {"do_rescale": False, "do_normalize": False, **options}
    return getattr(source, f"{made}ImageProcessorPil")(**options)


PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SETTINGS: dict[str, Family] = {
    "qwen3_vl": Qwen(unit=32, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
    "gemma3": Gemma3(unit=56),
    "gemma3 with crops": Gemma3(unit=56, do_pan_and_scan=True),
    "gemma4": Gemma4(unit=48),
    "pixtral": Pixtral(unit=16),
    "mistral3": Pixtral(unit=28, longest_edge=1540),
    "idefics3": Idefics3(unit=28),
    "idefics3 whole": Idefics3(unit=28, do_image_splitting=False),
    "smolvlm": Idefics3(unit=64, longest_edge=1024, tile=512),
    "internvl": InternVl(unit=28),
}


def theirs(name: str, processor: Any, picture: Image.Image) -> list[np.ndarray]:
    """The parts that the processor makes, [height, width, 3]."""
    made = processor(picture, return_tensors="np")
    values = np.asarray(made["pixel_values"])
    if name == "qwen3_vl":
        [[_, rows, columns]] = made["image_grid_thw"]
        values = values.reshape(rows // 2, columns // 2, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
        return [values.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 16, columns * 16, 3)]
    if name == "gemma4":
        columns, rows = made["image_position_ids"][0].max(0) + 1
        values = values[0][: rows * columns].reshape(rows, columns, 16, 16, 3)
        return [values.transpose(0, 2, 1, 3, 4).reshape(rows * 16, columns * 16, 3)]
    return [*values.reshape(-1, *values.shape[-3:]).transpose(0, 2, 3, 1)]


def as_torchvision(picture: Image.Image, size: Any, resample: Any, **_: Any) -> Image.Image:
    """Resizes as the processors with torchvision do."""
    if size == picture.size:
        return picture.copy()
    plane = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    kind = {1: "lanczos", 2: "bilinear", 3: "bicubic"}[resample]
    made = torch.nn.functional.interpolate(plane, size=size[::-1], mode=kind, antialias=True)
    return Image.fromarray(made[0].permute(1, 2, 0).contiguous().numpy())


def check_pixels(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, family = oracle(name), SETTINGS[name]
    monkeypatch.setattr(Image.Image, "resize", as_torchvision)
    num_compared = 0
    for picture in pictures(number):
        try:
            expected = theirs(name, processor, picture.copy())
        except ValueError:
            expected = None
        decoded = DecodedPicture(picture, "image").decode()
        try:
            layout = family.layout(decoded.height, decoded.width)
        except CannotResize:
            assert expected is None, decoded.size
            continue
        assert expected is not None, decoded.size
        made = cut(decoded, [part.steps for part in layout.parts], family.resample)
        assert len(made) == len(expected)
        for ours, other in zip(made, expected):
            assert np.array_equal(np.asarray(ours), other), decoded.size
        num_compared += 1
    assert num_compared > number // 2


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("name", SETTINGS)
def test_same_pixels_as_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pixels(name, 10, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_same_pixels_as_transformers_of_200_pictures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_pixels(name, 200, monkeypatch)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("family", "kwargs", "problem"),
    [
        (Qwen(unit=32), {"max_pixel": 1}, "has the unknown key 'max_pixel'"),
        (Qwen(unit=32), {"patch_size": 8}, "has the unknown key 'patch_size'"),
        (Qwen(unit=32), {"unit": 8}, "has the unknown key 'unit'"),
        (Qwen(unit=32), {"max_pixels": 0}, "max_pixels: expected `int` >= 1"),
        (Qwen(unit=32), {"max_pixels": 2**40}, "max_pixels: expected `int` <= 67108864"),
        (Qwen(unit=32), {"max_pixels": "many"}, "max_pixels: expected `int`, got `str`"),
        (Qwen(unit=32), {"max_pixels": 100}, "min_pixels=65536 is more than max_pixels=100"),
        (Gemma3(unit=56), {"do_pan_and_scan": 1}, "do_pan_and_scan: expected `bool`"),
        (Gemma3(unit=56), {"size": 100}, "has the unknown key 'size'"),
        (Gemma4(unit=48), {"max_soft_tokens": 1121}, "max_soft_tokens: expected `int` <= 1120"),
        (Pixtral(unit=16), {"size": {"width": 5}}, "size: must be a number from 1 to 8192"),
        (Qwen(unit=32), {"size": "x"}, "size: must be an object with shortest_edge and"),
        (Idefics3(unit=28), {"resample": 6}, "resample: expected `int` <= 3"),
        (InternVl(unit=28), {"max_patches": 65}, "max_patches: expected `int` <= 64"),
        (InternVl(unit=28), {"min_patches": 20}, "min_patches=20 is more than max_patches=12"),
        (Lfm2Vl(unit=32), {"min_tiles": 20}, "min_tiles=20 is more than max_tiles=10"),
        (Lfm2Vl(unit=32), {"min_image_tokens": 300}, "min_image_tokens=300 is more than"),
        (Lfm2Vl(unit=32), {"tile_size": 500}, "tile_size=500 is no multiple of 32"),
    ],
)
def test_wrong_settings(family: Family, kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameterError, match="mm_processor_kwargs") as caught:
        with_settings(family, kwargs)
    assert caught.value.problem.startswith(problem)


def test_every_family_with_an_encoder_has_a_processor() -> None:
    assert FAMILIES.keys() == vision_families.FAMILIES.keys()


def test_settings_of_the_files_and_of_kwargs() -> None:
    processor = {"size": {"shortest_edge": 4096, "longest_edge": 8192}, "image_mean": [0, 0, 0]}
    vision = image_processors.vision_config("qwen3_5", 32, processor=processor)
    family = make_family(vision, {"max_pixels": 10_000})
    assert family == Qwen(unit=32, min_pixels=4096, max_pixels=10_000)
    with pytest.raises(ModelLoadError, match="preprocessor_config.json: max_pixels: expected"):
        make_family(msgspec.structs.replace(vision, processor={"max_pixels": -1}), {})
    for key, value in (("do_center_crop", True), ("do_resize", False)):
        with pytest.raises(ModelLoadError, match=f"{key}: must be"):
            make_family(msgspec.structs.replace(vision, processor={key: value}), {})
    with pytest.raises(ModelLoadError, match="no processor of images is known for llava"):
        make_family(msgspec.structs.replace(vision, family="llava"), {})


MALFORMED = ("x", -1, 0, 1.5, 2**70, [], [1], {"a": 1}, {"longest_edge": -5}, float("nan"))
# keys of every family's file, and what transformers takes of them without a look
READ = {
    "size": {"gemma4", "gemma4_unified", "lfm2_vl"},
    "resample": set(),
    "do_resize": {"lfm2_vl"},
    "do_center_crop": set(),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_malformed_values_of_files(name: str) -> None:
    """The error names the file and the key; nothing is silently a default."""
    keys = {key for key, unread in READ.items() if name not in unread}
    keys |= {*FAMILIES[name].settable()} - {"crop_to_patches"}  # which the processor sets itself
    for key in keys:
        for value in MALFORMED:
            vision = image_processors.vision_config(
                name, 32, processor={key: value}, processor_file="processor_config.json"
            )
            try:
                family = make_family(vision, {})
            except ModelLoadError as error:
                assert re.match(rf"processor_config.json: .*\b{key}\b", str(error)), value
            else:
                assert getattr(family, key, None) == value or key in READ


@pytest.mark.parametrize(
    ("family", "size"),
    [(Qwen(unit=32), (201, 1)), (Pixtral(unit=16), (3000, 1)), (Pixtral(unit=16), (1, 3000))],
)
def test_picture_that_cannot_be_resized(family: Family, size: tuple[int, int]) -> None:
    picture = make_picture(*size)
    with pytest.raises(CannotResize):
        family.layout(picture.height, picture.width)
