"""Collects what the stages of a step change of its logits, and sends it to the device in one copy.

Must not know: stages, how logits are changed (kernels: change_logits).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.ops import LogitChanges
from ..device import packed

NO_PENALTIES = 1.0, 0.0, 0.0
Edits = tuple[np.ndarray, np.ndarray]  # token ids [N] i64, values [N] f32


class ChangeList:
    """What is added later comes after what is there."""

    def __init__(self, vocab_size: int):
        self.num_words = -(-vocab_size // 32)
        self._masks: dict[int, np.ndarray] = {}  # row -> words
        self._edits: dict[int, list[Edits]] = {}  # by row
        self._penalties: dict[int, tuple[np.ndarray, np.ndarray, Sequence[float]]] = {}  # by row

    def allow_words(self, row: int, words: np.ndarray) -> None:
        """Masks all tokens without a bit in words [num_words] i32."""
        words = words[: self.num_words]
        self._masks[row] = self._masks[row] & words if row in self._masks else words

    def allow(self, row: int, token_ids: np.ndarray) -> None:
        """Masks all other tokens."""
        bits = np.zeros(self.num_words * 32, bool)
        bits[token_ids] = True
        self.allow_words(row, np.packbits(bits, bitorder="little").view(np.int32))

    def add(self, row: int, token_ids: np.ndarray, values: np.ndarray) -> None:
        """Adds values [N] f32, -inf to mask, to the tokens [N] i64."""
        if len(token_ids):
            self._edits.setdefault(row, []).append((token_ids, values))

    def mask(self, row: int, token_ids: np.ndarray) -> None:
        self.add(row, token_ids, np.full(len(token_ids), -np.inf, np.float32))

    def penalise(
        self, row: int, token_ids: np.ndarray, counts: np.ndarray, penalties: Sequence[float]
    ) -> None:
        """token_ids and counts [N] i32; penalties: repetition, frequency, presence."""
        self._penalties[row] = token_ids, counts, penalties

    def rows(self) -> np.ndarray:
        """[M] i64, ascending: the rows that are changed."""
        return np.array(sorted({*self._masks, *self._edits, *self._penalties}), np.int64)

    def on(self, device: torch.device, raw_rows: np.ndarray) -> LogitChanges:
        """raw_rows [M] i64: see LogitChanges."""
        rows = self.rows().tolist()
        mask_rows = {row: place for place, row in enumerate(self._masks)}
        edits = [merged(self._edits.get(row, [])) for row in rows]
        nothing = np.zeros(0, np.int32), np.zeros(0, np.int32), NO_PENALTIES
        penalties = [self._penalties.get(row, nothing) for row in rows]
        columns = {
            "rows": np.array(rows, np.int64),
            "raw_rows": raw_rows,
            "mask_rows": np.array([mask_rows.get(row, -1) for row in rows], np.int64),
            "bitmask": np.concatenate([np.zeros(0, np.int32), *self._masks.values()]),
            "edit_starts": _starts([token_ids for token_ids, _ in edits]),
            "edit_tokens": np.concatenate([token_ids for token_ids, _ in edits]).astype(np.int32),
            "edit_values": np.concatenate([values for _, values in edits]).view(np.int32),
            "penalty_starts": _starts([token_ids for token_ids, *_ in penalties]),
            "penalty_tokens": np.concatenate([token_ids for token_ids, *_ in penalties]),
            "penalty_counts": np.concatenate([counts for _, counts, _ in penalties]),
            "penalties": np.array([row for *_, row in penalties], np.float32)
            .view(np.int32)
            .ravel(),
        }
        there = packed(columns, device)
        shapes = {"bitmask": (-1, self.num_words), "penalties": (-1, 3)}
        for name, shape in shapes.items():
            there[name] = there[name].view(*shape)
        for name in ("edit_values", "penalties"):
            there[name] = there[name].view(torch.float32)
        return LogitChanges(**there)


def merged(edits: Sequence[Edits]) -> Edits:
    """One addition for each token. At most one of a token's values is not -inf, so that the sum has
    the bits of additions one after the other.
    """
    if not edits:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    token_ids, places = np.unique(
        np.concatenate([token_ids for token_ids, _ in edits]), return_inverse=True
    )
    values = np.zeros(len(token_ids), np.float32)
    np.add.at(values, places, np.concatenate([values for _, values in edits]))
    return token_ids, values


def _starts(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)]).astype(np.int32)
