"""Recorded steps: the same bits as separate calls, buffers that share no memory while both are in
use, and errors that name the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.kernels.cpu.native.library import library
from quire.tests.kernels.attention_cases import make_metadata
from torch import Tensor

if library is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from quire.kernels import registry
from quire.kernels.cpu.native import program as wrappers
from quire.kernels.cpu.native.arena import Lifetime, place
from quire.kernels.cpu.native.calls import ALL_LOGITS, ALL_TOKENS
from quire.kernels.cpu.native.program import recording
from quire.kernels.cpu.native.recorder import Guard, Limits, Recorder, Unrecordable
from quire.kernels.cpu.native.replay import Program

DTYPES = (torch.float32, torch.bfloat16)
HIDDEN, VOCABULARY = 32, 50
LIMITS = Limits(num_tokens=24, num_requests=8, num_logits=8)

Model = Callable[[Tensor, Tensor, Any], Tensor]


@pytest.fixture(params=DTYPES, ids=str)
def ops(request) -> SimpleNamespace:
    """The native operations, and weights for them."""
    table = registry.select("cpu", request.param)
    torch.manual_seed(0)
    weights = {
        "table": torch.randn(VOCABULARY, HIDDEN),
        "norm": torch.rand(HIDDEN),
        "half_norm": torch.rand(HIDDEN // 2),
    }
    return SimpleNamespace(
        **vars(table), **{name: weight.to(request.param) for name, weight in weights.items()}
    )


def record(model: Model, ops: SimpleNamespace, limits: Limits = LIMITS) -> Program:
    recorder = Recorder(limits)
    with torch.inference_mode(), recording(recorder, Guard()):
        hidden = model(recorder.token_ids, recorder.positions, recorder.metadata)
        logits = ops.gather_rows(hidden, recorder.logits_indices)
    return Program(recorder, hidden, logits, owners=None)


def make_step(query_lens: list[int]) -> tuple:
    metadata = make_metadata(query_lens, query_lens, 16, 64)
    num_tokens = sum(query_lens)
    return (
        torch.randint(0, VOCABULARY, (num_tokens,), dtype=torch.int32),
        torch.arange(num_tokens),
        metadata,
        metadata.query_start_loc[1:].long() - 1,
    )


def check(model: Model, ops: SimpleNamespace, limits: Limits = LIMITS) -> Program:
    """The program's results equal the model's for alternating steps of several sizes."""
    program = record(model, ops, limits)
    for query_lens in ([1], [1, 1, 1], [20, 4], [3], [24], [1]):
        step = make_step(query_lens)
        with torch.inference_mode():
            expected = model(*step[:3])
            hidden, logits = program(*step)
        assert torch.equal(hidden, expected) and torch.equal(logits, expected[step[3]]), query_lens
    return program


def layers(ops: SimpleNamespace) -> Model:
    def model(token_ids: Tensor, positions: Tensor, metadata: Any) -> Tensor:
        residual = ops.embedding(token_ids, ops.table)
        x = ops.rms_norm(residual, ops.norm, 1e-6)
        for _ in range(4):
            gated = ops.silu_and_mul(x)
            # views of a result, as query and key are of one projection
            halves = x.view(len(x), 2, -1)
            first, second = halves.split((1, 1), dim=1)
            ops.fused_add_rms_norm(second.flatten(1), gated, ops.half_norm, 1e-6)
            ops.rms_norm(first, ops.half_norm, 1e-5)
            ops.fused_add_rms_norm(x, residual, ops.norm, 1e-6)
        return x

    return model


def test_a_program_gives_the_bits_of_its_calls(ops):
    program = check(layers(ops), ops)
    assert len(program.calls) == 2 + 4 * 4 + 1
    row_bytes = HIDDEN * ops.table.element_size()
    # residual, x, and what one layer needs, not all layers
    assert program.num_bytes < 6 * row_bytes * LIMITS.num_tokens


def test_as_many_logits_as_tokens(ops):
    check(layers(ops), ops, Limits(num_tokens=24, num_requests=24, num_logits=24))


def test_a_call_names_the_step_counts_that_it_uses(ops):
    recorder = Recorder(LIMITS)
    with torch.inference_mode(), recording(recorder, Guard()):
        ops.gather_rows(ops.embedding(recorder.token_ids, ops.table), recorder.logits_indices)
    assert [call.rows for call in recorder.calls] == [ALL_TOKENS, ALL_LOGITS]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_graphs(data):
    """Results that are used for a while, in any order, and summed in the end: memory assigned to
    two of them at once would change the sum.
    """
    table = registry.select("cpu", torch.float32)
    torch.manual_seed(0)
    ops = SimpleNamespace(
        **vars(table),
        table=torch.randn(VOCABULARY, HIDDEN),
        norm=torch.rand(HIDDEN),
        half_norm=torch.rand(HIDDEN // 2),
    )
    indices = st.integers(0, 99)
    moves = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["embed", "norm", "gate", "add", "drop"]), indices, indices),
            max_size=30,
        )
    )

    def model(token_ids: Tensor, positions: Tensor, metadata: Any) -> Tensor:
        live = [ops.embedding(token_ids, ops.table)]
        for move, i, j in moves:
            one, other = live[i % len(live)], live[j % len(live)]
            if move == "embed":
                live.append(ops.embedding(token_ids, ops.table))
            elif move == "norm":
                live.append(ops.rms_norm(one, ops.norm, 1e-6))
            elif move == "gate":  # halves the width; both halves are added to it
                small = ops.silu_and_mul(one)
                ops.fused_add_rms_norm(
                    small, other.view(len(other), 2, -1)[:, j % 2], ops.half_norm, 1e-6
                )
            elif move == "add" and one is not other:
                ops.fused_add_rms_norm(one, other, ops.norm, 1e-6)
            elif move == "drop" and len(live) > 1:
                live.pop(i % len(live))
        total, *rest = live
        for tensor in rest:
            ops.fused_add_rms_norm(tensor, total, ops.norm, 1e-6)
        return total

    check(model, ops)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    spans=st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 20), st.integers(0, 10)), max_size=30
    )
)
def test_live_buffers_do_not_overlap(spans):
    buffers = [Lifetime(size, first, first + length) for size, first, length in spans]
    offsets, num_bytes = place(buffers)
    for i, (mine, start) in enumerate(zip(buffers, offsets, strict=True)):
        assert start >= 0 and start + mine.num_bytes <= num_bytes
        for other, other_start in zip(buffers[:i], offsets):
            apart = start + mine.num_bytes <= other_start or other_start + other.num_bytes <= start
            assert apart or mine.last < other.first or other.last < mine.first
    if all(buffer.first == 0 for buffer in buffers):  # all in use at once: no gaps
        assert num_bytes == sum(buffer.num_bytes for buffer in buffers)


# ------------------------------------------------------------ several calls in one


def kinds(program: Program) -> list[str]:
    return [type(call).__name__ for call in program.calls]


def test_a_linear_layer_includes_the_gate_if_nothing_else_reads_its_result(ops):
    torch.manual_seed(3)
    gate_up = ops.pack_linear(
        torch.randn(2 * HIDDEN, HIDDEN).to(ops.norm.dtype),
        torch.randn(2 * HIDDEN).to(ops.norm.dtype),
    )
    # not a multiple of 32
    narrow = ops.pack_linear(torch.randn(HIDDEN + 2, HIDDEN).to(ops.norm.dtype), None)

    def alone(token_ids: Tensor, *_: object) -> Tensor:
        return ops.silu_and_mul(gate_up(ops.embedding(token_ids, ops.table)))

    def read_twice(token_ids: Tensor, *_: object) -> Tensor:
        both = gate_up(ops.embedding(token_ids, ops.table))
        gated = ops.silu_and_mul(both)
        ops.fused_add_rms_norm(gated, both[:, :HIDDEN], ops.norm, 1e-6)
        return gated

    def a_part(token_ids: Tensor, *_: object) -> Tensor:
        return ops.silu_and_mul(gate_up(ops.embedding(token_ids, ops.table))[:, :HIDDEN])

    def the_result(token_ids: Tensor, *_: object) -> Tensor:
        both = gate_up(ops.embedding(token_ids, ops.table))
        ops.silu_and_mul(both)
        return both

    def ragged(token_ids: Tensor, *_: object) -> Tensor:
        return ops.silu_and_mul(narrow(ops.embedding(token_ids, ops.table)))

    assert kinds(check(alone, ops)) == ["Embedding", "Linear", "GatherRows"]
    for model in (read_twice, a_part, the_result, ragged):
        assert "SiluAndMul" in kinds(check(model, ops)), model.__name__


@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "int8"])
@pytest.mark.parametrize(
    "activation", ["gelu", "gelu_tanh", "silu", "relu", "relu_squared", "gelu_and_mul"]
)
def test_a_linear_layer_includes_an_activation(ops, activation, bits):
    torch.manual_seed(4)
    weights = torch.randn(2 * HIDDEN, HIDDEN), torch.randn(2 * HIDDEN)
    weights = [weight.to(ops.norm.dtype) for weight in weights]
    multiply = ops.pack_quantized_linear(*weights, bits) if bits else ops.pack_linear(*weights)

    def model(token_ids: Tensor, *_: object) -> Tensor:
        return getattr(ops, activation)(multiply(ops.embedding(token_ids, ops.table)))

    linear = "QuantizedLinear" if bits else "Linear"
    assert kinds(check(model, ops)) == ["Embedding", linear, "GatherRows"]


@pytest.mark.parametrize(
    ("written", "expected"), [("key", ["RotaryAndWriteKv"]), ("value", ["Rotary", "WriteKv"])]
)
def test_rotation_and_write_are_fused_for_the_same_key(ops, written, expected):
    cos_sin, caches = torch.randn(64, 8), torch.zeros(2, 64, 16, 1, 8, dtype=ops.norm.dtype)

    def model(token_ids: Tensor, positions: Tensor, metadata: Any) -> Tensor:
        projection = ops.embedding(token_ids, ops.table)
        query, key, value = projection.view(len(projection), 4, 8).split((2, 1, 1), dim=1)
        ops.rotary_embedding(positions, query, key, cos_sin)
        ops.reshape_and_cache(
            {"key": key, "value": value}[written], value, *caches, metadata.slot_mapping
        )
        return projection

    program = check(model, ops)
    assert kinds(program) == ["Embedding", *expected, "GatherRows"]
    step = make_step([1, 20])
    filled = []
    for function in (lambda: model(*step[:3]), lambda: program(*step)):
        caches.zero_()
        function()
        filled.append(caches.clone())
    assert torch.equal(*filled) and filled[0].any()


# ------------------------------------------------------------ what cannot be recorded


def refused(model: Model, ops: SimpleNamespace) -> str:
    with pytest.raises(Unrecordable) as caught:
        record(model, ops)
    assert wrappers._thread.recorder is None  # the next call runs
    return str(caught.value)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x * 2, "mul.Tensor"),
        (lambda x: x.add_(1), "add_.Tensor"),
        (lambda x: x.clone(), "clone"),
        (lambda x: x.t().reshape(-1, HIDDEN), "reshape"),  # a copy in this case
        (lambda x: x.float().half(), "to.dtype"),
        (lambda x: torch.zeros(len(x), HIDDEN), "zeros"),
        (lambda x: x[torch.arange(3)], "arange"),
        (lambda x: x if x.sum() > 0 else -x, "sum"),
        (lambda x: x[:, x.argmax()], "argmax"),
    ],
)
def test_an_operation_of_torch_is_named(ops, compute, name):
    assert f"aten.{name}" in refused(
        lambda token_ids, *_: compute(ops.embedding(token_ids, ops.table)), ops
    )


def test_only_tensors_of_the_step_are_read(ops):
    assert (
        refused(lambda token_ids, *_: ops.embedding(token_ids[1:], ops.table), ops)
        == "an operand has 23 rows, where a step's tensors have 24 or 8"
    )
    others = torch.zeros(LIMITS.num_tokens, dtype=torch.int32)
    assert (
        refused(lambda *_: ops.embedding(others, ops.table), ops)
        == "Embedding reads other token_ids than the step's"
    )

    def norm_of_positions(token_ids: Tensor, positions: Tensor, metadata: Any) -> Tensor:
        return ops.rms_norm(
            positions.view(ops.table.dtype).view(LIMITS.num_tokens, -1), ops.norm, 1e-6
        )

    assert "RmsNorm takes positions as an operand" in refused(norm_of_positions, ops)


def test_lengths_are_not_read_in_python(ops):
    for read in (
        lambda metadata: max(metadata.seq_lens_list),
        lambda metadata: metadata.query_lens[0],
        lambda metadata: metadata.num_decodes > 3,
        lambda metadata: range(metadata.num_decodes),
    ):
        assert "reads the lengths" in refused(
            lambda token_ids, positions, metadata, read=read: read(metadata), ops
        )


def test_results_are_whole(ops):
    assert "not a whole result" in refused(
        lambda token_ids, *_: ops.embedding(token_ids, ops.table)[:, 1:], ops
    )


def test_a_larger_step_is_refused(ops):
    program = record(layers(ops), ops)
    with pytest.raises(ValueError, match="num_tokens is 25, but must be at most 24"):
        program(*make_step([25]))
    with pytest.raises(ValueError, match="num_requests is 9, but must be at most 8"):
        program(*make_step([1] * 9))
    token_ids, positions, metadata, _ = make_step([20])
    with pytest.raises(ValueError, match="num_logits is 20, but must be at most 8"):
        program(token_ids, positions, metadata, torch.arange(20))


def test_other_integers_are_refused(ops):
    program = record(layers(ops), ops)
    token_ids, *others = make_step([3])
    with pytest.raises(TypeError, match="a step's tensors must be of"):
        program(token_ids.long(), *others)


def test_other_threads_compute_in_the_meantime(ops):
    results = []

    def model(token_ids: Tensor, *_: object) -> Tensor:
        other = threading.Thread(
            target=lambda: results.append(
                ops.rms_norm(torch.ones(2, HIDDEN, dtype=ops.norm.dtype), ops.norm, 0.0)
            )
        )
        other.start()
        other.join()
        return ops.embedding(token_ids, ops.table)

    program = record(model, ops)
    assert len(program.calls) == 2
    assert torch.equal(results[0], ops.norm.expand(2, -1))
