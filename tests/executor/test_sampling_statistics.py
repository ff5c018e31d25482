"""Sampling frequencies against exact probabilities: every filter alone, and all pairs.

Tokens are sampled from one row of logits with many seeds, and the counts are compared by
chi-square. The seeds are fixed, so the result is deterministic. The limit is one that correct code
exceeds once in 30,000 tests. Every test also shows that it detects a missing filter.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from quire.executor.sampling.logits_processors import LoadedProcessor
from quire.executor.sampling.sampler import Sampler
from quire.tests.executor.stage_cases import MASKED, OPS, VOCAB_SIZE, StageRequest, make_batch

NUM_SLOTS, NUM_ROUNDS = 1024, 8
PROMPT, OUTPUT, EOS = [1, 2, 2, 7], [5, 6, 6], [4]
GRAMMAR = [0, 1, 2, 4, 5, 6, 8, 9, 11, 12, 14, 15, 17, 19, 20, 22]
RAMP = np.linspace(-1.0, 1.0, VOCAB_SIZE)
FILTERS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 1.9},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": 1.3},
    "logit_bias": {"logit_bias": {3: 2.5, 9: -3.0, 6: 1.0}},
    "allowed": {"allowed_token_ids": [0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 18, 21]},
    "bad_words": {"bad_words_token_ids": [[6, 9], [11], [5, 6, 0], [6, 6, 2]]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [8]},
    "mask": {"extra_args": {"grammar": True}},
    "processor": {"extra_args": {"ramp": True}},
}
PAIRS = list(combinations(FILTERS, 2))
# both keep a prefix of the same order, so the effect of one always contains that of the other
NESTED = ("top_k", "min_p")


class GrammarMask:
    """Takes the place of the grammar among the stages."""

    def enter(self, request) -> bool:
        return "grammar" in (request.sampling_params.extra_args or {})

    def leave(self, slot: int) -> None:
        pass

    def apply(self, logits, rows, slots, batch):
        others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in GRAMMAR]
        logits[torch.from_numpy(rows)[:, None], torch.tensor(others)] = MASKED


def make_ramp(params):
    ramp = torch.from_numpy(RAMP).float()
    return (
        (lambda prompt, output, logits: logits + ramp)
        if "ramp" in (params.extra_args or {})
        else None
    )


def params_of(*names: str) -> dict:
    merged: dict = {"temperature": 1.0}
    for name in names:
        extra_args = merged.get("extra_args", {}) | FILTERS[name].get("extra_args", {})
        merged |= {**FILTERS[name], "extra_args": extra_args}
    return merged


def make_logits() -> np.ndarray:
    """Return [VOCAB_SIZE] f32. Tokens that the filters affect are likely enough for a missing
    filter to be detected.
    """
    logits = 1.2 * np.random.default_rng(5).standard_normal(VOCAB_SIZE)
    logits[[4, 8, 9, 11, 0, 2, 5, 6]] = [1.6, 1.1, 1.9, 1.35, 1.45, 1.15, 1.75, 2.1]
    return logits.astype(np.float32)


def exact_probabilities(params: dict) -> np.ndarray:
    """Return [VOCAB_SIZE] f64, computed from the definitions in the documented order."""
    x = make_logits().astype(np.float64)
    if "grammar" in params.get("extra_args", {}):
        x[[token_id for token_id in range(VOCAB_SIZE) if token_id not in GRAMMAR]] = MASKED
    if "allowed_token_ids" in params:
        x[
            [
                token_id
                for token_id in range(VOCAB_SIZE)
                if token_id not in params["allowed_token_ids"]
            ]
        ] = MASKED
    for word in params.get("bad_words_token_ids", []):
        if [*OUTPUT, word[-1]][-len(word) :] == word and len(word) <= len(OUTPUT) + 1:
            x[word[-1]] = MASKED
    if len(OUTPUT) < params.get("min_tokens", 0):
        x[[*EOS, *params["stop_token_ids"]]] = MASKED
    for token_id, bias in params.get("logit_bias", {}).items():
        x[token_id] += bias
    if "ramp" in params.get("extra_args", {}):
        x += RAMP
    for token_id in set(PROMPT + OUTPUT):
        repetition = params.get("repetition_penalty", 1.0)
        x[token_id] = x[token_id] / repetition if x[token_id] > 0 else x[token_id] * repetition
    for token_id in OUTPUT:
        x[token_id] -= params.get("frequency_penalty", 0.0)
    x[list(set(OUTPUT))] -= params.get("presence_penalty", 0.0)
    weights = np.exp((x - x.max()) / params["temperature"])
    order = np.argsort(-weights, kind="stable")
    kept = [i for i in order.tolist() if weights[i] > 0 and weights[i] >= params.get("min_p", 0.0)]
    kept = kept[: params.get("top_k", 0) or None]
    mass_before = np.cumsum(weights[kept]) - weights[kept]
    kept = [
        i
        for i, before in zip(kept, mass_before)
        if before < params.get("top_p", 1.0) * weights[kept].sum()
    ]
    probabilities = np.zeros(VOCAB_SIZE)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def draw_counts(params: dict) -> np.ndarray:
    """Return [VOCAB_SIZE]: how often each token is sampled from the one row with NUM_SLOTS *
    NUM_ROUNDS seeds.
    """
    request = StageRequest(params, PROMPT, OUTPUT, EOS)
    batch = make_batch(
        *[request] * NUM_SLOTS,
        processors=[LoadedProcessor("tests:ramp", make_ramp)],
        first=[GrammarMask()],
        max_model_len=16,
    )
    slots, sampler, counts = np.arange(NUM_SLOTS), Sampler(OPS), np.zeros(VOCAB_SIZE, np.int64)
    for round_index in range(NUM_ROUNDS):
        batch.seeds[:] = slots + round_index * NUM_SLOTS
        # Each round needs a new array of slots: for the same array the cached parameters would be
        # used.
        output = sampler(
            torch.from_numpy(make_logits()).expand(NUM_SLOTS, -1).clone(), batch, slots.copy()
        )
        assert not output.errors
        counts += np.bincount(output.token_ids, minlength=VOCAB_SIZE)
    return counts


def chi_square_excess(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the chi-square statistic in standard deviations of the normal approximation of Wilson
    and Hilferty (1931). Above 4 the hypothesis is rejected. Cells with an expected count below five
    are merged. A sampled token of probability zero gives infinity.
    """
    if counts[probabilities == 0].any():
        return float("inf")
    expected = probabilities[probabilities > 0] * counts.sum()
    observed = counts[probabilities > 0]
    is_rare = expected < 5
    if is_rare.any():
        expected = np.append(expected[~is_rare], expected[is_rare].sum())
        observed = np.append(observed[~is_rare], observed[is_rare].sum())
    freedom = len(expected) - 1
    if freedom == 0:
        return 0.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


def test_the_statistic_has_published_quantiles():
    """The 0.999 quantiles of chi-square in tables are 3.09 standard deviations of the normal (two
    equal cells: one degree of freedom).
    """
    for freedom, quantile in ((1, 10.828), (5, 20.515), (20, 45.315)):
        expected = np.full(freedom + 1, 1000.0)
        observed = expected.copy()
        observed[:2] += np.array([1, -1]) * (quantile * 1000 / 2) ** 0.5
        assert chi_square_excess(observed, expected / expected.sum()) == pytest.approx(
            3.09, abs=0.12
        )
    assert chi_square_excess(np.array([5, 1, 0]), np.array([0.5, 0.0, 0.5])) == float("inf")


def test_without_filters():
    params = {"temperature": 1.0}
    assert abs(chi_square_excess(draw_counts(params), exact_probabilities(params))) < 4


@pytest.mark.parametrize("name", FILTERS)
def test_each_alone(name):
    counts = draw_counts(params_of(name))
    assert chi_square_excess(counts, exact_probabilities(params_of(name))) < 4
    assert chi_square_excess(counts, exact_probabilities({"temperature": 1.0})) > 8, (
        "the filter's absence would not be noticed"
    )


@pytest.mark.sampled(step=6)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs(pair):
    counts = draw_counts(params_of(*pair))
    assert chi_square_excess(counts, exact_probabilities(params_of(*pair))) < 4
    for name in pair if pair != NESTED else ():
        assert chi_square_excess(counts, exact_probabilities(params_of(name))) > 4, (
            f"{pair}: the other's absence would not be noticed"
        )


def test_all_at_once():
    # weaker, so that enough tokens remain to compare
    params = params_of(*FILTERS) | {"temperature": 1.5, "top_p": 0.95, "min_p": 0.05}
    counts = draw_counts(params)
    assert chi_square_excess(counts, exact_probabilities(params)) < 4
    assert np.count_nonzero(counts) >= 3
