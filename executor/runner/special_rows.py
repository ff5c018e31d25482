"""Samples rows that need more than their logits and their parameters: pooling, log-probabilities,
logits stages, grammars, refusals, logits that are not finite.

Must not know: how the model is run, the order of logits stages, how drafts are verified.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from ...ipc.step_messages import ModelRunnerOutput, RowError
from ..input_batch import InputBatch
from ..pooling.pooler import Pooler
from ..sampling.fused_sampler import FusedSampler
from ..sampling.grammar import Grammars
from ..sampling.prompt_logprobs import PromptScorer
from ..sampling.sampler import Sampler
from .step_inputs import StepInputs


class SpecialRows:
    """`grammars`: one of the batch's stages, if any. `pooler`: None of a model that cannot pool."""

    def __init__(
        self,
        batch: InputBatch,
        sampler: Sampler | FusedSampler,
        grammars: Grammars | None,
        prompt_scorer: PromptScorer,
        pooler: Pooler | None,
    ):
        self.sampler, self.prompt_scorer = sampler, prompt_scorer
        self.grammars, self.pooler = grammars, pooler
        self._batch = batch

    def begin(self, inputs: StepInputs) -> None:
        """Before the model runs: masks of grammars are computed meanwhile."""
        if self.grammars is not None:
            self.grammars.start(inputs.sampled_slots, self._batch)

    def sample(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor,
        logits: torch.Tensor | None = None,
        *largest: torch.Tensor,
        drafted: frozenset[int] = frozenset(),
    ) -> ModelRunnerOutput:
        """The results of Forward. logits: None of a model without an output head, whose rows are
        never sampled. drafted: slots whose drafts are verified next, on which grammars force no
        tokens.
        """
        batch, slots = self._batch, inputs.sampled_slots
        output = self._score(inputs, hidden)
        if not len(slots):
            return output
        assert logits is not None
        sampled = self.sampler(logits, batch, slots, largest)
        errors = {int(slots[row]): problem for row, problem in sampled.errors.items()}
        errors |= output.errors
        good = np.array([int(slot) not in errors for slot in slots], bool)
        batch.append_tokens(slots[good], sampled.token_ids[good])
        num_sampled, token_ids = inputs.in_order_of_step(
            inputs.sampled_rows[good], sampled.token_ids[good]
        )
        output = msgspec.structs.replace(
            output,
            num_sampled=num_sampled,
            token_ids=token_ids,
            logprobs=[row for row in sampled.logprobs if row.slot not in errors],
            errors=errors,
        )
        return self._jump(inputs, output, slots[good], drafted)

    def _score(self, inputs: StepInputs, hidden: torch.Tensor) -> ModelRunnerOutput:
        """What depends on hidden states alone, and the rows that are refused."""
        batch, slots = self._batch, inputs.slots
        prompt_logprobs, pooled, errors = [], [], self._refusals(slots)
        if batch.pooling and self.pooler is not None:
            pooled, failed = self.pooler(hidden, slots, inputs.metadata, batch)
            errors = failed | errors
        if batch.prompt_logprobs_slots:
            scored, failed = self.prompt_scorer(hidden, slots, inputs.metadata, batch)
            prompt_logprobs, errors = scored, failed | errors
        return ModelRunnerOutput(
            [0] * len(slots), [], errors=errors, prompt_logprobs=prompt_logprobs, pooled=pooled
        )

    def _jump(
        self,
        inputs: StepInputs,
        output: ModelRunnerOutput,
        sampled_slots: np.ndarray,
        drafted: frozenset[int],
    ) -> ModelRunnerOutput:
        """Adds the tokens that grammars force after those just sampled, and their time."""
        grammars = self.grammars
        if grammars is None or not grammars.has_any:
            return output
        jumping = [slot for slot in sampled_slots.tolist() if slot not in drafted]
        if forced := grammars.jump(np.array(jumping, np.int64), self._batch):
            order = inputs.slots[np.argsort(inputs.order)].tolist()
            num_sampled, token_ids = insert_forced(
                order, output.num_sampled, output.token_ids, forced
            )
            output = msgspec.structs.replace(output, num_sampled=num_sampled, token_ids=token_ids)
        costs = grammars.take_costs(inputs.sampled_slots)
        return msgspec.structs.replace(output, grammar_s=costs)

    def _refusals(self, slots: np.ndarray) -> dict[int, RowError]:
        refusals = self._batch.refusals
        return {slot: refusals[slot] for slot in slots.tolist() if slot in refusals}


def insert_forced(
    slots: list[int], num_sampled: list[int], token_ids: list[int], forced: dict[int, list[int]]
) -> tuple[list[int], list[int]]:
    """The columns of a ModelRunnerOutput with `forced` tokens, by slot, after each row's own."""
    counts, merged, cursor = [], [], 0
    for slot, count in zip(slots, num_sampled, strict=True):
        row = token_ids[cursor : cursor + count] + forced.get(slot, [])
        cursor += count
        counts.append(len(row))
        merged += row
    return counts, merged
