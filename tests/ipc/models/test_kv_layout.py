"""Groups of layers, and how many blocks a request holds, compared with a simulation."""

import pytest
from quire.ipc.models.kv_layout import MAX_BURST, KVLayout, group_layers, make_layout, one_group
from quire.tests.fakes import make_config

GEMMA = [512, 512, 512, 512, 512, 0]  # five layers with a window, one without


def test_equal_windows_are_one_group():
    assert group_layers([0] * 4, [9] * 4, 4096) == one_group(4) == (((0, 1, 2, 3),), (0,))
    assert group_layers([512] * 3, [1, 2, 9], 4096) == (((0, 1, 2),), (512,))


def test_a_window_that_no_context_exceeds_is_none():
    assert group_layers([4096, 0], [1, 1], 4096) == one_group(2)
    assert group_layers([4095, 0], [1, 1], 4096).windows == (0, 4095)


def test_a_larger_set_is_split_and_the_last_group_is_padded():
    groups = group_layers(GEMMA * 3, [7] * 18, 32_768)
    assert groups.windows == (0, 512, 512, 512, 512, 512)
    assert groups.layers[0] == (5, 11, 17) and groups.layers[1] == (0, 1, 2)
    groups = group_layers(GEMMA * 4 + [512, 512], [7] * 26, 32_768)  # 22 and 4, as in Gemma 3 1B
    assert [len(layers) for layers in groups.layers] == [4, 4, 4, 4, 4, 4, 2]
    assert sorted(sum(groups.layers, ())) == list(range(26))
    assert groups.pages == (5, 11, 17, 23)


def test_sets_of_nearly_equal_size_are_padded_and_not_split():
    groups = group_layers([0] * 4 + [64] * 5, [7] * 9, 4096)
    assert [len(layers) for layers in groups.layers] == [4, 5] and len(groups.pages) == 5


@pytest.mark.parametrize(
    ("num_periods", "period", "sizes", "counts"),
    [
        (3, [512] * 4 + [0], (1, 2), [3, 6, 6]),  # the own layers of Gemma 4 E2B
        (4, [512] * 5 + [0], (1, 2), [4, 8, 8, 4]),  # E4B
        (5, [1024] * 5 + [0], (2, 1), [5, *[2] * 12, 1]),  # 26B-A4B
        (10, [1024] * 5 + [0], (2, 1), [10, *[5] * 10]),  # 31B
    ],
)
def test_layers_of_different_sizes_fill_blocks(num_periods, period, sizes, counts):
    windows = period * num_periods
    sizes = [sizes[window == 0] for window in windows]
    groups = group_layers(windows, sizes, 32_768)
    assert [len(layers) for layers in groups.layers] == counts
    assert groups.windows == (0, *[period[0]] * (len(counts) - 1))
    assert sorted(sum(groups.layers, ())) == list(range(len(windows)))
    assert groups.largest(sizes) == num_periods * sizes[-1]


def most_held(layout: KVLayout, num_tokens: int, chunks: list[int]) -> int:
    """Compute a request in chunks; return the most blocks that it holds. `chunks` repeat."""
    most = num_computed = index = 0
    while num_computed < num_tokens:
        end = min(num_tokens, num_computed + chunks[index % len(chunks)])
        held = [
            -(-end // layout.block_size) - layout.first_seen(window, num_computed)
            for window in layout.windows
        ]
        most, num_computed, index = max(most, sum(held)), end, index + 1
    return most


@pytest.mark.parametrize("windows", [(0,), (1,), (33,), (0, 40), (0, 16, 17, 17)], ids=str)
@pytest.mark.parametrize("chunks", [[1], [16], [7, 1, 16], [37, 5]], ids=str)
def test_no_request_holds_more_than_is_planned(windows, chunks):
    layout = KVLayout(16, windows, max(chunks))
    for num_tokens in range(1, 200):
        most = most_held(layout, num_tokens, chunks)
        assert most <= layout.most_blocks(num_tokens)
    assert layout.most_blocks(199) - most <= 2 * sum(window > 0 for window in windows)
    assert layout.missing_blocks(199, 0, 0) == layout.most_blocks(199)


def test_what_is_missing_of_a_running_request():
    layout = KVLayout(16, (0, 40), 16)
    # 100 of 160 tokens are computed; of the window's five blocks at most it holds 3 to 6
    assert layout.missing_blocks(160, 100, 100) == (10 - 7) + (5 - 4)
    assert KVLayout(16).missing_blocks(100, 33, 33) == 7 - 3
    assert KVLayout(16).missing_blocks(33, 40, 40) == 0


def test_the_longest_sequence_is_the_inverse_of_its_blocks():
    for windows in ((0,), (0, 40), (40, 60)):
        layout = KVLayout(16, windows, 32)
        for num_blocks in range(60):
            longest = layout.longest(num_blocks, 320)
            assert layout.most_blocks(longest) <= num_blocks
            assert longest == 320 or layout.most_blocks(longest + 1) > num_blocks


def test_the_share_of_a_context_that_is_kept():
    assert KVLayout(16).held_share(100) == 1.0
    assert KVLayout(16, (0, 50), 16).held_share(100) == 0.75
    assert KVLayout(16, (0, 50), 16).held_share(0) == 1.0


def test_the_tokens_of_steps_that_have_not_ended():
    def most(**arguments):
        config = make_config(**{"max_num_batched_tokens": 64, **arguments})
        return make_layout(config, (1,)).most_blocks(10**6)

    assert most(num_scheduler_steps=1) == KVLayout(16, (1,), 64).most_blocks(10**6)
    assert most() == KVLayout(16, (1,), 63 + MAX_BURST).most_blocks(10**6)
    assert most(async_scheduling=True, num_scheduler_steps=1) == (
        KVLayout(16, (1,), 128).most_blocks(10**6)
    )
    assert most(long_prefill_token_threshold=20, num_scheduler_steps=1) == (
        KVLayout(16, (1,), 20).most_blocks(10**6)
    )


def test_gemma_keeps_a_fraction_of_a_long_context():
    """32 k tokens of Gemma 3 270M: three of 18 layers keep everything."""
    groups = group_layers(GEMMA * 3, [7] * 18, 32_768)
    blocks = KVLayout(16, groups.windows, 2048).most_blocks(32_768)
    assert blocks == 2048 + 5 * 161
    whole = 2048 * 18  # pages
    assert blocks * len(groups.pages) / whole == pytest.approx(0.232, abs=1e-3)
