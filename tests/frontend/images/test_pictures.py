"""Files of all formats and modes become RGB pictures, and hostile ones errors."""

from __future__ import annotations

import random
import resource
import struct
import time
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from quire.frontend.images import pictures as module
from quire.frontend.images.pictures import DecodedPicture, EncodedPicture
from quire.ipc.errors import InvalidParameterError
from quire.tests.pictures import MODES, encoded, make_picture

FORMATS = {  # the modes that a format can hold
    "PNG": ("RGB", "RGBA", "P", "P with a transparent color", "L", "LA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("RGB", "P", "P with a transparent color", "L", "1"),
    "BMP": ("RGB", "P", "L", "1"),
}


def on_white(image: Image.Image) -> np.ndarray:
    """transformers' convert_to_rgb, in words of its own: whole, and without strips."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, image).convert("RGB"))
    return np.asarray(image.convert("RGB"))


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(EncodedPicture(data, "image").decode())


def refused(data: bytes) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        decoded(data)
    assert caught.value.parameter == "image"
    return caught.value.problem


@pytest.mark.parametrize(
    ("format_", "mode"), [(name, mode) for name, modes in FORMATS.items() for mode in modes]
)
def test_formats_and_modes(format_: str, mode: str) -> None:
    data = encoded(make_picture(37, 1100, mode, 1), format_)
    assert np.array_equal(decoded(data), on_white(Image.open(BytesIO(data))))


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_pil(mode: str) -> None:
    picture = make_picture(9, 1300, mode)
    made = DecodedPicture(picture, "image").decode()
    assert made.mode == "RGB"
    assert np.array_equal(np.asarray(made), on_white(picture))


@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
def test_arrays(channels: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, (7, 5, *channels), dtype=np.uint8)
    plain = array[:, :, 0] if channels == (1,) else array
    for given in (array, np.asfortranarray(array)):
        made = np.asarray(DecodedPicture(given, "image").decode())
        assert np.array_equal(made, on_white(Image.fromarray(plain)))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_orientation(format_: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[0x0112] = orientation
    data = encoded(make_picture(8, 5, kind=1), format_, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    assert np.array_equal(decoded(data), np.asarray(expected))
    assert expected.size == ((5, 8) if orientation in (5, 6, 7, 8) else (8, 5))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_orientation_of_both_byte_orders(order: str, kind: int) -> None:
    value = struct.pack(order + {1: "B", 3: "H", 4: "I"}[kind], 6).ljust(4, b"\0")
    entries = struct.pack(f"{order}HHHI", 1, 0x0112, kind, 1) + value
    exif = b"Exif\0\0" + {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8)
    data = encoded(make_picture(8, 5), "JPEG", exif=exif + entries + b"\0" * 4)
    assert decoded(data).shape == (8, 5, 3)


def test_orientation_of_xmp() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"> tiff:Orientation="6" </x:xmpmeta>'
    data = encoded(make_picture(8, 5), "JPEG", xmp=xmp)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    assert np.array_equal(decoded(data), np.asarray(expected))
    assert expected.size == (5, 8)


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG"])
def test_first_frame(format_: str) -> None:
    frames = [make_picture(20, 10, "RGB", 2), make_picture(20, 10, "RGB", 1)]
    options: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    if format_ == "WEBP":
        options["lossless"] = True
    data = encoded(frames[0], format_, **options)
    assert np.array_equal(decoded(data), np.asarray(frames[0]))


# ---------------------------------------------------------------- hostile files


def png_of(width: int, height: int, data: bytes = b"", *chunks: tuple[bytes, bytes]) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    made = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b"")):
        made += struct.pack(">I", len(body)) + name + body
        made += struct.pack(">I", zlib.crc32(name + body))
    return made


def webp_of(width: int, height: int) -> bytes:
    body = b"\0" * 4 + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def gif_of(width: int, height: int) -> bytes:
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x01\x00\x00;"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0" * 6 + frame


def bmp_of(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header


def jpeg_of(width: int, height: int) -> bytes:
    data = encoded(make_picture(16, 16), "JPEG")
    start = data.index(b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height, width) + data[start + 4 :]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("make", [png_of, webp_of, gif_of, bmp_of, jpeg_of])
def test_bomb(make: Any) -> None:
    """The header alone is read."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problem = "is 10000 x 10000 pixels large; an image can have 67,108,864 pixels"
    assert refused(make(10_000, 10_000)).startswith(problem)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 64 * 1024  # KiB


def test_long_side() -> None:
    assert refused(png_of(2**16, 1)).endswith("and 65,535 on a side")
    assert refused(png_of(2**31 - 1, 2**31 - 1)).startswith("is 2147483647 x 2147483647 pixels")


def test_compressed_zeros() -> None:
    """More data than the pixels need is not decompressed."""
    data = png_of(4, 4, zlib.compress(b"\0" * 2**27))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decoded(data).shape == (4, 4, 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 64 * 1024


def test_scans_of_a_jpeg() -> None:
    data = encoded(make_picture(64, 64), "JPEG", progressive=True)
    assert decoded(data).shape == (64, 64, 3)
    start = data.rindex(b"\xff\xda")
    many = data[:start] + data[start:-2] * 200 + data[-2:]
    problem = refused(many)
    assert problem.startswith("has 2") and problem.endswith("scans; the most are 100")


def jpeg_with_exif(exif: bytes) -> bytes:
    """In segments, which Pillow puts together."""
    data, size = encoded(make_picture(4, 4), "JPEG"), 65_000
    parts = (b"Exif\0\0" + exif[i : i + size] for i in range(0, len(exif), size))
    segments = (b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts)
    return data[:2] + b"".join(segments) + data[2:]


def png_with_exif(exif: bytes) -> bytes:
    pixels = zlib.compress((b"\0" + b"\x01" * 12) * 4)
    return png_of(4, 4, pixels, (b"eXIf", exif))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [jpeg_with_exif, png_with_exif])
def test_large_exif(make: Any) -> None:
    """Each of 65,000 entries has all of the data as its value."""
    entries = b"".join(struct.pack("<HHII", 256 + i, 1, 2**20, 8) for i in range(65_000))
    exif = b"II*\0" + struct.pack("<IH", 8, 65_000) + entries + b"\0" * 2**20
    began = time.thread_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decoded(make(exif)).shape == (4, 4, 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 64 * 1024
    assert time.thread_time() - began < 5.0


@pytest.mark.parametrize("format_", FORMATS)
def test_truncated(format_: str) -> None:
    data = encoded(make_picture(64, 48), format_)
    for end in range(0, len(data) - 12, max(1, len(data) // 40)):
        assert refused(data[:end])


def mutated(data: bytes, chosen: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chosen.choice((1, 1, 2, 5, 20))):
        # most changes hit the headers
        place = chosen.randrange(min(len(changed), chosen.choice((32, 200, len(changed)))))
        match chosen.randrange(6):
            case 0:
                changed[place] ^= 1 << chosen.randrange(8)
            case 1:
                changed[place] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                changed[place : place + 4] = chosen.randbytes(4)
            case 3:
                del changed[place : place + chosen.randrange(1, 20)]
            case 4:
                end = place + chosen.randrange(1, 60)
                changed[place:place] = changed[place:end] * chosen.choice((1, 3))
            case 5:
                del changed[chosen.randrange(len(changed)) + 1 :]
        if not changed:
            break
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_mutated_files(format_: str) -> None:
    """500 of each: a picture within the limits or an InvalidParameterError, soon and with little
    memory.
    """
    chosen = random.Random(format_)
    kinds = (0, 1, 2, 0, 1, 2, 0, 1)
    sources = [make_picture(40, 30, *pair) for pair in zip(FORMATS[format_], kinds)]
    files = [encoded(source, format_) for source in sources]
    if format_ in ("PNG", "WEBP", "GIF"):
        files.append(encoded(sources[0], format_, save_all=True, append_images=sources[:1] * 2))
    if format_ == "JPEG":
        files.append(encoded(sources[0], format_, progressive=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    longest, num_pictures = 0.0, 0
    for _ in range(500):
        data = mutated(chosen.choice(files), chosen)
        began = time.thread_time()
        try:
            made = EncodedPicture(data, "image").decode()
            assert made.mode == "RGB" and made.width * made.height <= module.MAX_PIXELS
            num_pictures += 1
        except InvalidParameterError as error:
            assert error.parameter == "image" and len(str(error)) < 400
        longest = max(longest, time.thread_time() - began)
    assert 0 < num_pictures < 500
    assert longest < 5.0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 700 * 1024  # KiB: one picture of the largest size, and its strips
