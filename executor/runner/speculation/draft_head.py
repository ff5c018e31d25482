"""Drafts of heads that read hidden states of the model that verifies (models/draft_heads.py).

Must not know: how a draft is verified, how many drafts are worth their cost, files.

A head's position i needs the hidden state of position i and the token after it. So it follows every
pass of the model, once the tokens of that pass are known:

    known      a b c d e      the model has computed a to d, and drawn e
    held       a b c d        the hidden states of that pass, each with the next token: b c d e
    drafting   a b c d x y    a pass over what is held gives x, one of x gives y: drafts x y z

A pass with more positions than may be held, such as one of a prompt, is computed at once, except
for the last position. So is one whose next tokens are images, since their rows are there in this
step alone. The token after the last position comes with the next step.

A model may have several heads in a chain (DeepSeek-AI 2024, DeepSeek-V3). Position i of the one at
depth k reads what the one before it left there, and the token k + 1 positions later. It makes draft
k + 1. Its last k positions have read drafts, which may be refused, so they are computed again:

    depth 0    a b c d        reads b c d e, gives x
    depth 1    a b c d        reads c d e x, gives y; d is computed again
    depth 2    a b c d        reads d e x y, gives z; c and d are computed again

Drafts beyond the last head's are further passes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ...input_batch import InputBatch
from ..step_inputs import StepInputs
from .draft_passes import DraftPasses, pass_over, within
from .proposers import NOTHING

Arrivals = list[tuple[int, torch.Tensor]]  # slots, and hidden states [N, hidden_size] of each


class HeldStates:
    """A head, and by slot the positions that it has computed from known tokens, and the hidden
    states of at most `most_held` positions that follow and wait. The head's `state` [tokens,
    hidden_size] is what its pass reads and then leaves.
    """

    def __init__(self, passes: DraftPasses, num_slots: int, most_held: int):
        self.passes, self.state = passes, passes.model.state
        self.num_computed = np.zeros(num_slots, np.int64)
        self.num_held = np.zeros(num_slots, np.int64)
        self._held = self.state.new_zeros(num_slots, most_held, *self.state.shape[1:])

    def waiting(self, slot: int) -> torch.Tensor:
        return self._held[slot, : self.num_held[slot]]

    def hold(self, slot: int, states: torch.Tensor) -> bool:
        """Lets states [N, hidden_size] wait behind others, if there is room and all but the last
        one can be computed later.
        """
        begin, first = int(self.num_held[slot]), int(self.num_computed[slot])
        end = begin + len(states)
        if end > self._held.shape[1] or self.passes.must_run_now(slot, first, first + end - 1):
            return False
        self._held[slot, begin:end] = states
        self.num_held[slot] = end
        return True

    def advance(self, slot: int, num_computed: int, states: torch.Tensor) -> None:
        """Notes how many positions are computed. `states` wait, those of the next positions."""
        self.num_computed[slot], self.num_held[slot] = num_computed, len(states)
        self._held[slot, : len(states)] = states

    def run(
        self, slots: list[int], parts: list[torch.Tensor]
    ) -> tuple[StepInputs, tuple[torch.Tensor, ...]]:
        """A pass over the states `parts` of `slots`, from the first position that is not computed
        on. Returns its inputs and what DraftPasses.forward does.
        """
        counts, starts = [len(part) for part in parts], self.num_computed[slots].tolist()
        self.passes.make_inputs.restart()
        inputs = self.passes.make_inputs(pass_over(slots, counts, starts))
        torch.cat([parts[index] for index in inputs.order], out=self.state[: sum(counts)])
        return inputs, self.passes.forward(inputs)

    def left_by(self, inputs: StepInputs) -> Arrivals:
        """What the pass with these inputs has left."""
        ends = starts_of(inputs)
        rows = zip(inputs.slots.tolist(), ends, ends[1:])
        return [(slot, self.state[begin:end]) for slot, begin, end in rows]


class HeadDrafter:
    """The drafter of one head or of several in a chain; `passes` are those of each. A request that
    has missed a pass of the model gets no more drafts until it enters a slot again.

    most_held: positions of a request whose hidden states wait for the next drafts, which compute
    them in their first pass.
    """

    sees_every_pass = uses_blocks = True

    def __init__(
        self, passes: list[DraftPasses], batch: InputBatch, max_model_len: int, most_held: int
    ):
        self._batch = batch
        self.max_model_len = max_model_len
        num_slots = len(batch.num_tokens)
        # a further head also holds the position that has read a draft last
        self.heads = [
            HeldStates(own, num_slots, most_held + (depth > 0)) for depth, own in enumerate(passes)
        ]

    @property
    def passes(self) -> DraftPasses:
        """Those of the first head."""
        return self.heads[0].passes

    def enter(self, slot: int, num_computed: int) -> None:
        # what the prefix cache holds, the heads have mostly computed too
        for head in self.heads:
            head.num_computed[slot], head.num_held[slot] = num_computed, 0

    def leave(self, slot: int) -> None:
        pass

    @torch.inference_mode()
    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Takes a pass of the model, whose drawn tokens are known; hidden [T, hidden_size]."""
        first_head, arrivals = self.heads[0], Arrivals()
        ends = starts_of(inputs)
        for row, slot in enumerate(inputs.slots.tolist()):
            start = int(first_head.num_computed[slot] + first_head.num_held[slot])
            # a model with states computes accepted drafts again, which the head has seen
            num_seen = start - inputs.metadata.seq_lens_list[row] + ends[row + 1] - ends[row]
            first = ends[row] + num_seen
            # positions whose next token is known; drafts that were refused are none
            count = min(ends[row + 1] - first, int(self._batch.num_tokens[slot]) - 1 - start)
            if count > 0 and num_seen >= 0:
                arrivals.append((slot, hidden[first : first + count]))
        self._receive(0, arrivals)

    def _receive(self, depth: int, arrivals: Arrivals) -> None:
        """Lets a head hold states, or compute all but the last one where it would hold too many."""
        head, slots, parts = self.heads[depth], [], []
        for slot, states in arrivals:
            if not head.hold(slot, states):
                slots.append(slot)
                parts.append(torch.cat([head.waiting(slot), states]))
        if not slots:
            return
        inputs, _ = head.run(slots, [part[:-1] for part in parts])
        if depth + 1 < len(self.heads):
            self._receive(depth + 1, head.left_by(inputs))
        for slot, part in zip(slots, parts):
            head.advance(slot, int(head.num_computed[slot]) + len(part) - 1, part[-1:])

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], counts: Sequence[int], room: int) -> list[np.ndarray]:
        batch, drafts = self._batch, [NOTHING] * len(slots)
        chosen = np.array(slots, np.int64)
        known = batch.num_tokens[chosen]
        wanted = np.where(self.is_ready(chosen), np.array(counts, np.int64), 0).tolist()
        rows, left = within(list(slots), wanted, room, known, self.max_model_len)
        if not rows:
            return drafts
        drafting, before = chosen[rows], known[rows]
        self._append_drafts(drafting, left)
        ends = batch.num_tokens[drafting]
        batch.num_tokens[drafting] = before
        for row, slot, start, end in zip(rows, drafting, before.tolist(), ends.tolist()):
            drafts[row] = batch.token_ids[slot, start:end].copy()
        return drafts

    def is_ready(self, slots: np.ndarray) -> np.ndarray:
        """slots [B] -> [B] bool: whether what is held reaches to the last known token."""
        head, known = self.heads[0], self._batch.num_tokens[slots]
        num_held = head.num_held[slots]
        return (num_held > 0) & (head.num_computed[slots] + num_held == known - 1)

    def _append_drafts(self, slots: np.ndarray, left: np.ndarray) -> None:
        """Appends `left` [B] drafts to `slots` [B], or fewer where logits are not finite."""
        known = dict(zip(slots.tolist(), self._batch.num_tokens[slots].tolist()))
        # states that the next head reads though they follow from drafts
        uncertain: dict[int, torch.Tensor] = {}
        for depth in range(len(self.heads) - 1):
            slots, left, inputs, parts = self._run(depth, slots, left, uncertain)
            self._settle(depth, inputs, parts, known, uncertain)
            continues = left > 0
            slots, left = slots[continues], left[continues]
            if not len(slots):
                return
        slots, left, inputs, parts = self._run(len(self.heads) - 1, slots, left, uncertain)
        self._settle(len(self.heads) - 1, inputs, parts, known, uncertain)
        self._continue(inputs, slots, left)

    def _run(
        self, depth: int, slots: np.ndarray, left: np.ndarray, uncertain: dict[int, torch.Tensor]
    ) -> tuple[np.ndarray, np.ndarray, StepInputs, list[torch.Tensor]]:
        """Computes what waits for a head, and appends a draft to each of `slots` [B], where `left`
        [B] are wanted. Returns both in the order of the inputs, with what is left then; the inputs;
        and the states that they go with.
        """
        head, batch = self.heads[depth], self._batch
        parts = [head.waiting(slot) for slot in slots.tolist()]
        if depth:
            parts = [torch.cat([part, uncertain[i]]) for i, part in zip(slots.tolist(), parts)]
        inputs, results = head.run(slots.tolist(), parts)
        slots, left = slots[inputs.order], left[inputs.order]
        known = batch.num_tokens[slots]
        head.passes.append(slots, *results)
        left = np.where(batch.num_tokens[slots] > known, left - 1, 0)
        return slots, left, inputs, [parts[index] for index in inputs.order]

    def _settle(
        self,
        depth: int,
        inputs: StepInputs,
        parts: list[torch.Tensor],
        known: dict[int, int],
        uncertain: dict[int, torch.Tensor],
    ) -> None:
        """After a pass over `parts`, in the order of the inputs, notes which positions follow from
        `known` tokens, and gives the next head what they left. `uncertain` gets the rest.
        """
        head, certain = self.heads[depth], Arrivals()
        for (slot, states), part in zip(head.left_by(inputs), parts):
            end = known[slot] - 1 - depth
            count = end - int(head.num_computed[slot])
            # a copy, because these may be views of where they go
            head.advance(slot, end, part[count : count + 1].clone())
            certain.append((slot, states[:count]))
            uncertain[slot] = states[count:]
        if depth + 1 < len(self.heads):
            self._receive(depth + 1, certain)

    def _continue(self, inputs: StepInputs, slots: np.ndarray, left: np.ndarray) -> None:
        """Appends further drafts of the last head, whose first pass has had these inputs."""
        continues, state = left > 0, self.heads[-1].state
        if not continues.any():
            return
        if len(inputs.token_ids) > len(slots):
            state[: len(slots)] = state[inputs.logits_indices]
        if not continues.all():
            self._keep_rows(continues)
        passes = self.heads[-1].passes
        passes.decode(slots[continues], left[continues], self._keep_rows)

    def _keep_rows(self, rows: np.ndarray) -> None:
        state = self.heads[-1].state
        kept = state[: len(rows)][torch.from_numpy(rows)]
        state[: len(kept)] = kept


def starts_of(inputs: StepInputs) -> list[int]:
    """[B + 1]: where each row's tokens begin, as query_start_loc has it on the device."""
    return [0, *accumulate(inputs.metadata.query_lens)]
