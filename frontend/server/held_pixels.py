"""HeldPixels: limits the memory of images whose requests wait or run.

Must not know: HTTP beyond its errors, images, the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .http.errors import ApiError

MAX_BYTES = 2 * 2**30  # of all requests together
RETRY_S = 5.0


class HeldPixels:
    """Small files may have large images, so the limits of bodies do not bound this memory. Each key
    that holds images may have an equal share of the limit, whatever others hold.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes = max_bytes
        self._by_key: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._by_key.total()

    @contextmanager
    def holding(self, key: str, num_bytes: int) -> Iterator[None]:
        """Counts the bytes while the context lasts. Raises ApiError 429."""
        if not num_bytes:
            yield
            return
        own, total = self._by_key[key] + num_bytes, self.num_bytes + num_bytes
        share = self._max_bytes // len({key, *self._by_key})
        if own > num_bytes and total > self._max_bytes and own > share:
            message = (
                f"The images of this key's requests take {own - num_bytes:,} bytes already, and "
                f"all may take {self._max_bytes:,}. Try again in {RETRY_S:.0f} s."
            )
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_S)
        self._by_key[key] = own
        try:
            yield
        finally:
            self._by_key[key] -= num_bytes
            if not self._by_key[key]:
                del self._by_key[key]
