"""Attention in both directions: what a token sees, by the rules of the models that it is for, and
that requests do not affect each other.
"""

import math

import pytest
import quire.kernels.torch_ops  # noqa: F401  defines torch.ops.quire
import torch
from quire.kernels import ops
from quire.tests.kernels.encoder_cases import encoder_case, encoder_metadata, make_bias
from quire.tests.kernels.implementations import each


def seen(attention, length: int, *options) -> torch.Tensor:
    """[length, length]: whether each token sees each other one."""
    query = key = torch.zeros(length, 1, 128)
    value = torch.eye(length, 128)[:, None]
    out = attention(query, key, value, encoder_metadata([length]), 1.0, *options)
    return out[:, 0, :length] > 0


@each("encoder_attention")
@pytest.mark.parametrize("window", [0, 1, 64, 99, 100])
def test_a_window_ends_at_its_distance(encoder_attention, window):
    """|i - j| <= window, as transformers' sliding_window_bidirectional_overlay."""
    i, j = torch.meshgrid(torch.arange(100), torch.arange(100), indexing="ij")
    expected = (i - j).abs() <= (window or 100)
    assert torch.equal(seen(encoder_attention, 100, window), expected)


@each("encoder_attention")
def test_a_bias_goes_by_the_keys_distance_from_the_query(encoder_attention):
    """-inf at all distances but one, which is -inf or beyond the last distance of the table."""
    for distance in (-3, 0, 2):
        bias = torch.full((1, 9), -math.inf)
        bias[0, 4 + distance] = 0
        # row i sees column i + distance; a row that would see nothing has no defined result
        rows = range(max(0, -distance), 70 - max(0, distance))
        visible = seen(encoder_attention, 70, 0, bias)
        assert all(visible[i].nonzero().flatten().tolist() == [i + distance] for i in rows)
    bias = torch.full((1, 9), -math.inf)
    bias[0, -1] = 0
    i, j = torch.meshgrid(torch.arange(66), torch.arange(70), indexing="ij")
    assert torch.equal(seen(encoder_attention, 70, 0, bias)[:66], j - i >= 4)


@each("encoder_attention")
def test_a_request_with_nan_does_not_affect_others(encoder_attention):
    torch.manual_seed(0)
    for options in ((), (8,), (0, make_bias(3, 20))):
        case = encoder_case([5, 70, 33], (3, 3, 32), torch.float32, *options)
        (before,) = case.run(encoder_attention)
        for spoilt in case.args[1:3]:
            spoilt[5:75] = math.nan
        (after,) = case.run(encoder_attention)
        rows = [*range(5), *range(75, 108)]
        assert torch.equal(after[rows], before[rows]) and after[5:75].isnan().all()


def test_it_is_there_for_programs_of_torch():
    torch.manual_seed(1)
    case = encoder_case([5, 30], (4, 2, 32), torch.float32, 3, make_bias(4, 7))
    query, key, value, metadata, *others = case.args
    result = torch.ops.quire.encoder_attention(query, key, value, metadata.query_start_loc, *others)
    assert torch.equal(result, ops.encoder_attention(*case.args))
