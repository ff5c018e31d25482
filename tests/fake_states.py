"""The states of a fake model with recurrent layers: in each place, the digest of the tokens so far.

A state that is not written has a random digest, so that a row which starts from the wrong place
gives wrong tokens.
"""

from __future__ import annotations

import random

from quire.ipc.step_messages import SchedulerOutput


class FakeStates:
    """The places of slots, and those of checkpoints after them."""

    def __init__(self, num_slots: int, num_checkpoints: int, *, drafts: bool):
        """drafts: whether lookahead tokens are drafts, after which no state is kept."""
        self.num_slots, self._drafts = num_slots, drafts
        rng = random.Random(0)
        self.places = [rng.getrandbits(32) for _ in range(num_slots + num_checkpoints)]
        self._saves: dict[int, tuple[int, int]] = {}  # of the step, by slot: position, place

    def begin(self, step: SchedulerOutput) -> None:
        """Make the copies of a step, and note what its rows are to save. Fails for a save that no
        row can make.
        """
        for source, destination in step.state_copies:
            assert source >= self.num_slots or destination >= self.num_slots, step.state_copies
            self.places[destination] = self.places[source]
        self._saves = {slot: (position, place) for slot, position, place in step.state_saves}
        assert len(self._saves) == len(step.state_saves), f"a row saves twice: {step.state_saves}"
        places = {place for _, place in self._saves.values()}
        assert len(places) == len(self._saves), f"a place is written twice: {step.state_saves}"
        assert all(self.num_slots <= place < len(self.places) for place in places), places
        lookahead = [0] * len(step.slots)
        if step.num_lookahead_tokens and not self._drafts:
            lookahead = step.num_lookahead_tokens
        rows = zip(step.slots, step.num_computed_tokens, step.num_scheduled_tokens, lookahead)
        ranges = {slot: (first, first + num + ahead) for slot, first, num, ahead in rows}
        for slot, (position, _) in self._saves.items():
            first, end = ranges[slot]
            assert first <= position < end, f"slot {slot} does not compute {position}"

    def read(self, slot: int, num_tokens: int, empty: int) -> int:
        """Return the state of a row that continues after `num_tokens` tokens. empty: the state
        before the first token.
        """
        return self.places[slot] if num_tokens else empty

    def write(self, slot: int, position: int, digest: int) -> None:
        """The token at this position gives the slot this state."""
        self.places[slot] = digest
        if self._saves.get(slot, (-1, 0))[0] == position:
            self.places[self._saves.pop(slot)[1]] = digest
