"""The native sampling kernels at the limits of their groups and pieces, with one thread and two, on
every instruction set.
"""

import math

import pytest
import torch
from quire.kernels.cpu.native.library import library
from quire.kernels.reference import linear as reference_rows
from quire.kernels.reference import sampling as reference
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY

if library is None:
    pytest.skip(NEEDS_LIBRARY, allow_module_level=True)

from quire.kernels.cpu.native import rows
from quire.kernels.cpu.native import sampling as native

VOCAB_SIZES = [1, 3, 64, 65, 1000, 8191, 8193, 20_001]
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 700},
    {"top_k": 15_000},
    {"top_p": 0.1},
    {"top_p": 0.95},
    {"top_p": 0.9999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 3000, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.0, "top_k": 3},
]


def columns(filters: list[dict]) -> list[torch.Tensor]:
    neutral = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return [torch.tensor([(neutral | row)[name] for row in filters]) for name in neutral]


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_the_reference_samples_the_same_tokens(isa, scale):
    """Every filter and every size, with rows of all kinds together, with ties, and with gaps
    between rows.
    """
    for vocab_size in VOCAB_SIZES:
        torch.manual_seed(vocab_size)
        logits = (scale * torch.randn(len(FILTERS), vocab_size + 5))[:, :vocab_size]
        logits[:, vocab_size // 2 :] = logits[:, vocab_size // 2 :].bfloat16().float()
        seeds, positions = (
            torch.randint(-(2**63), 2**63 - 1, (len(FILTERS),)),
            torch.randint(0, 2**40, (len(FILTERS),)),
        )
        expected = reference.sample_tokens(logits, *columns(FILTERS), seeds, positions)
        for num_threads in (1, 2):
            library.set_num_threads(num_threads)
            assert torch.equal(
                native.sample_tokens(logits, *columns(FILTERS), seeds, positions), expected
            ), (vocab_size, num_threads)


def test_rows_that_are_nearly_or_wholly_masked(isa):
    """With all filters, a masked token is not drawn. A row that is completely masked or invalid
    only has to give a valid id.
    """
    for vocab_size in (65, 9000):
        logits = torch.full((len(FILTERS), vocab_size), -math.inf)
        logits[:, [40, vocab_size - 1]] = torch.tensor([-3.0, -3.5])
        numbers = torch.arange(len(FILTERS))
        assert set(native.sample_tokens(logits, *columns(FILTERS), numbers, numbers).tolist()) <= {
            40,
            vocab_size - 1,
        }
        for bad in (math.inf, -math.inf, math.nan):
            drawn = native.sample_tokens(
                torch.full_like(logits, bad), *columns(FILTERS), numbers, numbers
            )
            assert int(drawn.min()) >= 0 and int(drawn.max()) < vocab_size


def test_memory_after_a_row_is_not_read(isa):
    """The memory between two rows holds what would be the largest logit."""
    memory = torch.full((4, 9000), 1e9)
    logits = memory[:, :8129]
    logits.copy_(torch.randn(4, 8129))
    filters, numbers = [{}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}], torch.arange(4)
    drawn, alone = (
        native.sample_tokens(memory, *columns(filters), numbers, numbers)
        for memory in (logits, logits.clone())
    )
    assert torch.equal(drawn, alone)
    token_ids, is_finite = native.argmax(logits)
    assert torch.equal(token_ids, logits.clone().argmax(-1)) and is_finite.all()


def test_log_probabilities_equal_the_references(isa):
    """Values agree up to rounding, the rest exactly (except the order of masked tokens). A row does
    not depend on other rows, and a row with a NaN does not affect others.
    """
    for vocab_size in (1, 65, 1000, 8193):
        torch.manual_seed(vocab_size)
        size = vocab_size + 3  # so that the stride exceeds a row's length
        # all different
        logits = (torch.stack([torch.randperm(size) for _ in range(5)]) * (20 / size) - 10)[
            :, :vocab_size
        ]
        logits[1, vocab_size // 3 :] = -math.inf
        logits[1, 0] = 1.0
        token_ids = torch.randint(0, vocab_size, (5,))
        token_ids[1] = 0
        for k in sorted({0, 1, min(20, vocab_size), vocab_size}):
            expected = reference.gather_logprobs(logits, token_ids, k)
            library.set_num_threads(2)
            ids, logprobs, ranks = native.gather_logprobs(logits, token_ids, k)
            assert torch.equal(ids[[0, 2, 3, 4]], expected[0][[0, 2, 3, 4]]) and torch.equal(
                ranks, expected[2]
            )
            torch.testing.assert_close(logprobs, expected[1], rtol=1e-6, atol=1e-5)
            library.set_num_threads(1)
            alone = native.gather_logprobs(logits[3:4], token_ids[3:4], k)
            assert all(
                torch.equal(column, whole[3:4])
                for column, whole in zip(alone, (ids, logprobs, ranks))
            )
            broken = logits.clone()
            broken[2] = math.nan
            others = native.gather_logprobs(broken, token_ids, k)
            assert all(
                torch.equal(column[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])
                for column, whole in zip(others, (ids, logprobs, ranks))
            )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_of_a_part_of_the_vocabulary(isa, num_threads):
    torch.manual_seed(7)
    library.set_num_threads(num_threads)
    for vocab_size in VOCAB_SIZES:
        size = 1 + vocab_size // 3
        token_ids = torch.randperm(vocab_size)[:size].sort().values.int()
        logits = torch.randn(3, size)
        expected = reference_rows.spread_logits(logits, token_ids, vocab_size)
        assert torch.equal(rows.spread_logits(logits, token_ids, vocab_size), expected)
