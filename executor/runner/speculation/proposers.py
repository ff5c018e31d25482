"""Proposes tokens that may come next, as drafts.

Must not know: the model, how a draft is verified, requests beyond their tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np

NOTHING = np.empty(0, np.int32)


class Proposer(Protocol):
    def propose(self, token_ids: np.ndarray, num_tokens: int, salt: Hashable) -> np.ndarray:
        """token_ids [N] i32, prompt and output of one request -> at most `num_tokens` that may
        follow, or none where no text suggests any. salt: only text of requests with an equal one
        may be seen; None: of those that have none.
        """
        ...

    def remember(self, output: np.ndarray, salt: Hashable) -> None:
        """output [N] i32: what a request has been answered since it entered its slot. It has left
        the slot.
        """
        ...


class NgramProposer:
    """Prompt lookup (Saxena 2023): what followed the last tokens where they stood before.

    Of the places where the longest end of the text stands, of `most` tokens at most and `least` at
    least, it takes the latest one. Each call reads the whole text with vector instructions, so
    there is no state to keep.
    """

    def __init__(self, least: int, most: int):
        self.least, self.most = least, most

    def remember(self, output: np.ndarray, salt: Hashable) -> None:
        pass

    def propose(self, token_ids: np.ndarray, num_tokens: int, salt: Hashable) -> np.ndarray:
        length = len(token_ids)
        # where the last token stands, except at the end
        places = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        num_equal = 1
        while num_equal < self.most and len(places):
            longer = places[places >= num_equal]
            longer = longer[token_ids[longer - num_equal] == token_ids[length - 1 - num_equal]]
            if not len(longer):
                break
            places, num_equal = longer, num_equal + 1
        if not len(places) or num_equal < self.least:
            return NOTHING
        start = int(places[-1]) + 1
        found = token_ids[start : start + num_tokens]
        if len(found) == num_tokens:
            return found
        # the place overlaps the end: the text repeats itself with this period
        return np.resize(token_ids[start:], num_tokens)


class FirstOf:
    """The first of `proposers` that finds something."""

    def __init__(self, *proposers: Proposer):
        self._proposers = proposers

    def propose(self, token_ids: np.ndarray, num_tokens: int, salt: Hashable) -> np.ndarray:
        for proposer in self._proposers:
            if len(found := proposer.propose(token_ids, num_tokens, salt)):
                return found
        return NOTHING

    def remember(self, output: np.ndarray, salt: Hashable) -> None:
        for proposer in self._proposers:
            proposer.remember(output, salt)
