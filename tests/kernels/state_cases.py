"""Inputs for the operations on slots' tables, and their results in numpy. These are integers and
copies, so results must be equal bit by bit.
"""

from __future__ import annotations

import numpy as np
import torch
from quire.tests.kernels.case import Case
from torch import Tensor

UNTOUCHED = -77  # fills places that must not be written


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def filled(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype)


def write_runs() -> list[Case]:
    """Runs in any order, of 0 to thousands of values; the memory between them does not change."""

    def own(memory: Tensor, places: Tensor, starts: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        written = memory.numpy().copy()
        for n, place in enumerate(places.numpy()):
            run = values.numpy()[starts[n] : starts[n + 1]]
            written[place : place + len(run)] = run
        return (tensor(written),)

    def case(*lengths: int) -> Case:
        chance = np.random.default_rng(len(lengths))
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        order, gaps = chance.permutation(len(lengths)), chance.integers(0, 5, len(lengths))
        places, place = np.zeros(len(lengths), np.int64), 3
        for n in order:
            places[n] = place
            place += lengths[n] + gaps[n]
        args = (
            filled(place + 4),
            tensor(places),
            tensor(starts),
            tensor(chance.integers(0, 9999, starts[-1]).astype(np.int32)),
        )
        return Case(f"runs of {lengths}", args, own, in_place=(0,))

    return [case(), case(1), case(0, 3), case(1, 8, 1, 1, 30, 4, 0), case(2500, 1, 1024, 1025)]


def prepare_step_inputs() -> list[Case]:
    """Slots in any order, chunks that begin anywhere, tables wider and narrower than needed,
    padding.
    """

    def own(
        slots: Tensor,
        num_computed: Tensor,
        starts: Tensor,
        token_table: Tensor,
        block_table: Tensor,
        block_size: int,
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        token_ids, positions, slot_mapping, seq_lens, block_tables = (
            output.numpy().copy() for output in outputs
        )
        tokens, blocks = token_table.numpy(), block_table.numpy()
        for row, (slot, computed) in enumerate(zip(slots.tolist(), num_computed.tolist())):
            for t in range(starts[row], starts[row + 1]):
                position = computed + t - int(starts[row])
                token_ids[t], positions[t] = tokens[slot, position], position
                slot_mapping[t] = (
                    int(blocks[slot, position // block_size]) * block_size + position % block_size
                )
            seq_lens[row] = computed + starts[row + 1] - starts[row]
            for i in range(-(-seq_lens[row] // block_size)):
                block_tables[row, i] = blocks[slot, i]
        for row in range(len(slots), len(seq_lens)):
            (
                token_ids[row],
                positions[row],
                slot_mapping[row],
                seq_lens[row],
                block_tables[row, 0],
            ) = 0, 0, -1, 1, 0
        return tuple(map(tensor, (token_ids, positions, slot_mapping, seq_lens, block_tables)))

    def case(
        rows: list[tuple[int, int]],
        block_size: int,
        max_len: int,
        num_slots: int,
        padded: int = 0,
        spare: int = 0,
    ) -> Case:
        """rows: (num_computed, tokens)"""
        chance = np.random.default_rng(max_len)
        num_computed, query_lens = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        width = -(-max_len // block_size)
        used = -(-int((num_computed + query_lens).max(initial=1)) // block_size) + spare
        num_rows, num_tokens = len(rows) + padded, int(starts[-1]) + padded
        args = (
            tensor(chance.permutation(num_slots)[: len(rows)].astype(np.int32)),
            tensor(num_computed),
            tensor(starts),
            tensor(chance.integers(0, 2**31 - 1, (num_slots, max_len)).astype(np.int32)),
            tensor(chance.integers(0, 2**31 - 1, (num_slots, width)).astype(np.int32)),
            block_size,
            filled(num_tokens),
            filled(num_tokens, dtype=torch.int64),
            filled(num_tokens, dtype=torch.int64),
            filled(num_rows),
            filled(num_rows, used),
        )
        return Case(
            f"{rows} + {padded}, blocks of {block_size}", args, own, in_place=(6, 7, 8, 9, 10)
        )

    return [
        case([(0, 1)], 16, 64, 1),
        case([(15, 1), (16, 1), (63, 1), (0, 1)], 16, 64, 9),
        case([(5, 1), (40, 1), (0, 1)], 8, 64, 3, padded=5, spare=3),
        case([(7, 1), (0, 20), (13, 19), (30, 1)], 8, 50, 4),
        case([(0, 2100), (2047, 1)], 1, 2200, 2),
        case([], 16, 64, 2, padded=2),
        case([(1, 1500), (3000, 1)], 16, 3008, 3, spare=1),
    ]


def gather_sampling_parameters() -> list[Case]:
    """Every bit of every word, and the slots' order."""

    def own(parameters: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        words = np.ascontiguousarray(parameters.numpy()[slots.numpy()])
        floats = words.view(np.float32)
        return tuple(
            map(
                tensor,
                (floats[:, 0], words[:, 1], floats[:, 2], floats[:, 3], words.view(np.int64)[:, 2]),
            )
        )

    def case(num_rows: int, num_slots: int) -> Case:
        chance = np.random.default_rng(num_rows)
        parameters = chance.integers(-(2**31), 2**31, (num_slots, 8)).astype(np.int32)
        parameters[:, [0, 2, 3]] = chance.random((num_slots, 3)).astype(np.float32).view(np.int32)
        return Case(
            f"{num_rows} of {num_slots}",
            (tensor(parameters), tensor(chance.permutation(num_slots)[:num_rows].astype(np.int32))),
            own,
        )

    return [case(0, 3), case(1, 1), case(5, 9), case(300, 301)]


def append_sampled_tokens() -> list[Case]:
    def own(
        table: Tensor,
        slots: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        is_finite: Tensor,
        results: Tensor,
    ) -> tuple[Tensor, ...]:
        table, results = table.numpy().copy(), results.numpy().copy()
        for r, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
            table[slot, position], results[r] = (
                (token_ids[r], token_ids[r]) if is_finite[r] else (0, -1)
            )
        return tensor(table), tensor(results)

    def case(num_rows: int, num_slots: int, max_len: int) -> Case:
        chance = np.random.default_rng(num_rows)
        args = (
            filled(num_slots, max_len),
            tensor(chance.permutation(num_slots)[:num_rows].astype(np.int32)),
            tensor(chance.integers(0, max_len, num_rows)),
            tensor(chance.integers(0, 151_936, num_rows)),
            tensor(chance.random(num_rows) < 0.8),
            filled(num_rows),
        )
        return Case(f"{num_rows} of {num_slots}", args, own, in_place=(0, 5))

    return [case(0, 2, 8), case(1, 1, 1), case(7, 9, 33), case(300, 310, 20)]


STATE_OPS = {
    function.__name__: function
    for function in (
        write_runs,
        prepare_step_inputs,
        gather_sampling_parameters,
        append_sampled_tokens,
    )
}
