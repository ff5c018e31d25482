"""A simulation of owners that share several engines: real schedulers with fake executors, behind
the router of the replicas.

Each owner keeps a number of requests unfinished, as behind the server's queue. A step takes
`STEP_S`, and `TOKEN_S` for each of its tokens.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.frontend.clients.replicas.requests import PlacedRequests
from quire.frontend.clients.replicas.routing import Router
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.core.scheduling.loop import Loop

STEP_S, TOKEN_S = 0.010, 0.0005


@dataclass
class Sender:
    """An owner. Lengths are means, in tokens."""

    name: str
    weight: float = 1.0
    num_at_once: int = 16
    num_shared: int = 0  # tokens at the start of all its prompts
    num_own: int = 30  # tokens of a prompt after that
    num_answer: int = 20
    pause_s: float = 0.0  # between the end of a request and the next one
    num_sent: int = 0
    first_token_s: list[float] = field(default_factory=list)


class Engines:
    """`number` engines behind a router, and `senders`.

    num_each: requests that each sender has at once, instead of its own number. spread: of lengths
    and arrivals; 0.0: all are equal and arrive at once. arguments: of the engines.
    """

    def __init__(
        self,
        number: int,
        senders: Sequence[Sender],
        *,
        num_each: int | None = None,
        seed: int = 0,
        spread: float = 0.5,
        **arguments,
    ):
        self.rng, self.spread, self.now = random.Random(seed), spread, 0.0
        self.senders = {sender.name: replace(sender) for sender in senders}
        arguments = dict(max_num_batched_tokens=64, num_gpu_blocks_override=400) | arguments
        self.engines = [Loop(**arguments) for _ in range(number)]
        config = self.engines[0].config
        capacity = config.cache_config.num_gpu_blocks_override * config.cache_config.block_size
        self.placed = PlacedRequests(Router(number, capacity, config.scheduler_config.max_num_seqs))
        self.served: Counter[str] = Counter()  # computed tokens by owner
        self.served_by: list[Counter[str]] = [Counter() for _ in range(number)]
        self._sent_at: dict[str, float] = {}
        # (time, order, engine) at the end of a step; (time, order, name) of a request
        self._events: list[tuple[float, int, int | str]] = []
        self._num_events = 0
        self._is_busy = [False] * number
        self._steps: list[dict[str, int]] = [{} for _ in range(number)]
        numbers = {sender.name: num_each or sender.num_at_once for sender in senders}
        for i in range(max(numbers.values())):
            for name, number_of in numbers.items():
                if i < number_of:
                    self._push(self.rng.uniform(0, 0.1 * spread), name)

    def _push(self, when: float, what: int | str) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, what))

    def _length(self, mean: int) -> int:
        return max(1, round(mean * self.rng.uniform(1 - self.spread, 1 + self.spread)))

    def _send(self, sender: Sender) -> None:
        request_id = f"{sender.name}-{sender.num_sent}"
        sender.num_sent += 1
        start = [sum(map(ord, sender.name)) % 97] * sender.num_shared
        own = [self.rng.randrange(97) for _ in range(self._length(sender.num_own))]
        params = SamplingParams(
            temperature=0.0, seed=0, max_tokens=self._length(sender.num_answer), ignore_eos=True
        )
        request = EngineCoreRequest(
            request_id, start + own, params, owner=sender.name, owner_weight=sender.weight
        )
        index = self.placed.place(request)
        self._sent_at[request_id] = self.now
        self.engines[index].scheduler.add_request(request, 0)
        self._begin_step(index)

    def _begin_step(self, index: int) -> None:
        """Computes the next step; its results are seen at its end."""
        engine = self.engines[index]
        if self._is_busy[index] or not engine.scheduler.has_unfinished_requests():
            return
        step = self._steps[index] = engine.step()
        self._is_busy[index] = True
        self._push(self.now + STEP_S + TOKEN_S * sum(step.values()), index)

    def _end_step(self, index: int) -> None:
        engine, self._is_busy[index] = self.engines[index], False
        for request_id, num_tokens in self._steps[index].items():
            name = request_id.partition("-")[0]
            self.served[name] += num_tokens
            self.served_by[index][name] += num_tokens
            if engine.tokens.get(request_id) and request_id in self._sent_at:
                self.senders[name].first_token_s.append(self.now - self._sent_at.pop(request_id))
                self.placed.begin(request_id)
        for request_id in list(engine.ends):
            del engine.ends[request_id], engine.tokens[request_id]
            self.placed.end(request_id)
            sender = self.senders[request_id.partition("-")[0]]
            self._push(self.now + sender.pause_s, sender.name)
        self._begin_step(index)

    def run(self, seconds: float) -> dict[str, float]:
        """Each owner's part of the tokens that are computed in this time."""
        before, until = Counter(self.served), self.now + seconds
        while self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            if isinstance(what, str):
                self._send(self.senders[what])
            else:
                self._end_step(what)
        self.now = until
        served = {name: self.served[name] - before[name] for name in self.senders}
        return {name: number / sum(served.values()) for name, number in served.items()}
