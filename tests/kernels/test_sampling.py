"""The sampler draws from exactly the requested distribution, and a row's token depends on the row
alone.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.kernels import registry
from quire.kernels.reference.sampling import keep_tokens
from quire.tests.kernels.implementations import each
from torch import Tensor

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def params(rows: list[dict]) -> list[Tensor]:
    """[{"temperature": …, …}] -> the columns of sample_tokens before seeds and positions."""
    columns = {name: torch.tensor([(NEUTRAL | row)[name] for row in rows]) for name in NEUTRAL}
    return [
        columns["temperature"].float(),
        columns["top_k"].int(),
        columns["top_p"].float(),
        columns["min_p"].float(),
    ]


def draw(sample_tokens, logits: Tensor, num_draws: int, **filters) -> Tensor:
    """[num_draws] tokens of one row of logits [V], half with different seeds and half with
    different positions.
    """
    seeds = torch.arange(num_draws).where(torch.arange(num_draws) % 2 == 0, torch.tensor(12345))
    positions = torch.arange(num_draws).where(torch.arange(num_draws) % 2 == 1, torch.tensor(67))
    columns = [column.expand(num_draws) for column in params([filters])]
    return sample_tokens(logits.expand(num_draws, -1).clone(), *columns, seeds, positions)


# ---------------------------------------------------------------- which tokens, how often


def exact_distribution(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Computed in Python, token by token, from the contract's definition."""
    weights = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= min_p * weights[order[0]] * (1 - 1e-12)]
    if top_k > 0:
        order = order[:top_k]
    left, kept = sum(weights[token] for token in order), []
    for token in order:
        if sum(weights[k] for k in kept) >= top_p * left * (1 + 1e-12) and top_p < 1:
            break
        kept.append(token)
    probs = torch.zeros(len(weights), dtype=torch.float64)
    probs[kept] = torch.tensor([weights[token] for token in kept], dtype=torch.float64)
    return probs / probs.sum()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 2.0, "top_p": 0.95, "min_p": 0.1},
]


@each("sample_tokens")
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_exact_distribution(sample_tokens, filters):
    """Chi-square over 12 tokens and 2000 fixed draws: below the 0.9999 quantile of 11 degrees of
    freedom. Deterministic.
    """
    torch.manual_seed(1)
    logits, num_draws = torch.randn(12) * 1.5, 2000
    probs = exact_distribution(logits, **(NEUTRAL | filters))
    counts = torch.bincount(draw(sample_tokens, logits, num_draws, **filters), minlength=12)
    assert counts[probs == 0].sum() == 0, "drew a token that a filter removed"
    expected = probs * num_draws
    chi_square = ((counts - expected).square() / expected)[probs > 0].sum().item()
    assert chi_square < 37.4


@each("sample_tokens")
def test_no_filters_are_filters_that_keep_all(sample_tokens):
    torch.manual_seed(9)
    logits, seeds, positions = (
        torch.randn(9, 3000) * 3,
        torch.randint(0, 2**62, (9,)),
        torch.randint(0, 2**20, (9,)),
    )
    logits[4, 5:] = -math.inf
    temperature, *filters = params(
        [{"temperature": t} for t in (0.0, 0.01, 0.5, 0.8, 1.0, 1.3, 5.0, 0.0, 1.0)]
    )
    drawn = sample_tokens(logits.clone(), temperature, None, None, None, seeds, positions)
    assert torch.equal(
        drawn, sample_tokens(logits.clone(), temperature, *filters, seeds, positions)
    )


@each("sample_tokens")
def test_a_large_vocabulary_is_drawn_from_in_full(sample_tokens):
    """A flat distribution over more tokens than any list of candidates holds: each quarter of the
    vocabulary gets its share.
    """
    num_draws = 400
    flat = torch.zeros(2400)
    tokens = torch.cat(
        [
            draw(sample_tokens, flat, num_draws, **filters)
            for filters in ({}, {"top_p": 0.9999}, {"top_k": 2399})
        ]
    )
    counts = torch.histc(tokens.double(), bins=4, min=0, max=2400)
    assert (counts - 300).abs().max() < 60  # four standard deviations of 15


# ---------------------------------------------------------------- filters


def survivors(sample_tokens, logits: Tensor, **filters) -> set[int]:
    return set(draw(sample_tokens, logits, 150, **filters).tolist())


@each("sample_tokens")
def test_equal_logits_are_kept_from_the_lowest_index(sample_tokens):
    flat = torch.zeros(10)
    assert survivors(sample_tokens, flat, top_k=3) == {0, 1, 2}
    assert survivors(sample_tokens, flat, top_p=0.45) == {0, 1, 2, 3, 4}
    assert survivors(sample_tokens, flat, min_p=1.0) == set(range(10))
    two_highest = torch.tensor([0.0, 2.0, 1.0, 2.0])
    assert survivors(sample_tokens, two_highest, top_k=1) == {1}
    assert survivors(sample_tokens, two_highest, min_p=1.0) == {1, 3}
    assert (
        survivors(sample_tokens, two_highest, top_k=0)
        == survivors(sample_tokens, two_highest, top_k=-1)
        == {0, 1, 2, 3}
    )


@each("sample_tokens")
def test_equal_logits_across_many_candidates(sample_tokens):
    """2000 equal tokens of 6000: the end of any short list falls among them."""
    logits = torch.full((6000,), -50.0)
    logits[2000:4000] = 1.0
    assert max(survivors(sample_tokens, logits, top_k=100)) < 2100
    assert max(survivors(sample_tokens, logits, top_p=0.5)) < 3000
    wide = survivors(sample_tokens, logits, min_p=0.5)
    assert min(wide) >= 2000 and 3000 < max(wide) < 4000
    few = torch.full((6000,), -50.0)
    # 200 equal ones: all fit the short list, but half of them are cut
    few[3010:5010:10] = 1.0
    assert max(survivors(sample_tokens, few, top_k=100)) < 4010


@each("sample_tokens")
def test_top_p_is_a_share_of_the_whole_row(sample_tokens):
    """Ten tokens of 5 % each; the other half of the mass is spread over thousands that no short
    list holds.
    """
    logits = torch.full((6010,), 0.5 / 6000).log()
    logits[600:610] = torch.tensor(0.05).log()
    assert survivors(sample_tokens, logits, top_p=0.42) == set(range(600, 609))
    # of the ten alone, five tenths would reach 0.42
    assert survivors(sample_tokens, logits, top_p=0.42, min_p=0.01) == set(range(600, 605))


@each("sample_tokens")
def test_stages_come_in_vllms_order(sample_tokens):
    """top_p is a share of what top_k keeps; the temperature is applied before min_p."""
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    # 0.5 / 0.8 is enough; 0.5 of everything is not
    assert survivors(sample_tokens, logits, top_k=2, top_p=0.6) == {0}
    assert survivors(sample_tokens, logits, top_p=0.6) == {0, 1}
    assert survivors(sample_tokens, logits, min_p=0.5) == {0, 1}
    assert survivors(sample_tokens, logits, min_p=0.5, temperature=3.0) == {0, 1, 2, 3}


@each("sample_tokens")
def test_smallest_top_p_keeps_one_token(sample_tokens):
    logits = torch.arange(100.0) / 50
    assert survivors(sample_tokens, logits, top_p=1e-8) == {99}


# ---------------------------------------------------------------- rows


@each("argmax")
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 65, 3000, 20_000])
def test_argmax_is_the_lowest_index_of_the_largest(argmax, vocab_size):
    """Over ties, with -inf and NaN anywhere; rows whose stride is not their length."""
    torch.manual_seed(vocab_size)
    logits = torch.randint(-9, 9, (12, vocab_size + 3)).float()[:, :vocab_size]
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, vocab_size // 2] = -7.0
    logits[5, vocab_size - 1] = 99.0
    logits[6] = -4.5
    for row, bad in ((8, math.inf), (9, -math.inf), (10, math.nan)):
        logits[row, torch.randint(0, vocab_size, ())] = bad
    token_ids, is_finite = argmax(logits)
    assert token_ids.dtype == torch.int64 and is_finite.dtype == torch.bool
    for row in range(12):
        values = logits[row].tolist()
        assert is_finite[row].item() == all(math.isfinite(value) for value in values)
        assert (
            0 <= token_ids[row] < vocab_size
            if row == 10
            else token_ids[row] == values.index(max(values))
        )


@each("sample_tokens")
def test_greedy_takes_the_lowest_of_the_largest(sample_tokens):
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-math.inf, -5.0, -math.inf, -5.0]]
    )
    for temperature in (0.0, 1e-6):
        assert draw_rows(
            sample_tokens, logits, [{"temperature": temperature, "top_k": 2}] * 3
        ).tolist() == [1, 0, 1]


def draw_rows(
    sample_tokens,
    logits: Tensor,
    rows: list[dict],
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    numbers = torch.arange(len(rows))
    return sample_tokens(
        logits,
        *params(rows),
        numbers if seeds is None else seeds,
        numbers if positions is None else positions,
    )


@each("sample_tokens")
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 1e-9}], ids=str)
def test_removed_logits_are_never_drawn(sample_tokens, filters):
    logits = torch.full((50,), -math.inf)
    logits[[7, 30]] = torch.tensor([-2.0, -2.5])
    assert survivors(sample_tokens, logits, **filters) == {7, 30}


@each("sample_tokens")
def test_the_smallest_temperature_does_not_overflow(sample_tokens):
    logits = torch.tensor([60.0, -60.0, 59.999]).repeat(1, 1)
    assert draw_rows(sample_tokens, logits, [{"temperature": 1.1e-5}]).tolist() == [0]


@each("sample_tokens")
def test_logits_are_not_written(sample_tokens):
    logits = torch.randn(4, 3000)
    before = logits.clone()
    draw_rows(sample_tokens, logits, [{}, {"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.5}])
    assert torch.equal(logits, before)


def test_filters_of_the_reference_are_the_contract():
    """Against a plain implementation in Python, over ties and all filters."""
    torch.manual_seed(3)
    for _ in range(60):
        logits = torch.randint(-4, 4, (15,)).float() / 2
        top_k, top_p, min_p = (
            int(torch.randint(0, 16, ())),
            float(torch.rand(()).clamp(min=0.01)),
            float(torch.rand(()) ** 3),
        )
        order = logits.argsort(descending=True, stable=True)
        kept = keep_tokens(
            logits - logits.max(),
            order,
            torch.tensor(top_k),
            torch.tensor(top_p),
            torch.tensor(min_p),
        )
        assert torch.equal(kept, exact_distribution(logits, 1.0, top_k, top_p, min_p) > 0)


@each("sample_tokens")
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_row_does_not_depend_on_other_rows(sample_tokens, data):
    """Any mix of rows gives the same tokens drawn together, in another order and one by one; they
    are those of the reference.
    """
    vocab_size = data.draw(st.sampled_from([5, 512, 3000]))
    row = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.5]),
            "top_k": st.sampled_from([0, 0, 1, 20, 200, 2500]),
            "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.95]),
            "min_p": st.sampled_from([0.0, 0.0, 0.05]),
        }
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=9))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(len(rows), vocab_size) * 3
    if data.draw(st.booleans()):
        logits = logits.bfloat16().float()  # many ties
    seeds, positions = torch.randint(0, 2**62, (len(rows),)), torch.randint(0, 5000, (len(rows),))
    together = draw_rows(sample_tokens, logits, rows, seeds, positions)
    order = torch.randperm(len(rows))
    shuffled = draw_rows(
        sample_tokens, logits[order], [rows[i] for i in order], seeds[order], positions[order]
    )
    assert torch.equal(shuffled, together[order])
    alone = [
        draw_rows(sample_tokens, logits[i, None], [rows[i]], seeds[i, None], positions[i, None])
        for i in range(len(rows))
    ]
    assert torch.equal(torch.cat(alone), together)
    reference = next(
        i.function for i in registry.implementations("sample_tokens") if i.name == "reference"
    )
    assert torch.equal(draw_rows(reference, logits, rows, seeds, positions), together)


@each("sample_tokens")
def test_a_row_with_nan_does_not_affect_others(sample_tokens):
    torch.manual_seed(5)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}):
        for vocab_size in (40, 3000):
            logits = torch.randn(3, vocab_size)
            before = draw_rows(sample_tokens, logits, [filters] * 3)
            logits[1, 7] = math.nan
            after = draw_rows(sample_tokens, logits, [filters] * 3)
            assert torch.equal(after[[0, 2]], before[[0, 2]])
            assert 0 <= after[1] < vocab_size


@each("sample_tokens")
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}], ids=str
)
def test_rows_of_only_nan_give_a_valid_token(sample_tokens, filters):
    logits, ids = torch.full((2, 3000), math.nan), torch.arange(2)
    token_ids = sample_tokens(logits, *params([filters, filters]), ids, ids)
    assert ((token_ids >= 0) & (token_ids < 3000)).all()
