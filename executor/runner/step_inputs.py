"""The inputs of model and sampler for a step: the rows of a SchedulerOutput, flattened.

Must not know: the model, requests beyond their slot, what is done with the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...ipc.step_messages import SchedulerOutput
from ...kernels.ops import AttentionMetadata, ImageRows, make_metadata
from ..input_batch import InputBatch
from .image_table import ImageTable, no_images
from .state_table import ALL_KNOWN, StateTable, no_states

NULL_BLOCK = 0  # never allocated; block tables of padding rows point to it


@dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    """Rows are requests, decodes (one token) first; the tokens of row r are [query_start_loc[r],
    query_start_loc[r + 1]).

    Valid until the next step's inputs are made.
    """

    order: np.ndarray  # [B]: row -> index into SchedulerOutput.slots
    slots: np.ndarray  # [B], by row
    token_ids: torch.Tensor  # [T] i32
    positions: torch.Tensor  # [T] i64
    metadata: AttentionMetadata
    sampled_rows: np.ndarray  # [R] rows whose last known token is computed in this step
    # [R]; the same array as in the previous step if the same rows continue
    sampled_slots: np.ndarray
    logits_indices: torch.Tensor  # [R] i64, indices in [0, T) of their last tokens
    token_types: torch.Tensor | None = None  # [T] i32, of models that take them

    def in_order_of_step(
        self, rows: np.ndarray, token_ids: np.ndarray
    ) -> tuple[list[int], list[int]]:
        """The first columns of the ModelRunnerOutput of a step whose `rows` [R] have sampled
        `token_ids` [R].
        """
        by_request = np.full(len(self.slots), -1, np.int64)
        by_request[self.order[rows]] = token_ids
        has_token = by_request >= 0
        return has_token.astype(int).tolist(), by_request[has_token].tolist()


@dataclass(eq=False, slots=True)
class _Decodes:
    """A step of decodes that were all sampled, with the arrays behind the inputs' tensors."""

    output: SchedulerOutput
    inputs: StepInputs
    token_index: np.ndarray  # [B] into token_ids of the slot table, flat
    token_ids: np.ndarray
    positions: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray  # [groups, B]
    block_tables: list[torch.Tensor]  # of each group, like the following
    slot_mappings: list[torch.Tensor]


class StepLayout(NamedTuple):
    """The rows of a step, without tokens."""

    order: np.ndarray  # [B], like the following: see StepInputs
    slots: np.ndarray
    num_computed: np.ndarray
    query_lens: np.ndarray
    query_start_loc: np.ndarray  # [B + 1]
    seq_lens: np.ndarray  # [B] i32; all others are i64
    num_decodes: int
    sampled_rows: np.ndarray  # [R]

    def is_all_sampled_decodes(self) -> bool:
        return len(self.sampled_rows) == self.num_decodes == len(self.slots)

    def logits_indices(self) -> np.ndarray:
        """[R]"""
        return self.query_start_loc[1:][self.sampled_rows] - 1

    def num_drafts(self, num_tokens: np.ndarray) -> np.ndarray:
        """num_tokens [slots]: length of each slot's sequence -> [B]: what a row computes beyond."""
        return np.maximum(self.seq_lens - num_tokens[self.slots], 0)

    def of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """The position and the slot of each token: two of [T]."""
        firsts = self.num_computed - self.query_start_loc[:-1]
        positions = np.arange(self.query_start_loc[-1]) + np.repeat(firsts, self.query_lens)
        return positions, np.repeat(self.slots, self.query_lens)


def lay_out(scheduler_output: SchedulerOutput, num_tokens: np.ndarray) -> StepLayout:
    """num_tokens [slots]: length of each slot's sequence."""
    query_lens = np.array(scheduler_output.num_scheduled_tokens, np.int64)
    is_prefill = query_lens != 1
    num_decodes = len(query_lens) - int(np.count_nonzero(is_prefill))
    slots = np.array(scheduler_output.slots, np.int64)
    num_computed = np.array(scheduler_output.num_computed_tokens, np.int64)
    if num_decodes == len(slots):  # most steps
        order, query_start_loc = np.arange(num_decodes), np.arange(num_decodes + 1)
    else:
        order = np.arange(len(slots))
        if num_decodes:
            order = np.argsort(is_prefill, kind="stable")
            query_lens, slots, num_computed = query_lens[order], slots[order], num_computed[order]
        query_start_loc = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(query_lens, out=query_start_loc[1:])
    seq_lens = (num_computed + query_lens).astype(np.int32)
    return StepLayout(
        order=order,
        slots=slots,
        num_computed=num_computed,
        query_lens=query_lens,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        sampled_rows=np.flatnonzero(seq_lens >= num_tokens[slots]),  # greater with drafts
    )


def token_types(
    batch: InputBatch, count: int, token_slots: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """[T] i32: 1 for the tokens of a pair's second text, where the model distinguishes `count` > 1
    types.
    """
    second = batch.second_text_start[token_slots]
    return ((count > 1) & (second > 0) & (positions >= second)).astype(np.int32)


class StepInputMaker:
    """Makes inputs on a CPU; executor/runner/device_inputs.py does it on a GPU.

    Vectorised over rows and tokens: no Python per token or request.
    """

    def __init__(
        self,
        batch: InputBatch,
        block_size: int,
        num_token_types: int = 0,
        tokens_ahead: int = 0,
        states: StateTable | None = None,
        images: ImageTable | None = None,
    ):
        """num_token_types: that a model distinguishes; 0: it takes none. tokens_ahead: a position
        gets the token so many positions later, and the last ones are not computed. states: of a
        model that keeps any. images: of a model that reads any.
        """
        self._tokens_ahead, self._states, self._images = tokens_ahead, states, images
        self._num_token_types = num_token_types
        self.batch = batch
        self.block_size = block_size
        self._last: _Decodes | None = None  # the last step, if the next may continue it

    def __call__(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Makes the inputs. The step's differences are already in the tables."""
        last = self._last
        if last is not None and self._is_next(last, scheduler_output):
            return self._advance(last, scheduler_output)
        return self._make(scheduler_output)

    def restart(self) -> None:
        """The next step continues no earlier one: requests may have entered slots since."""
        self._last = None

    def for_burst(self, scheduler_output: SchedulerOutput, count: int) -> StepInputs:
        """Makes the inputs of the first of `count` steps, whose block tables serve all of them; the
        other steps update them in place.
        """
        return self._make(scheduler_output, count - 1)

    def _make(self, scheduler_output: SchedulerOutput, num_ahead: int = 0) -> StepInputs:
        batch, ahead = self.batch, self._tokens_ahead
        layout = lay_out(scheduler_output, batch.num_tokens - ahead)
        slots, seq_lens = layout.slots, layout.seq_lens
        batch.check_blocks(slots, seq_lens + num_ahead)
        positions, token_slots = layout.num_computed, slots
        if layout.num_decodes < len(slots):
            positions, token_slots = layout.of_tokens()
        token_ids = batch.token_ids[token_slots, positions + ahead]
        slot_mapping = self._slot_mapping(token_slots, positions)
        block_tables = self._block_tables(slots, seq_lens + num_ahead)
        slot_mappings = [torch.from_numpy(of_group) for of_group in slot_mapping]
        inputs = StepInputs(
            order=layout.order,
            slots=slots,
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            logits_indices=torch.from_numpy(layout.logits_indices()),
            metadata=make_metadata(
                torch.from_numpy(layout.query_start_loc.astype(np.int32)),
                torch.from_numpy(seq_lens),
                block_tables,
                slot_mappings,
                layout.num_decodes,
                layout.query_lens.tolist(),
                seq_lens.tolist(),
                self._adapters(token_slots),
                self._states and self._states.rows(slots, self._last_positions(slots, num_ahead)),
                self._images and self._image_rows(slots, layout.num_computed, layout.query_lens),
            ),
            sampled_rows=layout.sampled_rows,
            sampled_slots=slots[layout.sampled_rows],
            token_types=self._token_types(token_slots, positions),
        )
        self._last = None
        if layout.is_all_sampled_decodes() and not num_ahead:
            self._last = _Decodes(
                output=scheduler_output,
                inputs=inputs,
                token_index=slots * batch.token_ids.shape[1] + positions + ahead,
                token_ids=token_ids,
                positions=positions,
                seq_lens=seq_lens,
                slot_mapping=slot_mapping,
                block_tables=block_tables,
                slot_mappings=slot_mappings,
            )
        return inputs

    def _is_next(self, last: _Decodes, now: SchedulerOutput) -> bool:
        """Whether the same requests continue by one token each and are all sampled again."""
        before = last.inputs.metadata
        return (
            now.slots == last.output.slots
            and not now.new_requests
            and now.num_computed_tokens == before.seq_lens_list
            and now.num_scheduled_tokens == before.query_lens
            and bool(
                (
                    self.batch.num_tokens[last.inputs.slots]
                    == last.seq_lens + 1 + self._tokens_ahead
                ).all()
            )
        )

    def _advance(self, last: _Decodes, now: SchedulerOutput) -> StepInputs:
        """Gives the result of `_make` in the arrays of the previous step. For one row this takes a
        third of the time.
        """
        inputs, before = last.inputs, last.inputs.metadata
        last.positions += 1
        last.seq_lens += 1
        last.token_index += 1
        # raises before the copy, in case of an error
        self.batch.token_ids.ravel().take(last.token_index, out=last.token_ids, mode="clip")
        if (last.positions % self.block_size).all():
            last.slot_mapping += 1
        else:  # some row begins a block
            self.batch.check_blocks(inputs.slots, last.seq_lens)
            last.slot_mapping[:] = self._slot_mapping(inputs.slots, last.positions)
            last.block_tables = self._block_tables(inputs.slots, last.seq_lens)
        metadata = make_metadata(
            before.query_start_loc,
            before.seq_lens,
            last.block_tables,
            last.slot_mappings,
            before.num_decodes,
            before.query_lens,
            last.seq_lens.tolist(),
            before.adapters,
            self._states and self._states.rows(inputs.slots, self._last_positions(inputs.slots)),
            self._images and self._image_rows(inputs.slots, last.positions),
        )
        last.output = now
        last.inputs = StepInputs(
            order=inputs.order,
            slots=inputs.slots,
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            metadata=metadata,
            sampled_rows=inputs.sampled_rows,
            sampled_slots=inputs.sampled_slots,
            logits_indices=inputs.logits_indices,
        )
        return last.inputs

    def _token_types(self, token_slots: np.ndarray, positions: np.ndarray) -> torch.Tensor | None:
        if not self._num_token_types:
            return None
        types = token_types(self.batch, self._num_token_types, token_slots, positions)
        return torch.from_numpy(types)

    def _image_rows(
        self, slots: np.ndarray, firsts: np.ndarray, counts: np.ndarray | None = None
    ) -> ImageRows:
        """See ImageTable.columns. counts: None of rows with one token each."""
        assert self._images is not None
        counts = np.ones_like(firsts) if counts is None else counts
        return self._images.columns(slots, firsts, counts, self._tokens_ahead).on_host()

    def _adapters(self, token_slots: np.ndarray) -> torch.Tensor | None:
        """[T] i32: see AttentionMetadata."""
        batch = self.batch
        return None if batch.loras is None else torch.from_numpy(batch.adapters[token_slots])

    def _last_positions(self, slots: np.ndarray, num_ahead: int = 0) -> np.ndarray:
        """[B] i64, of the rows of `slots` [B]. What follows the tokens that a slot has are drafts,
        except in a burst, whose later passes compute what the earlier ones sample.
        """
        if num_ahead:
            return np.full(len(slots), ALL_KNOWN, np.int64)
        return self.batch.num_tokens[slots] - 1

    def _slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[groups, T] i64: the cache slot of each slot's token at each position."""
        tables = self.batch.block_tables
        index = slots * tables.shape[2] + positions // self.block_size
        block_ids = tables.reshape(len(tables), -1).take(index, axis=1)
        return block_ids.astype(np.int64) * self.block_size + positions % self.block_size

    def _block_tables(self, slots: np.ndarray, seq_lens: np.ndarray) -> list[torch.Tensor]:
        """Of each group: [B, max_blocks] i32."""
        num_blocks = -(-int(seq_lens.max()) // self.block_size)
        tables = self.batch.block_tables[:, slots, :num_blocks]
        return [torch.from_numpy(of_group) for of_group in tables]


def dummy_step(
    num_tokens: int,
    num_logits: int,
    num_groups: int,
    device: torch.device | None = None,
    has_adapters: bool = False,
    has_states: bool = False,
    has_images: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
    """token_ids, positions, metadata and logits_indices of `num_tokens` one-token rows without
    effect on the cache, with logits of `num_logits` of them.
    """

    def filled(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    metadata = make_metadata(
        torch.arange(num_tokens + 1, dtype=torch.int32, device=device),
        filled(1, torch.int32, num_tokens),
        filled(NULL_BLOCK, torch.int32, num_groups, num_tokens, 1).unbind(),
        filled(-1, torch.int64, num_groups, num_tokens).unbind(),
        num_tokens,
        [1] * num_tokens,
        [1] * num_tokens,
        filled(-1, torch.int32, num_tokens) if has_adapters else None,
        no_states(num_tokens, device) if has_states else None,
        no_images(num_tokens, device) if has_images else None,
    )
    token_ids, positions = filled(0, torch.int32, num_tokens), filled(0, torch.int64, num_tokens)
    return token_ids, positions, metadata, filled(0, torch.int64, num_logits)
