"""Lookups draft for each row of a step, within the room of all."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.runner.speculation.drafters import LookupDrafter
from quire.executor.runner.speculation.proposers import NgramProposer
from quire.executor.runner.speculation.verification import Speculation
from quire.ipc.step_messages import SchedulerOutput


class Recording(NgramProposer):
    def __init__(self) -> None:
        super().__init__(1, 4)
        self.remembered: list[list[int]] = []

    def remember(self, output: np.ndarray, salt: object) -> None:
        self.remembered.append(output.tolist())


def make_batch(texts: list[list[int]]) -> InputBatch:
    batch = InputBatch(len(texts), 64, 16, None)
    for slot, text in enumerate(texts):
        batch.token_ids[slot, : len(text)] = text
        batch.num_tokens[slot] = len(text)
    return batch


def test_rows_share_the_room():
    drafter = LookupDrafter(NgramProposer(1, 4), make_batch([[1, 2, 3, 1], [5, 6, 7, 8, 5], [9]]))
    drafts = [draft.tolist() for draft in drafter.draft([0, 1, 2], [2, 4, 4], 5)]
    assert drafts == [[2, 3], [6, 7, 8], []]
    assert [len(draft) for draft in drafter.draft([1, 0], [0, 3], 5)] == [0, 3]
    assert [len(draft) for draft in drafter.draft([1, 0], [3, 3], 0)] == [0, 0]


def test_a_request_that_leaves_is_remembered_without_its_prompt():
    proposer, batch = Recording(), make_batch([[1, 2, 3, 4]])
    batch.num_entry_tokens[0] = 3
    LookupDrafter(proposer, batch).leave(0)
    assert proposer.remembered == [[4]]


@pytest.mark.parametrize(("room", "wanted", "is_seen"), [(3, 3, True), (0, 0, True), (3, 0, False)])
def test_which_passes_a_head_sees(room: int, wanted: int, is_seen: bool):
    """Also those whose rows have no room for drafts, as the last ones of a step, but none where
    drafts are not worth their cost.
    """
    seen = []
    head = SimpleNamespace(
        sees_every_pass=True,
        observe=lambda inputs, hidden: seen.append(inputs),
    )
    depth = SimpleNamespace(choose=lambda *_: [wanted], can_gain=lambda *_: True)
    speculation = Speculation(head, depth, SimpleNamespace(refusals={}), 4, 64, 64)
    step = SchedulerOutput(0, [0], [1], [5], [], num_lookahead_tokens=[room])
    speculation.choose(step)
    decode = SimpleNamespace(slots=[0], metadata=SimpleNamespace(num_decodes=1))
    speculation.observe(decode, torch.zeros(1, 8))
    assert bool(seen) is is_seen
