"""Pooling modes: from the hidden states of a prompt, chunk by chunk, to one row.

Must not know: requests, what happens to the row.

A mode is named as in sentence-transformers. Sums are in fp32, one row after the other in the order
of tokens: numpy adds the rows of a C-contiguous array in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Mode(Protocol):
    """The state of one mode for one request."""

    def take(self, rows: np.ndarray, first: int, num_tokens: int) -> None:
        """rows f4 [n, size] of the tokens from index `first` of a prompt of `num_tokens`."""
        ...

    def result(self) -> np.ndarray:
        """f4 [size], when all rows were taken."""
        ...


class Cls:
    """The first token."""

    def take(self, rows: np.ndarray, first: int, num_tokens: int) -> None:
        if not first:
            self._row = rows[0].copy()

    def result(self) -> np.ndarray:
        return self._row


class LastToken:
    def take(self, rows: np.ndarray, first: int, num_tokens: int) -> None:
        self._row = rows[-1].copy()

    def result(self) -> np.ndarray:
        return self._row


class Max:
    def take(self, rows: np.ndarray, first: int, num_tokens: int) -> None:
        greatest = rows.max(axis=0)
        self._row = greatest if not first else np.maximum(self._row, greatest)

    def result(self) -> np.ndarray:
        return self._row


class Mean:
    """The sum of all rows, divided by their number to the power of `exponent`."""

    def __init__(self, exponent: float = 1.0):
        self._exponent = exponent

    def take(self, rows: np.ndarray, first: int, num_tokens: int) -> None:
        self._sum = _add(rows, self._sum if first else None)
        self._divisor = np.float32(num_tokens**self._exponent)

    def result(self) -> np.ndarray:
        return self._sum / self._divisor


class WeightedMean:
    """Token i, counted from 1, has the weight i."""

    def take(self, rows: np.ndarray, first: int, num_tokens: int) -> None:
        weights = np.arange(first + 1, first + 1 + len(rows), dtype=np.float32)
        self._sum = _add(rows * weights[:, None], self._sum if first else None)
        self._divisor = np.float32(num_tokens * (num_tokens + 1) / 2)

    def result(self) -> np.ndarray:
        return self._sum / self._divisor


def _add(rows: np.ndarray, to: np.ndarray | None) -> np.ndarray:
    """The sum of rows [n, size], added to `to` [size] one after the other."""
    return np.add.reduce(rows if to is None else np.vstack([to, rows]), axis=0)


MODES = {
    "cls": Cls,
    "lasttoken": LastToken,
    "max": Max,
    "mean": Mean,
    "mean_sqrt_len_tokens": lambda: Mean(0.5),
    "weightedmean": WeightedMean,
}


def make_modes(names: Sequence[str]) -> list[type[Mode]]:
    """What makes the state of each mode."""
    return [MODES[name] for name in names]


class Collected:
    """What has been read of one request's prompt."""

    def __init__(self, modes: Sequence[type[Mode]], is_by_token: bool, first: int = 0):
        """is_by_token: all rows are kept. first: the index of the first token that is read."""
        self.num_taken = first
        self._first = first
        self._modes = [] if is_by_token else [make() for make in modes]
        self._rows: list[np.ndarray] = []

    def take(self, rows: np.ndarray, num_tokens: int) -> None:
        """rows f4 [n, size] of the next tokens of a prompt of `num_tokens`."""
        for mode in self._modes:
            mode.take(rows, self.num_taken - self._first, num_tokens)
        if not self._modes:
            self._rows.append(rows.copy())
        self.num_taken += len(rows)

    def result(self) -> np.ndarray:
        """f4 [size of all modes], or [num_tokens, size] by token"""
        if not self._modes:
            return np.concatenate(self._rows)
        return np.concatenate([mode.result() for mode in self._modes])
