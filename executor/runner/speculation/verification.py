"""Steps whose rows verify drafts: several tokens of a request in one pass of the model.

Must not know: how drafts are found, the scheduler, the model.

A token depends on nothing but logits, parameters, seed and position (kernels: sample_tokens). So
the token after a draft is drawn as if the draft had been drawn itself, and a draft is accepted if
it is what the model draws. Rows are sampled position by position, by the stages of consecutive
steps, so that outputs are those of consecutive steps:

    known    drafts      logits at      drawn       accepted   sampled
    … a      b c d       a b c d        b c x       b c        b c x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from ....ipc.config import SchedulerConfig, SpeculativeConfig, resolved
from ....ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...input_batch import NO_LOGPROBS, InputBatch
from ...sampling.fused_sampler import FusedSampler
from ...sampling.logprob_arrays import join_logprobs
from ...sampling.sampler import NOT_FINITE, Sampler
from ..merged_outputs import tokens_by_row
from ..step_inputs import StepInputs
from .draft_depth import DraftDepth
from .drafters import Drafter, LookupDrafter, UntriedDrafts
from .pass_costs import PassCosts, PassTimes, max_num_logits
from .proposers import FirstOf, NgramProposer, Proposer
from .suffix_proposer import SuffixProposer


def make_speculation(
    scheduler_config: SchedulerConfig,
    batch: InputBatch,
    drafter: Drafter,
    depth: DraftDepth | None,
    *,
    has_states: bool,
) -> Speculation:
    """What an engine that drafts needs. has_states: see Speculation."""
    return Speculation(
        drafter,
        depth,
        batch,
        most=resolved(scheduler_config.speculative_config).num_speculative_tokens,
        max_num_tokens=resolved(scheduler_config.max_num_batched_tokens),
        max_num_rows=max_num_logits(scheduler_config),
        has_states=has_states,
    )


def make_lookup(scheduler_config: SchedulerConfig, batch: InputBatch) -> LookupDrafter | None:
    """The drafter of an engine that drafts without a model."""
    wanted = scheduler_config.speculative_config
    if wanted is None or wanted.draft_model_config is not None:
        return None
    return LookupDrafter(make_proposer(wanted), batch)


def make_depth(
    scheduler_config: SchedulerConfig,
    batch: InputBatch,
    times: PassTimes,
    clock: Callable[[], float] | None,
    lookup: LookupDrafter | None,
) -> DraftDepth:
    """How many drafts are worth their cost. clock: see DraftDepth. lookup: what drafts without a
    model.
    """
    most = resolved(scheduler_config.speculative_config).num_speculative_tokens
    drafting = None if times.draft is None else PassCosts(times.draft)
    verifying = None if times.verify is None else PassCosts(times.verify)
    untried = None if lookup is None else UntriedDrafts(lookup, batch)
    return DraftDepth(most, batch, PassCosts(times.model), drafting, verifying, clock, untried)


def make_proposer(wanted: SpeculativeConfig) -> Proposer:
    ngram = NgramProposer(wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    suffix = SuffixProposer(
        wanted.suffix_decoding_max_tree_depth,
        wanted.suffix_decoding_max_cached_requests,
        wanted.suffix_decoding_max_spec_factor,
        wanted.suffix_decoding_min_token_prob,
    )
    return {"ngram": ngram, "suffix": suffix, "auto": FirstOf(ngram, suffix)}[wanted.method]


class Speculation:
    """`depth`: how many drafts are worth their cost; None: as many as a row may have.
    `most`: drafts of a row. `max_num_rows`: of logits in one step.
    """

    def __init__(
        self,
        drafter: Drafter,
        depth: DraftDepth | None,
        batch: InputBatch,
        most: int,
        max_num_tokens: int,
        max_num_rows: int,
        has_states: bool = False,
    ):
        """has_states: whether the model keeps states, which end before the drafts."""
        self.drafter, self.has_states = drafter, has_states
        self.most = most
        self.depth = depth
        self._batch = batch
        self._num_misses = 0  # since the last draft
        self._are_wanted = False  # whether the last pass wanted drafts of any row
        # whether drafts are wanted of what the last pass computes
        self.drafts_decodes = False
        self._max_num_tokens = max_num_tokens
        self._max_num_rows = max_num_rows

    def choose(self, scheduler_output: SchedulerOutput) -> list[int]:
        """How many drafts each row is to have."""
        slots, limits = scheduler_output.slots, scheduler_output.num_lookahead_tokens
        most = limits if self.depth is None else self.depth.choose(scheduler_output)
        self._are_wanted = any(most)
        # a pass whose rows have no room for drafts is followed by passes that have some
        self.drafts_decodes = self._are_wanted or not any(limits)
        refusals = self._batch.refusals
        return [
            0 if slot in refusals else min(limit, wanted, self.most)
            for slot, limit, wanted in zip(slots, limits, most)
        ]

    def begin(self, drafts_decodes: bool) -> None:
        """Says whether drafts are wanted of the pass that follows, where `choose` was called for
        another pass since it was called for this one.
        """
        self.drafts_decodes = drafts_decodes

    def draft(
        self, scheduler_output: SchedulerOutput, counts: list[int]
    ) -> tuple[list[np.ndarray], int]:
        """At most `counts` drafts of each row, which `choose` gave: none where the row does not
        compute its last known token.

        Also returns how many passes to run in one call if no row has any: as many as possible where
        drafts are not worth their cost, else twice as many each time that none is found.
        """
        slots = scheduler_output.slots
        room = min(
            self._max_num_tokens - scheduler_output.total_num_scheduled_tokens,
            self._max_num_rows - len(slots),
        )
        drafts = self.drafter.draft(slots, counts, room)
        if self.drafter.sees_every_pass and self._are_wanted:
            return drafts, 1  # several passes in one call would be missed
        self._num_misses = 0 if any(map(len, drafts)) else min(self._num_misses + 1, 8)
        return drafts, 1 << self._num_misses if self._are_wanted else scheduler_output.num_passes

    def clock(self) -> float:
        """Seconds of passes and of the host's work for them, where these are learned."""
        clock = None if self.depth is None else self.depth.clock
        return 0.0 if clock is None else clock()

    def learn_time(
        self, step: SchedulerOutput, num_passes: int, num_drafted: list[int], seconds: float
    ) -> None:
        """Takes how long passes took, with `num_drafted` drafts of each row that had some."""
        if self.depth is not None:
            num_tokens = step.total_num_scheduled_tokens
            self.depth.learn_time(len(step.slots), num_tokens, num_passes, num_drafted, seconds)

    def is_worth(self, num_rows: int) -> bool:
        """Whether drafts can gain anything in a step of so many rows."""
        return self.depth is None or self.depth.can_gain(num_rows)

    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Shows a pass of the model to a drafter that has to see it, unless no drafts are worth
        their cost in a batch of this size, or for these decodes.
        """
        num_rows = len(inputs.slots)
        has_prompts = inputs.metadata.num_decodes < num_rows
        if (
            self.drafter.sees_every_pass
            and (has_prompts or self.drafts_decodes)
            and self.is_worth(num_rows)
        ):
            self.drafter.observe(inputs, hidden)

    def verify_at_once(
        self,
        drafts: list[np.ndarray],
        inputs: StepInputs,
        of_logits: Sequence[torch.Tensor],
        sampler: Sampler | FusedSampler,
    ) -> ModelRunnerOutput:
        """As `verify`, without a first output, for rows of which none uses a stage: all positions
        are sampled in one call.
        """
        batch, order = self._batch, inputs.order[inputs.sampled_rows]
        lengths = np.array([len(drafts[index]) for index in order], np.int64)
        slots, starts = inputs.sampled_slots, first_rows(lengths)
        row_of = np.repeat(np.arange(len(slots)), lengths + 1)
        offsets = np.arange(len(row_of)) - starts[row_of]
        logits, *largest = of_logits
        sampled = sampler(
            logits, batch, slots[row_of], tuple(largest), batch.num_tokens[slots][row_of] + offsets
        )
        expected = np.full(len(row_of), -1, np.int64)  # no token
        if lengths.any():
            expected[offsets < lengths[row_of]] = np.concatenate([drafts[i] for i in order])
        is_last = sampled.token_ids != expected
        if sampled.errors:
            is_last[list(sampled.errors)] = True
        num_accepted = np.minimum.reduceat(np.where(is_last, offsets, len(row_of)), starts)
        last = starts + num_accepted
        failed = np.array([row in sampled.errors for row in last.tolist()], bool)
        # accepted drafts are in the table already
        ends = batch.num_tokens[slots] + num_accepted
        batch.token_ids[slots, ends] = sampled.token_ids[last]
        batch.num_tokens[slots] = ends + ~failed
        num_sampled, accepted = [0] * len(drafts), [0] * len(drafts)
        tokens: list[list[int]] = [[] for _ in drafts]
        for index, start, count, has_failed in zip(
            order.tolist(), starts.tolist(), num_accepted.tolist(), failed.tolist()
        ):
            end = start + count + (not has_failed)
            tokens[index] = sampled.token_ids[start:end].tolist()
            num_sampled[index], accepted[index] = end - start, count
        asked = np.flatnonzero(batch.num_logprobs[slots[row_of]] != NO_LOGPROBS).tolist()
        entries = zip((row for row in asked if row not in sampled.errors), sampled.logprobs)
        is_taken = offsets <= num_accepted[row_of]
        first = ModelRunnerOutput(
            num_sampled,
            [token_id for row in tokens for token_id in row],
            join_logprobs([entry] for row, entry in entries if is_taken[row]),
            dict.fromkeys(slots[failed].tolist(), NOT_FINITE),
        )
        return self._with_drafts(first, inputs, drafts, accepted)

    def verify(
        self,
        drafts: list[np.ndarray],
        inputs: StepInputs,
        of_logits: Sequence[torch.Tensor],
        first: ModelRunnerOutput,
        sampler: Sampler | FusedSampler,
    ) -> ModelRunnerOutput:
        """Samples what follows the accepted drafts.

        inputs: of the step that `place_drafts` returned. of_logits: what the model returned for
        `logits_rows`. first: the output of the step whose rows' last known tokens are sampled.
        """
        batch, order, rows = self._batch, inputs.order, inputs.sampled_rows
        lengths = np.array([len(drafts[index]) for index in order[rows]], np.int64)
        starts = first_rows(lengths)
        tokens, errors, logprobs = tokens_by_row(first), dict(first.errors), [first.logprobs]
        accepted = [0] * len(drafts)
        active, depth = self._accepted(drafts, np.arange(len(rows)), order[rows], tokens, 0), 0
        while len(active):
            depth += 1
            slots, index = inputs.slots[rows[active]], torch.from_numpy(starts[active] + depth)
            logits, *largest = (values[index] for values in of_logits)
            sampled = sampler(logits, batch, slots, tuple(largest))
            errors |= {int(slots[row]): problem for row, problem in sampled.errors.items()}
            good = np.array([row not in sampled.errors for row in range(len(slots))])
            batch.append_tokens(slots[good], sampled.token_ids[good])
            logprobs.append(sampled.logprobs)
            for row in order[rows[active]]:
                accepted[row] += 1
            active = active[good]
            for row, token_id in zip(order[rows[active]], sampled.token_ids[good].tolist()):
                tokens[row].append(token_id)
            active = self._accepted(drafts, active, order[rows], tokens, depth)
        first = msgspec.structs.replace(
            first,
            num_sampled=[len(row) for row in tokens],
            token_ids=[token_id for row in tokens for token_id in row],
            logprobs=join_logprobs(logprobs),
            errors=errors,
        )
        return self._with_drafts(first, inputs, drafts, accepted)

    def _with_drafts(
        self,
        result: ModelRunnerOutput,
        inputs: StepInputs,
        drafts: list[np.ndarray],
        accepted: list[int],
    ) -> ModelRunnerOutput:
        """The result with what became of the drafts, which the depth learns."""
        num_drafted = [len(draft) for draft in drafts]
        if self.depth is not None:
            self.depth.learn(inputs.slots[np.argsort(inputs.order)].tolist(), num_drafted, accepted)
        return msgspec.structs.replace(
            result,
            # a state ends before the drafts, so these are computed again
            num_ahead=[0] * len(accepted) if self.has_states else accepted,
            num_drafted=[count for count in num_drafted if count],
            num_accepted=[count for count, drafted in zip(accepted, num_drafted) if drafted],
        )

    @staticmethod
    def _accepted(
        drafts: list[np.ndarray],
        active: np.ndarray,
        indices: np.ndarray,
        tokens: list[list[int]],
        depth: int,
    ) -> np.ndarray:
        """Those of `active`, rows of `indices`, whose last token is their draft of this depth."""
        return np.array(
            [
                row
                for row in active.tolist()
                if depth < len(draft := drafts[indices[row]])
                and len(tokens[indices[row]]) == depth + 1
                and tokens[indices[row]][depth] == draft[depth]
            ],
            np.int64,
        )


def place_drafts(
    batch: InputBatch, scheduler_output: SchedulerOutput, drafts: list[np.ndarray]
) -> SchedulerOutput:
    """Writes the drafts behind the known tokens; returns the step that computes them too."""
    for slot, draft in zip(scheduler_output.slots, drafts):
        start = batch.num_tokens[slot]
        batch.token_ids[slot, start : start + len(draft)] = draft
    counts = [
        count + len(draft) for count, draft in zip(scheduler_output.num_scheduled_tokens, drafts)
    ]
    return msgspec.structs.replace(
        scheduler_output, num_scheduled_tokens=counts, num_lookahead_tokens=[]
    )


def first_rows(num_drafts: np.ndarray) -> np.ndarray:
    """num_drafts [N] of sampled rows -> [N] i64: the index in `logits_rows` of each one's last
    known token.
    """
    return np.cumsum(num_drafts + 1) - num_drafts - 1


def logits_rows(inputs: StepInputs, drafts: list[np.ndarray]) -> torch.Tensor:
    """[R] i64: of each sampled row in turn, its last known token and its drafts."""
    ends = np.cumsum(inputs.metadata.query_lens)
    rows = [
        np.arange(end - len(drafts[index]) - 1, end)
        for end, index in zip(ends[inputs.sampled_rows], inputs.order[inputs.sampled_rows])
    ]
    indices = np.concatenate(rows) if rows else np.empty(0, np.int64)
    return torch.from_numpy(indices).to(inputs.token_ids.device)
