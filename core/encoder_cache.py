"""The rows of the executor's table of encoded images: which image lies where, and which makes room.

Must not know: requests, pixels, what an encoder computes.

An image stays as long as there is room, also after its request, and the least recently used one
makes room first. What the step being made reads or writes stays. What earlier steps read may be
overwritten: steps run in order, and a step encodes its images before it reads any.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class EncodedImage:
    """One image in the table. Its rows are [first_row, first_row + num_rows)."""

    first_row: int
    num_rows: int
    first_step: int  # the step that encodes it
    last_step: int  # the last one that reads it

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows


class EncoderCache:
    """Owns the rows of the table."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._images: dict[bytes, EncodedImage] = {}  # by digest; the least recently used first

    def find(self, digest: bytes, step: int) -> EncodedImage | None:
        """The image, which the step being made reads. None: it is not in the table."""
        image = self._images.pop(digest, None)
        if image is not None:
            image.last_step = step
            self._images[digest] = image
        return image

    def peek(self, digest: bytes) -> EncodedImage | None:
        """The image, whose use this is not."""
        return self._images.get(digest)

    def add(self, digest: bytes, num_rows: int, step: int) -> EncodedImage | None:
        """Makes room for an image that the step being made encodes. None: what this step uses
        leaves no room.
        """
        first_row = self._make_room(num_rows, step)
        if first_row is None:
            return None
        image = self._images[digest] = EncodedImage(first_row, num_rows, step, step)
        return image

    def _make_room(self, num_rows: int, step: int) -> int | None:
        """The first of so many free rows. Images are dropped for them, as few as possible in the
        order of their last use.
        """
        kept = sorted(self._images.values(), key=lambda image: image.first_row)
        unused = [digest for digest, image in self._images.items() if image.last_step < step]
        for digest in [None, *unused]:
            if digest is not None:
                kept.remove(self._images[digest])
            first_row = self._first_gap(kept, num_rows)
            if first_row is not None:
                for dropped in unused[: unused.index(digest) + 1 if digest is not None else 0]:
                    del self._images[dropped]
                return first_row
        return None

    def _first_gap(self, kept: list[EncodedImage], num_rows: int) -> int | None:
        """The first of so many rows that no image of `kept`, in order of their rows, has."""
        start = 0
        for image in kept:
            if image.first_row - start >= num_rows:
                return start
            start = image.end_row
        return start if self.num_rows - start >= num_rows else None

    def is_unused(self, step: int) -> bool:
        """Whether the step being made uses none."""
        return all(image.last_step < step for image in self._images.values())

    def drop(self, digest: bytes) -> None:
        """The image was not encoded."""
        del self._images[digest]

    def clear(self) -> None:
        """Forgets all images."""
        self._images.clear()

    @property
    def num_used_rows(self) -> int:
        return sum(image.num_rows for image in self._images.values())

    def check_integrity(self) -> None:
        """Raises AssertionError unless each row has at most one image."""
        end = 0
        for image in sorted(self._images.values(), key=lambda image: image.first_row):
            if image.first_row < end or image.end_row > self.num_rows:
                raise AssertionError("rows of encoded images overlap, or end behind the table")
            end = image.end_row
