"""Pooling modes, which turn the hidden states of a prompt into one row, chunk by chunk.

Must not know: requests, what happens to the row.

A mode is named as in sentence-transformers. Sums are in fp32, one row after the other in the order
of tokens: numpy adds the rows of a C-contiguous array in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

NOTHING_LEFT = "instruction_length: must be less than the prompt, of which pooling reads the rest"


class Mode:
    """The state of one mode for one request. `skips_instruction`: it leaves out the tokens of the
    instruction in front of a text, where the model says include_prompt: false.
    """

    skips_instruction = True

    def take(self, rows: np.ndarray, first: int, num_tokens: int, skipped: int = 0) -> None:
        """rows f4 [n, size] of the tokens from index `first` of a prompt of `num_tokens`, of which
        the first `skipped` are left out.
        """
        raise NotImplementedError

    def result(self) -> np.ndarray:
        """f4 [size], when all rows were taken."""
        return self._row

    _row: np.ndarray


class Cls(Mode):
    """The first token, or the first behind an instruction."""

    def take(self, rows: np.ndarray, first: int, num_tokens: int, skipped: int = 0) -> None:
        if first == skipped:
            self._row = rows[0].copy()


class LastToken(Mode):
    skips_instruction = False

    def take(self, rows: np.ndarray, first: int, num_tokens: int, skipped: int = 0) -> None:
        self._row = rows[-1].copy()


class Max(Mode):
    def take(self, rows: np.ndarray, first: int, num_tokens: int, skipped: int = 0) -> None:
        greatest = rows.max(axis=0)
        self._row = greatest if first == skipped else np.maximum(self._row, greatest)


class Mean(Mode):
    """The sum of all rows, divided by their number to the power of `exponent`."""

    def __init__(self, exponent: float = 1.0):
        self._exponent = exponent

    def take(self, rows: np.ndarray, first: int, num_tokens: int, skipped: int = 0) -> None:
        self._sum = _add(rows, None if first == skipped else self._sum)
        self._divisor = np.float32((num_tokens - skipped) ** self._exponent)

    def result(self) -> np.ndarray:
        return self._sum / self._divisor


class WeightedMean(Mode):
    """Token i, counted from 1, has the weight i."""

    def take(self, rows: np.ndarray, first: int, num_tokens: int, skipped: int = 0) -> None:
        weights = np.arange(first + 1, first + 1 + len(rows), dtype=np.float32)
        self._sum = _add(rows * weights[:, None], None if first == skipped else self._sum)
        self._divisor = np.float32((num_tokens * (num_tokens + 1) - skipped * (skipped + 1)) / 2)

    def result(self) -> np.ndarray:
        return self._sum / self._divisor


def _add(rows: np.ndarray, to: np.ndarray | None) -> np.ndarray:
    """The sum of rows [n, size], added to `to` [size] one after the other."""
    return np.add.reduce(rows if to is None else np.vstack([to, rows]), axis=0)


MODES: dict[str, Callable[[], Mode]] = {
    "cls": Cls,
    "lasttoken": LastToken,
    "max": Max,
    "mean": Mean,
    "mean_sqrt_len_tokens": lambda: Mean(0.5),
    "weightedmean": WeightedMean,
}


def make_modes(names: Sequence[str]) -> list[Callable[[], Mode]]:
    """Functions that make the state of each mode."""
    return [MODES[name] for name in names]


class Collected:
    """What has been read of one request's prompt."""

    def __init__(
        self,
        modes: Sequence[Callable[[], Mode]],
        is_by_token: bool,
        first: int = 0,
        skipped: int = 0,
    ):
        """is_by_token: all rows are kept. first: the index of the first token that is read.
        skipped: tokens of an instruction in front that take no part.
        """
        self.num_taken = first
        self._first = first
        self._skipped = skipped
        self._modes = [] if is_by_token else [make() for make in modes]
        self._rows: list[np.ndarray] = []

    def take(self, rows: np.ndarray, num_tokens: int) -> None:
        """rows f4 [n, size] of the next tokens of a prompt of `num_tokens`.

        Raises ValueError if the instruction is the whole prompt.
        """
        if self._modes and self._skipped >= num_tokens:
            raise ValueError(NOTHING_LEFT)
        first = self.num_taken - self._first
        for mode in self._modes:
            skipped = self._skipped if mode.skips_instruction else 0
            left_out = min(max(skipped - first, 0), len(rows))
            if left_out < len(rows):
                mode.take(rows[left_out:], first + left_out, num_tokens, skipped)
        if not self._modes:
            self._rows.append(rows.copy())
        self.num_taken += len(rows)

    def skip(self, count: int) -> None:
        """Counts the next tokens, whose rows no mode reads."""
        self.num_taken += count

    def result(self) -> np.ndarray:
        """f4 [size of all modes], or [num_tokens, size] by token"""
        if not self._modes:
            return np.concatenate(self._rows)
        return np.concatenate([mode.result() for mode in self._modes])
