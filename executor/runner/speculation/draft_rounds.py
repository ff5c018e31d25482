"""Several rounds of a head's drafts and their verification in one native call.

Must not know: how many drafts are worth their cost, the scheduler, files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ....kernels.cpu.native.drafting import Drafting
from ...sampling.sampler import NOT_FINITE, draw_parameters, draws
from ..input_batch import InputBatch
from .draft_head import HeadDrafter


class DraftRounds:
    """For steps of decodes whose tokens depend on nothing but logits and parameters."""

    def __init__(self, drafting: Drafting, drafter: HeadDrafter, batch: InputBatch):
        self._drafting, self._drafter, self._batch = drafting, drafter, batch

    def count(self, step: SchedulerOutput, counts: Sequence[int], num_passes: int) -> int:
        """How many rounds run() can take of a step whose rows are to have `counts` drafts; 0: none.

        num_passes: the most passes of the model.
        """
        num_drafts, slots = counts[0], step.slots
        if (
            not num_drafts
            or any(count != num_drafts for count in counts)
            or step.num_scheduled_tokens.count(1) != len(slots)
            or not self._drafting.fits(len(slots), num_drafts)
        ):
            return 0
        known = self._batch.num_tokens[slots]
        room = 1 + min(step.num_lookahead_tokens)
        room = min(room, self._drafter.max_model_len - int(known.max()))
        is_last = (known - 1).tolist() == step.num_computed_tokens
        is_ready = is_last and bool(self._drafter.is_ready(np.array(slots)).all())
        return min(num_passes, room // (num_drafts + 1)) if is_ready else 0

    def run(
        self, step: SchedulerOutput, num_drafts: int, num_rounds: int
    ) -> list[tuple[list[int], ModelRunnerOutput]]:
        """The rows and the output of each round, as of passes that verify drafts. A row has no more
        rounds after logits that are not finite.
        """
        batch, drafter = self._batch, self._drafter
        slots = np.array(step.slots, np.int64)
        order = drafter.order(slots)
        slots = slots[order]
        width = num_drafts + 1
        inputs = drafter.first_inputs(slots, num_rounds * width)
        draw = None
        if draws(batch, slots):
            known = torch.from_numpy(batch.num_tokens[slots])
            draw = (*draw_parameters(batch, slots, torch.device("cpu")), known)
        drawn, is_finite, accepted = (
            result.numpy()
            for result in self._drafting(
                inputs.token_ids,
                inputs.positions,
                inputs.metadata,
                inputs.logits_indices,
                num_rounds,
                num_drafts,
                draw,
            )
        )
        rounds: list[tuple[list[int], ModelRunnerOutput]] = []
        goes_on = np.ones(len(slots), bool)
        for tokens, finite, counts in zip(drawn, is_finite, accepted):
            is_good = np.take_along_axis(finite, counts[:, None], 1)[:, 0]
            by_row: dict[int, tuple[list[int], int]] = {}
            errors = {}
            for index in np.flatnonzero(goes_on).tolist():
                count, slot = int(counts[index]), int(slots[index])
                sampled = tokens[index, : count + is_good[index]]
                batch.append_runs(slots[index : index + 1], sampled[None])
                by_row[int(order[index])] = sampled.tolist(), count
                if not is_good[index]:
                    errors[slot] = NOT_FINITE
            goes_on &= is_good
            rows = sorted(by_row)
            of_rows = [by_row[row] for row in rows]
            result = ModelRunnerOutput(
                [len(sampled) for sampled, _ in of_rows],
                [token_id for sampled, _ in of_rows for token_id in sampled],
                errors=errors,
                num_ahead=[count for _, count in of_rows],
                num_drafted=[num_drafts] * len(rows),
                num_accepted=[count for _, count in of_rows],
            )
            rounds.append((rows, result))
            if not goes_on.any():
                break
        drafter.hold(slots, 1 + accepted[-1])
        return rounds
