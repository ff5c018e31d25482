"""The draw on a GPU, in the interpreter: the reference's tokens and filters; the noise has the same
bits up to its logarithms.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from quire.ipc.errors import InvalidParameterError
from quire.kernels.reference import sampling as reference
from quire.kernels.triton import noise, sampling
from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter

# numpy's warnings about masked lanes
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero) encountered:RuntimeWarning"
)

SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))  # TRITON_INTERPRET=1 pytest -m slow
NEUTRAL = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 50},
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


def columns(rows: list[dict]) -> list[torch.Tensor]:
    return [torch.tensor([(NEUTRAL | row)[name] for row in rows]) for name in NEUTRAL]


def numbers(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions that use all their bits."""
    return torch.randint(-(2**63), 2**63 - 1, (count,)), torch.randint(0, 2**40, (count,))


# ---------------------------------------------------------------- noise


@triton.jit
def uniform_kernel(seeds_ptr, positions_ptr, out_ptr, start, SIZE: tl.constexpr):
    row = tl.program_id(0)
    u = noise.uniform(start, tl.load(seeds_ptr + row), tl.load(positions_ptr + row), SIZE)
    tl.store(out_ptr + row * SIZE + tl.arange(0, SIZE), u)


def test_random_numbers_are_the_references_bits():
    torch.manual_seed(0)
    seeds, positions = numbers(6)
    out, start = torch.empty(6, 1024), 150_528
    uniform_kernel[(6,)](seeds, positions, out, start, SIZE=1024)
    quads = (start // 4 + torch.arange(256))[None, :]
    high, low = (
        (column[:, None] >> 32 & reference.WORD for column in (positions, seeds)),
        (c[:, None] & reference.WORD for c in (positions, seeds)),
    )
    (position_high, seed_high), (position_low, seed_low) = high, low
    words = reference.philox4x32(
        (quads, position_low, position_high, torch.zeros_like(quads)), (seed_low, seed_high)
    )
    words = torch.stack(words, dim=-1).flatten(1)
    assert torch.equal(out, words.float().add(0.5).mul(2**-32).clamp(max=reference.LARGEST_U))


@pytest.mark.parametrize("num_tokens", [1, 1025])
def test_noise_is_the_references(num_tokens):
    seeds, positions = numbers(3)
    given, expected = (
        noise.random_gumbel(seeds, positions, num_tokens),
        reference.random_gumbel(seeds, positions, num_tokens),
    )
    torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)


@triton.jit
def gumbel_kernel(u_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, noise.gumbel(tl.load(u_ptr + i)))


def test_noise_is_exact_over_the_whole_range_of_u():
    """In fp64, from the smallest u to the largest: within a few roundings of the noise, or of its
    logarithm where that is near 0.
    """
    u = torch.cat(
        (
            2.0 ** -torch.linspace(0.01, 33, 4000),
            1 - 2.0 ** -torch.arange(1, 25),
            torch.tensor([2**-33, 2**-25, 2**-24, 0.5]),
        )
    )
    u = torch.nn.functional.pad(u, (0, 4096 - len(u)), value=0.3).clamp(2**-33, reference.LARGEST_U)
    out = torch.empty(4096)
    gumbel_kernel[(1,)](u, out, SIZE=4096)
    expected = -torch.log(-torch.log1p(-u.double()))
    assert ((out - expected).abs() / expected.abs().clamp(min=1)).max() < 3e-7


# ---------------------------------------------------------------- filters


def kept(logits: torch.Tensor, filters: list[dict]) -> torch.Tensor:
    """[rows, V] bool: what top_k, top_p and min_p keep, computed from the kernels' results."""
    temperature, top_k, top_p, min_p = columns(filters)
    draw = sampling.Draw(temperature, top_k, top_p, min_p, *numbers(len(logits)))
    _, last_kept = sampling.choose(logits, sampling.argmax(logits)[0], draw)
    has_one = (top_k > 0) & (top_k < logits.shape[1]) | (top_p < 1)
    last_kept = torch.where(has_one, last_kept, -(2**63))
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | (
        0x7FFFFFFF - torch.arange(logits.shape[1])
    )
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    return (order >= last_kept[:, None]) & (scaled.double().exp() >= min_p[:, None])


def references(logits: torch.Tensor, filters: list[dict]) -> torch.Tensor:
    order = logits.argsort(dim=-1, descending=True, stable=True)
    scaled = (logits - logits.amax(-1, keepdim=True)) / columns(filters)[0][:, None]
    return torch.stack(
        [reference.keep_tokens(*row) for row in zip(scaled, order, *columns(filters)[1:])]
    )


def random_filters(count: int, vocab_size: int) -> list[dict]:
    """Includes the limits: top_k of 1, V - 1, V and more; top_p next to 0 and 1, and multiples of
    one half, which flat rows reach exactly.
    """

    def one(*values: float) -> float:
        return values[int(torch.randint(len(values), ()))]

    rows = []
    for _ in range(count):
        top_k = one(
            0,
            -1,
            1,
            2,
            vocab_size - 1,
            vocab_size,
            vocab_size + 1,
            int(torch.randint(1, vocab_size + 1, ())),
        )
        top_p = one(1.0, 1.0, 0.5, 0.25, 1e-8, 1 - 2**-24, float(torch.rand(())))
        rows.append(
            {
                "temperature": one(0.01, 0.7, 1.0, 5.0),
                "top_k": top_k,
                "top_p": top_p,
                "min_p": one(0.0, 0.0, 1.0, 0.05),
            }
        )
    return rows


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("vocab_size", "count"), [(2, 8), (13, 24), (70, 24), pytest.param(40, 2000, marks=SLOW)]
)
def test_the_same_tokens_are_kept(vocab_size, count):
    """Rows of random numbers, of few different ones, of a single one, and nearly all masked."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(count, vocab_size) * 3
    logits[1::4] = logits[1::4].round()
    logits[2::4] = 0.0
    logits[3::4, : vocab_size // 2] = -math.inf
    logits[5, 1:] = -math.inf
    filters = random_filters(count, vocab_size)
    given, expected = kept(logits, filters), references(logits, filters)
    wrong = [
        (filters[row], logits[row])
        for row in (given != expected).any(-1).nonzero().flatten().tolist()
    ]
    assert not wrong, wrong[0]


def test_a_row_that_does_not_fit_the_list_is_searched_in_full(monkeypatch):
    monkeypatch.setattr(sampling, "CAPACITY", 4)
    torch.manual_seed(4)
    logits = torch.randn(8, 3000)
    logits[::2] = logits[::2].bfloat16().float()
    filters = [
        {"top_k": 5},
        {"top_k": 900},
        {"top_p": 0.9},
        {"top_p": 0.5, "min_p": 0.2},
        {"top_k": 700, "top_p": 0.9},
    ] + [{"top_p": 0.3}] * 3
    assert torch.equal(kept(logits, filters), references(logits, filters))


# ---------------------------------------------------------------- draws


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("vocab_size", "scale", "some"),
    [(1, 3, FILTERS[::4]), (65, 30, FILTERS), (1000, 0.3, FILTERS), (4099, 3, FILTERS[1::3])],
)
def test_the_reference_samples_the_same_tokens(vocab_size, scale, some):
    """Rows of all kinds together, with ties, and with gaps between rows.

    A row alone gets the same token.
    """
    torch.manual_seed(vocab_size)
    logits = (scale * torch.randn(len(some), vocab_size + 5))[:, :vocab_size]
    logits[:, vocab_size // 2 :] = logits[:, vocab_size // 2 :].bfloat16().float()
    seeds, positions = numbers(len(some))
    drawn = sampling.sample_tokens(logits, *columns(some), seeds, positions)
    assert torch.equal(drawn, reference.sample_tokens(logits, *columns(some), seeds, positions))
    alone = sampling.sample_tokens(logits[1:2], *columns(some[1:2]), seeds[1:2], positions[1:2])
    assert torch.equal(alone, drawn[1:2])


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("vocab_size", [1, 4099])
def test_without_filters_the_same_with_less_work(vocab_size):
    torch.manual_seed(vocab_size)
    rows = [{"temperature": temperature} for temperature in (0.01, 0.0, 0.7, 1.0, 30.0)]
    logits, (temperature, *filters) = torch.randn(5, vocab_size) * 3, columns(rows)
    logits[3, 1:] = -math.inf
    seeds, positions = numbers(5)
    drawn = sampling.sample_tokens(logits, temperature, None, None, None, seeds, positions)
    assert torch.equal(
        drawn, sampling.sample_tokens(logits, temperature, *filters, seeds, positions)
    )
    assert torch.equal(
        drawn, reference.sample_tokens(logits, temperature, None, None, None, seeds, positions)
    )


def test_rows_that_are_nearly_or_wholly_masked():
    """With all filters, a masked token is not drawn. A row that is completely invalid only has to
    give a valid id, and does not affect others.
    """
    some, vocab_size = [FILTERS[i] for i in (0, 2, 5, 7, 12)], 4100
    logits = torch.full((len(some) + 3, vocab_size), -math.inf)
    logits[:, [40, vocab_size - 1]] = torch.tensor([-3.0, -3.5])
    for row, bad in enumerate((math.inf, -math.inf, math.nan)):
        logits[len(some) + row] = bad
    rows = some + [{"top_p": 0.5}, {}, {"top_k": 3}]
    drawn = sampling.sample_tokens(logits, *columns(rows), *numbers(len(rows)))
    assert set(drawn[: len(some)].tolist()) <= {40, vocab_size - 1}
    assert int(drawn.min()) >= 0 and int(drawn.max()) < vocab_size


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_rows():
    torch.manual_seed(6)
    logits = torch.randn(2000, 90) * torch.rand(2000, 1) * 8
    logits[::3] = logits[::3].bfloat16().float()
    filters, (seeds, positions) = random_filters(2000, 90), numbers(2000)
    drawn = sampling.sample_tokens(logits, *columns(filters), seeds, positions)
    assert torch.equal(drawn, reference.sample_tokens(logits, *columns(filters), seeds, positions))


def test_a_vocabulary_too_large_for_the_masses_is_refused():
    with pytest.raises(InvalidParameterError, match="fewer than 524288 tokens"):
        sampling.sample_tokens(torch.zeros(1, 2**19), *columns([{}]), *numbers(1))


def test_nothing_is_drawn_from_no_rows():
    none = torch.zeros(0, dtype=torch.int64)
    assert sampling.sample_tokens(
        torch.zeros(0, 9), *(torch.zeros(0) for _ in range(4)), none, none
    ).shape == (0,)
    assert [len(column) for column in sampling.argmax(torch.zeros(0, 9))] == [0, 0]


@pytest.mark.parametrize("vocab_size", [1, 65, 9000])
def test_argmax_is_the_lowest_index_of_the_largest(vocab_size):
    """Over ties, with -inf and NaN anywhere; rows whose stride is not their length."""
    torch.manual_seed(vocab_size)
    logits = torch.randint(-9, 9, (9, vocab_size + 3)).float()[:, :vocab_size]
    logits[0] = torch.where(torch.rand(vocab_size) < 0.5, 0.0, -0.0)
    logits[1], logits[2], logits[3, vocab_size - 1] = -math.inf, -4.5, 99.0
    for row, bad in ((5, math.inf), (6, -math.inf), (7, math.nan)):
        logits[row, torch.randint(0, vocab_size, ())] = bad
    token_ids, is_finite = sampling.argmax(logits)
    assert token_ids.dtype == torch.int64 and torch.equal(is_finite, logits.isfinite().all(-1))
    rows = [0, 1, 2, 3, 4, 5, 6, 8]
    assert token_ids[rows].tolist() == [
        logits[row].tolist().index(max(logits[row].tolist())) for row in rows
    ]
    assert 0 <= token_ids[7] < vocab_size
