"""The sizes of operations against counting."""

import pytest
from quire.kernels import work


def test_a_linear_layer_reads_x_and_writes_the_result():
    found = work.linear(3, 8, 5, in_bytes=2, out_bytes=4)
    assert found == ("[3, 8] · [5, 8]ᵀ", 3 * 8 * 2 + 3 * 5 * 4, 2 * 3 * 8 * 5)


@pytest.mark.parametrize("window", [0, 1, 3, 4, 7, 100])
@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 9), (5, 5), (3, 9), (9, 9)])
def test_attention_counts_the_keys_that_each_query_sees(queries, length, window):
    seen = [
        [key for key in range(position + 1) if not window or position - key < window]
        for position in range(length - queries, length)
    ]
    found = work.attention([queries], [length], 4, 2, 8, 2, 1, window)
    pairs, keys = sum(map(len, seen)), len(set().union(*seen))
    assert found.flops == 4 * pairs * 4 * 8
    assert found.num_bytes == 2 * queries * 4 * 8 * 2 + 2 * keys * 2 * 8 * 1


def test_attention_adds_its_requests():
    parts = [work.attention([q], [n], 4, 2, 8, 2, 2, 5) for q, n in ((1, 7), (4, 4))]
    both = work.attention([1, 4], [7, 4], 4, 2, 8, 2, 2, 5)
    assert both.flops == sum(part.flops for part in parts)
    assert both.num_bytes == sum(part.num_bytes for part in parts)


@pytest.mark.parametrize(("lens", "window"), [([1], 0), ([7, 3], 0), ([7, 3], 2), ([5], 9)])
def test_attention_in_both_directions_counts_what_is_near(lens, window):
    pairs = sum(
        1
        for length in lens
        for i in range(length)
        for j in range(length)
        if not window or abs(i - j) <= window
    )
    found = work.encoder_attention(lens, 4, 2, 8, 2, window)
    assert found.flops == 4 * pairs * 4 * 8 and found.num_bytes == 2 * sum(lens) * 6 * 8 * 2
