"""apply_grammar_bitmask in every implementation, against bits counted one by one in Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.tests.kernels.implementations import each


@each("apply_grammar_bitmask")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_clears_exactly_the_tokens_without_a_bit(apply_grammar_bitmask, data):
    vocab_size = data.draw(st.sampled_from([1, 31, 32, 33, 64, 100, 2048]))
    num_rows = data.draw(st.integers(1, 5))
    rows = data.draw(
        st.permutations(range(num_rows)).map(
            lambda order: order[: data.draw(st.integers(0, num_rows))]
        )
    )
    words = st.sampled_from([0, -1, 1, -(2**31), 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)
    masks = [
        data.draw(st.lists(words, min_size=-(-vocab_size // 32), max_size=-(-vocab_size // 32)))
        for _ in rows
    ]
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for row, mask in zip(rows, masks):
        for token_id in range(vocab_size):
            if not mask[token_id // 32] >> token_id % 32 & 1:
                expected[row, token_id] = float("-inf")
    bitmask = torch.tensor(masks, dtype=torch.int32).reshape(len(rows), -(-vocab_size // 32))
    assert apply_grammar_bitmask(logits, bitmask, torch.tensor(rows, dtype=torch.int64)) is None
    assert torch.equal(logits, expected)


@each("apply_grammar_bitmask")
def test_what_is_masked_stays_masked(apply_grammar_bitmask):
    logits = torch.tensor([[float("-inf"), 1.0, -2.5]])
    apply_grammar_bitmask(logits, torch.tensor([[0b011]], dtype=torch.int32), torch.tensor([0]))
    assert logits.tolist() == [[float("-inf"), 1.0, float("-inf")]]
