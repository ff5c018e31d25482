"""Timed runs give the same bits, and say when each thread worked on each call."""

import ctypes
import time

import pytest
import torch
from quire.kernels.cpu.native.library import library

if library is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from quire.kernels import registry
from quire.kernels.cpu.native.calls import ALL_TOKENS, F32, GatedDeltaRule, Op
from quire.kernels.cpu.native.program import recording
from quire.kernels.cpu.native.recorder import Guard, Limits, Recorder
from quire.kernels.cpu.native.replay import Program
from quire.kernels.cpu.native.timing import CallTimer, timed_calls, work_of
from quire.kernels.ops import make_metadata
from quire.tests.kernels.state_rows_cases import Row, delta_operands, states_metadata

LIMITS = Limits(num_tokens=8, num_requests=4, num_logits=4)


@pytest.fixture
def program():
    ops = registry.select("cpu", torch.float32)
    torch.manual_seed(0)
    norm, multiply = torch.rand(32), ops.pack_linear(torch.randn(48, 32), None)
    table = torch.randn(50, 32)
    recorder = Recorder(LIMITS)
    with recording(recorder, Guard()):
        x = ops.rms_norm(ops.embedding(recorder.token_ids, table), norm, 1e-5)
        hidden = multiply(x)
        rows = ops.gather_rows(hidden, recorder.logits_indices)
    return Program(recorder, hidden, rows, owners=(norm, multiply, table))


def step(num_tokens=5):
    lengths = torch.tensor([num_tokens], dtype=torch.int32)
    metadata = make_metadata(
        torch.tensor([0, num_tokens], dtype=torch.int32),
        lengths,
        [torch.zeros(1, 1, dtype=torch.int32)],
        [torch.arange(num_tokens)],
        0,
        [num_tokens],
        [num_tokens],
    )
    ids = torch.arange(num_tokens, dtype=torch.int32)
    return ids, torch.arange(num_tokens), metadata, torch.tensor([num_tokens - 1])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_timed_run_is_the_same_run(program, num_threads):
    plain = [result.clone() for result in program(*step())]
    library.set_num_threads(num_threads, [-1] * num_threads)
    try:
        program.set_timer(CallTimer(num_threads))
        before = time.monotonic()
        timed = program(*step())
        after = time.monotonic()
    finally:
        library.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(plain, timed))
    [run] = program.timer.take()
    assert program.timer.take() == []
    calls = list(timed_calls(run))
    assert [call.op for call in calls] == ["embedding", "rms_norm", "linear", "gather_rows"]
    ends = [before]
    for call in calls:
        assert call.threads and all(0 <= thread < num_threads for thread, *_ in call.threads)
        # a call begins when the one before it is done
        assert min(begin for _, begin, _ in call.threads) >= ends[-1] - 1e-6
        ends.append(max(end for *_, end in call.threads))
    assert ends[-1] <= after
    linear = calls[2]
    assert linear.work.shape == "[5, 32] · [48, 32]ᵀ" and linear.work.flops == 2 * 5 * 32 * 48
    assert linear.dtype == "float32" and calls[3].work.shape.startswith("[1, ")


def test_fewer_times_than_threads_are_asked_for(program):
    library.set_num_threads(2, [-1, -1])
    try:
        program.set_timer(CallTimer(1))
        program(*step())
    finally:
        library.set_num_threads(1)
    [run] = program.timer.take()
    assert {thread for call in timed_calls(run) for thread, *_ in call.threads} <= {0}


@pytest.mark.parametrize("decays_rows", [False, True])
def test_a_state_is_read_and_written_by_each_request(decays_rows):
    operands = delta_operands(4, torch.float32, 2, 4, 8, 6, decays_rows=decays_rows)
    metadata = states_metadata([Row(1, 8, 0), Row(3, 0, 1)])
    _, key, value, _, _ = operands.tokens
    call = GatedDeltaRule.from_buffer(bytearray(ctypes.sizeof(GatedDeltaRule)))
    call.op, call.dtype, call.rows = Op.GATED_DELTA_RULE, F32, ALL_TOKENS
    _, call.key_heads, call.key_size = key.shape
    _, call.value_heads, call.value_size = value.shape
    call.decays_rows = decays_rows
    found = work_of(call, (4, 2), metadata.query_lens, metadata.seq_lens_list)
    read = sum(one.nbytes for one in operands.tokens)
    assert found.shape == "[4] · state [4, 8, 6]" and found.flops == 4 * 4 * 8 * 6 * 7
    assert found.num_bytes == 2 * 2 * 4 * 4 * 8 * 6 + read + value.nbytes
