"""Several rounds of prompt lookup and verification in one native call.

Must not know: how many drafts are worth their cost, the scheduler, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from ....ipc.step_messages import SchedulerOutput
from ....kernels.cpu.native.lookups import LookupPasses
from ...sampling.sampler import draw_parameters, draws
from ..bursts import Bursts
from ..input_batch import InputBatch
from .draft_rounds import RoundsOutput, collect_rounds
from .proposers import NgramProposer

MISS = 0.25  # refused drafts


class LookupRounds:
    """For steps of decodes whose tokens depend on nothing but logits and parameters. Drafts are
    those of the proposer.
    """

    is_ragged = True

    def __init__(self, proposer: NgramProposer, bursts: Bursts, batch: InputBatch):
        sizes = batch.block_size, proposer.least, proposer.most
        self._passes = LookupPasses(bursts.program, *sizes)
        self._make_inputs, self._batch = bursts.make_inputs, batch

    def count(self, step: SchedulerOutput, counts: Sequence[int], num_passes: int) -> int:
        slots, most = step.slots, max(counts)
        if (
            not most
            or step.num_scheduled_tokens.count(1) != len(slots)
            or not self._passes.fits(len(slots), len(slots) + sum(counts))
            or (self._batch.num_tokens[slots] - 1).tolist() != step.num_computed_tokens
        ):
            return 0
        return min(num_passes, (1 + min(step.num_lookahead_tokens)) // (1 + most))

    def run(self, step: SchedulerOutput, counts: Sequence[int], num_rounds: int) -> RoundsOutput:
        batch = self._batch
        inputs = self._make_inputs.for_burst(step, num_rounds * (1 + max(counts)))
        slots, order = inputs.slots, inputs.order
        draw = None
        if draws(batch, slots):
            draw = tuple(draw_parameters(batch, slots, torch.device("cpu")))
        results = self._passes(
            inputs.token_ids,
            inputs.positions,
            inputs.metadata,
            inputs.logits_indices,
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(slots),
            torch.from_numpy(batch.num_tokens[slots]),
            torch.from_numpy(np.array(counts, np.int64)[order]),
            num_rounds,
            draw,
        )
        rounds = [
            [
                (end - start - 1, drawn[start:end], is_finite[start:end], count)
                for (start, end), count in zip(pairwise(starts), accepted)
            ]
            for starts, drawn, is_finite, accepted in zip(*(of_all.tolist() for of_all in results))
        ]
        output = collect_rounds(batch, slots, order, rounds)
        # A round that finds nothing costs a part of what one with a refused draft costs.
        wanted = dict(zip(step.slots, counts))
        tried = [
            count or (MISS if wanted[slot] else 0)
            for slot, count in zip(output.slots, output.num_drafted)
        ]
        return output._replace(num_drafted=tried)
