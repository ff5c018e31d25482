"""Compressed bodies: split at any byte, decompression bombs, and invalid gzip."""

from __future__ import annotations

import gzip
import json

import httpx2 as httpx
import pytest
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.request_body import Gunzip, decoder

TEXT = json.dumps({"prompt": "Once upon a time " * 50}).encode()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_pieces_of_any_size(size: int) -> None:
    compressed, gunzip = gzip.compress(TEXT), Gunzip(len(TEXT))
    pieces = [compressed[i : i + size] for i in range(0, len(compressed), size)]
    assert b"".join(map(gunzip.feed, pieces)) == TEXT
    gunzip.end()


def test_a_bomb_is_refused_before_it_is_decompressed() -> None:
    """64 MiB of zeros in 64 KiB: never more than the limit is decompressed."""
    bomb, gunzip = gzip.compress(bytes(64 * 2**20)), Gunzip(1000)
    with pytest.raises(ApiError, match="at most 1000 bytes, decompressed") as caught:
        gunzip.feed(bomb)
    assert caught.value.status == 413
    assert len(gunzip._inflate.unconsumed_tail) > len(bomb) // 2  # it was not read


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (TEXT, "incorrect header"),
        (gzip.compress(TEXT)[:-9], "it is truncated"),
        (b"", "it is truncated"),
        (gzip.compress(TEXT) + b"x", "data follow its end"),
        (gzip.compress(TEXT)[:40] + b"\xff" * 400, "while decompressing"),
    ],
    ids=["plain", "cut", "empty", "more", "damaged"],
)
def test_invalid_gzip(body: bytes, problem: str) -> None:
    gunzip = Gunzip(10**6)
    with pytest.raises(ApiError, match=problem) as caught:
        gunzip.feed(body)
        gunzip.end()
    assert (caught.value.status, caught.value.code) == (400, "invalid_gzip")


def test_encodings() -> None:
    assert decoder("", 1) is None and decoder("Identity", 1) is None
    assert isinstance(decoder(" GZIP ", 1), Gunzip)
    for name in ("br", "deflate", "gzip, gzip", "zstd"):
        with pytest.raises(ApiError) as caught:
            decoder(name, 1)
        assert caught.value.status == 415 and name in caught.value.message


def test_over_http(server: httpx.Client) -> None:
    body = gzip.compress(json.dumps({"prompt": "Once", "max_tokens": 2}).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = server.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["choices"]
    bomb = gzip.compress(bytes(40 * 2**20))
    answer = server.post("/v1/completions", content=bomb, headers=headers)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    answer = server.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_gzip"
