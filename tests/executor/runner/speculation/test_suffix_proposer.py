"""Suffix decoding against its definition, written as loops."""

from __future__ import annotations

import random

import numpy as np
from quire.executor.runner.speculation import suffix_proposer
from quire.executor.runner.speculation.suffix_proposer import SuffixProposer


def followed(
    texts: list[list[int]], tokens: list[int], depth: int, count: int, factor: float, least: float
) -> list[int]:
    """What follows the longest end of `tokens` most often; texts[0] is `tokens` itself, whose
    matches are taken where another text has none that is longer.
    """
    matches: list[tuple[int, int, int]] = []  # (length, of the own text, place)
    for number, text in enumerate(texts):
        for place in range(len(text) - (number == 0)):
            length = 0
            while (
                length < min(depth, len(tokens), place + 1)
                and text[place - length] == tokens[-1 - length]
            ):
                length += 1
            matches.append((length, number == 0, place + 1000 * number))
    if not matches:
        return []
    length, is_own, _ = max(matches, key=lambda of: of[:2])
    if length < 2:
        return []
    places = [at for of, own, at in reversed(matches) if (of, own) == (length, is_own)]
    draft, probability = [], 1.0
    while len(draft) < min(count, int(factor * length)):
        places = [at + 1 for at in places if at % 1000 + 1 < len(texts[at // 1000])]
        following = [texts[at // 1000][at % 1000] for at in places]
        if not following:
            break
        token = max(following, key=following.count)
        probability *= following.count(token) / len(following)
        if probability < least:
            break
        draft.append(token)
        places = [at for at, other in zip(places, following) if other == token]
    return draft


def test_suffixes_of_random_texts():
    rng = random.Random(2)
    num_found = num_others = 0
    for _ in range(1500):
        words = range(rng.choice([3, 6, 20]))
        others = [rng.choices(words, k=rng.randint(1, 12)) for _ in range(rng.randint(0, 5))]
        tokens = rng.choices(words, k=rng.randint(1, 20))
        depth, count = rng.randint(2, 6), rng.randint(1, 8)
        factor, least = rng.choice([0.5, 1.0, 2.0]), rng.choice([0.0, 0.3, 0.6])
        proposer = SuffixProposer(depth, 100, factor, least)
        for other in others:
            proposer.remember(np.array(other, np.int32), "salt")
        known = np.array(tokens, np.int32)
        found = proposer.propose(known, count, "salt").tolist()
        assert found == followed([tokens, *others], tokens, depth, count, factor, least)
        alone = proposer.propose(known, count, None).tolist()
        assert alone == followed([tokens], tokens, depth, count, factor, least)
        num_found += bool(found)
        num_others += found != alone
    assert num_found > 300 and num_others > 50


def draft_of(proposer: SuffixProposer, *tokens: int) -> list[int]:
    return proposer.propose(np.array(tokens, np.int32), 8, None).tolist()


def test_the_oldest_outputs_are_forgotten(monkeypatch):
    proposer = SuffixProposer(8, 2, 1.0, 0.0)
    for first in (1, 2, 3):
        proposer.remember(np.arange(10 * first, 10 * first + 8, dtype=np.int32), None)
    assert draft_of(proposer, 11, 12) == []
    assert draft_of(proposer, 21, 22) == [23, 24] and draft_of(proposer, 31, 32) == [33, 34]
    forgetful = SuffixProposer(8, 0, 1.0, 0.0)
    forgetful.remember(np.arange(9, dtype=np.int32), None)
    assert draft_of(forgetful, 3, 4) == []

    monkeypatch.setattr(suffix_proposer, "MOST_TOKENS", 64)
    monkeypatch.setattr(suffix_proposer, "MOST_SALTS", 3)
    rng, proposer, remembered = random.Random(3), SuffixProposer(8, 1000, 1.0, 0.0), []
    for number in range(300):
        output = rng.choices(range(1000), k=rng.randint(0, 30 if number % 50 else 100))
        proposer.remember(np.array(output, np.int32), None)
        remembered.append(output)
        if len(output) > 9:  # the end of the latest one is known
            assert draft_of(proposer, *output[-6:-3])[:3] == output[-3:]
    assert draft_of(proposer, *remembered[0][:3]) == []
    for salt in "abc":
        proposer.remember(np.arange(9, dtype=np.int32), salt)
    assert draft_of(proposer, *output[-6:-3]) == []
    assert len(proposer.propose(np.array([3, 4], np.int32), 8, "a")) == 2
