"""Pooling modes against their formulas, and chunks against whole prompts, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from quire.executor.pooling.modes import MODES, Collected, make_modes

ROWS = np.random.default_rng(1).standard_normal((37, 24)).astype(np.float32)


def collect(names, rows, chunks, is_by_token=False) -> np.ndarray:
    collected = Collected(make_modes(names), is_by_token)
    start = 0
    for chunk in chunks:
        collected.take(rows[start : start + chunk], len(rows))
        start += chunk
    return collected.result()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cls", ROWS[0]),
        ("lasttoken", ROWS[-1]),
        ("max", ROWS.max(0)),
        ("mean", ROWS.astype(float).mean(0)),
        ("mean_sqrt_len_tokens", ROWS.astype(float).sum(0) / np.sqrt(37)),
        ("weightedmean", np.average(ROWS.astype(float), axis=0, weights=np.arange(1, 38))),
    ],
)
def test_a_mode_is_its_formula(name, expected):
    np.testing.assert_allclose(collect([name], ROWS, [37]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("chunks", [[1] * 37, [16, 16, 5], [36, 1], [1, 36]])
@pytest.mark.parametrize("size", [2, 24])
def test_chunks_change_no_bit(name, chunks, size):
    rows = ROWS[:, :size]
    assert collect([name], rows, chunks).tobytes() == collect([name], rows, [37]).tobytes()


def test_several_modes_are_concatenated():
    both = collect(["mean", "max"], ROWS, [30, 7])
    assert (
        both.tobytes()
        == np.concatenate([collect([n], ROWS, [37]) for n in ("mean", "max")]).tobytes()
    )


def test_by_token_all_rows_are_kept():
    assert collect(["mean"], ROWS, [30, 7], is_by_token=True).tobytes() == ROWS.tobytes()
