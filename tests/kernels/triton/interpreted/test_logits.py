"""Changes of logits, and log-probabilities, in the interpreter, against the reference: equal bits
except for logarithms.
"""

import math

import pytest
import torch
from quire.kernels.reference import grammar
from quire.kernels.reference import sampling as reference
from quire.kernels.triton import logits as triton_logits
from quire.kernels.triton import logprobs as triton_logprobs
from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter

# numpy's warnings about masked lanes
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero) encountered:RuntimeWarning"
)


@pytest.mark.parametrize("num_pairs", [0, 1, 700])
def test_penalties_are_bit_equal_to_the_reference(num_pairs):
    """With every sign, also on masked logits; nothing else changes."""
    torch.manual_seed(num_pairs)
    logits = torch.randn(20, 507)[:, :500]
    logits[torch.rand(20, 500) < 0.1] = -math.inf
    logits[::3, ::5] = 0.0
    pairs = torch.randperm(logits.numel())[:num_pairs]
    counts = torch.randint(0, 4, (num_pairs,), dtype=torch.int32)
    penalties = torch.rand(num_pairs) + 0.5, torch.randn(num_pairs), torch.randn(num_pairs)
    given, expected = logits.clone(), logits.clone()
    for function, rows in (
        (triton_logits.apply_penalties, given),
        (reference.apply_penalties, expected),
    ):
        function(rows, pairs // 500, pairs % 500, counts, *penalties)
    assert torch.equal(given.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 4200])
def test_masks_equal_the_references(vocab_size):
    """Words with all bits, the sign bit included; rows in any order, others unchanged."""
    torch.manual_seed(vocab_size)
    memory = torch.randn(6, vocab_size + 3)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (4, -(-vocab_size // 32)), dtype=torch.int32)
    bitmask[2], bitmask[3] = 0, -1
    given, expected = memory.clone(), memory.clone()
    for function, rows in (
        (triton_logits.apply_grammar_bitmask, given),
        (grammar.apply_grammar_bitmask, expected),
    ):
        function(rows[:, :vocab_size], bitmask, torch.tensor([4, 0, 5, 2]))
    assert torch.equal(given, expected)
    triton_logits.apply_grammar_bitmask(given, bitmask[:0], torch.zeros(0, dtype=torch.int64))
    assert torch.equal(given, expected)


@pytest.mark.parametrize(("vocab_size", "counts"), [(1, (0, 1)), (65, (0, 20, 65)), (8193, (3,))])
def test_log_probabilities_equal_the_references(vocab_size, counts):
    """Values agree up to rounding, the rest exactly (except the order of masked tokens); a row with
    a NaN does not affect others.
    """
    torch.manual_seed(vocab_size)
    size = vocab_size + 3  # so that the stride exceeds a row's length
    # all different
    logits = (torch.stack([torch.randperm(size) for _ in range(4)]) * (20 / size) - 10)[
        :, :vocab_size
    ]
    logits[1, vocab_size // 3 :] = -math.inf
    logits[1, 0] = 1.0
    token_ids = torch.randint(0, vocab_size, (4,))
    token_ids[1] = 0
    for k in counts:
        expected = reference.gather_logprobs(logits, token_ids, k)
        given = triton_logprobs.gather_logprobs(logits, token_ids, k)
        check_logprobs(given, expected, torch.tensor([0, 2, 3]))
        assert torch.equal(
            given[0][1, : 1 + min(k, vocab_size // 3)],
            expected[0][1, : 1 + min(k, vocab_size // 3)],
        )
        torch.testing.assert_close(given[1][1], expected[1][1], rtol=1e-6, atol=1e-5)
    logits[2] = math.nan
    check_logprobs(
        triton_logprobs.gather_logprobs(logits, token_ids, counts[-1]),
        expected,
        torch.tensor([0, 3]),
    )


def check_logprobs(
    given: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], rows: torch.Tensor
) -> None:
    assert [column.dtype for column in given] == [torch.int32, torch.float32, torch.int32]
    for mine, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(
            mine[rows], theirs[rows], rtol=1e-6, atol=1e-5 if mine.is_floating_point() else 0
        )


def test_ranks_of_equal_and_masked_tokens():
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf, 0.0]]).repeat(3, 1)
    ids, logprobs, ranks = triton_logprobs.gather_logprobs(logits, torch.tensor([0, 2, 3]), 2)
    assert ranks.tolist() == [3, 1, 5] and ids[:, 1:].tolist() == [[1, 2]] * 3
    torch.testing.assert_close(
        logprobs[:, 0], logits[0].log_softmax(-1)[[0, 2, 3]], rtol=1e-6, atol=1e-6
    )
