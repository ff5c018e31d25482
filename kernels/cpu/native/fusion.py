"""Neighbours among recorded calls that one kernel does at once: fewer barriers between threads, and
less memory in between.

Must not know: tensors, models. A fused call gives the bits of the calls that it stands for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from .calls import Call, Epilogue, Linear, Op, Rotary, RotaryAndWriteKv, SiluAndMul, WriteKv
from .recorder import Recorder

GATED_MULTIPLE = 32  # of the outputs of a linear layer that gates (src/abi.h: Epilogue)


def fuse(recorder: Recorder, results: Iterable[int]) -> list[Call]:
    """The recorder's calls, some of them in one.

    `results`: buffers that are read when all calls are done.
    """
    # of a buffer: (index of the call, field), in order
    uses: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for index, call in enumerate(recorder.calls):
        for operand in recorder.operands(call):
            uses[operand.buffer].append((index, operand.field))
    for buffer in results:
        uses[buffer].append((len(recorder.calls), "result"))
    calls: list[Call | None] = list(recorder.calls)
    for index, call in enumerate(recorder.calls):
        if isinstance(call, SiluAndMul):
            found = recorder.find(call.x)
            _gate(calls, index, uses[found[0]] if found else [])
        elif isinstance(call, WriteKv) and index:
            _rotate_and_write(calls, index)
    return [call for call in calls if call is not None]


def _gate(calls: list[Call | None], index: int, uses: list[tuple[int, str]]) -> None:
    """Linear, then SiluAndMul of the whole result, which nobody else reads: Linear with that
    epilogue.
    """
    if len(uses) != 2 or uses[0][1] != "out" or uses[1] != (index, "x"):
        return
    linear, gate = calls[uses[0][0]], calls[index]
    is_whole = isinstance(linear, Linear) and (linear.out, linear.out_row, linear.out_features) == (
        gate.x,
        gate.x_row,
        2 * gate.size,
    )
    is_plain = (
        is_whole
        and linear.epilogue == Epilogue.PLAIN
        and linear.out_dtype == linear.dtype
        and linear.rows == gate.rows
    )
    if is_plain and linear.out_features % GATED_MULTIPLE == 0:
        fused = type(linear).from_buffer_copy(linear)
        fused.out, fused.out_row, fused.epilogue = gate.out, gate.out_row, Epilogue.GATED
        calls[uses[0][0]], calls[index] = fused, None


def _rotate_and_write(calls: list[Call | None], index: int) -> None:
    """Rotary, then WriteKv of the key that it rotated."""
    rotary, write = calls[index - 1], calls[index]
    if type(rotary) is not Rotary or (rotary.key, rotary.key_row, rotary.key_head) != (
        write.key,
        write.key_row,
        write.key_head,
    ):
        return
    if (rotary.rows, rotary.dtype, rotary.kv_heads) != (write.rows, write.dtype, write.kv_heads):
        return
    shared = {name: getattr(rotary, name) for name, _ in (*Call._fields_, *Rotary._fields_)} | {
        "op": Op.ROTARY_AND_WRITE_KV
    }
    calls[index - 1] = None
    calls[index] = RotaryAndWriteKv(
        **shared, **{name: getattr(write, name) for name, _ in RotaryAndWriteKv._fields_}
    )
