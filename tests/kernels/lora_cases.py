"""Inputs for the operations of LoRA adapters, and the same in torch."""

from __future__ import annotations

import torch
from quire.kernels.lora import LORA_BLOCK, first_blocks, in_blocks
from quire.tests.kernels.case import Case, rand
from torch import Tensor

PLACES, MAX_RANK = 3, 20


def _places(num_rows: int) -> Tensor:
    """Rows of every adapter and of none, in runs and alone."""
    places = torch.arange(num_rows) // 3 % (PLACES + 1) - 1
    places[num_rows // 2 :] = torch.arange(num_rows - num_rows // 2) % (PLACES + 1) - 1
    return places.int()


def without_blocks(b: Tensor, size: int) -> Tensor:
    """[blocks, rank, LORA_BLOCK] -> [rank, size]"""
    return b.transpose(0, 1).flatten(1)[:, :size]


def random_b(slices: list[int], dtype: torch.dtype) -> Tensor:
    """[PLACES, C, MAX_RANK, LORA_BLOCK], NaN behind the last output of each slice"""
    parts = []
    for size in slices:
        numbers = rand(PLACES, size, MAX_RANK, dtype=dtype) / MAX_RANK**0.5
        parts.append(torch.stack([in_blocks(of_place) for of_place in numbers]))
        parts[-1][:, -1, :, size % LORA_BLOCK or LORA_BLOCK :] = float("nan")
    return torch.cat(parts, 1)


def add_lora(dtype: torch.dtype) -> list[Case]:
    def own(
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scales: Tensor,
        ranks: Tensor,
        adapters: Tensor,
        indices: Tensor | None,
        slices: list[int],
    ) -> tuple[Tensor, ...]:
        y, of_rows = y.clone(), adapters if indices is None else adapters[indices]
        for row, place in enumerate(of_rows.tolist()):
            if place < 0:
                continue
            first = first_blocks(slices)
            for s, columns in enumerate(y[row].split(slices)):
                rank = int(ranks[place, s])
                of_b = without_blocks(b[place, first[s] : first[s + 1]], len(columns))
                wide = torch.float64 if y.dtype == torch.float64 else torch.float32
                low = (a[place, s, :rank].to(wide) @ x[row].to(wide)) * scales[place, s].to(wide)
                columns += (low @ of_b[:rank].to(wide)).to(y.dtype)
        return (y,)

    def case(rows: int, size: int, slices: list[int], by_index: bool = False) -> Case:
        num_tokens = 2 * rows + 1 if by_index else rows
        wide = rand(rows, sum(slices) + 24, dtype=dtype)
        a = rand(PLACES, len(slices), MAX_RANK, size, dtype=dtype) / size**0.5
        b = random_b(slices, dtype)
        ranks = torch.randint(0, MAX_RANK + 1, (PLACES, len(slices)), dtype=torch.int32)
        ranks[0] = MAX_RANK
        for place in range(PLACES):  # what lies behind a rank is not read
            for s in range(len(slices)):
                a[place, s, ranks[place, s] :] = float("nan")
        indices = torch.arange(rows) * 2 if by_index else None
        args = (
            wide[:, 8 : 8 + sum(slices)],
            rand(rows, size + 8, dtype=dtype)[:, :size],
            a,
            b,
            rand(PLACES, len(slices), dtype=torch.float32),
            ranks,
            _places(num_tokens),
            indices,
            slices,
        )
        return Case(f"{rows} x {size} -> {slices}", args, own, in_place=(0,))

    return [
        case(1, 64, [96]),
        case(13, 96, [128, 64, 64]),
        case(40, 200, [33, 70], by_index=True),
        case(5, 7, [1, 30, 2, 5]),
        case(0, 8, [16]),
    ]


def add_lora_embedding(dtype: torch.dtype) -> list[Case]:
    def own(
        y: Tensor,
        token_ids: Tensor,
        a: Tensor,
        b: Tensor,
        scales: Tensor,
        ranks: Tensor,
        adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        y = y.clone()
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        for row, place in enumerate(adapters.tolist()):
            if place >= 0:
                rank = int(ranks[place, 0])
                low = a[place, int(token_ids[row]), :rank].to(wide) * scales[place, 0].to(wide)
                of_b = without_blocks(b[place], y.shape[1])[:rank]
                y[row] += (low @ of_b.to(wide)).to(y.dtype)
        return (y,)

    def case(rows: int, size: int) -> Case:
        args = (
            rand(rows, size, dtype=dtype),
            torch.randint(0, 50, (rows,), dtype=torch.int32),
            rand(PLACES, 50, MAX_RANK, dtype=dtype),
            random_b([size], dtype),
            rand(PLACES, 1, dtype=torch.float32),
            torch.tensor([[20], [8], [0]], dtype=torch.int32),
            _places(rows),
        )
        return Case(f"{rows} x {size}", args, own, in_place=(0,))

    return [case(1, 64), case(30, 100), case(0, 8)]


LORA_OPS = {f.__name__: f for f in (add_lora, add_lora_embedding)}
