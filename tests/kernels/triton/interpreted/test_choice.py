"""Tokens and log-probabilities of all options together, in the interpreter: they have the bits of
the separate kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
from quire.kernels.choice import NOT_SCORED, OWN_LOGITS, LogitChanges
from quire.kernels.reference import grammar
from quire.kernels.reference import sampling as reference
from quire.kernels.triton import choice, logprobs, sampling
from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter

# numpy's warnings about masked lanes
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero) encountered:RuntimeWarning"
)
V = 1100


@pytest.fixture(autouse=True)
def two_chunks(monkeypatch):
    for module in (choice, sampling, logprobs):
        monkeypatch.setattr(module, "CHUNK", 1024)


def changes_of(rows: list[int], logits: torch.Tensor) -> tuple[LogitChanges, torch.Tensor]:
    """Changes of all kinds of some rows, and the logits that they give by the references."""
    expected, count = logits.clone(), len(rows)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (count, -(-V // 32)), dtype=torch.int32)
    edits = [torch.randperm(V)[: 600 if place == 0 else place] for place in range(count)]
    seen = [torch.randperm(V)[: 600 * (place % 2)] for place in range(count)]
    values = [torch.randn(len(tokens)) * 5 for tokens in edits]
    counts = [torch.randint(0, 3, (len(tokens),), dtype=torch.int32) for tokens in seen]
    penalties = torch.stack((torch.rand(count) + 0.5, torch.randn(count), torch.randn(count)), 1)
    for place, row in enumerate(rows):
        values[place][::3] = -math.inf
        expected[row, edits[place]] += values[place]
        factors = penalties[place].expand(len(seen[place]), 3).unbind(1)
        here = torch.full((len(seen[place]),), row)
        reference.apply_penalties(expected, here, seen[place], counts[place], *factors)
        if place != 1:
            words = bitmask[place : place + 1]
            grammar.apply_grammar_bitmask(expected, words, torch.tensor([row]))

    def starts(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([0, *map(len, parts)]).cumsum(0).int()

    masks = torch.arange(count)
    masks[1] = -1
    changes = LogitChanges(
        rows=torch.tensor(rows),
        raw_rows=torch.tensor([place - 1 for place in range(count)]),
        mask_rows=masks,
        bitmask=bitmask,
        edit_starts=starts(edits),
        edit_tokens=torch.cat(edits).int(),
        edit_values=torch.cat(values),
        penalty_starts=starts(seen),
        penalty_tokens=torch.cat(seen).int(),
        penalty_counts=torch.cat(counts),
        penalties=penalties,
    )
    return changes, expected


def test_all_changes_of_a_step_have_the_bits_of_the_separate_ones():
    torch.manual_seed(0)
    logits, rows = torch.randn(6, V + 3)[:, :V] * 4, [4, 0, 2, 5]
    changes, expected = changes_of(rows, logits)
    given, largest, raw = logits.clone(), torch.full((6,), -7), torch.empty(3, V)
    peaks = choice.change_logits(given, largest, raw, changes)
    assert torch.equal(given.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(peaks, expected[rows].amax(-1))
    assert largest[rows].tolist() == expected[rows].argmax(-1).tolist()
    assert largest[[1, 3]].tolist() == [-7, -7] and torch.equal(raw, logits[rows[1:]])


def test_rows_that_are_wholly_masked_or_not_finite_say_so():
    logits = torch.zeros(3, V)
    logits[0, 7], logits[2, V - 1] = math.nan, math.inf
    changes, _ = changes_of([0, 1, 2], torch.zeros(3, V))
    masks = torch.tensor([-1, 0, -1])
    none = torch.zeros(4, dtype=torch.int32)
    changes = changes._replace(
        raw_rows=torch.full((3,), -1),
        mask_rows=masks,
        bitmask=torch.zeros_like(changes.bitmask),
        edit_starts=none,
        penalty_starts=none,
    )
    largest = torch.zeros(3, dtype=torch.int64)
    peaks = choice.change_logits(logits, largest, torch.empty(0, V), changes)
    assert peaks[0].isnan() and peaks[1:].tolist() == [-math.inf, math.inf]
    assert int(largest.min()) >= 0 and int(largest.max()) < V


OPTIONS = [
    {"temperature": 0.0},
    {},
    {"temperature": 1.5},
    {"top_k": 30},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 200, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("kind", "k"), [("greedy", 0), ("drawn", 5), ("filtered", 0), ("filtered", 5)]
)
def test_tokens_and_log_probabilities_have_the_bits_of_the_separate_kernels(kind, k):
    torch.manual_seed(k)
    count = len(OPTIONS)
    neutral = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = [torch.tensor([(neutral | row)[name] for row in OPTIONS]) for name in neutral]
    logits = torch.randn(count, V + 3)[:, :V] * 2
    raw = torch.randn(2, V) * 2
    raw_rows = torch.tensor([OWN_LOGITS, 1, OWN_LOGITS, NOT_SCORED, 0, OWN_LOGITS, NOT_SCORED])
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (count,)), torch.arange(count) + 7
    largest, _ = sampling.argmax(logits)
    draws = [*columns, seeds, positions]
    if kind == "drawn":
        draws[1:4] = [None] * 3
    expected = largest if kind == "greedy" else sampling.sample_tokens(logits, *draws)
    given = choice.choose_tokens(
        logits, largest, *([None] * 6 if kind == "greedy" else draws), raw, raw_rows, k
    )
    assert torch.equal(given[0], expected)
    for row, raw_row in enumerate(raw_rows.tolist()):
        if raw_row != NOT_SCORED:
            values = logits[row : row + 1] if raw_row == OWN_LOGITS else raw[raw_row : raw_row + 1]
            scores = logprobs.gather_logprobs(values, expected[row : row + 1], k)
            for mine, theirs in zip(given[1:], scores, strict=True):
                assert torch.equal(mine[row : row + 1], theirs)
