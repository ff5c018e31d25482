"""How many tokens to draft for each row: as many as are expected to be worth their cost.

Must not know: how drafts are found or verified, the model.

A row whose drafts are accepted with probability p each gives (1 - p^(d + 1)) / (1 - p) tokens per
pass with d drafts. The depths are those that give the most tokens of all rows in a pass's time,
which depends on the number of its tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from ....ipc.step_messages import SchedulerOutput
from ...input_batch import InputBatch
from .drafters import UntriedDrafts
from .pass_costs import PassCosts

# Work of the host for a pass with drafts beyond that of one without, which may share a call with
# others, until it is known. It is about this much for a few rows (ledger, 2026-11-25).
HOST_S = 120e-6
# Work of the host for the drafts of a model or a head, until it is known.
DRAFTING_S = 300e-6
LEARNED = 0.2  # of what is known of the host's work, per pass
FORGOTTEN = 0.002  # of the same, per choice of no drafts because of it
PRIOR_DECAY = 0.98  # of what models have drafted for earlier requests, per pass with drafts
PRIOR, PRIOR_WEIGHT = 0.6, 2.0  # of the probability of a request without history, and its weight
DECAY = 0.9  # of what is known, per pass with drafts
# A request without drafts of a model gets some again after so many passes: its text may be another
# by now.
MOST_PASSES_WITHOUT = 32
# After a choice of no drafts, passes of the same requests follow without another choice, so that
# choices take at most this share of the time.
CHOICES_SHARE = 0.02
CHOICE_S, CHOICE_S_PER_ROW = 200e-6, 50e-6  # of one choice, where no clock tells
# The least probability that a draft and all before it are accepted.
LOG_THRESHOLDS = [math.log(p) for p in (0.85, 0.7, 0.5, 0.35, 0.25, 0.15, 0.08, 0.04)]


class HostTime:
    """Seconds of a pass beyond those of its model: what was seen of passes with about as many rows.
    `prior`: until then.
    """

    def __init__(self, prior: float):
        self._prior = prior
        self._known: dict[int, float] = {}  # by the magnitude of the number of rows

    def __call__(self, num_rows: int) -> float:
        return self._known.get(num_rows.bit_length(), self._prior)

    def learn(self, num_rows: int, seconds: float) -> None:
        """Takes what one pass has had. It may have been disturbed, or its model faster than when it
        was measured.
        """
        known = self(num_rows)
        seen = min(max(0.0, seconds), 3 * known + HOST_S)
        self._known[num_rows.bit_length()] = known + LEARNED * (seen - known)

    def forget(self, num_rows: int) -> None:
        """Comes closer to the prior, so that what costs too much is tried again some time."""
        known = self(num_rows)
        self._known[num_rows.bit_length()] = known + FORGOTTEN * (self._prior - known)


class DraftDepth:
    """`most`: drafts of one row. `costs`: of a pass of the model; `draft_costs`: of a pass of the
    draft model, which gives each row one draft; None: drafts take no time. `verify_costs`: of a
    pass that verifies drafts; None: as any other. `clock`: seconds of the thread that runs passes,
    which tell the host's work; None: it is taken to be as usual, since all ranks choose alike.
    `untried`: drafts that take no time, which tell how many of a request would be accepted where
    they are not worth their pass; None: now and then a pass has to try them.
    """

    def __init__(
        self,
        most: int,
        batch: InputBatch,
        costs: PassCosts,
        draft_costs: PassCosts | None = None,
        verify_costs: PassCosts | None = None,
        clock: Callable[[], float] | None = None,
        untried: UntriedDrafts | None = None,
    ):
        self.most, self.clock = most, clock
        self._untried = untried
        self._batch = batch
        self._cost, self._draft_costs = costs, draft_costs
        self._verify_cost = verify_costs or costs
        drafting_s = 0.0 if draft_costs is None else DRAFTING_S
        self._host, self._drafting_host = HostTime(0.0), HostTime(HOST_S + drafting_s)
        # What one text repeats says nothing about the next text; how well a model drafts does.
        self._prior = PRIOR
        num_slots = len(batch.num_tokens)
        # by slot; numbers of Python, which are read one by one
        self._entries = [0] * num_slots  # the requests that the following is about
        self._tried, self._accepted = [0.0] * num_slots, [0.0] * num_slots
        self._num_without = [0] * num_slots  # passes
        # seconds in which passes like this one get no drafts without another choice
        self._idle_s = 0.0
        self._idle_step: tuple[int, int, int] | None = None

    def choose(self, scheduler_output: SchedulerOutput) -> list[int]:
        """The number of drafts of each row. Rows without lookahead tokens get none."""
        slots, allowed = scheduler_output.slots, scheduler_output.num_lookahead_tokens
        num_tokens = scheduler_output.total_num_scheduled_tokens
        base = self._plain_rate(len(slots), num_tokens)
        none = [0] * len(slots)
        step = len(slots), num_tokens, self._batch.num_added
        if self._idle_s > 0 and step == self._idle_step:
            return none
        # even if all drafts are accepted
        if self._best_rate(len(slots), num_tokens) <= base:
            self._drafting_host.forget(len(slots))
            return none
        rows = [row for row, most in enumerate(allowed) if most > 0]
        if not rows:
            return none
        start = 0.0 if self.clock is None else self.clock()
        if self._untried is not None:
            self.learn(*self._untried.take(slots))
        probabilities = [self._probability(slots[row]) for row in rows]
        counts = Counter(probabilities)  # those of requests without history are equal
        candidates = [
            {p: min(self.most, int(threshold / math.log(p))) for p in counts}
            for threshold in LOG_THRESHOLDS
        ]
        depth_of, best_rate = dict.fromkeys(counts, 0), base
        for depths in candidates:
            gained, num_drafts, num_drafting = len(slots), 0, 0
            for p, depth in depths.items():
                gained += counts[p] * p * (1 - p**depth) / (1 - p)
                num_drafts += counts[p] * depth
                num_drafting += counts[p] if depth else 0
            seconds = self._verify_cost(num_tokens + num_drafts)
            seconds += self._drafting_s(len(slots), num_drafting, max(depths.values()))
            if gained / seconds > best_rate:
                depth_of, best_rate = depths, gained / seconds
        best = none
        for row, p in zip(rows, probabilities):
            slot, best[row] = slots[row], depth_of[p]
            if self._draft_costs is not None and not self._tried[slot]:
                best[row] = max(1, best[row])  # each request tells how well the model drafts
            self._num_without[slot] = 0 if best[row] else self._num_without[slot] + 1
            if self._untried is None and self._num_without[slot] > MOST_PASSES_WITHOUT:
                self._num_without[slot], best[row] = 0, 1
        if self._untried is not None:
            self._untried.find([slots[row] for row in rows if not best[row]], self.most)
        if not any(best):
            self._drafting_host.forget(len(slots))
            seconds = CHOICE_S + CHOICE_S_PER_ROW * len(slots)
            if self.clock is not None:
                seconds = self.clock() - start
            self._idle_s, self._idle_step = seconds / CHOICES_SHARE, step
            for row in rows:
                self._num_without[slots[row]] += int(self._idle_s / self._cost(num_tokens))
        return best

    def can_gain(self, num_rows: int) -> bool:
        """Whether drafts are worth their cost in a step of so many decodes if all are accepted."""
        return self._best_rate(num_rows, num_rows) > self._plain_rate(num_rows, num_rows)

    def _plain_rate(self, num_rows: int, num_tokens: int) -> float:
        """Tokens per second without drafts."""
        return num_rows / (self._cost(num_tokens) + self._host(num_rows))

    def _best_rate(self, num_rows: int, num_tokens: int) -> float:
        """Tokens per second if all drafts were accepted, at the best depth."""
        return max(
            num_rows
            * (depth + 1)
            / (
                self._verify_cost(num_tokens + num_rows * depth)
                + self._drafting_s(num_rows, num_rows, depth)
            )
            for depth in {1, (self.most + 1) // 2, self.most}
        )

    def _drafting_s(self, num_rows: int, num_drafting: int, depth: int) -> float:
        """Seconds beyond those of the model's pass: for drafts of `num_drafting` of the rows, at
        most `depth` of each.
        """
        costs = self._draft_costs
        passes = 0.0 if costs is None else depth * costs(num_drafting)
        return passes + self._drafting_host(num_rows)

    def _probability(self, slot: int) -> float:
        """The probability that a draft of the request in this slot is accepted."""
        entry = int(self._batch.entries[slot])
        if self._entries[slot] != entry:
            self._entries[slot] = entry
            self._tried[slot] = self._accepted[slot] = 0.0
            self._num_without[slot] = 0
        accepted = self._accepted[slot] + self._prior * PRIOR_WEIGHT
        known = accepted / (self._tried[slot] + PRIOR_WEIGHT)
        return min(0.99, max(0.01, known))

    def learn_time(
        self,
        num_rows: int,
        num_tokens: int,
        num_passes: int,
        num_drafted: Sequence[int],
        seconds: float,
    ) -> None:
        """Takes the seconds of passes of `num_tokens` tokens without drafts. num_drafted: drafts of
        each row that had some; empty: none were wanted, or none found.
        """
        if self.clock is None:
            self._idle_s -= num_passes * self._cost(num_tokens)
            return
        self._idle_s -= seconds
        if num_tokens > num_rows:
            return  # costs are those of decodes
        if num_drafted:
            seconds -= self._verify_cost(num_rows + sum(num_drafted))
            if self._draft_costs is not None:
                seconds -= max(num_drafted) * self._draft_costs(len(num_drafted))
            self._drafting_host.learn(num_rows, seconds)
        else:
            self._host.learn(num_rows, seconds / num_passes - self._cost(num_rows))

    def learn(
        self, slots: Sequence[int], num_drafted: Sequence[float], num_accepted: Sequence[int]
    ) -> None:
        """Takes the results of a pass, by row."""
        for slot, drafted, accepted in zip(slots, num_drafted, num_accepted):
            if drafted:  # what follows a refused draft says nothing
                self._tried[slot] = DECAY * self._tried[slot] + min(accepted + 1, drafted)
                self._accepted[slot] = DECAY * self._accepted[slot] + accepted
                if self._draft_costs is not None:
                    share = accepted / min(accepted + 1, drafted)
                    self._prior = PRIOR_DECAY * self._prior + (1 - PRIOR_DECAY) * share
