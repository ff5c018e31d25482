"""Where the images of requests are in their prompts, and what their tokens read in a step.

Must not know: pixels, how an image is encoded, who decides which rows an image gets, the model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...ipc.step_messages import ImagePlace, SchedulerOutput
from ...kernels.ops import ImageRows

NO_ROW = -1  # of a token that reads its embedding
Runs = list[tuple[int, int, int]]  # (position, count, row of the table)


class Columns(NamedTuple):
    """The fields of ImageRows on the host."""

    rows: np.ndarray  # [T] i32
    offsets: np.ndarray  # [3, T] i32
    later: np.ndarray  # [T] i32

    def on_host(self) -> ImageRows:
        return ImageRows(*map(torch.from_numpy, self))


class SlotImages:
    """The images of one request. Positions after the last image have the offset `delta`."""

    def __init__(self, places: list[ImagePlace], has_components: bool, sees_whole: bool):
        end = places[-1].end
        self.offsets = np.zeros((3, end), np.int32)
        self.later = np.zeros(end, np.int32)
        self.delta = before = 0
        for place in places:
            if sees_whole:
                self.later[place.start : place.end] = np.arange(place.end - place.start)[::-1]
            if has_components:
                self.offsets[:, before : place.start] = self.delta
                before = place.end
                self._turn(place)

    def _turn(self, place: ImagePlace) -> None:
        """Tokens of an image have one position in time, and those of their row and column. The next
        token is placed behind the largest of these (Wang et al. 2024).
        """
        first = place.start + self.delta
        index = np.arange(place.end - place.start)
        components = index * 0, index // place.columns, index % place.columns
        for offsets, component in zip(self.offsets, components, strict=True):
            offsets[place.start : place.end] = first + component - (place.start + index)
        self.delta = first + max(place.rows, place.columns) - place.end

    def write(self, columns: Columns, first: int, tokens: slice) -> None:
        """Writes the columns of `tokens`, which begin at position `first`."""
        end = first + tokens.stop - tokens.start
        known = max(0, min(end, len(self.later)) - first)
        middle = tokens.start + known
        columns.offsets[:, tokens.start : middle] = self.offsets[:, first : first + known]
        columns.offsets[:, middle : tokens.stop] = self.delta
        columns.later[tokens.start : middle] = self.later[first : first + known]


class ImageTable:
    """Of a model that reads images."""

    def __init__(self, has_components: bool, sees_whole: bool):
        """has_components: positions have three components. sees_whole: tokens of an image see each
        other.
        """
        self._has_components, self._sees_whole = has_components, sees_whole
        self._slots: dict[int, SlotImages] = {}
        self._runs: dict[int, Runs] = {}  # by slot, of this step

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Notes which requests enter and leave, and which rows the step reads."""
        for slot in scheduler_output.freed_slots:
            self._slots.pop(slot, None)
        for request in scheduler_output.new_requests:
            self._slots.pop(request.slot, None)
            if request.images:
                self._slots[request.slot] = SlotImages(
                    request.images, self._has_components, self._sees_whole
                )
        self._runs = {}
        for slot, position, count, row in scheduler_output.image_rows:
            self._runs.setdefault(slot, []).append((position, count, row))

    def columns(
        self, slots: np.ndarray, firsts: np.ndarray, counts: np.ndarray, tokens_ahead: int = 0
    ) -> Columns:
        """Of rows of `slots` [B], each with counts [B] positions from firsts [B] on. tokens_ahead:
        see StepInputMaker.
        """
        num_tokens = int(counts.sum())
        columns = Columns(
            np.full(num_tokens, NO_ROW, np.int32),
            np.zeros((3, num_tokens), np.int32),
            np.zeros(num_tokens, np.int32),
        )
        if not self._slots:
            return columns
        start = 0
        for slot, first, count in zip(slots.tolist(), firsts.tolist(), counts.tolist()):
            if slot in self._slots:
                tokens = slice(start, start + count)
                self._slots[slot].write(columns, first, tokens)
                runs = self._runs.get(slot, [])
                self._write_rows(columns.rows[tokens], first + tokens_ahead, runs)
            start += count
        return columns

    def has_rows(self, slot: int, first: int, end: int) -> bool:
        """Whether one of the tokens [first, end) reads a row in this step."""
        return any(
            position < end and position + count > first
            for position, count, _ in self._runs.get(slot, [])
        )

    @staticmethod
    def _write_rows(rows: np.ndarray, first: int, runs: Runs) -> None:
        """rows: of the tokens from position `first` on. A later pass of the step computes tokens
        after those of the runs.
        """
        for position, count, row in runs:
            begin, end = max(position, first), min(position + count, first + len(rows))
            if begin < end:
                rows[begin - first : end - first] = np.arange(begin, end) + (row - position)


def no_images(num_tokens: int, device: torch.device | None = None) -> ImageRows:
    """Of tokens of texts."""
    zeros = torch.zeros(4, num_tokens, dtype=torch.int32, device=device)
    return ImageRows(zeros[3] + NO_ROW, zeros[:3], zeros[0].clone())
