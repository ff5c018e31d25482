"""random_gumbel in every implementation: Philox numbers, noise, moments."""

import math

import pytest
import torch
from quire.kernels.reference.sampling import philox4x32
from quire.tests.kernels.implementations import each
from torch import Tensor


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors, the lines "philox4x32 10"
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter, key, expected):
    def words(text: str) -> tuple[Tensor, ...]:
        return tuple(torch.tensor([int(word, 16)]) for word in text.split())

    assert [int(word) for word in philox4x32(words(counter), words(key))] == [
        int(word, 16) for word in expected.split()
    ]


@each("random_gumbel")
def test_gumbel_noise_is_the_documented_function_of_its_words(random_gumbel):
    """Every element against Python's integers and doubles. Seeds and positions also use their high
    words.
    """
    seeds, positions = torch.tensor([0, 2**63 - 1, 5 + 2**40]), torch.tensor([0, 2**33 + 7, 9])
    noise = random_gumbel(seeds, positions, 11)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist())):
        for token in range(11):
            word = python_philox(
                [token // 4, position % 2**32, position >> 32, 0], [seed % 2**32, seed >> 32]
            )[token % 4]
            u = min((word + 0.5) * 2**-32, 1 - 2**-24)
            assert noise[row, token].item() == pytest.approx(
                -math.log(-math.log1p(-u)), rel=1e-5, abs=1e-6
            )


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    for i in range(10):
        if i:
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        high0, low0 = divmod(counter[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(counter[2] * 0xCD9E8D57, 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
    return counter


@each("random_gumbel")
def test_gumbel_noise_has_its_moments_and_no_infinities(random_gumbel):
    noise = random_gumbel(torch.arange(64), torch.arange(64) * 31, 4096).double()
    assert noise.isfinite().all()
    # Euler's constant; the mean's own deviation is 0.0025
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    neighbours = torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))[
        0, 1
    ]
    assert abs(neighbours) < 0.01


@each("random_gumbel")
def test_more_tokens_do_not_change_the_first_ones(random_gumbel):
    seeds, positions = torch.tensor([3, 4]), torch.tensor([8, 9])
    torch.testing.assert_close(
        random_gumbel(seeds, positions, 6), random_gumbel(seeds, positions, 99)[:, :6]
    )
