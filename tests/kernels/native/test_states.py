"""Layers with states in recorded steps: results and states have the bits of separate calls, also if
several steps run as one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quire.kernels import registry
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.state_rows_cases import Row, make_state, states_metadata
from torch import Tensor

if library is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from quire.kernels.cpu.native.passes import Passes
from quire.kernels.cpu.native.program import recording
from quire.kernels.cpu.native.recorder import Guard, Limits, Recorder
from quire.kernels.cpu.native.replay import Program

DTYPES = (torch.float32, torch.bfloat16)
VOCABULARY, BLOCK_SIZE, PLACES = 50, 8, 5
KEY_HEADS, HEADS, SIZE = 2, 4, 16
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE


class Model:
    """A convolution, both recurrences, gates, and a head."""

    def __init__(self, dtype: torch.dtype):
        self.ops = registry.select("cpu", dtype)
        torch.manual_seed(0)
        self.table, self.gates = (
            torch.randn(VOCABULARY, size).to(dtype) for size in (CHANNELS, HEADS * SIZE)
        )
        self.conv, self.norm = torch.randn(CHANNELS, 4).to(dtype), torch.randn(SIZE).to(dtype)
        self.numbers = torch.randn(5, HEADS)
        weight = torch.randn(VOCABULARY, HEADS * SIZE).to(dtype)
        self.head = self.ops.pack_linear(weight, None)
        self.states = [
            make_state(PLACES, (3, CHANNELS), dtype),
            *(make_state(PLACES, (HEADS, SIZE, SIZE), torch.float32) for _ in range(2)),
        ]

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
    ) -> tuple[Tensor, ...]:
        ops, rows = self.ops, len(token_ids)
        x, gate = (ops.embedding(token_ids, table) for table in (self.table, self.gates))
        x = ops.short_conv(x, self.conv, None, self.states[0], metadata, "silu")
        heads = x.view(rows, -1, SIZE)
        query, key, value = heads.split((KEY_HEADS, KEY_HEADS, HEADS), 1)
        small = gate[:, :HEADS], gate[:, -HEADS:]
        y = ops.gated_delta_rule(
            query, key, value, *small, *self.numbers[:2], self.states[1], metadata, False
        )
        y = ops.gated_rms_norm(y.view(rows, -1), gate, self.norm, 1e-6, SIZE, False)
        y = y.view(rows, HEADS, SIZE)
        y = ops.selective_scan(y, small[0], query, key, *self.numbers[2:], self.states[2], metadata)
        hidden = ops.multiply(y, value, "sigmoid").view(rows, -1)
        logits = self.head.logits(ops.gather_rows(hidden, logits_indices))
        return hidden, logits, *ops.argmax(logits)

    def record(self) -> Program:
        recorder = Recorder(Limits(48, 8, 8), has_states=True)
        step = recorder.token_ids, recorder.positions, recorder.metadata, recorder.logits_indices
        with torch.inference_mode(), recording(recorder, Guard()):
            results = self(*step)
        return Program(recorder, *results, owners=self)


def make_step(rows: list[Row]) -> tuple[Tensor, Tensor, AttentionMetadata, Tensor]:
    metadata = states_metadata(rows)
    positions = [torch.arange(row.first, row.first + row.num_tokens) for row in rows]
    metadata = replace(metadata, block_tables=torch.zeros(len(rows), 9, dtype=torch.int32))
    token_ids = torch.randint(0, VOCABULARY, (sum(metadata.query_lens),), dtype=torch.int32)
    return token_ids, torch.cat(positions), metadata, metadata.query_start_loc[1:].long() - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_program_gives_the_bits_of_its_calls(dtype):
    model = Model(dtype)
    program = model.record()
    for rows in (
        [Row(1, 0, 2)],
        [Row(1, 9, 0), Row(40, 0, 3, copy=20, copy_place=1), Row(1, 0, -1)],
        [Row(1, 1, 2), Row(6, 2, 1, last=4), Row(3, 40, 3)],
    ):
        step = make_step(rows)
        before = [state.clone() for state in model.states]
        with torch.inference_mode():
            expected = [*model(*step), *(state.clone() for state in model.states)]
            for state, old in zip(model.states, before):
                state.copy_(old)
            found = [*program(*step), *model.states]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), rows


@pytest.mark.parametrize("num_threads", [1, 2])
def test_several_steps_in_one_run(num_threads):
    library.set_num_threads(num_threads)
    model = Model(torch.bfloat16)
    program = model.record()
    passes = Passes(program, BLOCK_SIZE)
    rows = [Row(1, 4, 1), Row(1, 9, 3, copy=11, copy_place=0), Row(1, 0, 2)]
    start, before = make_step(rows), [state.clone() for state in model.states]
    expected, token_ids = [], start[0]
    for i in range(4):
        now = [row._replace(first=row.first + i) for row in rows]
        step = make_step(now)
        token_ids = program(token_ids.int(), *step[1:])[2].clone()
        expected.append(token_ids)
    after = [state.clone() for state in model.states]
    for state, old in zip(model.states, before):
        state.copy_(old)
    assert torch.equal(passes(*start, count=4)[0], torch.stack(expected))
    assert all(torch.equal(*pair) for pair in zip(model.states, after, strict=True))
    library.set_num_threads(1)


def test_a_step_of_a_model_with_states_says_where_they_are():
    model = Model(torch.float32)
    program, step = model.record(), make_step([Row(1, 0, 2), Row(1, 3, 1)])
    metadata = step[2]
    with pytest.raises(TypeError, match="metadata.states must be tensors"):
        program(*step[:2], replace(metadata, states=None), step[3])
    wrong = replace(metadata.states, places=metadata.states.places.long())
    with pytest.raises(TypeError, match="each of 2 requests"):
        program(*step[:2], replace(metadata, states=wrong), step[3])
