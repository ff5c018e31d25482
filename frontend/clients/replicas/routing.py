"""Chooses the replica of a request, from numbers of tokens and from what each has computed before.

Must not know: clients, engines, requests.

A request costs a replica what it must compute before the request's first token: the prompts that
wait there, as far as their owners' turns come first, and the part of the request's own prompt that
is not in its prefix cache. Requests that run there take part of each step. The cheapest replica is
chosen; a cached prefix counts only on a replica that is not far above the mean load.

The choice between cached and balanced is that of Preble (arXiv 2407.00023). The bound is that of
consistent hashing with bounded loads (arXiv 1608.01350).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

# Each of a prompt's first NUM_FINE keys stands for FINE_TOKENS tokens, and each later one for
# COARSE_TOKENS.
FINE_TOKENS, NUM_FINE, COARSE_TOKENS = 16, 32, 64
MAX_CANDIDATES = 8  # replicas with the longest cached prefix that are compared
# A token of a running request's context costs as much as this part of a token of a prompt that
# waits.
RUNNING_WEIGHT = 1 / 32
# A cached prefix attracts requests up to this multiple of the mean load, and the slack above it.
MAX_IMBALANCE, SLACK_TOKENS = 1.5, 4096
# These are added to the load of a replica that has no room in its steps, is being replaced, or is
# lost.
FULL, REPLACED, LOST = 1e12, 1e15, inf


def num_tokens_of(num_keys: int) -> int:
    """Returns the tokens that so many keys of a prompt stand for."""
    return FINE_TOKENS * min(num_keys, NUM_FINE) + COARSE_TOKENS * max(0, num_keys - NUM_FINE)


def prefix_keys(token_ids: Sequence[int], salt: object = None) -> list[int]:
    """Returns a key for the end of each piece of a prompt, which stands for all tokens up to there.

    Prompts share keys only with an equal `salt` (hashable).
    """
    key, keys, start = hash(salt), [], 0
    for size, most in ((FINE_TOKENS, NUM_FINE), (COARSE_TOKENS, len(token_ids))):
        for end in range(start + size, min(len(token_ids), start + size * most) + 1, size):
            key = hash((key, *token_ids[end - size : end]))
            keys.append(key)
        start += size * most
    return keys


def fair_wait(
    queued: float, own: float, num_tokens: float, others: float, weight: float = 1.0
) -> float:
    """Returns the tokens that are computed before those of a new request, where owners take turns.

    queued: tokens that wait; own: those of the request's owner; num_tokens: the request's own;
    others: the weights of the owners of the rest; weight: its owner's. Meanwhile the others get at
    most what their weights say.
    """
    return own + min(queued - own, others / weight * (own + num_tokens))


def cost(wait: float, num_uncached: float, running: float) -> float:
    """Returns what precedes the first token of a request, in tokens."""
    return wait + num_uncached + RUNNING_WEIGHT * running


def most_load(mean_load: float) -> float:
    """Returns the load up to which a replica is chosen for its cached prefix."""
    return MAX_IMBALANCE * mean_load + SLACK_TOKENS


class PrefixTable:
    """Estimates which prefixes each replica has in its prefix cache.

    capacity: the number of tokens that a replica holds. The least recently used ones are dropped. A
    replica that holds a key holds all keys before it in a prompt, because those are never older.
    """

    def __init__(self, num_replicas: int, capacity: int):
        self._capacity = capacity
        # A key maps to the number of tokens between it and the one before it.
        self._keys: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(num_replicas)]
        self._num_tokens = [0] * num_replicas
        self._holders: dict[int, dict[int, None]] = {}  # key -> replicas

    def note(self, replica: int, keys: Sequence[int]) -> None:
        """Notes that the replica computes a prompt with these keys."""
        own, num_new = self._keys[replica], 0
        for index in range(len(keys) - 1, -1, -1):
            key = keys[index]
            if key in own:
                own.move_to_end(key)
            else:
                own[key] = size = FINE_TOKENS if index < NUM_FINE else COARSE_TOKENS
                num_new += size
                self._holders.setdefault(key, {})[replica] = None
        self._num_tokens[replica] += num_new
        while self._num_tokens[replica] > self._capacity:
            key, size = own.popitem(last=False)
            self._num_tokens[replica] -= size
            self._drop(replica, key)

    def forget(self, replica: int) -> None:
        """Notes that the replica has lost its prefix cache."""
        for key in self._keys[replica]:
            self._drop(replica, key)
        self._keys[replica].clear()
        self._num_tokens[replica] = 0

    def _drop(self, replica: int, key: int) -> None:
        holders = self._holders[key]
        del holders[replica]
        if not holders:
            del self._holders[key]

    def num_held(self, replica: int, keys: Sequence[int]) -> int:
        """Returns how many of a prompt's keys the replica holds."""
        own = self._keys[replica]
        return bisect_left(keys, True, key=lambda key: key not in own)

    def longest(self, keys: Sequence[int]) -> dict[int, int]:
        """Returns the replicas that hold most of a prompt's keys, at most MAX_CANDIDATES, with how
        many.
        """
        found: dict[int, int] = {}
        depth = bisect_left(keys, True, key=lambda key: key not in self._holders)
        while depth and len(found) < MAX_CANDIDATES:
            holders = self._holders[keys[depth - 1]]
            for replica in islice(holders, MAX_CANDIDATES):
                found.setdefault(replica, depth)
            # This is the next depth at which other replicas hold the prefix, too.
            num_known = len(holders)
            depth = bisect_left(
                keys, True, 0, depth, key=lambda key: len(self._holders[key]) <= num_known
            )
        return found


@dataclass(slots=True, eq=False)
class Load:
    """What a request adds to its replica."""

    replica: int
    owner: str
    num_tokens: float  # of its prompt
    num_uncached: float  # of these, to compute
    is_running: bool = False  # it has its first token


@dataclass(slots=True, eq=False)
class Owner:
    """One who has requests, and what they add to each replica."""

    weight: float
    num_on: list[int]  # prompts that have not ended, by replica
    queued: list[float]  # tokens of prompts without a first token, by replica
    loads: list[float]  # as Router's bases
    num_prompts: int = 0  # that have not ended


class Router:
    """The loads of `num_replicas` replicas, and the choice between them.

    capacity_tokens: the size of a replica's prefix cache. max_num_seqs: the most requests in a step
    of a replica.
    """

    def __init__(self, num_replicas: int, capacity_tokens: int, max_num_seqs: int):
        self.prefixes = PrefixTable(num_replicas, capacity_tokens)
        self._max_num_seqs = max_num_seqs
        self._queued = [0.0] * num_replicas  # tokens of prompts without a first token
        self._running = [0.0] * num_replicas  # tokens of the context of running requests
        self._num_requests = [0] * num_replicas
        self._bases = [0.0] * num_replicas  # loads from these tokens
        self._total = 0.0  # of the bases
        self._states = [0.0] * num_replicas  # 0.0, REPLACED or LOST
        self._loads = [0.0] * num_replicas  # what `min` compares
        self._owners: dict[str, Owner] = {}  # those with requests
        self._weights = [0.0] * num_replicas  # of the owners with queued prompts

    def set_state(self, replica: int, state: float) -> None:
        """Sets whether the replica takes requests. With 0.0 it does, with REPLACED only if no other
        one does, and with LOST never.
        """
        self._states[replica] = state
        self._change(replica)

    def place(
        self,
        keys: Sequence[int],
        num_tokens: int,
        owner: str = "",
        num_requests: int = 1,
        replica: int | None = None,
        weight: float = 1.0,
    ) -> Load:
        """Chooses the replica of a prompt of `num_tokens` tokens with these keys, unless it is
        given, and adds the prompt there.

        num_requests: the completions that it will have. weight: of an owner without requests, who
        keeps it until the last of them ends.
        """
        if owner not in self._owners:
            num = len(self._loads)
            self._owners[owner] = Owner(weight, [0] * num, [0.0] * num, [0.0] * num)
        self._owners[owner].num_prompts += 1
        if replica is None:
            replica, num_held = self.choose(keys, num_tokens, owner)
        else:
            num_held = self.prefixes.num_held(replica, keys)
        num_uncached = max(1, num_tokens - num_tokens_of(num_held))
        load = Load(replica, owner, num_tokens, num_uncached)
        self.prefixes.note(replica, keys)
        self._num_requests[replica] += num_requests
        self._owners[owner].num_on[replica] += 1
        self._add(load, num_uncached, 0.0)
        return load

    def choose(self, keys: Sequence[int], num_tokens: int, name: str) -> tuple[int, int]:
        """Returns the replica for a prompt of this owner, and how many of the keys it holds.

        It compares the replica with the least load, those that hold most of the prompt, and, if
        there are several owners, the one with the least load by this owner. Each engine is fair
        between owners, so shares are right if every owner waits wherever others do.
        """
        loads, owner = self._loads, self._owners.get(name)
        least = loads.index(min(loads))
        candidates, most = self.prefixes.longest(keys), most_load(self._total / len(loads))
        candidates = {one: held for one, held in candidates.items() if self._bases[one] <= most}
        if owner is not None and len(self._owners) > 1 and min(owner.loads) < owner.loads[least]:
            fewest = min(zip(owner.loads, loads, range(len(loads))))[2]
            if fewest not in candidates:
                candidates[fewest] = self.prefixes.num_held(fewest, keys)
        if not candidates:
            return least, 0
        best, best_held = least, self.prefixes.num_held(least, keys)
        lowest = self._reserved_for(best, owner), self._cost(best, best_held, num_tokens, owner)
        for replica, num_held in candidates.items():
            reserved = self._reserved_for(replica, owner)
            if reserved <= lowest[0]:
                value = reserved, self._cost(replica, num_held, num_tokens, owner)
                if value < lowest:
                    best, best_held, lowest = replica, num_held, value
        return best, best_held

    def _reserved(self, replica: int) -> float:
        is_full = self._num_requests[replica] >= self._max_num_seqs
        return self._states[replica] + (FULL if is_full else 0.0)

    def _reserved_for(self, replica: int, owner: Owner | None) -> float:
        """Returns what `_reserved` does, and more if the replica is full and the owner has its
        share of it.
        """
        reserved = self._reserved(replica)
        if owner is None or reserved != FULL:
            return reserved
        others = self._weights[replica] - (owner.weight if owner.queued[replica] else 0.0)
        share = self._max_num_seqs * owner.weight / (owner.weight + others)
        has_share = others > 0 and owner.num_on[replica] >= share
        return reserved + (FULL if has_share else 0.0)

    def _cost(self, replica: int, num_held: int, num_tokens: int, owner: Owner | None) -> float:
        num_uncached = num_tokens - num_tokens_of(num_held)
        own, weight, others = 0.0, 1.0, self._weights[replica]
        if owner is not None:
            own, weight = owner.queued[replica], owner.weight
            others -= weight if own else 0.0
        wait = fair_wait(self._queued[replica], own, num_uncached, others, weight)
        return cost(wait, num_uncached, self._running[replica])

    def begin(self, load: Load) -> None:
        """Notes that the request has its first token."""
        if not load.is_running:
            load.is_running = True
            self._add(load, -load.num_uncached, load.num_tokens)

    def end(self, load: Load, num_requests: int = 1, *, is_last: bool = True) -> None:
        """Notes that so many of the request's completions have ended. With `is_last` none is
        left.
        """
        self._num_requests[load.replica] -= num_requests
        if not is_last:
            return self._change(load.replica)
        if load.is_running:
            self._add(load, 0.0, -load.num_tokens)
        else:
            self._add(load, -load.num_uncached, 0.0)
        owner = self._owners[load.owner]
        owner.num_prompts -= 1
        owner.num_on[load.replica] -= 1
        if not owner.num_prompts:
            del self._owners[load.owner]

    def _add(self, load: Load, queued: float, running: float) -> None:
        """Adds tokens to the prompts that wait, and to the context of those that run."""
        replica, owner = load.replica, self._owners[load.owner]
        self._queued[replica] += queued
        self._running[replica] += running
        owner.loads[replica] += queued + RUNNING_WEIGHT * running
        before = owner.queued[replica]
        after = owner.queued[replica] = before + queued
        self._weights[replica] += owner.weight * ((after > 0) - (before > 0))
        self._change(replica)

    def _change(self, replica: int) -> None:
        base = self._queued[replica] + RUNNING_WEIGHT * self._running[replica]
        self._total += base - self._bases[replica]
        self._bases[replica] = base
        self._loads[replica] = base + self._reserved(replica)

    def num_requests(self, replica: int) -> int:
        """Returns the number of its unfinished completions."""
        return self._num_requests[replica]
