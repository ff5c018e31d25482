"""Native kernels of LoRA adapters on every instruction set: a row's bits alone and among any
others, on any number of threads, and rows without an adapter are not written.
"""

from __future__ import annotations

import pytest
import torch
from quire.kernels.cpu.native.library import library
from quire.tests.kernels.lora_cases import LORA_OPS
from quire.tests.kernels.test_parity import DTYPES

if library is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from quire.kernels.cpu.native.lora import add_lora, add_lora_embedding
from quire.tests.kernels.native.test_isas import same_bits
from torch import Tensor


def exact(x: Tensor) -> Tensor:
    """In memory of its own that ends with its last element: sanitizers find what lies behind."""
    return x.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_is_the_same_bits_alone_and_among_any_number(isa, num_threads, dtype):
    torch.manual_seed(3)
    library.set_num_threads(num_threads)
    for case in LORA_OPS["add_lora"](dtype):
        y, x, a, b, scales, ranks, adapters, indices, slices = case.args
        together = exact(y)
        add_lora(together, exact(x), a, b, scales, ranks, adapters, indices, slices)
        of_rows = adapters if indices is None else adapters[indices]
        for row, place in enumerate(of_rows.tolist()):
            piece = slice(row, row + 1)
            alone = exact(y[piece])
            add_lora(alone, exact(x[piece]), a, b, scales, ranks, of_rows[piece], None, slices)
            assert same_bits(alone, together[piece]), (case.name, row)
            if place < 0:
                assert same_bits(alone, y[piece])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_token_is_the_same_bits_alone_and_among_any_number(isa, num_threads, dtype):
    torch.manual_seed(4)
    library.set_num_threads(num_threads)
    for case in LORA_OPS["add_lora_embedding"](dtype):
        y, token_ids, a, b, scales, ranks, adapters = case.args
        together = exact(y)
        add_lora_embedding(together, token_ids, a, b, scales, ranks, adapters)
        for row in range(len(y)):
            piece = slice(row, row + 1)
            alone = exact(y[piece])
            add_lora_embedding(alone, token_ids[piece], a, b, scales, ranks, adapters[piece])
            assert same_bits(alone, together[piece]), (case.name, row)
