"""A step's inputs that are derived from the previous step equal inputs that are made from
scratch.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.runner.step_inputs import StepInputMaker, StepInputs
from quire.executor.sampling.logits_stages import LogitsStages
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData, SchedulerOutput

NUM_SLOTS, MAX_LEN, BLOCK_SIZE = 6, 64, 8


class Tables:
    """Plays the runner: tables of the slots, with blocks for all their tokens, and steps."""

    def __init__(self, windows: tuple[int, ...] = (0,)) -> None:
        self.batch = InputBatch(
            NUM_SLOTS, MAX_LEN, BLOCK_SIZE, LogitsStages((), NUM_SLOTS), windows
        )
        self.make = StepInputMaker(self.batch, BLOCK_SIZE)
        self.num_computed: dict[int, int] = {}

    def add(self, slot: int, num_tokens: int, rng: random.Random) -> NewRequestData:
        request = NewRequestData(
            slot,
            f"r{rng.random()}",
            rng.choices(range(300), k=num_tokens),
            num_tokens,
            SamplingParams(seed=0),
        )
        self.batch.add(request)
        num_blocks = MAX_LEN // BLOCK_SIZE * self.batch.num_groups
        self.batch.append_blocks(slot, rng.sample(range(1, 1000), num_blocks))
        self.num_computed[slot] = 0
        return request

    def step(
        self, lengths: dict[int, int], new: list[NewRequestData] | None = None
    ) -> tuple[StepInputs, StepInputs]:
        """Make a step from the number of tokens by slot. Return (the inputs, those of a new maker
        without previous steps).
        """
        slots = list(lengths)
        output = SchedulerOutput(
            0,
            slots,
            list(lengths.values()),
            [self.num_computed[slot] for slot in slots],
            [[] for _ in slots],
            new or [],
        )
        for slot, length in lengths.items():
            self.num_computed[slot] += length
        return self.make(output), StepInputMaker(self.batch, BLOCK_SIZE)(output)

    def sample(self, inputs: StepInputs) -> None:
        self.batch.append_tokens(
            inputs.sampled_slots, np.arange(100, 100 + len(inputs.sampled_slots))
        )


def assert_equal(one: StepInputs, other: StepInputs) -> None:
    for name in ("order", "slots", "sampled_rows", "sampled_slots"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    for name in ("token_ids", "positions", "logits_indices"):
        assert (
            torch.equal(getattr(one, name), getattr(other, name))
            and getattr(one, name).dtype == getattr(other, name).dtype
        ), name
    for mine, theirs in zip(
        (one.metadata, *one.metadata.groups), (other.metadata, *other.metadata.groups), strict=True
    ):
        for name in ("query_start_loc", "seq_lens", "block_tables", "slot_mapping"):
            assert (
                torch.equal(getattr(mine, name), getattr(theirs, name))
                and getattr(mine, name).dtype == getattr(theirs, name).dtype
            ), name
        for name in ("num_decodes", "query_lens", "seq_lens_list"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert mine.scratch == {}


def test_groups_differ_in_blocks_alone():
    tables = Tables((0, 9))
    new = tables.add(2, 20, random.Random(0))
    inputs, _ = tables.step({2: 20}, [new])
    for group, metadata in enumerate(inputs.metadata.groups):
        blocks = tables.batch.block_tables[group, 2, :3]
        assert metadata.block_tables.tolist() == [blocks.tolist()]
        assert metadata.slot_mapping.is_contiguous()
        assert metadata.slot_mapping.tolist() == [
            blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(20)
        ]
    assert len(inputs.metadata.groups) == 2


@pytest.mark.parametrize("windows", [(0,), (0, 9, 9)], ids=["one group", "three groups"])
def test_random_lives_of_slots(windows):
    """Requests come and go, prompts are chunked, rows pause, fail to sample, or gain several tokens
    at once.
    """
    num_reused = 0
    for seed in range(40):
        rng, tables = random.Random(seed), Tables(windows)
        last: StepInputs | None = None
        for _ in range(60):
            new = []
            for slot in range(NUM_SLOTS):
                length = int(tables.batch.num_tokens[slot])
                if slot in tables.num_computed and (length > MAX_LEN - 4 or rng.random() < 0.02):
                    tables.batch.remove(slot)
                    del tables.num_computed[slot]
                if slot not in tables.num_computed and rng.random() < 0.2:
                    new.append(tables.add(slot, rng.choice([1, 1, 5, 9, 20]), rng))
            lengths = {}
            for slot, num_computed in tables.num_computed.items():
                left = int(tables.batch.num_tokens[slot]) - num_computed
                if left and (rng.random() < 0.98 or any(request.slot == slot for request in new)):
                    lengths[slot] = left if rng.random() < 0.9 else rng.randint(1, left)
            if not lengths:
                continue
            inputs, expected = tables.step(
                lengths, [request for request in new if request.slot in lengths]
            )
            assert_equal(inputs, expected)
            num_reused += last is not None and inputs.positions is last.positions
            last = inputs
            if rng.random() < 0.97:
                tables.sample(inputs)
            # as forced tokens of a grammar
            if rng.random() < 0.03 and len(inputs.sampled_slots):
                tables.batch.append_tokens(inputs.sampled_slots[:1], np.array([7]))
            # a row that was not sampled has nothing to compute: its request fails
            for slot in list(tables.num_computed):
                if tables.num_computed[slot] >= tables.batch.num_tokens[slot]:
                    tables.batch.remove(slot)
                    del tables.num_computed[slot]
    assert num_reused > 300


def test_a_row_with_more_tokens_to_compute_is_not_sampled():
    """The slot gained two tokens at once, and the step computes one of them."""
    rng, tables = random.Random(2), Tables()
    new = [tables.add(slot, 3, rng) for slot in range(2)]
    inputs, _ = tables.step({0: 3, 1: 3}, new)
    for _ in range(2):
        tables.sample(inputs)
        inputs, _ = tables.step({0: 1, 1: 1})
    tables.sample(inputs)
    tables.batch.append_tokens(np.array([0]), np.array([7]))
    inputs, expected = tables.step({0: 1, 1: 1})
    assert_equal(inputs, expected)
    assert inputs.sampled_slots.tolist() == [1]


def test_a_step_beyond_a_slots_blocks_is_refused():
    """Also if the inputs are derived from those of the previous step."""
    rng, tables = random.Random(3), Tables()
    for length, steps in ((8, 0), (5, 3)):
        request = tables.add(1, length, rng)
        tables.batch.num_blocks[1] = 1
        inputs, _ = tables.step({1: length}, [request])
        for _ in range(steps):
            tables.sample(inputs)
            inputs, _ = tables.step({1: 1})
        tables.sample(inputs)
        with pytest.raises(ValueError, match="blocks of slot 1, which hold 8 tokens, got 9"):
            tables.step({1: 1})
        tables.batch.remove(1)


def test_a_new_request_in_the_same_slot_is_distinguished():
    """It starts at the position where the old request would have continued, as a preempted request
    with cached blocks may.
    """
    rng, tables = random.Random(1), Tables()
    request = tables.add(2, 9, rng)
    inputs, _ = tables.step({2: 9}, [request])
    for _ in range(2):
        tables.sample(inputs)
        inputs, _ = tables.step({2: 1})
    tables.batch.remove(2)
    request = tables.add(2, 12, rng)
    tables.num_computed[2] = 11
    assert_equal(*tables.step({2: 1}, [request]))
