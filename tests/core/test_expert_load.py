"""Figures of a layer's load, against hand-computed values."""

import pytest
from quire.core.observation import imbalance, unused


@pytest.mark.parametrize(
    ("tokens", "over_mean", "without"),
    [
        ([3, 3, 3, 3], 1.0, 0.0),
        ([8, 0, 0, 0], 4.0, 0.75),
        ([2, 4, 0], 2.0, 1 / 3),
        ([0, 0], 0.0, 1.0),
        ([5], 1.0, 0.0),
    ],
)
def test_of_a_layer(tokens, over_mean, without):
    assert imbalance(tokens) == over_mean and unused(tokens) == without
