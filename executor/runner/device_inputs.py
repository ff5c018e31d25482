"""The slot tables on a GPU, and a step's inputs made from them on the GPU.

Must not know: the model, how rows are sampled, why anything changes.

    host    InputBatch: all that is known ──▶ differences and rows of a step, packed ─┐ one copy
    GPU     token_ids, block_tables, parameters by slot ◀── write_runs ◀──────────────┤
            inputs of a pass, in a graph's buffers      ◀── prepare_step_inputs ◀─────┘

The device appends what it samples to its own token_ids, and the host learns it later. So the host's
tables have all but the newest tokens, and the device's have all but what the host has sampled,
which is sent with the next step, as are the drafts that a step verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ipc.step_messages import SchedulerOutput
from ...kernels.ops import ImageRows, StateRows, make_metadata
from ..device import packed
from ..input_batch import InputBatch
from .cuda_graphs import Tensors
from .image_table import ImageTable
from .state_table import StateTable
from .step_inputs import StepInputs, StepLayout, lay_out, token_types

NUM_PARAMETERS = 8  # words of a slot, see gather_sampling_parameters, which reads the first six
ADAPTER = 6  # the word with the place of the slot's LoRA adapter, or -1
WORDS_ALIGNED = 4  # table rows are aligned to 16 bytes


class DeviceTables:
    """One memory of 32-bit words [M], and the tables in it.

    A step's differences are runs of words, whichever table they belong to.
    """

    def __init__(self, batch: InputBatch, ops: Any, device: torch.device):
        num_groups, num_slots, max_blocks = batch.block_tables.shape
        row = aligned(max_blocks)
        widths = (NUM_PARAMETERS, num_groups * row, aligned(batch.token_ids.shape[1]))
        self.batch, self.device, self._write_runs = batch, device, ops.write_runs
        self._memory = torch.zeros(num_slots * sum(widths), dtype=torch.int32, device=device)
        self.parameters, self.block_tables, self.token_ids = (
            table.view(num_slots, width)
            for table, width in zip(
                self._memory.split([num_slots * width for width in widths]), widths, strict=True
            )
        )
        # of each group of layers: [num_slots, max_blocks]
        self.group_tables = self.block_tables.view(num_slots, num_groups, row).unbind(1)
        # slot -> index of the first token that the device lacks
        self._unsent_tokens: dict[int, int] = {}
        self._unsent_drafts: dict[int, int] = {}  # slot -> how many follow its tokens
        # place in memory, words [N] i32: of other tables
        self._unsent_runs: list[tuple[int, np.ndarray]] = []

    def note_differences(self, scheduler_output: SchedulerOutput) -> None:
        """Notes differences that the host's tables already have; the next `ship` sends them."""
        batch = self.batch
        for request in scheduler_output.new_requests:
            self._unsent_tokens[request.slot] = 0
            self._unsent_runs.append(
                (
                    self._place(self.parameters, request.slot, 0),
                    parameter_words(batch, request.slot),
                )
            )
        for slot, block_ids in zip(scheduler_output.slots, scheduler_output.new_block_ids):
            if block_ids:
                end = int(batch.num_blocks[slot])
                start = end - len(block_ids) // batch.num_groups
                row = self.group_tables[0].shape[1]
                self._unsent_runs += [
                    (
                        self._place(self.block_tables, slot, group * row + start),
                        table[slot, start:end],
                    )
                    for group, table in enumerate(batch.block_tables)
                ]

    def note_sampled_by_host(self, slots: np.ndarray) -> None:
        """Notes tokens that the host may append to `slots` [R] and the device does not know. Those
        that it knows behind them, such as drafts, are of no use from now on.
        """
        unsent = self._unsent_tokens
        for slot, num_tokens in zip(slots.tolist(), self.batch.num_tokens[slots].tolist()):
            unsent[slot] = min(unsent.get(slot, num_tokens), num_tokens)

    def note_drafts(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Notes that `counts` [R] drafts follow the tokens of `slots` [R] in the host's table."""
        drafting = np.flatnonzero(counts)
        if len(drafting):
            self.note_sampled_by_host(slots[drafting])
            self._unsent_drafts = dict(zip(slots[drafting].tolist(), counts[drafting].tolist()))

    def ship(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copies the arrays to the device and updates the tables: one copy, and one launch if
        anything differs.
        """
        runs, batch = self._unsent_runs, self.batch
        for slot, start in self._unsent_tokens.items():
            end = batch.num_tokens[slot] + self._unsent_drafts.get(slot, 0)
            place = self._place(self.token_ids, slot, start)
            runs.append((place, batch.token_ids[slot, start:end]))
        if runs:
            arrays = arrays | {
                "places": np.array([place for place, _ in runs]),
                "starts": np.cumsum([0, *(len(words) for _, words in runs)], dtype=np.int32),
                "words": np.concatenate([words for _, words in runs]),
            }
        self._unsent_tokens, self._unsent_drafts, self._unsent_runs = {}, {}, []
        tensors = packed(arrays, self.device)
        if runs:
            self._write_runs(
                self._memory, *(tensors.pop(name) for name in ("places", "starts", "words"))
            )
        return tensors

    @staticmethod
    def _place(table: torch.Tensor, slot: int, column: int) -> int:
        return int(table.storage_offset()) + slot * table.shape[1] + column


def aligned(num_words: int) -> int:
    return -(-num_words // WORDS_ALIGNED) * WORDS_ALIGNED


def parameter_words(batch: InputBatch, slot: int) -> np.ndarray:
    """[8] i32: the words that gather_sampling_parameters reads."""
    words = np.zeros(NUM_PARAMETERS, np.int32)
    words.view(np.float32)[[0, 2, 3]] = (
        batch.temperature[slot],
        batch.top_p[slot],
        batch.min_p[slot],
    )
    words[1], words.view(np.int64)[2] = batch.top_k[slot], batch.seeds[slot]
    words[ADAPTER] = batch.adapters[slot]
    return words


class _Outputs(NamedTuple):
    """Where the inputs of a pass are written, padding rows included, and what the pass reads."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]  # of each group, as the tables
    seq_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    adapters: torch.Tensor | None
    read_token_ids: torch.Tensor  # [T]
    read_positions: torch.Tensor  # [T]
    read_seq_lens: torch.Tensor  # [B]
    read_block_tables: tuple[torch.Tensor, ...]  # [B, max_blocks]
    read_slot_mapping: tuple[torch.Tensor, ...]  # [T]


def _outputs(tensors: Tensors, count: int, num_tokens: int) -> _Outputs:
    """tensors: as of GraphedStep.buffers."""
    token_ids, positions, slot_mapping, seq_lens, block_tables, *adapters = tensors
    return _Outputs(
        token_ids,
        positions,
        slot_mapping.unbind(),
        seq_lens,
        block_tables.unbind(),
        adapters[0] if adapters else None,
        token_ids[:num_tokens],
        positions[:num_tokens],
        seq_lens[:count],
        block_tables[:, :count].unbind(),
        slot_mapping[:, :num_tokens].unbind(),
    )


class DeviceInputMaker:
    """Does on the device what StepInputMaker does on a CPU, from the device's tables.

    `graph_buffers`: GraphedStep.buffers, or a function that returns None.
    """

    def __init__(
        self,
        tables: DeviceTables,
        block_size: int,
        ops: Any,
        graph_buffers: Callable[[int], Tensors | None],
        num_token_types: int = 0,
        states: StateTable | None = None,
        images: ImageTable | None = None,
        tokens_ahead: int = 0,
    ):
        """num_token_types: that a model distinguishes; 0: it takes none. states: of a model that
        keeps any. images: of a model that reads any. tokens_ahead: see StepInputMaker.
        """
        self._num_token_types, self._tokens_ahead = num_token_types, tokens_ahead
        self._token_table = tables.token_ids[:, tokens_ahead:]
        self.tables, self._states, self._images = tables, states, images
        self.block_size = block_size
        self._prepare = ops.prepare_step_inputs
        self._graph_buffers = graph_buffers
        num_slots, device = len(tables.token_ids), tables.device
        self._of_graphs: dict[int, _Outputs] = {}  # by the number of decodes
        # query_start_loc of decodes
        self._starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        # logits_indices of decodes
        self._rows = torch.arange(num_slots, dtype=torch.int64, device=device)

    def __call__(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Makes the inputs of a step that the host samples. It knows all tokens so far, and what a
        row computes beyond them are drafts.
        """
        num_tokens = self.tables.batch.num_tokens - self._tokens_ahead
        layout = lay_out(scheduler_output, num_tokens)
        self.tables.batch.check_blocks(layout.slots, layout.seq_lens)
        num_drafts = layout.num_drafts(num_tokens)
        self.tables.note_drafts(layout.slots, num_drafts)
        (columns,) = self.ship([layout], num_drafts)
        inputs = self.prepare(layout, columns)
        self.tables.note_sampled_by_host(inputs.sampled_slots)
        return inputs

    def restart(self) -> None:
        """See StepInputMaker: here no step continues another."""

    def ship(
        self, layouts: Sequence[StepLayout], num_drafts: np.ndarray | int = 0
    ) -> list[dict[str, torch.Tensor]]:
        """Copies the rows of all passes of a step to the device, with all that the tables lack, in
        one copy. num_drafts [B]: tokens of each row that are drafts.

        For each pass: the arguments of `prepare`, and the slots [R] i32 and positions [R] i64 of
        the tokens to sample.
        """
        passes = [self._columns(layout, num_drafts) for layout in layouts]
        tensors = self.tables.ship(
            {
                f"{name} {number}": column
                for number, columns in enumerate(passes)
                for name, column in columns.items()
            }
        )
        shipped = []
        for number, (layout, columns) in enumerate(zip(layouts, passes, strict=True)):
            there = {name: tensors[f"{name} {number}"] for name in columns}
            if layout.is_all_sampled_decodes():
                count = len(layout.slots)
                there |= {
                    "query_start_loc": self._starts[: count + 1],
                    "logits_indices": self._rows[:count],
                    "sampled_slots": there["slots"],
                }
            shipped.append(there)
        return shipped

    def _columns(self, layout: StepLayout, num_drafts: np.ndarray | int) -> dict[str, np.ndarray]:
        slots = layout.slots.astype(np.int32)
        positions = layout.seq_lens[layout.sampled_rows].astype(np.int64)
        columns = {
            "slots": slots,
            "num_computed": layout.num_computed.astype(np.int32),
            "positions": positions,
        }
        if not layout.is_all_sampled_decodes():
            columns["query_start_loc"] = layout.query_start_loc.astype(np.int32)
            columns["logits_indices"] = layout.logits_indices()
            columns["sampled_slots"] = slots[layout.sampled_rows]
        if self._states is not None:
            columns["last_positions"] = layout.seq_lens.astype(np.int64) - 1 - num_drafts
            columns["copy_positions"] = self._states.copy_positions[layout.slots]
            columns["copy_places"] = self._states.copy_places[layout.slots]
        if self._images is not None:
            images = self._images.columns(
                layout.slots, layout.num_computed, layout.query_lens, self._tokens_ahead
            )
            columns["image_rows"], columns["later_tokens"] = images.rows, images.later
            columns["position_offsets"] = images.offsets.ravel()
        if self._num_token_types:
            positions, slots = layout.of_tokens()
            columns["token_types"] = token_types(
                self.tables.batch, self._num_token_types, slots, positions
            )
        return columns

    def prepare(self, layout: StepLayout, columns: dict[str, torch.Tensor]) -> StepInputs:
        """Prepares a pass from `columns` of `ship`.

        Passes are prepared in order, each after the previous one has sampled.
        """
        tables, outputs = self.tables, self._outputs(layout)
        num_tokens = len(outputs.read_token_ids)
        rows = columns["slots"], columns["num_computed"], columns["query_start_loc"]
        for table, slot_mapping, block_tables in zip(
            tables.group_tables, outputs.slot_mapping, outputs.block_tables, strict=True
        ):
            self._prepare(
                *rows,
                self._token_table,
                table,
                self.block_size,
                outputs.token_ids,
                outputs.positions,
                slot_mapping,
                outputs.seq_lens,
                block_tables,
            )
        return StepInputs(
            order=layout.order,
            slots=layout.slots,
            token_ids=outputs.read_token_ids,
            positions=outputs.read_positions,
            metadata=make_metadata(
                columns["query_start_loc"],
                outputs.read_seq_lens,
                outputs.read_block_tables,
                outputs.read_slot_mapping,
                layout.num_decodes,
                layout.query_lens.tolist(),
                layout.seq_lens.tolist(),
                self._adapters(num_tokens, columns, outputs.adapters),
                self._state_rows(columns),
                self._image_rows(columns),
            ),
            sampled_rows=layout.sampled_rows,
            sampled_slots=layout.slots[layout.sampled_rows],
            logits_indices=columns["logits_indices"],
            token_types=columns.get("token_types"),
        )

    def _outputs(self, layout: StepLayout) -> _Outputs:
        """A graph's buffers, whose views are made once, or memory of the pass's own."""
        count = len(layout.slots)
        if layout.is_all_sampled_decodes():
            if count not in self._of_graphs and (buffers := self._graph_buffers(count)) is not None:
                self._of_graphs[count] = _outputs(buffers, count, count)
            if count in self._of_graphs:
                return self._of_graphs[count]
        num_tokens = int(layout.query_start_loc[-1])
        num_groups, longest = len(self.tables.group_tables), int(layout.seq_lens.max())
        sizes = (
            (num_tokens,),
            (num_tokens,),
            (num_groups, num_tokens),
            (count,),
            (num_groups, count, -(-longest // self.block_size)),
        )
        dtypes = torch.int32, torch.int64, torch.int64, torch.int32, torch.int32
        own = tuple(
            torch.empty(size, dtype=dtype, device=self.tables.device)
            for size, dtype in zip(sizes, dtypes, strict=True)
        )
        return _outputs(own, count, num_tokens)

    def _state_rows(self, columns: dict[str, torch.Tensor]) -> StateRows | None:
        """A place is a slot."""
        if self._states is None:
            return None
        names = "slots", "last_positions", "copy_positions", "copy_places"
        return StateRows(*(columns[name] for name in names))

    def _image_rows(self, columns: dict[str, torch.Tensor]) -> ImageRows | None:
        if self._images is None:
            return None
        offsets = columns["position_offsets"].view(3, -1)
        return ImageRows(columns["image_rows"], offsets, columns["later_tokens"])

    def _adapters(
        self, num_tokens: int, columns: dict[str, torch.Tensor], buffer: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """[T] i32: see AttentionMetadata. buffer: of a graph, whose padding rows have none."""
        tables = self.tables
        if tables.batch.loras is None:
            return None
        adapters = tables.parameters[:, ADAPTER].index_select(0, columns["slots"])
        if num_tokens != len(adapters):
            tokens = torch.arange(num_tokens, dtype=torch.int32, device=tables.device)
            rows = torch.searchsorted(columns["query_start_loc"][1:], tokens, right=True)
            adapters = adapters.index_select(0, rows)
        if buffer is None:
            return adapters
        buffer[:num_tokens].copy_(adapters)
        buffer[num_tokens:].fill_(-1)
        return buffer[:num_tokens]
