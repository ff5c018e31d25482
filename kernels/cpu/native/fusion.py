"""Fuses neighbouring recorded calls into one kernel, which saves barriers and memory traffic.

Must not know: tensors, models.

A fused call gives the same bits as the calls that it replaces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .calls import (
    Activate,
    Call,
    CountExperts,
    Epilogue,
    Linear,
    Op,
    Rotary,
    RotaryAndWriteKv,
    SiluAndMul,
    SortByExpert,
    WriteKv,
)
from .recorder import Recorder

EPILOGUES = {
    Op.SILU_AND_MUL: Epilogue.GATED,
    Op.GELU_TANH_AND_MUL: Epilogue.GATED_GELU_TANH,
    Op.GELU_AND_MUL: Epilogue.GATED_GELU,
    Op.GELU: Epilogue.GELU,
    Op.GELU_TANH: Epilogue.GELU_TANH,
    Op.SILU: Epilogue.SILU,
    Op.RELU: Epilogue.RELU,
    Op.RELU_SQUARED: Epilogue.RELU_SQUARED,
}
GATED_MULTIPLE = 32  # of the outputs of a gated linear layer (src/abi.h: Epilogue)


def fuse(recorder: Recorder, results: Iterable[int]) -> list[Call]:
    """Returns the recorder's calls, some of them fused.

    `results`: buffers that are read after all calls.
    """
    # A buffer maps to the (index of the call, field) of its uses, in order.
    uses: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for index, call in enumerate(recorder.calls):
        for operand in recorder.operands(call):
            uses[operand.buffer].append((index, operand.field))
    for buffer in results:
        uses[buffer].append((len(recorder.calls), "result"))
    calls: list[Any] = list(recorder.calls)  # None: fused with another
    for index, call in enumerate(recorder.calls):
        if isinstance(call, (SiluAndMul, Activate)):
            found = recorder.find(call.x)
            _activate(calls, index, uses[found[0]] if found else [])
        elif isinstance(call, WriteKv) and index:
            _rotate_and_write(calls, index)
        elif isinstance(call, SortByExpert) and index:
            _count_and_sort(calls, index)
    return [call for call in calls if call is not None]


def _activate(calls: list[Any], index: int, uses: list[tuple[int, str]]) -> None:
    """Fuses Linear with the activation of its whole result, if nothing else reads that."""
    if len(uses) != 2 or uses[0][1] != "out" or uses[1] != (index, "x"):
        return
    linear, activation = calls[uses[0][0]], calls[index]
    is_gated = isinstance(activation, SiluAndMul)
    is_whole = isinstance(linear, Linear) and (linear.out, linear.out_row, linear.out_features) == (
        activation.x,
        activation.x_row,
        activation.size * (2 if is_gated else 1),
    )
    is_plain = (
        is_whole
        and linear.epilogue == Epilogue.PLAIN
        and linear.out_dtype == linear.dtype
        and linear.rows == activation.rows
    )
    if is_plain and not (is_gated and linear.out_features % GATED_MULTIPLE):
        changed = {
            "out": activation.out,
            "out_row": activation.out_row,
            "epilogue": EPILOGUES[activation.op],
        }
        fused = type(linear)(**linear.values() | changed)
        fused.origin = linear.origin
        calls[uses[0][0]], calls[index] = fused, None


def _rotate_and_write(calls: list[Any], index: int) -> None:
    """Fuses Rotary with WriteKv of the key that it rotates."""
    rotary, write = calls[index - 1], calls[index]
    if type(rotary) is not Rotary or rotary.op != Op.ROTARY:
        return
    if (rotary.key, rotary.key_row, rotary.key_head) != (
        write.key,
        write.key_row,
        write.key_head,
    ):
        return
    if (rotary.rows, rotary.dtype, rotary.kv_heads) != (write.rows, write.dtype, write.kv_heads):
        return
    calls[index - 1] = None
    calls[index] = RotaryAndWriteKv(
        **write.values() | rotary.values() | {"op": Op.ROTARY_AND_WRITE_KV}
    )
    calls[index].origin = write.origin


def _count_and_sort(calls: list[Any], index: int) -> None:
    """Fuses CountExperts with SortByExpert of the same ids."""
    count, sort = calls[index - 1], calls[index]
    if isinstance(count, CountExperts) and count.slots is None:
        if (count.ids, count.rows, count.count) == (sort.ids, sort.rows, sort.count):
            sort.counts, calls[index - 1] = count.counts, None
