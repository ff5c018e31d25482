"""Keeps prepared images by their contents, the least recently used ones leave first.

Must not know: how an image is prepared.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from ...ipc.messages import Array
from .layout import Layout


class PreparedPart(NamedTuple):
    """An input of the encoder, before it has a place in a prompt."""

    pixels: Array  # u1 [height, width, 3]
    grid: tuple[int, int]
    digest: bytes


class PreparedImage(NamedTuple):
    layout: Layout
    parts: list[PreparedPart]


class ItemCache:
    """Thread-safe. `max_bytes` counts pixels; 0: nothing is kept."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[Any, PreparedImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> PreparedImage | None:
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: Any, image: PreparedImage) -> None:
        if image.layout.num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._images:  # another thread was faster
                return
            self._images[key] = image
            self._num_bytes += image.layout.num_bytes
            while self._num_bytes > self._max_bytes:
                _, oldest = self._images.popitem(last=False)
                self._num_bytes -= oldest.layout.num_bytes
