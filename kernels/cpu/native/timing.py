"""Runs a program's calls and measures the time of each, and says what each call was, for traces.

Must not know: models, requests, what is done with the times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ... import work
from ...work import Work
from . import calls as c
from .calls import ALL_LOGITS, ALL_TOKENS, Call, CallList, Op, Step
from .library import library

DTYPE_NAMES = {c.BF16: "bfloat16", c.F32: "float32", c.INT8: "int8"}
ITEM_BYTES = {c.BF16: 2, c.F32: 4, c.INT8: 1}
EPILOGUES: dict[int, str] = {
    c.Epilogue.GATED: " + silu_and_mul",
    c.Epilogue.GATED_GELU_TANH: " + gelu_tanh_and_mul",
    c.Epilogue.GATED_CLAMPED: " + clamped_swiglu",
    c.Epilogue.GATED_GELU: " + gelu_and_mul",
    c.Epilogue.GELU: " + gelu",
    c.Epilogue.GELU_TANH: " + gelu_tanh",
    c.Epilogue.SILU: " + silu",
    c.Epilogue.RELU: " + relu",
    c.Epilogue.RELU_SQUARED: " + relu_squared",
}


class TimedCall(NamedTuple):
    """A call of a run, and when it ran, in seconds of time.monotonic()."""

    address: int  # of the struct
    op: str
    dtype: str
    work: Work
    weights: list[int]  # addresses of operands that may be weights, read whole
    threads: list[tuple[int, float, float]]  # (thread, begin_s, end_s)
    pass_number: int  # of several decoding steps in one run


class _Run(NamedTuple):
    calls: list[Call]
    counts: tuple[int, int]  # T and R
    query_start_loc: bytes  # [B + 1] i32
    seq_lens: bytes  # [B] i32, before the first pass
    times: ctypes.Array  # [calls, threads, 2] i64, ns


class CallTimer:
    """Runs calls as Library.run_all does, and keeps their times until they are taken."""

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._kinds: dict[int, type[ctypes.Array]] = {}  # of times, by the number of calls
        self._runs: list[_Run] = []

    def run(self, calls: CallList, step: Step) -> None:
        num_calls = len(calls.calls)
        kind = self._kinds.get(num_calls)
        if kind is None:
            kind = self._kinds[num_calls] = ctypes.c_int64 * (num_calls * self._num_threads * 2)
        times = kind()
        num_requests = step.num_requests
        run = _Run(
            calls.calls,
            (step.num_tokens, step.num_logits),
            _copied(step.query_start_loc, num_requests + 1),
            _copied(step.seq_lens, num_requests),
            times,
        )
        self._runs.append(run)
        library.run_all_timed(calls.pointers, step, ctypes.addressof(times), self._num_threads)

    def take(self) -> list[_Run]:
        """Returns the runs since the last call, for `timed_calls`."""
        taken, self._runs = self._runs, []
        return taken


def timed_calls(run: _Run) -> Iterator[TimedCall]:
    """Returns what the calls of a run were, in order."""
    pass_number = 0
    query_lens = np.diff(np.frombuffer(run.query_start_loc, np.int32)).tolist()
    first_seq_lens = np.frombuffer(run.seq_lens, np.int32).tolist()
    all_times = np.ctypeslib.as_array(run.times).reshape(len(run.calls), -1, 2)
    for call, times in zip(run.calls, all_times.tolist()):
        op = Op(call.op)
        seq_lens = [length + pass_number for length in first_seq_lens]
        threads = [
            (thread, begin / 1e9, end / 1e9) for thread, (begin, end) in enumerate(times) if end
        ]
        yield TimedCall(
            ctypes.addressof(call),
            op.name.lower() + EPILOGUES.get(getattr(call, "epilogue", 0), ""),
            DTYPE_NAMES[call.dtype],
            work_of(call, run.counts, query_lens, seq_lens),
            _weights(call, run.counts[0]),
            threads,
            pass_number,
        )
        pass_number += op == Op.NEXT_TOKENS


def work_of(
    call: Call, counts: tuple[int, int], query_lens: list[int], seq_lens: list[int]
) -> Work:
    """counts: T and R of the step; query_lens and seq_lens [B]."""
    rows = int(call.rows)
    if rows in (ALL_TOKENS, ALL_LOGITS):
        rows = counts[0] if rows == ALL_TOKENS else counts[1]
    item = ITEM_BYTES[call.dtype]
    if isinstance(call, c.ExpertsLinear):
        rows *= call.top_k
    if isinstance(call, c.Linear):
        is_gated = c.is_gated(call.epilogue)
        found = work.linear(
            rows, call.in_features, call.out_features, item, ITEM_BYTES[call.out_dtype]
        )
        written = rows * call.out_features * ITEM_BYTES[call.out_dtype] // 2 if is_gated else 0
        return found._replace(num_bytes=found.num_bytes - written)
    if isinstance(call, (c.Attention, c.EncoderAttention)):
        return _work_of_attention(call, query_lens, seq_lens, item)
    if isinstance(call, (c.ShortConv, c.GatedDeltaRule, c.SelectiveScan)):
        return _work_on_states(call, query_lens, item)
    if isinstance(call, c.Rotary):
        size = call.rotary_dim
        found = work.rows_of(rows, (call.heads + call.kv_heads) * size, item, 2)
        if isinstance(call, c.RotaryAndWriteKv):
            written = rows * call.kv_heads * call.head_dim
            moved = 2 * written * ITEM_BYTES[call.cache_dtype] + written * item
            found = found._replace(num_bytes=found.num_bytes + moved)
        return found._replace(shape=f"[{rows}, {call.heads} + {call.kv_heads}, {size}]")
    if isinstance(call, c.WriteKv):
        size = call.kv_heads * call.head_dim
        num_bytes = 2 * rows * size * (item + ITEM_BYTES[call.cache_dtype])
        return Work(f"[{rows}, {call.kv_heads}, {call.head_dim}] × 2", num_bytes)
    if isinstance(call, (c.Argmax, c.Sample, c.SpreadLogits)):
        return work.rows_of(rows, call.vocab_size, 4, 1)
    if isinstance(call, (c.RouteExperts, c.SortByExpert, c.CountExperts)):
        return Work(f"[{rows}, {call.count}], {call.top_k} of each row", 4 * rows * call.count)
    if isinstance(call, c.AddLora):  # as if all rows had an adapter, of the highest rank
        columns = call.in_features if call.x else 1
        rank = call.num_slices * call.max_rank
        low = work.linear(rows, columns, rank, item, 4)
        wide = work.linear(rows, call.max_rank, call.out_features, 4, 2 * ITEM_BYTES[call.y_dtype])
        return low._replace(num_bytes=low.num_bytes + wide.num_bytes, flops=low.flops + wide.flops)
    if isinstance(call, c.External):
        sizes = [
            (rows if row else 1) * size * ITEM_BYTES[dtype]
            for row, size, dtype in zip(call.row, call.size, call.tensor_dtype)
        ]
        return Work(f"[{rows}, {call.size[0]}]", sum(sizes))
    size = getattr(call, "size", 0) * getattr(call, "heads", 1)
    # SiluAndMul reads two numbers for each that it writes.
    passes = {
        **dict.fromkeys((c.SiluAndMul, c.Add, c.AddGated, c.Multiply, c.GatedRmsNorm), 3),
        **dict.fromkeys((c.AddRmsNorm, c.AddLayerNorm), 4),
    }.get(type(call), 2)
    return work.rows_of(rows, size, item, passes)


def _work_of_attention(
    call: c.Attention | c.EncoderAttention, query_lens: list[int], seq_lens: list[int], item: int
) -> Work:
    heads = call.heads, call.kv_heads, call.head_dim
    if isinstance(call, c.EncoderAttention):
        lens = [sum(query_lens)] if call.is_whole else query_lens
        return work.encoder_attention(lens, *heads, item, call.window)
    cache = ITEM_BYTES[call.cache_dtype]
    return work.attention(query_lens, seq_lens, *heads, item, cache, call.sliding_window)


def _work_on_states(
    call: c.ShortConv | c.GatedDeltaRule | c.SelectiveScan, query_lens: list[int], item: int
) -> Work:
    if isinstance(call, c.ShortConv):
        shape = call.taps - 1, call.channels
        return work.states(query_lens, shape, item, 2 * call.channels * item, 2)
    if isinstance(call, c.GatedDeltaRule):
        shape = call.value_heads, call.key_size, call.value_size
        numbers = 2 * call.key_heads * call.key_size + 2 * call.value_heads * (call.value_size + 1)
        numbers += call.decays_rows * call.value_heads * (call.key_size - 1)
        return work.states(query_lens, shape, 4, numbers * item, work.DELTA_RULE_FLOPS)
    shape = call.heads, call.head_size, call.state_size
    numbers = call.heads * (2 * call.head_size + 1) + 2 * call.groups * call.state_size
    return work.states(query_lens, shape, 4, numbers * item, work.SCAN_FLOPS)


def _weights(call: Call, num_tokens: int) -> list[int]:
    if isinstance(call, c.Embedding):  # reads rows of its table
        return []
    if isinstance(call, c.ExpertsLinear):
        # Which experts the tokens have chosen is not kept; experts have the same size, and at most
        # so many were read.
        count = min(call.count, num_tokens * call.top_k)
        of_all = [getattr(call, name) for name in ("weights", "all_scales", "biases")]
        return [
            address
            for pointer in of_all
            if pointer
            for address in (ctypes.c_int64 * count).from_address(pointer)
        ]
    names = ("weight", "scales", "bias", "sinks")
    found = [getattr(call, name, None) for name in names]
    return [address for address in found if address is not None]


def _copied(address: int | None, count: int) -> bytes:
    """Copies `count` numbers of 4 bytes."""
    return ctypes.string_at(address, 4 * count) if address else b""
