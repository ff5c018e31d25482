"""A simulation of many replicas under conversations: engines with given step times, requests that
a rule routes, and how long their first tokens take.

Time within an engine is computed, not stepped: between two events all steps are equal, so a
thousand engines cost what their requests cost. Conversations are made when they begin, so a day
costs no more memory than those that go on at the same time, and two numbers per request.

    conversation ─▶ request ─▶ rule ─▶ engine: waits ─▶ prefill ─▶ first token ─▶ rows ─▶ end
         ▲                                                                              │
         └──────────────── thinks: the next turn continues the text ◀───────────────────┘
"""

from __future__ import annotations

import heapq
import math
import random
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from quire.frontend.clients.replicas.routing import (
    COARSE_TOKENS,
    FINE_TOKENS,
    NUM_FINE,
    Load,
    Router,
)


@dataclass(frozen=True)
class Machine:
    """An engine. A step takes `step_s`, and `token_s` for each of its tokens."""

    step_s: float = 0.020
    token_s: float = 0.0006
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    cache_tokens: int = 120_000


@dataclass(frozen=True)
class Traffic:
    """Conversations per second follow a day: a cosine around `rate`, times 1 ± `swing`.

    An application is a system prompt that its conversations share; some have many more than others.
    Lengths are in tokens, times in seconds.
    """

    rate: float
    day_s: float
    swing: float = 0.6
    num_applications: int = 20
    mean_turns: float = 6.0
    think_s: float = 15.0
    mean_message: float = 90.0
    mean_answer: float = 120.0


@dataclass(slots=True, eq=False)
class Turn:
    conversation: int
    application: int
    num_system: int  # tokens of the system prompt
    num_prompt: int
    num_answer: int
    arrival: float
    # turns after this one: seconds before it, tokens of its message, of its answer
    later: list[tuple[float, int, int]]
    num_cached: int = 0
    remaining: float = 0.0  # of the prompt, to compute
    load: Load | None = None


def num_keys(num_tokens: int) -> int:
    fine = FINE_TOKENS * NUM_FINE
    return min(num_tokens, fine) // FINE_TOKENS + max(0, num_tokens - fine) // COARSE_TOKENS


def keys_of(turn: Turn) -> list[int]:
    """As prefix_keys, of texts that do not exist: equal numbers stand for equal tokens."""
    num_shared, number = num_keys(turn.num_system), num_keys(turn.num_prompt)
    system = -(turn.application + 1) * 4096
    own = turn.conversation * 4096
    return [
        *range(system, system + num_shared),
        *range(own + num_shared, own + number),
    ]


class Engine:
    """Computes one prompt after the other, beside a token of each running request per step."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.now = self.step = 0.0  # seconds; steps since the start, a fraction within one
        self.waiting: deque[Turn] = deque()
        self.num_remaining = 0.0  # tokens of prompts
        self.rows: list[tuple[float, int, Turn]] = []  # heap by the step at which they end
        self.version = 0
        # tokens in the prefix cache, by conversation, and below 0 by application; oldest first
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._num_cached = 0

    def add(self, turn: Turn) -> None:
        key, system = turn.conversation, -1 - turn.application
        turn.num_cached = min(
            self._cached.get(key) or self._cached.get(system, 0), turn.num_prompt - 1
        )
        turn.remaining = turn.num_prompt - turn.num_cached
        self.num_remaining += turn.remaining
        self.waiting.append(turn)
        self._remember(key, turn.num_prompt)
        self._remember(system, turn.num_system)

    def _remember(self, key: int, num_tokens: int) -> None:
        self._num_cached += num_tokens - self._cached.pop(key, 0)
        self._cached[key] = num_tokens
        while self._num_cached > self.machine.cache_tokens:
            self._num_cached -= self._cached.popitem(last=False)[1]

    def _pace(self) -> tuple[float, float]:
        """Seconds of a step, and tokens of prompts in it."""
        machine, num_rows, chunk = self.machine, len(self.rows), 0.0
        if self.waiting and num_rows < machine.max_num_seqs:
            chunk = min(machine.max_num_batched_tokens - num_rows, max(1.0, self.num_remaining))
        return machine.step_s + machine.token_s * (num_rows + chunk), chunk

    def next_event(self) -> float:
        """When the next prompt or row ends; infinity if nothing runs."""
        step_s, chunk = self._pace()
        when = math.inf
        if chunk:
            when = self.now + max(1.0, self.waiting[0].remaining / chunk) * step_s
            if self.waiting[0].remaining < chunk:  # within the present step, with others
                when = self.now + self.waiting[0].remaining / chunk * step_s
        if self.rows:
            when = min(when, self.now + max(0.0, self.rows[0][0] - self.step) * step_s)
        return when

    def advance(self, until: float) -> tuple[list[Turn], list[Turn]]:
        """Returns the turns that have got their first token, and those that have ended."""
        first, ended = [], []
        while (when := self.next_event()) <= until + 1e-12:
            self._move(when)
            if self.rows and self.rows[0][0] <= self.step + 1e-9:
                turn = heapq.heappop(self.rows)[2]
                self._remember(turn.conversation, turn.num_prompt + turn.num_answer)
                ended.append(turn)
            elif self.waiting:
                turn = self.waiting.popleft()
                self.num_remaining -= turn.remaining
                turn.remaining = 0.0
                heapq.heappush(self.rows, (self.step + turn.num_answer, turn.conversation, turn))
                first.append(turn)
        self._move(until)
        return first, ended

    def _move(self, until: float) -> None:
        step_s, chunk = self._pace()
        steps = (until - self.now) / step_s
        self.now, self.step = until, self.step + steps
        if chunk:
            done = min(self.waiting[0].remaining, steps * chunk)
            self.waiting[0].remaining -= done
            self.num_remaining -= done


class Rule:
    """Round robin."""

    def __init__(self, number: int, machine: Machine):
        self.number, self.turn = number, 0

    def place(self, turn: Turn) -> int:
        self.turn += 1
        return self.turn % self.number

    def begin(self, turn: Turn) -> None: ...

    def end(self, turn: Turn) -> None: ...


class Sticky(Rule):
    """A conversation stays where a hash of its id says."""

    def place(self, turn: Turn) -> int:
        return hash((turn.conversation, "sticky")) % self.number


class Routed(Rule):
    """quire.frontend.clients.replicas.routing."""

    def __init__(self, number: int, machine: Machine):
        self.router = Router(number, machine.cache_tokens, machine.max_num_seqs)

    def keys(self, turn: Turn) -> list[int]:
        return keys_of(turn)

    def place(self, turn: Turn) -> int:
        turn.load = self.router.place(self.keys(turn), turn.num_prompt)
        return turn.load.replica

    def begin(self, turn: Turn) -> None:
        self.router.begin(turn.load)

    def end(self, turn: Turn) -> None:
        self.router.end(turn.load)


class LeastLoad(Routed):
    """The same loads without prefixes."""

    def keys(self, turn: Turn) -> list[int]:
        return []


RULES = {"round robin": Rule, "least load": LeastLoad, "sticky": Sticky, "router": Routed}


class Result:
    def __init__(self) -> None:
        self.arrival_s, self.first_token_s = array("d"), array("d")  # of each request
        self.num_prompt = self.num_cached = 0
        self.rule_s = 0.0  # spent in the rule

    @property
    def hit_rate(self) -> float:
        return self.num_cached / self.num_prompt

    def quantile(self, share: float, since_s: float = 0.0, until_s: float = math.inf) -> float:
        """Of the time to the first token, of requests that arrive in this time."""
        arrivals, times = np.frombuffer(self.arrival_s), np.frombuffer(self.first_token_s)
        return float(np.quantile(times[(arrivals >= since_s) & (arrivals < until_s)], share))

    @property
    def rule_us(self) -> float:
        return 1e6 * self.rule_s / len(self.first_token_s)


def conversations(traffic: Traffic, seed: int) -> Iterator[Turn]:
    """The first turns of a day, in order of arrival, each with all that follow."""
    rng, when, number = random.Random(seed), 0.0, 0
    systems = [rng.randint(100, 1500) for _ in range(traffic.num_applications)]
    weights = list(accumulate(1 / (1 + i) for i in range(traffic.num_applications)))
    most = traffic.rate * (1 + traffic.swing)
    while (when := when + rng.expovariate(most)) < traffic.day_s:
        share = 1 - traffic.swing * math.cos(2 * math.pi * when / traffic.day_s)
        if rng.random() * (1 + traffic.swing) > share:
            continue
        [application] = rng.choices(range(traffic.num_applications), cum_weights=weights)
        later = [
            (
                rng.expovariate(1 / traffic.think_s),
                1 + int(rng.expovariate(1 / traffic.mean_message)),
                1 + int(rng.expovariate(1 / traffic.mean_answer)),
            )
            for _ in range(min(40, 1 + int(rng.expovariate(1 / (traffic.mean_turns - 1)))))
        ]
        system = systems[application]
        yield following(Turn(number, application, system, system, 0, when, later), when)
        number += 1


def following(turn: Turn, arrival: float) -> Turn:
    _, num_message, num_answer = turn.later[0]
    num_prompt = turn.num_prompt + turn.num_answer + num_message
    identity = turn.conversation, turn.application, turn.num_system
    return Turn(*identity, num_prompt, num_answer, arrival, turn.later[1:])


def simulate(
    kind: type[Rule], number: int, traffic: Traffic, machine: Machine = Machine(), seed: int = 0
) -> Result:
    """A day of `number` engines. The traffic is the same for every rule; when a conversation goes
    on depends on its last answer.
    """
    rule, result = kind(number, machine), Result()
    engines = [Engine(machine) for _ in range(number)]
    beginnings = conversations(traffic, seed)
    next_one = next(beginnings, None)
    # (time, order, engine or None, its version, turn that arrives)
    events: list[tuple[float, int, int, int, Turn | None]] = []
    order, clock = 0, time.thread_time
    while events or next_one is not None:
        if next_one is not None and (not events or next_one.arrival <= events[0][0]):
            now, index, version, turn = next_one.arrival, -1, 0, next_one
            next_one = next(beginnings, None)
        else:
            now, _, index, version, turn = heapq.heappop(events)
        if turn is not None:
            began = clock()
            index = rule.place(turn)
            result.rule_s += clock() - began
        elif engines[index].version != version:
            continue
        engine = engines[index]
        first, ended = engine.advance(now)
        if turn is not None:
            engine.add(turn)
            result.num_prompt += turn.num_prompt
            result.num_cached += turn.num_cached
        if first or ended:
            began = clock()
            for one in first:
                rule.begin(one)
            for one in ended:
                rule.end(one)
            result.rule_s += clock() - began
        for one in first:
            result.arrival_s.append(one.arrival)
            result.first_token_s.append(now - one.arrival)
        for one in ended:
            if one.later:
                when = now + one.later[0][0]
                order += 1
                heapq.heappush(events, (when, order, -1, 0, following(one, when)))
        engine.version += 1
        if (when := engine.next_event()) < math.inf:
            order += 1
            heapq.heappush(events, (max(when, now), order, index, engine.version, None))
    return result
