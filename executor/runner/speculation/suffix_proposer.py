"""Proposes what followed the last tokens in this request and in earlier outputs (Oliaro et al.
2024, SuffixDecoding).

Must not know: the model, how a draft is verified, requests beyond their tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from itertools import pairwise

import numpy as np

from .proposers import NOTHING

MOST_PLACES = 64  # that are compared, the latest ones
MOST_TOKENS = 2**15  # remembered of one salt
MOST_SALTS = 64  # the least recently used ones are forgotten
LEAST_MATCH = 2  # tokens
NUM_HASHES = 2**14  # of pairs of tokens
END = -1  # stands behind each output


class SuffixProposer:
    """Of the places where the longest end of the text stands, it follows the most frequent tokens.

    Outputs are remembered by salt (InputBatch.salts), and a request sees those of its own salt
    alone: how fast it is must not tell what others were answered, and adapters answer differently.
    """

    def __init__(
        self, max_depth: int, max_requests: int, spec_factor: float, min_token_prob: float
    ):
        """max_depth: tokens of an end that are compared. max_requests: remembered, of one salt.
        spec_factor: most drafts per token that agrees. min_token_prob: of a draft and all before
        it, by how often they followed.
        """
        self._max_depth, self._max_requests = max_depth, max_requests
        self._spec_factor, self._min_token_prob = spec_factor, min_token_prob
        self._outputs: OrderedDict[Hashable, Outputs] = OrderedDict()  # by salt

    def propose(self, token_ids: np.ndarray, num_tokens: int, salt: Hashable) -> np.ndarray:
        own = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        found = self._longest(token_ids, own, token_ids)
        outputs = self._outputs.get(salt)
        if outputs is not None and len(token_ids) >= LEAST_MATCH:
            self._outputs.move_to_end(salt)
            places = outputs.places(int(token_ids[-2]), int(token_ids[-1]))
            other = self._longest(outputs.tokens, places, token_ids)
            if other[0] > found[0]:
                found = other
        length, text, places = found
        count = min(num_tokens, int(self._spec_factor * length))
        if length < LEAST_MATCH or not count:
            return NOTHING
        return self._follow(text, places, count)

    def remember(self, output: np.ndarray, salt: Hashable) -> None:
        """output [N] i32, all tokens that a request was answered."""
        if not len(output) or not self._max_requests:
            return
        if salt not in self._outputs:
            self._outputs[salt] = Outputs(self._max_requests)
            if len(self._outputs) > MOST_SALTS:
                self._outputs.popitem(last=False)
        self._outputs.move_to_end(salt)
        self._outputs[salt].add(output)

    def _longest(
        self, text: np.ndarray, places: np.ndarray, token_ids: np.ndarray
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """The most tokens that agree with the end of `token_ids` up to one of `places` in `text`,
        the text, and those of the places with as many, the latest first.
        """
        places = places[-MOST_PLACES:][::-1]
        if not len(places):
            return 0, text, places
        depth = min(self._max_depth, len(token_ids))
        index = places[:, None] - np.arange(depth)
        is_equal = (index >= 0) & (text[index] == token_ids[::-1][:depth])
        lengths = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        longest = int(lengths.max())
        return longest, text, places[lengths == longest]

    def _follow(self, text: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
        """At most `count` tokens after `places` in `text`: the most frequent one, then the most
        frequent one after it, and so on.
        """
        draft, probability = [], 1.0
        for _ in range(count):
            places = places + 1
            places = places[places < len(text)]
            tokens = text[places].tolist()
            followed = Counter(token for token in tokens if token != END)
            if not followed:
                break
            token, how_often = followed.most_common(1)[0]
            probability *= how_often / followed.total()
            if probability < self._min_token_prob:
                break
            draft.append(token)
            places = places[[token == other for other in tokens]]
        return np.array(draft, np.int32)


class Outputs:
    """The latest outputs of one salt, one after the other, and where each pair of tokens stands.

    The places of pairs with the same hash are a chain, as in zlib: `_latest` has the last one, and
    `_before` for each place the one before; 0 ends it. Memory is a fixed number of bytes, which are
    taken as they are written.
    """

    def __init__(self, max_requests: int):
        self.tokens = np.zeros(2 * MOST_TOKENS, np.int32)
        self._before = np.zeros(2 * MOST_TOKENS, np.int32)
        self._latest = np.zeros(NUM_HASHES, np.int32)
        self._starts: deque[int] = deque()  # of outputs in `tokens`, ascending
        self._end = 0
        self._max_requests = max_requests

    def add(self, output: np.ndarray) -> None:
        """output [N] i32; of a longer one than there is room for, the end is kept."""
        output = output[-(MOST_TOKENS - 1) :]
        if self._end + len(output) + 1 > len(self.tokens):
            self._move_to_front(len(output) + 1)
        self._append(output)
        if len(self._starts) > self._max_requests:
            self._starts.popleft()

    def places(self, token: int, next_token: int) -> np.ndarray:
        """Ascending: the latest places where `next_token` may stand after `token`."""
        oldest = self._starts[0] if self._starts else 0
        place, found = int(self._latest[_hash(token, next_token)]), []
        while place > oldest and len(found) < MOST_PLACES:
            found.append(place)
            place = int(self._before[place])
        return np.array(found[::-1], np.int64)

    def _append(self, output: np.ndarray) -> None:
        start = self._end
        self._starts.append(start)
        self._end = start + len(output) + 1
        self.tokens[start : self._end - 1] = output
        self.tokens[self._end - 1] = END
        known = output.tolist()
        for place, (token, next_token) in enumerate(pairwise(known), start + 1):
            key = _hash(token, next_token)
            self._before[place] = self._latest[key]
            self._latest[key] = place

    def _move_to_front(self, room: int) -> None:
        """Keeps the latest outputs that leave `room` in the first half of the space."""
        ends = [*list(self._starts)[1:], self._end]
        outputs = [self.tokens[start : end - 1].copy() for start, end in zip(self._starts, ends)]
        num_tokens, num_kept = room, 0
        for output in reversed(outputs):
            num_tokens += len(output) + 1
            if num_tokens > MOST_TOKENS:
                break
            num_kept += 1
        self._starts.clear()
        self._latest.fill(0)
        self._end = 0
        for output in outputs[len(outputs) - num_kept :]:
            self._append(output)


def _hash(token: int, next_token: int) -> int:
    return (token * 40503 + next_token * 9973) % NUM_HASHES
