"""Log-probabilities in the form of the wire: numpy's arrays as messages carry them, and those of
several steps as one.

Must not know: where a number comes from.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...ipc.messages import Array, SlotLogprobs


def to_array(values: np.ndarray) -> Array:
    return Array(
        f"{values.dtype.kind}{values.dtype.itemsize}",
        values.shape,
        np.ascontiguousarray(values).data,
    )


def join_logprobs(steps: Iterable[list[SlotLogprobs]]) -> list[SlotLogprobs]:
    """What several draws in a row gave, each slot's tokens in their order as one entry; slots in
    the order of their first.
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
