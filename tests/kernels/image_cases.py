"""Inputs for the operations of models that read images, and the same operations with torch."""

from __future__ import annotations

import torch
from quire.tests.kernels.case import Case, rand
from torch import Tensor


def _rows(num_tokens: int, num_rows: int) -> Tensor:
    rows = torch.randint(0, num_rows, (num_tokens,), dtype=torch.int32)
    rows[torch.rand(num_tokens) < 0.3] = -1
    return rows


def _cases(dtype: torch.dtype, own) -> list[Case]:
    def case(name: str, num_tokens: int, size: int, width: int, first: int) -> Case:
        table = rand(20, width, dtype=dtype)[:, first : first + size]
        x = rand(num_tokens, size + 8, dtype=dtype)[:, :size]
        return Case(name, (x, _rows(num_tokens, 20), table), own, in_place=(0,))

    return [
        case("one token", 1, 64, 64, 0),
        case("a second vector", 70, 100, 200, 100),
        case("wide", 5, 900, 900, 0),
        case("none", 0, 8, 8, 0),
    ]


def replace_rows(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, rows: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(rows[:, None] >= 0, table[rows.clamp(min=0).long()], x),)

    return _cases(dtype, own)


def add_rows(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, rows: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return (x + table[rows.clamp(min=0).long()] * (rows >= 0)[:, None],)

    return _cases(dtype, own)


def clamp(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
        return (x.clamp(*bounds.to(dtype).to(x.dtype)),)

    # numbers that no type but fp32 has
    bounds = torch.tensor([-0.70001, 1.30001])
    wide = rand(5, 80, dtype=dtype)[:, 3:70]
    return [
        *(
            Case(f"{n} x {m}", (rand(n, m, dtype=dtype), bounds), own)
            for n, m in ((1, 3), (37, 64))
        ),
        Case("strided", (wide, bounds), own),
        Case("none", (rand(0, 8, dtype=dtype), bounds), own),
    ]


def rotary_embedding_by_component(dtype: torch.dtype) -> list[Case]:
    def own(
        positions: Tensor,
        offsets: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin_cache: Tensor,
        components: Tensor,
    ) -> tuple[Tensor, ...]:
        size = cos_sin_cache.shape[1]
        pairs = torch.arange(size // 2)
        at = (positions + offsets)[components.long()].T  # [T, R / 2]
        cos, sin = (cos_sin_cache[at, pairs + first] for first in (0, size // 2))
        cos, sin = cos.to(query.dtype)[:, None], sin.to(query.dtype)[:, None]

        def rotate(x: Tensor) -> Tensor:
            first, second, rest = x.tensor_split([size // 2, size], -1)
            turned = first * cos - second * sin, second * cos + first * sin
            return torch.cat((*turned, rest), -1)

        return rotate(query), rotate(key)

    def case(num_tokens: int, heads: int, size: int, rotary_dim: int) -> Case:
        angles = torch.rand(50, rotary_dim // 2) * 6
        # rounded in advance, so that fp64 has the same rotations
        cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).float()
        positions = torch.randint(0, 40, (num_tokens,))
        offsets = torch.randint(0, 10, (3, num_tokens + 3), dtype=torch.int32)[:, :num_tokens]
        merged = rand(num_tokens, heads + 2, size, dtype=dtype)
        components = torch.arange(rotary_dim // 2, dtype=torch.int32) % 3
        return Case(
            f"{num_tokens} x {heads} x {size}, {rotary_dim} rotated",
            (
                positions,
                offsets,
                merged[:, :heads],
                merged[:, heads:],
                cache,
                components,
            ),
            own,
            in_place=(2, 3),
        )

    return [case(1, 4, 64, 64), case(37, 3, 32, 8), case(0, 2, 16, 16)]


IMAGE_OPS = {f.__name__: f for f in (replace_rows, add_rows, clamp, rotary_embedding_by_component)}
