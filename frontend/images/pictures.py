"""Encoded images and arrays as RGB pictures.

Must not know: where an image comes from, models, tokens. Files are hostile: sizes are read from the
header before anything is decoded, only the first frame is read, and whatever Pillow raises becomes
an InvalidParameterError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol

from ...ipc.checks import require, shown
from ...ipc.errors import InvalidParameterError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 2**26  # of an image before it is resized; decoded it takes 256 MiB
MAX_SIDE = 2**16 - 1  # as of JPEG; the tables of a resize grow with the longer side
MAX_SCANS = 100  # of a progressive JPEG, each of which costs a pass over all pixels; cameras use 10
FORMATS = "PNG, JPEG, WebP, GIF or BMP"
# signature -> Pillow's module and class. Image.open would try formats that nobody has asked for.
READERS = (
    (rb"\x89PNG\r\n\x1a\n", "PngImagePlugin", "PngImageFile"),
    (rb"\xff\xd8\xff", "JpegImagePlugin", "JpegImageFile"),
    (rb"RIFF....WEBP", "WebPImagePlugin", "WebPImageFile"),
    (rb"GIF8[79]a", "GifImagePlugin", "GifImageFile"),
    (rb"BM", "BmpImagePlugin", "BmpImageFile"),
)
# the operation that undoes an orientation of EXIF: a member of Image.Transpose
UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
ORIENTATION = 0x0112
INTEGER_SIZES = {1: 1, 3: 2, 4: 4}  # types of an EXIF value -> bytes
STRIP_ROWS = 512  # that are blended at once


class Picture(Protocol):
    """An image of a request before it is decoded."""

    parameter: str  # by which errors name it

    @property
    def key(self) -> bytes:
        """32 bytes: equal only where decode() gives equal pixels."""
        ...

    def decode(self) -> Image.Image:
        """The upright picture in mode RGB. Raises InvalidParameterError."""
        ...


class EncodedPicture:
    """A file's contents."""

    def __init__(self, data: bytes, parameter: str):
        self.parameter = parameter
        self._data = data

    @property
    def key(self) -> bytes:
        return sha256(self._data).digest()

    def decode(self) -> Image.Image:
        try:
            image = _open(self._data, self.parameter)
            image.load()
            return to_rgb(_upright(image), self.parameter)
        except InvalidParameterError:
            raise
        # Pillow raises OSError, SyntaxError, ValueError, EOFError, struct.error, MemoryError and
        # others. A file from outside must not select the handler.
        except Exception as error:
            problem = f"cannot be decoded: {type(error).__name__}: {error!s:.200}"
            raise InvalidParameterError(self.parameter, problem) from error


class DecodedPicture:
    """A PIL image or a NumPy array u8 [height, width], or [height, width, 1, 3 or 4] of grey, RGB
    or RGBA.

    As with transformers, the EXIF orientation of a PIL image is left alone.
    """

    def __init__(self, value: Any, parameter: str):
        from PIL import Image

        self.parameter = parameter
        image = value if isinstance(value, Image.Image) else _from_array(value, parameter)
        check_size(image.size, parameter)
        try:
            self._image = to_rgb(image, parameter)
        except InvalidParameterError:
            raise
        except Exception as error:  # a PIL image that is still a file; see EncodedPicture
            problem = f"cannot be decoded: {type(error).__name__}: {error!s:.200}"
            raise InvalidParameterError(parameter, problem) from error

    @property
    def key(self) -> bytes:
        digest = sha256(f"RGB {self._image.size} ".encode())
        digest.update(self._image.tobytes())
        return digest.digest()

    def decode(self) -> Image.Image:
        return self._image


def to_rgb(image: Image.Image, parameter: str) -> Image.Image:
    """The picture in mode RGB, blended onto white where it is transparent: transformers'
    convert_to_rgb. Raises InvalidParameterError for a mode that Pillow cannot convert.
    """
    try:
        if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
            return _on_white(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except ValueError as error:
        problem = f"has the mode {image.mode}, which cannot become RGB: {error!s:.200}"
        raise InvalidParameterError(parameter, problem) from error


def check_size(size: tuple[int, int], parameter: str) -> None:
    """size: (width, height) in pixels."""
    width, height = size
    require(width > 0 and height > 0, parameter, f"has no pixels: it is {width} x {height}")
    require(
        width * height <= MAX_PIXELS and max(size) <= MAX_SIDE,
        parameter,
        f"is {width} x {height} pixels large; an image can have {MAX_PIXELS:,} pixels, and "
        f"{MAX_SIDE:,} on a side",
    )


def _on_white(image: Image.Image) -> Image.Image:
    """In strips, so that the copies with four channels stay small."""
    from PIL import Image

    width, height = image.size
    result = Image.new("RGB", image.size)
    for top in range(0, height, STRIP_ROWS):
        box = (0, top, width, min(top + STRIP_ROWS, height))
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        result.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return result


def _from_array(value: Any, parameter: str) -> Image.Image:
    import numpy as np
    from PIL import Image

    wanted = "uint8 of shape [height, width] or [height, width, 1, 3 or 4]"
    if not isinstance(value, np.ndarray):
        kinds = "bytes, a path, a data URL, an array or a PIL image"
        raise InvalidParameterError(parameter, f"must be an image: {kinds}, got {shown(value)}")
    is_image = value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4))
    require(
        value.dtype == np.uint8 and is_image,
        parameter,
        f"must be an array {wanted}, got {value.dtype} of shape {list(value.shape)}",
    )
    check_size((value.shape[1], value.shape[0]), parameter)
    return Image.fromarray(
        np.ascontiguousarray(value[:, :, 0] if value.shape[2:] == (1,) else value)
    )


# ---------------------------------------------------------------- files


def _open(data: bytes, parameter: str) -> Image.Image:
    """The image with its header read and checked, and nothing decoded."""
    found = (r for r in READERS if re.match(r[0], data, re.DOTALL))
    reader = next(found, None)
    if reader is None:
        raise InvalidParameterError(parameter, f"must be {FORMATS}; its first bytes are no image's")
    _, module, name = reader
    if module == "WebPImagePlugin":  # its reader allocates the canvas at once
        check_size(_webp_size(data), parameter)
    if module == "JpegImagePlugin":  # within the pixels' data, the marker cannot occur
        num_scans = data.count(b"\xff\xda")
        problem = f"has {num_scans} scans; the most are {MAX_SCANS}"
        require(num_scans <= MAX_SCANS, parameter, problem)
    image = getattr(import_module(f"PIL.{module}"), name)(BytesIO(data))
    check_size(image.size, parameter)
    return image


def _webp_size(data: bytes) -> tuple[int, int]:
    """(width, height) as the first chunk states them. Raises ValueError."""
    kind, body = data[12:16], data[20:30]
    if len(body) == 10 and kind == b"VP8 ":
        low, high = body[6:8], body[8:10]
        return int.from_bytes(low, "little") & 0x3FFF, int.from_bytes(high, "little") & 0x3FFF
    if len(body) == 10 and kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if len(body) >= 5 and kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise ValueError("its first chunk has no size")


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF or XMP data says: what ImageOps.exif_transpose does. That one
    reads all of the data, whose parts may be gigabytes when they are put side by side.
    """
    from PIL import Image

    method = UPRIGHT.get(_orientation(image.info))
    return image if method is None else image.transpose(Image.Transpose[method])


def _orientation(info: dict[Any, Any]) -> int:
    exif = info.get("exif")
    if exif is None and "Raw profile type exif" in info:  # of ImageMagick
        exif = bytes.fromhex("".join(info["Raw profile type exif"].split("\n")[3:]))
    found = next(_orientations(exif or b""), None)
    if found is not None:
        return found
    xmp = info.get("XML:com.adobe.xmp") or info.get("xmp") or b""
    xmp = xmp.encode() if isinstance(xmp, str) else xmp
    match = re.search(rb'tiff:Orientation(?:="|>)([0-9])', xmp)
    return int(match[1]) if match else 1


def _orientations(exif: bytes) -> Iterator[int]:
    """The orientations in the first directory of EXIF data (TIFF 6.0, section 2)."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    if exif[:2] not in (b"II", b"MM"):
        return

    def number(start: int, size: int) -> int:
        value = exif[start : start + size]
        return int.from_bytes(value, "little" if exif[:1] == b"I" else "big")

    start = number(4, 4)
    for entry in range(start + 2, min(start + 2 + 12 * number(start, 2), len(exif) - 11), 12):
        size = INTEGER_SIZES.get(number(entry + 2, 2))
        if number(entry, 2) == ORIENTATION and size and number(entry + 4, 4) == 1:
            yield number(entry + 8, size)
