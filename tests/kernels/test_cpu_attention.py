"""How the CPU's attention groups decoding requests: padding is bounded, calls are few."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.kernels.cpu import attention
from quire.kernels.cpu.attention import group_by_length
from quire.tests.kernels.attention_cases import attention_case


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=60),
    call_cost=st.integers(0, 2000),
    max_tokens=st.integers(1, 20000),
)
def test_groups_hold_every_row_once_within_both_bounds(lengths, call_cost, max_tokens):
    groups = group_by_length(lengths, call_cost, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        longest = lengths[group[0]]
        assert all(lengths[row] <= longest for row in group)
        assert sum(longest - lengths[row] for row in group) <= call_cost
        assert len(group) == 1 or len(group) * longest <= max_tokens


def test_one_long_context_does_not_pad_thirty_short_ones():
    assert group_by_length([50] * 31 + [1500], 512, 10**6) == [[31], list(range(31))]
    assert len(group_by_length(list(range(100, 132)), 512, 10**6)) == 1
    # 255 rows, all different
    assert len(group_by_length(list(range(6, 1536, 6)), 512, 10**6)) < 25


def test_decode_calls_do_not_grow_with_the_number_of_requests(monkeypatch):
    calls = []
    attend = attention.F.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs),
    )
    for num_requests in (1, 4, 64):
        calls.clear()
        case = attention_case(
            [1] * num_requests,
            [40 + i % 8 for i in range(num_requests)],
            (4, 2, 16),
            16,
            torch.float32,
        )
        attention.paged_attention(*case.args)
        assert len(calls) == 1


def test_the_largest_mask_is_a_tile_of_the_context(monkeypatch):
    """For a long chunk over a long context, no mask covers all queries times all keys."""
    largest = 0
    attend = attention.F.scaled_dot_product_attention

    def watch(*args, attn_mask=None, **kwargs):
        nonlocal largest
        largest = max(largest, 0 if attn_mask is None else attn_mask.numel())
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watch)
    attention.paged_attention(*attention_case([2000], [2000], (1, 1, 8), 16, torch.float32).args)
    assert largest == 0
    attention.paged_attention(*attention_case([1500], [2000], (1, 1, 8), 16, torch.float32).args)
    assert 0 < largest <= attention.QUERY_TILE * 2000
