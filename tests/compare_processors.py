"""Compares the pixels of 200 pictures with those of transformers' processors that use torchvision,
its default.

    python -m quire.tests.compare_processors [NUMBER]

Needs torchvision and takes minutes. Prints a row for each family: how many values differ, and by
how much at most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from quire.frontend.images.images import ImagePreparer
from quire.frontend.images.media import ImageSource
from quire.ipc.errors import InvalidParameterError
from quire.tests.image_processors import Case, backend, cases, preparer_of, sole_prompt_of
from quire.tests.pictures import encoded, make_picture, pictures

LONG = (4000, 30)
NUM_ORIENTATIONS = 8


def given_pictures(number: int) -> Iterator[tuple[Any, Image.Image]]:
    """Each as Quire gets it, and as transformers' load_image gives it to the processor."""
    for picture in pictures(number - NUM_ORIENTATIONS - 1):
        yield picture, picture.copy()
    yield (long := make_picture(*LONG, "RGB", 1)), long
    for orientation in range(1, NUM_ORIENTATIONS + 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(make_picture(400 + orientation, 300, "RGB", 1), "PNG", exif=exif)
        yield data, ImageOps.exif_transpose(_opened(data))


def _opened(data: bytes) -> Image.Image:
    from io import BytesIO

    return Image.open(BytesIO(data))


def compare(case: Case, processor: Any, number: int) -> tuple[int, int, int, int, int]:
    """(pictures compared, values, values that differ, by more than 1, the largest difference)"""
    preparer, prompt = preparer_of(case), sole_prompt_of(case)
    compared = values = different = far = most = 0
    problem = ""
    for ours, theirs in given_pictures(number):
        try:
            made = processor(images=[theirs], text=prompt, return_tensors="pt", **case.kwargs)
            expected = case.parts(made)
        except Exception as error:
            expected, problem = [], f"{type(error).__name__}: {error!s:.80}"
        parts = _parts(preparer, prompt, ours)
        if not parts or not expected:
            if bool(parts) != bool(expected):
                what = f"theirs: {problem}" if parts else "only theirs"
                print(f"    {theirs.size} {theirs.mode}: {what}", file=sys.stderr)
            continue
        assert len(parts) == len(expected), (theirs.size, theirs.mode)
        compared += 1
        for one, other in zip(parts, expected, strict=True):
            assert one.shape == other.shape, (theirs.size, theirs.mode, one.shape, other.shape)
            difference = np.abs(one.astype(np.int16) - other)
            values += difference.size
            different += int((difference > 0).sum())
            far += int((difference > 1).sum())
            most = max(most, int(difference.max()))
    return compared, values, different, far, most


def _parts(preparer: ImagePreparer, prompt: str, picture: Any) -> list[np.ndarray]:
    """Empty where the picture is refused."""
    try:
        _, items = preparer.prepare(prompt, [ImageSource(picture, "image")])
    except InvalidParameterError:
        return []
    return [np.frombuffer(i.pixels.data, np.uint8).reshape(i.pixels.shape) for i in items]


def main() -> None:
    from transformers import PreTrainedTokenizerFast

    number = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print("| family | pictures | values | differ | by more than 1 | at most |")
    print("|---|---|---|---|---|---|")
    for name, case in cases().items():
        named = PreTrainedTokenizerFast(
            tokenizer_object=backend(), pad_token="<video>", extra_special_tokens=case.tokens
        )
        processor = case.processor(named)
        row = compare(case, processor, number)
        print(f"| {name} |", " | ".join(f"{n:,}" for n in row), "|", flush=True)


if __name__ == "__main__":
    main()
