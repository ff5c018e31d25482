"""Which images a request may name, and how they are read."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.frontend.images import media
from quire.frontend.images.media import ImageSource, Media, read_base64
from quire.frontend.images.web import Web
from quire.ipc.config import MultiModalConfig
from quire.ipc.errors import InvalidParameterError
from quire.tests.pictures import encoded, make_picture

PICTURE = make_picture(5, 3)
PNG = encoded(PICTURE)
TEXT = base64.b64encode(PNG).decode()


def make_media(**settings: Any) -> Media:
    return Media(MultiModalConfig(**settings))


def opened(value: Any, **settings: Any) -> np.ndarray:
    [picture] = make_media(**settings).open_all([ImageSource(value, "image")])
    return np.asarray(picture.decode())


def refused(value: Any, **settings: Any) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        opened(value, **settings)
    assert caught.value.parameter == "image"
    return caught.value.problem


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        bytearray(PNG),
        memoryview(PNG),
        f"data:image/png;base64,{TEXT}",
        f"DATA:;BASE64,{TEXT}",
        f"data:image/png;charset=x;base64,{TEXT[:40]}\n {TEXT[40:]}\n",
        PICTURE,
        np.asarray(PICTURE),
    ],
)
def test_forms_of_an_image(value: Any) -> None:
    assert np.array_equal(opened(value), np.asarray(PICTURE))


def test_path(tmp_path: Path) -> None:
    """A Path comes from Python, not from a request."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    assert np.array_equal(opened(path), np.asarray(PICTURE))
    assert refused(str(path)).startswith("must be a URL that begins with data:, http:, https: or")
    assert (
        refused(tmp_path / "none")
        == f"{tmp_path / 'none'} cannot be read: No such file or directory"
    )
    assert refused(tmp_path) == f"{tmp_path} cannot be read: Is a directory"
    os.mkfifo(tmp_path / "fifo")
    assert refused(tmp_path / "fifo").endswith("is not a regular file")
    assert refused(Path("/dev/zero")) == "/dev/zero is not a regular file"
    assert refused(Path("a\0b")).endswith("cannot be read: embedded null byte")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "must be a URL that begins with"),
        ("javascript:1", "must be a URL that begins with"),
        (TEXT, "must be a URL that begins with"),
        ("data:image/png,abc", "must be a data URL in base64"),
        ("data:image/png;base64", "must be a data URL in base64"),
        ("data:image/png;base64,ab!c", "is not base64"),
        ("data:image/png;base64,abcde", "is not base64"),
        ("data:image/png;base64,\u00e9", "is not base64"),
        ("data:image/png;base64,", "must be PNG, JPEG, WebP, GIF or BMP"),
        (b"", "must be PNG, JPEG, WebP, GIF or BMP"),
        (b"<svg/>", "must be PNG, JPEG, WebP, GIF or BMP"),
        (5, "must be an image: bytes, a path, a data URL, an array or a PIL image, got 5"),
        (None, "must be an image"),
        ({"a": 1}, "must be an image"),
        (np.zeros((2, 2, 2), np.uint8), "must be an array uint8 of shape"),
        (np.zeros((2, 2, 3), np.float32), "must be an array uint8 of shape"),
        (np.zeros((3,), np.uint8), "must be an array uint8 of shape"),
        (np.zeros((0, 4, 3), np.uint8), "has no pixels: it is 4 x 0"),
        (np.broadcast_to(np.uint8(0), (2**16, 1)), "is 1 x 65536 pixels large; an image can have"),
        (np.broadcast_to(np.uint8(0), (2**14, 2**13)), "is 8192 x 16384 pixels large"),
    ],
)
def test_what_is_no_image(value: Any, problem: str) -> None:
    assert refused(value).startswith(problem)


def test_web_is_closed_by_default() -> None:
    assert "allowed_media_domains: none" in refused("http://example.com/a.png")
    assert "allowed_media_domains: none" in refused("HTTPS://example.com/a.png")


def test_web(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def fetch(self: Web, url: str, parameter: str, max_bytes: int) -> bytes:
        fetched.append((url, parameter, max_bytes))
        return PNG

    monkeypatch.setattr(Web, "fetch", fetch)
    assert np.array_equal(opened("http://example.com/a.png"), np.asarray(PICTURE))
    assert fetched == [("http://example.com/a.png", "image", media.MAX_BYTES)]
    assert ImageSource("Https://example.com", "image").needs_network
    assert not ImageSource("data:https:", "image").needs_network
    assert not ImageSource(b"http:", "image").needs_network


def test_files_under_the_allowed_directory(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "allowed beside"
    allowed.mkdir()
    outside.mkdir()
    for directory in (allowed, outside):
        (directory / "a b.png").write_bytes(PNG)
    (allowed / "inner").symlink_to(allowed / "a b.png")
    (allowed / "outer").symlink_to(outside / "a b.png")
    settings = {"allowed_local_media_path": str(allowed)}
    for name in (f"{allowed}/a%20b.png", f"localhost{allowed}/inner", f"{allowed}/x/../a b.png"):
        assert np.array_equal(opened(f"file://{name}", **settings), np.asarray(PICTURE))
    must = f"must name a file under allowed_local_media_path={allowed}"
    for name in (
        *(f"{outside}/a%20b.png", f"{allowed}/outer", f"{allowed}/../allowed beside/a b.png"),
        *(f"{allowed}/%2e%2e/allowed%20beside/a b.png", "/etc/passwd", "/dev/zero"),
    ):
        assert refused(f"file://{name}", **settings) == must
    assert refused(f"file://host{allowed}/inner", **settings).startswith("must name a file of this")
    assert refused(f"file://{allowed}", **settings).endswith("cannot be read: Is a directory")
    assert refused(f"file://{allowed}/a%00b", **settings).startswith("is no URL")
    assert refused(f"file://{allowed}/inner").endswith("runs without allowed_local_media_path")


def test_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are not read, and base64 is not decoded, if they are too large."""
    monkeypatch.setattr(media, "MAX_BYTES", 3000)
    monkeypatch.setattr(media, "MAX_TOTAL_BYTES", 5000)
    large = encoded(make_picture(40, 40))
    assert 3000 < len(large) < 5000
    (tmp_path / "large").write_bytes(large)
    problem = f"is a file of {len(large):,} bytes; an image can have 3,000"
    assert refused(large) == problem
    assert refused(tmp_path / "large") == problem
    text = base64.b64encode(large).decode()
    assert refused(f"data:;base64,{text}").endswith("an image can have 3,000")
    some = encoded(make_picture(28, 28))
    assert 2000 < len(some) < 3000
    sources = [ImageSource(some, "first"), ImageSource(some, "second"), ImageSource(some, "third")]
    with pytest.raises(InvalidParameterError, match="all images of a prompt 5,000") as caught:
        make_media().open_all(sources)
    assert caught.value.parameter == "third"


def test_base64_alone() -> None:
    """As Ollama's clients send images."""
    assert read_base64(TEXT, "images[0]") == PNG
    with pytest.raises(InvalidParameterError, match=r"images\[0\]: is not base64"):
        read_base64("a", "images[0]")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_local_media_path", "/no/such/directory"),
        ("allowed_local_media_path", __file__),
        ("allowed_media_domains", ["example.com", "https://example.org"]),
        ("allowed_media_domains", ["*.example.com"]),
        ("allowed_media_domains", [""]),
    ],
)
def test_settings_that_allow_nothing(name: str, value: Any) -> None:
    """They are found at start-up, not by the first request."""
    with pytest.raises(InvalidParameterError, match=name):
        make_media(**{name: value})
