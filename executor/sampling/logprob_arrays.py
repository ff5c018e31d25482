"""Converts log-probabilities to wire arrays, and joins those of several steps.

Must not know: how a number is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...ipc.messages import Array
from ...ipc.step_messages import SlotLogprobs


def to_array(values: np.ndarray) -> Array:
    return Array(
        f"{values.dtype.kind}{values.dtype.itemsize}",
        values.shape,
        np.ascontiguousarray(values).data,
    )


def join_logprobs(steps: Iterable[list[SlotLogprobs]]) -> list[SlotLogprobs]:
    """Joins the results of consecutive steps: one entry per slot with its tokens in order.

    Slots are in order of first appearance.
    """
    by_slot: dict[int, list[SlotLogprobs]] = {}
    for entries in steps:
        for entry in entries:
            by_slot.setdefault(entry.slot, []).append(entry)
    return [
        entries[0] if len(entries) == 1 else _join(slot, entries)
        for slot, entries in by_slot.items()
    ]


def _join(slot: int, entries: list[SlotLogprobs]) -> SlotLogprobs:
    def column(name: str) -> Array:
        arrays = [getattr(entry, name) for entry in entries]
        shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
        return Array(arrays[0].dtype, shape, b"".join(array.data for array in arrays))

    return SlotLogprobs(slot, column("token_ids"), column("logprobs"), column("ranks"))
