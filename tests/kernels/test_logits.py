"""Log-probabilities and penalties in every implementation, against torch and Python in fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.kernels.ops import ABSENT
from quire.tests.kernels.implementations import each


@each("gather_logprobs")
@pytest.mark.parametrize("k", [0, 1, 20, 300])
def test_logprobs_and_ranks(gather_logprobs, k):
    torch.manual_seed(6)
    logits = torch.randn(5, 300) * 6
    token_ids = torch.tensor([0, 299, 17, 5, int(logits[4].argmax())])
    ids, logprobs, ranks = gather_logprobs(logits, token_ids, k)
    assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert ids.shape == logprobs.shape == (5, k + 1) and ranks.shape == (5,)
    truth = logits.double().log_softmax(-1)
    assert torch.equal(ids[:, 0].long(), token_ids)
    assert torch.equal(ids[:, 1:].long(), truth.sort(descending=True).indices[:, :k])
    torch.testing.assert_close(logprobs.double(), truth.gather(1, ids.long()), rtol=1e-6, atol=1e-5)
    assert torch.equal(ranks.long(), (truth > truth.gather(1, token_ids[:, None])).sum(-1) + 1)
    assert ranks[4] == 1


@each("gather_logprobs")
def test_ranks_of_equals(gather_logprobs):
    ranks = gather_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 4), torch.arange(4), 0)[2]
    assert ranks.tolist() == [3, 1, 1, 4]


@each("apply_penalties")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_penalties_equal_a_plain_implementation(apply_penalties, data):
    """Row by row and token by token in Python's doubles; every other logit is unchanged."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    num_rows, vocab_size = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([3, 40, 2000]))
    logits = torch.randn(num_rows, vocab_size) * 4
    logits[torch.rand(logits.shape) < 0.1] = -math.inf
    logits[torch.rand(logits.shape) < 0.1] = 0.0
    pairs = (torch.rand(logits.shape) < data.draw(st.sampled_from([0.0, 0.2, 1.0]))).nonzero()
    pairs = pairs[torch.randperm(len(pairs))]
    rows, token_ids = pairs.unbind(1)
    counts = torch.randint(0, 4, (len(pairs),), dtype=torch.int32)
    of_rows = [
        torch.tensor([data.draw(st.sampled_from(values)) for _ in range(num_rows)])
        for values in ([1.0, 0.6, 1.7], *[[0.0, -1.5, 0.8]] * 2)
    ]
    expected = logits.double()
    for row, token_id, count in zip(rows.tolist(), token_ids.tolist(), counts.tolist()):
        repetition, frequency, presence = (values[row].item() for values in of_rows)
        value = logits[row, token_id].item()
        value = value / repetition if value > 0 else value * repetition
        expected[row, token_id] = value - frequency * count - (presence if count > 0 else 0.0)
    is_touched = torch.zeros(logits.shape, dtype=torch.bool)
    is_touched[rows, token_ids] = True
    before = logits.clone()
    assert (
        apply_penalties(logits, rows, token_ids, counts, *(values[rows] for values in of_rows))
        is None
    )
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[~is_touched], before[~is_touched])
    assert torch.equal(logits.isneginf(), before.isneginf())


@each("spread_logits")
@pytest.mark.parametrize(("rows", "size", "vocab_size"), [(1, 3, 7), (5, 4000, 20_001), (0, 5, 9)])
def test_logits_of_a_part_of_the_vocabulary(spread_logits, rows, size, vocab_size):
    torch.manual_seed(7)
    logits = torch.randn(rows, size + 3)[:, :size]
    token_ids = torch.randperm(vocab_size)[:size].sort().values.int()
    expected = torch.full((rows, vocab_size), ABSENT)
    expected[:, token_ids.long()] = logits
    assert torch.equal(spread_logits(logits, token_ids, vocab_size), expected)


@each("soft_cap")
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (5, 20_001), (0, 5)])
def test_capped_logits(soft_cap, rows, size):
    torch.manual_seed(8)
    memory = torch.randn(rows, size + 3) * 60
    memory[:, 2], memory[:, 3] = math.nan, -math.inf
    logits, before = memory[:, :size], memory.clone()
    soft_cap(logits, 30.0)
    expected = 30 * (before[:, :size].double() / 30).tanh()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(memory[:, size:], before[:, size:])
