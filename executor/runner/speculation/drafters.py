"""Drafts for the rows of a step.

Must not know: how a draft is verified, how many drafts are worth their cost, the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ...input_batch import InputBatch
from ..step_inputs import StepInputs
from .proposers import NOTHING, Proposer


class Drafter(Protocol):
    # Whether it has to see every pass of the model. A drafter that does not is shown none.
    sees_every_pass: bool
    # Whether it writes to the blocks of the slots: drafts then need places in them.
    uses_blocks: bool

    def enter(self, slot: int, num_computed: int) -> None:
        """A request entered the slot. The cache has the keys and values of `num_computed` of its
        tokens.
        """
        ...

    def leave(self, slot: int) -> None:
        """The request in this slot leaves it. Its tokens are still there."""
        ...

    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Takes the inputs of a pass of the model, and hidden [T, hidden_size] for the drafter;
        the tokens that the pass gave are in the tables.
        """
        ...

    def draft(self, slots: Sequence[int], counts: Sequence[int], room: int) -> list[np.ndarray]:
        """At most `counts` [B] tokens that may follow those of `slots` [B], `room` of all rows
        together. Where it uses blocks, each slot's have places for its drafts.
        """
        ...


class LookupDrafter:
    """Drafts that a proposer finds in texts, row by row."""

    sees_every_pass = uses_blocks = False

    def __init__(self, proposer: Proposer, batch: InputBatch):
        self.proposer = proposer
        self._batch = batch

    def enter(self, slot: int, num_computed: int) -> None:
        pass

    def leave(self, slot: int) -> None:
        batch = self._batch
        output = batch.token_ids[slot, batch.num_entry_tokens[slot] : batch.num_tokens[slot]]
        self.proposer.remember(output, batch.salts.get(slot))

    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        pass

    def draft(self, slots: Sequence[int], counts: Sequence[int], room: int) -> list[np.ndarray]:
        batch, drafts = self._batch, []
        for slot, wanted in zip(slots, counts):
            count, found = min(wanted, room), NOTHING
            if count > 0:
                known = batch.token_ids[slot, : batch.num_tokens[slot]]
                found = self.proposer.propose(known, count, batch.salts.get(slot))
                room -= len(found)
            drafts.append(found)
        return drafts


class UntriedDrafts:
    """Drafts that no pass verifies. Whether they would have been accepted shows once later passes
    have given the tokens.
    """

    def __init__(self, drafter: Drafter, batch: InputBatch):
        self._drafter, self._batch = drafter, batch
        # by slot: the entry it is of, how many of its tokens it follows, and the draft
        self._drafts: dict[int, tuple[int, int, np.ndarray]] = {}

    def find(self, slots: Sequence[int], most: int) -> None:
        """Finds at most `most` tokens that may follow those of each of the slots."""
        batch = self._batch
        drafts = self._drafter.draft(slots, [most] * len(slots), most * len(slots))
        for slot, draft in zip(slots, drafts):
            if len(draft):
                self._drafts[slot] = int(batch.entries[slot]), int(batch.num_tokens[slot]), draft

    def take(self, slots: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """What would have become of the drafts that these slots had, which are dropped: the slots
        that had one, and for each how many of its tokens can be told and were accepted.
        """
        batch, of_slot, known, accepted = self._batch, list[int](), list[int](), list[int]()
        for slot in slots:
            entry, start, draft = self._drafts.pop(slot, (-1, 0, NOTHING))
            draft = draft[: int(batch.num_tokens[slot]) - start]
            if entry == batch.entries[slot] and len(draft):
                differs = np.flatnonzero(draft != batch.token_ids[slot, start : start + len(draft)])
                of_slot.append(slot)
                known.append(len(draft))
                accepted.append(int(differs[0]) if len(differs) else len(draft))
        return of_slot, known, accepted
