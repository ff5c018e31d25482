"""The places of states: where parts lie, what a copy moves, and which rows use them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.runner.state_table import ALL_KNOWN, StateTable
from quire.executor.runner.step_inputs import StepInputMaker
from quire.executor.sampling.logits_stages import LogitsStages
from quire.executor.state_memory import StateMemory
from quire.ipc.models.state_layout import ALIGNMENT, StatePart, place_parts
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData, SchedulerOutput
from quire.tests.executor.driver import start_executor


class Layer:
    def __init__(self, *parts: StatePart) -> None:
        self.state_parts = parts
        self.states: list[torch.Tensor] = []

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None:
        self.states = list(parts)


def make_layers() -> list[Layer]:
    conv, state = StatePart((3, 5), is_fp32=False), StatePart((2, 4, 8), is_fp32=True)
    return [Layer(conv, state), Layer(conv), Layer(state)]


def test_parts_are_aligned_and_do_not_overlap():
    parts = [part for layer in make_layers() for part in layer.state_parts]
    offsets, size = place_parts(parts, itemsize=2)
    ends = [offset + part.num_bytes(2) for offset, part in zip(offsets, parts)]
    assert all(offset % ALIGNMENT == 0 for offset in (*offsets, size))
    assert all(end <= start for end, start in zip(ends, [*offsets[1:], size]))
    assert parts[0].num_bytes(2) == 30 and parts[1].num_bytes(2) == 256


def test_a_copy_moves_the_states_of_all_layers_and_nothing_else():
    layers = make_layers()
    memory = StateMemory(layers, torch.bfloat16, torch.device("cpu"))
    memory.allocate(layers, 5)
    expected = []
    for layer in layers:
        for part, states in zip(layer.state_parts, layer.states, strict=True):
            assert states.shape == (5, *part.shape) and not states.any()
            assert states.dtype == (torch.float32 if part.is_fp32 else torch.bfloat16)
            assert states[1].is_contiguous()
            states.copy_(torch.randn(states.shape))
            expected.append(states.clone())
    # in this order: place 3 gets what place 1 had before
    memory.copy([(1, 3), (0, 1), (3, 4)])
    for states, before in zip([s for layer in layers for s in layer.states], expected):
        assert torch.equal(states, before[[0, 0, 2, 1, 1]])


def test_other_layers_take_over_and_a_release_takes_away():
    layers, others = make_layers(), make_layers()
    memory = StateMemory(layers, torch.float32, torch.device("cpu"))
    memory.bind(layers)
    assert layers[0].states == []  # not allocated
    memory.allocate(layers, 2)
    layers[2].states[0][1] = 7.0
    memory.bind(others)
    assert (others[2].states[0][1] == 7.0).all()
    memory.release(others)
    assert all(layer.states == [] for layer in others)


def test_rows_name_their_places_and_what_is_copied():
    batch, table = InputBatch(4, 64, 8, LogitsStages((), 4)), StateTable(4)
    make, rng = StepInputMaker(batch, 8, states=table), random.Random(0)
    new = [
        NewRequestData(slot, str(slot), rng.choices(range(9), k=n), n, SamplingParams(seed=0))
        for slot, n in ((2, 20), (0, 5))
    ]
    blocks = [[1, 2, 3], [4]]
    output = SchedulerOutput(
        0, [2, 0], [16, 5], [0, 0], blocks, new, state_saves=[(2, 7, 4), (0, 3, 6)]
    )
    batch.apply(output)
    table.apply(output)
    states = make(output).metadata.states
    assert states is not None
    assert states.places.tolist() == [2, 0] and states.places.dtype == torch.int32
    assert states.last_positions.tolist() == [19, 4]  # the tokens that the slots have
    assert states.copy_positions.tolist() == [7, 3]
    assert states.copy_places.tolist() == [4, 6]
    # nothing is copied in the next step, whose first row verifies two drafts
    batch.append_tokens(np.array([0]), np.array([1]))
    output = SchedulerOutput(1, [0, 2], [1 + 2, 4], [5, 16], [[], []])
    batch.apply(output)
    table.apply(output)
    states = make(output).metadata.states
    assert states is not None
    assert states.last_positions.tolist() == [5, 19]
    assert states.copy_positions.tolist() == [-1, -1]


def test_a_burst_keeps_the_state_after_its_last_token_and_continued_rows_follow():
    batch, table = InputBatch(2, 64, 8, LogitsStages((), 2)), StateTable(2)
    make = StepInputMaker(batch, 8, states=table)
    new = [NewRequestData(1, "1", [1, 2, 3], 3, SamplingParams(seed=0))]
    batch.apply(SchedulerOutput(0, [1], [3], [0], [[1, 2]], new))
    batch.append_tokens(np.array([1]), np.array([4]))
    output = SchedulerOutput(1, [1], [1], [3], [[]])
    burst = make.for_burst(output, 4).metadata.states
    assert burst is not None and burst.last_positions.tolist() == [ALL_KNOWN]
    first = make(output).metadata.states
    assert first is not None and first.last_positions.tolist() == [3]
    batch.append_tokens(np.array([1]), np.array([5]))
    output = SchedulerOutput(2, [1], [1], [4], [[]], state_saves=[(1, 4, 3)])
    batch.apply(output)
    table.apply(output)
    inputs = make(output)
    states = inputs.metadata.states
    assert states is not None
    assert states.last_positions.tolist() == [4]
    assert states.copy_positions.tolist() == [4] and states.copy_places.tolist() == [3]


@pytest.mark.parametrize("kind", ["mamba2", "granitemoehybrid"])
def test_states_are_swapped_also_without_blocks(tiny, kind: str) -> None:
    """What a swap costs includes the copies of the state."""
    worker = start_executor(tiny(kind), preemption_mode="auto", max_num_seqs=2)
    num_host_blocks, costs = worker.initialize_swap_space()
    assert num_host_blocks > 0 and costs.swap_s > 0 and costs.recompute_s_per_token > 0
    if kind == "mamba2":  # it has no blocks
        assert costs.swap_s_per_token == 0
    worker = start_executor(tiny(kind), preemption_mode="auto", swap_space=0.0)
    assert worker.initialize_swap_space()[0] == 0
