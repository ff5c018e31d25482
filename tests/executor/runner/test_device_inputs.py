"""Inputs made on the device equal those made on the host, whatever happens to the slots. Also which
copies are made, and how often.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.runner import device_inputs
from quire.executor.runner.device_inputs import DeviceInputMaker, DeviceTables, aligned
from quire.executor.runner.image_table import ImageTable
from quire.executor.runner.step_inputs import StepInputMaker, StepInputs, lay_out
from quire.executor.sampling.logits_stages import LogitsStages
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import ImagePlace, NewRequestData, SchedulerOutput
from quire.kernels import registry
from quire.kernels.ops import AttentionMetadata

CPU = torch.device("cpu")
NUM_SLOTS, MAX_LEN, BLOCK_SIZE = 6, 61, 8


class Runner:
    """Tables on the host and on the device, updated by the differences between steps. Blocks are
    added as tokens need them.
    """

    def __init__(
        self, graph_buffers=lambda count: None, windows=(0,), has_images: bool = False
    ) -> None:
        ops = registry.select("cpu", torch.float32)
        self.batch = InputBatch(
            NUM_SLOTS, MAX_LEN, BLOCK_SIZE, LogitsStages((), NUM_SLOTS), windows
        )
        self.tables = DeviceTables(self.batch, ops, CPU)
        self.images = ImageTable(has_components=True, sees_whole=True)
        images = self.images if has_images else None
        self.make = DeviceInputMaker(self.tables, BLOCK_SIZE, ops, graph_buffers, images=images)
        self.num_computed: dict[int, int] = {}
        self.new: list[NewRequestData] = []
        self.freed: list[int] = []

    def add(self, slot: int, rng: random.Random) -> None:
        params = SamplingParams(
            temperature=rng.random(),
            top_k=rng.randrange(50),
            top_p=rng.random(),
            min_p=rng.random() / 9,
            seed=rng.randrange(2**63),
        )
        tokens = rng.choices(range(300), k=rng.choice([1, 1, 5, 9, 20]))
        self.new.append(
            NewRequestData(
                slot,
                f"r{rng.random()}",
                tokens,
                len(tokens),
                params,
                images=[ImagePlace(2, 8, 2, 3)] if len(tokens) > 8 else [],
            )
        )
        self.num_computed[slot] = 0

    def free(self, slot: int) -> None:
        self.freed.append(slot)
        del self.num_computed[slot]

    def schedule(self, lengths: dict[int, int], rng: random.Random) -> SchedulerOutput:
        """Schedule a step. Takes the number of tokens by slot, and the changes before it."""
        for slot in self.freed:
            self.batch.remove(slot)
        for request in self.new:
            self.batch.add(request)
        new_block_ids = []
        for slot, length in lengths.items():
            needed = -(-(self.num_computed[slot] + length) // BLOCK_SIZE) - int(
                self.batch.num_blocks[slot]
            )
            count = needed * self.batch.num_groups
            new_block_ids.append(rng.choices(range(1, 9999), k=count))
            self.batch.append_blocks(slot, new_block_ids[-1])
        output = SchedulerOutput(
            0,
            list(lengths),
            list(lengths.values()),
            [self.num_computed[slot] for slot in lengths],
            new_block_ids,
            self.new,
            self.freed,
            image_rows=[
                (slot, self.num_computed[slot], length, rng.randrange(99))
                for slot, length in lengths.items()
                if rng.random() < 0.3
            ],
        )
        self.images.apply(output)
        self.new, self.freed = [], []
        self.tables.note_differences(output)
        for slot, length in lengths.items():
            self.num_computed[slot] += length
        return output


def assert_equal(mine: StepInputs, oracle: StepInputs) -> None:
    for name in ("order", "slots", "sampled_rows", "sampled_slots"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(oracle, name), name)
    for name in ("token_ids", "positions", "logits_indices"):
        torch.testing.assert_close(getattr(mine, name), getattr(oracle, name), rtol=0, atol=0)
    for own, expected in zip(
        (mine.metadata, *mine.metadata.groups),
        (oracle.metadata, *oracle.metadata.groups),
        strict=True,
    ):
        assert_same_metadata(own, expected)
    if oracle.metadata.images is not None:
        for name, expected in vars(oracle.metadata.images).items():
            own = getattr(mine.metadata.images, name)
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


def assert_same_metadata(mine: AttentionMetadata, oracle: AttentionMetadata) -> None:
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        torch.testing.assert_close(getattr(mine, name), getattr(oracle, name), rtol=0, atol=0)
    for name in ("num_decodes", "query_lens", "seq_lens_list"):
        assert getattr(mine, name) == getattr(oracle, name), name
    for row, length in enumerate(oracle.seq_lens_list):
        blocks = -(-length // BLOCK_SIZE)
        assert (
            mine.block_tables[row, :blocks].tolist() == oracle.block_tables[row, :blocks].tolist()
        )


@pytest.mark.sampled
@pytest.mark.parametrize("windows", [(0,), (0, 9, 9)], ids=["one group", "three groups"])
@pytest.mark.parametrize("has_buffers", [False, True])
def test_random_lives_of_slots(has_buffers, windows):
    """Requests come and go, prompts are chunked, rows pause or fail, the host or the device
    samples, the host appends tokens.
    """
    size = NUM_SLOTS + 2
    buffers = tuple(
        torch.full(shape, -9, dtype=dtype)
        for shape, dtype in (
            ((size,), torch.int32),
            ((size,), torch.int64),
            ((len(windows), size), torch.int64),
            ((size,), torch.int32),
            ((len(windows), size, 8), torch.int32),
        )
    )
    num_in_buffers = 0
    for seed in range(8):
        rng, runner = (
            random.Random(seed),
            Runner((lambda count: buffers) if has_buffers else (lambda count: None), windows, True),
        )
        batch = runner.batch
        for _ in range(50):
            for slot in range(NUM_SLOTS):
                if slot in runner.num_computed and (
                    batch.num_tokens[slot] > MAX_LEN - 5 or rng.random() < 0.03
                ):
                    runner.free(slot)
                if slot not in runner.num_computed and rng.random() < 0.3:
                    runner.add(slot, rng)
            new = {request.slot: len(request.token_ids) for request in runner.new}
            left = {
                slot: new.get(slot, int(batch.num_tokens[slot])) - done
                for slot, done in runner.num_computed.items()
            }
            lengths = {
                slot: n if rng.random() < 0.9 else rng.randint(1, n)
                for slot, n in left.items()
                if n and (slot in new or rng.random() < 0.95)
            }
            if not lengths:
                continue
            output = runner.schedule(lengths, rng)
            oracle = StepInputMaker(batch, BLOCK_SIZE, images=runner.images)(output)
            is_host_to_sample = rng.random() < 0.5
            if is_host_to_sample:
                inputs = runner.make(output)
            else:
                layout = lay_out(output, batch.num_tokens)
                (columns,) = runner.make.ship([layout])
                inputs = runner.make.prepare(layout, columns)
            assert_equal(inputs, oracle)
            num_in_buffers += inputs.token_ids.data_ptr() == buffers[0].data_ptr()
            slots, sampled = (
                oracle.sampled_slots,
                np.array([rng.randrange(300) for _ in oracle.sampled_slots], np.int64),
            )
            good = np.array([rng.random() < 0.95 for _ in slots], bool)
            if not is_host_to_sample:
                results = torch.zeros(len(slots), dtype=torch.int32)
                ops = registry.select("cpu", torch.float32)
                sampling = (
                    columns["sampled_slots"],
                    columns["positions"],
                    torch.from_numpy(sampled),
                    torch.from_numpy(good),
                )
                ops.append_sampled_tokens(runner.tables.token_ids, *sampling, results)
                assert results.tolist() == np.where(good, sampled, -1).tolist()
                for column, name in zip(
                    ops.gather_sampling_parameters(
                        runner.tables.parameters, columns["sampled_slots"]
                    ),
                    ("temperature", "top_k", "top_p", "min_p", "seeds"),
                    strict=True,
                ):
                    assert column.tolist() == getattr(batch, name)[slots].tolist(), name
            batch.append_tokens(slots[good], sampled[good])
            for slot in slots[~good].tolist():
                runner.free(slot)
            # as forced tokens of a grammar
            if is_host_to_sample and good.any() and rng.random() < 0.1:
                batch.append_tokens(slots[good][:1], np.array([7]))
    assert (num_in_buffers > 50) == has_buffers


def test_views_of_a_graphs_buffers_are_made_once():
    """For each number of decodes: making them takes a step's host a fifth of its time."""
    types = torch.int32, torch.int64, torch.int64, torch.int32, torch.int32
    shapes = (8,), (8,), (1, 8), (8,), (1, 8, 8)
    buffers = tuple(torch.zeros(s, dtype=dtype) for s, dtype in zip(shapes, types, strict=True))
    asked: list[int] = []
    rng, runner = random.Random(0), Runner(lambda count: asked.append(count) or buffers)
    runner.add(0, rng)
    runner.make(runner.schedule({0: len(runner.new[0].token_ids)}, rng))
    asked.clear()
    seen = []
    for _ in range(2):
        runner.batch.append_tokens(np.array([0]), np.array([5]))
        seen.append(runner.make(runner.schedule({0: 1}, rng)))
    assert asked == [1] and seen[0].token_ids is seen[1].token_ids
    assert seen[1].positions.tolist() == [runner.num_computed[0] - 1]


def test_one_copy_per_step_of_new_data_only(monkeypatch):
    copies: list[dict[str, np.ndarray]] = []
    packed = device_inputs.packed
    monkeypatch.setattr(
        device_inputs,
        "packed",
        lambda arrays, device: copies.append(dict(arrays)) or packed(arrays, device),
    )
    rng, runner = random.Random(0), Runner()
    for slot in (4, 1):
        runner.add(slot, rng)
        runner.new[-1] = NewRequestData(slot, str(slot), list(range(9)), 9, SamplingParams(seed=1))
    output = runner.schedule({4: 9, 1: 9}, rng)
    (columns,) = runner.make.ship([lay_out(output, runner.batch.num_tokens)])
    # tokens, parameters, blocks
    assert len(copies) == 1 and len(copies[0]["words"]) == 2 * (9 + 8 + 2)
    # the device knows the tokens that it sampled
    runner.batch.append_tokens(np.array([4, 1]), np.array([5, 6]))
    for step in range(3):
        output = runner.schedule({4: 1, 1: 1}, rng)
        runner.make.ship([lay_out(output, runner.batch.num_tokens)])
        assert (
            len(copies) == 2 + step
            and "words" not in copies[-1]
            and sum(array.nbytes for array in copies[-1].values()) == 2 * (4 + 4 + 8)
        )
        runner.batch.append_tokens(np.array([4, 1]), np.array([5, 6]))
    for _ in range(2):
        output = runner.schedule({4: 1, 1: 1}, rng)
        copies.clear()
        runner.make(output)  # sampled by the host
        runner.batch.append_tokens(np.array([4, 1]), np.array([8, 9]))
    assert (
        len(copies) == 1 and copies[0]["words"].tolist() == [8, 9] and len(copies[0]["starts"]) == 3
    )


def test_rows_of_tables_are_aligned_to_sixteen_bytes():
    tables = Runner().tables
    assert tables.token_ids.shape == (NUM_SLOTS, 64) and tables.block_tables.shape == (NUM_SLOTS, 8)
    for table in (tables.parameters, tables.block_tables, tables.token_ids):
        assert (
            (table.data_ptr() - tables.parameters.data_ptr()) % 16 == table.stride(0) * 4 % 16 == 0
        )
    assert [aligned(n) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
