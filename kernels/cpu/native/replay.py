"""Replays a recorded model, whose calls, with all addresses filled in, run as one.

Must not know: models, requests, any operation.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from ...ops import AttentionMetadata, ImageRows, StateRows
from .arena import Lifetime, place
from .calls import CallList, Step
from .fusion import fuse
from .library import library
from .recorder import Recorder, Unrecordable
from .timing import CallTimer

INPUT_DTYPES = (
    torch.int32,
    torch.int64,
    torch.int64,
    torch.int32,
    torch.int32,
    torch.int32,
    torch.int64,
)
STATE_DTYPES = torch.int32, torch.int64, torch.int64, torch.int32
ALIGNMENT = 64  # bytes: a cache line, an AVX-512 vector, a tile row


class Program:
    """The recorded step of one model.

    It holds the addresses of weights and caches. Make a new one when any of them moves.
    """

    def __init__(self, recorder: Recorder, hidden: Tensor, *of_logits: Tensor, owners: Any):
        """`hidden` [T, hidden_size] and `of_logits` [R, ...] are recorded tensors: the step's
        results.

        `owners` keeps weights and caches alive.
        """
        results = [hidden, *of_logits]
        found = [
            place
            for tensor in results
            if (place := recorder.find(tensor.data_ptr())) is not None and tensor.is_contiguous()
        ]
        if len(found) != len(results) or any(offset for _, offset in found):
            raise Unrecordable("what the model returns is not a whole result of a native kernel")
        self.limits = recorder.limits
        self._owners = owners
        self.calls = fuse(recorder, [buffer for buffer, _ in found])
        self._call_list = CallList(self.calls)
        self._step = Step(num_groups=len(recorder.metadata.groups) or 1)
        self.has_token_types = recorder.token_types is not None
        self.has_adapters = recorder.metadata.adapters is not None
        self.has_states = recorder.metadata.states is not None
        self.has_images = recorder.metadata.images is not None
        self._has_groups = bool(recorder.metadata.groups)
        self._has_more = (
            self.has_token_types
            or self.has_adapters
            or self.has_states
            or self.has_images
            or self._has_groups
        )
        self.timer: CallTimer | None = None
        # They are [T of limits, hidden_size] and [R of limits, ...], and are valid after a step.
        self.hidden, *self.of_logits = self._settle(recorder, results, found)
        self._counts = -1, -1  # T and R of the last step
        self._results: tuple[Tensor, ...] = ()  # the results of the last step

    def _settle(
        self, recorder: Recorder, results: list[Tensor], found: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Moves every recorded operand into the arena and returns the results' tensors there.

        `found`: buffer and offset of each result.
        """
        calls = self.calls
        operands = [recorder.operands(call) for call in calls]
        # The key is the buffer. A buffer that fusion made unused takes no space.
        lifetimes: dict[int, Lifetime] = {}
        for time, used in enumerate([*operands, found]):
            for buffer in {operand[-2] for operand in used}:  # results are (buffer, offset)
                num_bytes = -(-recorder.buffers[buffer][1] // ALIGNMENT) * ALIGNMENT
                first = lifetimes[buffer].first if buffer in lifetimes else time
                lifetimes[buffer] = Lifetime(num_bytes, first, time)
        places, self.num_bytes = place(list(lifetimes.values()))
        offsets = dict(zip(lifetimes, places))
        # The system allocates pages as steps grow.
        memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        arena = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
        for call, used in zip(calls, operands):
            for operand in used:
                setattr(
                    call, operand.field, arena.data_ptr() + offsets[operand.buffer] + operand.offset
                )
        return [
            arena[offsets[buffer] : offsets[buffer] + tensor.nbytes]
            .view(tensor.dtype)
            .view(tensor.shape)
            for (buffer, _), tensor in zip(found, results)
        ]

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """token_ids and token_types [T] i32, positions [T] i64, logits_indices [R] i64 -> hidden
        [T, hidden_size] and the other results [R, ...].

        The next step overwrites all results. Raises ValueError for a step larger than the recorded
        one, and TypeError for other integer types.
        """
        step = self.fill_step(token_ids, positions, metadata, logits_indices, token_types)
        self.run(self._call_list, step)
        counts = step.num_tokens, step.num_logits
        if self._counts != counts:
            self._counts = counts
            self._results = (
                self.hidden[: counts[0]],
                *(tensor[: counts[1]] for tensor in self.of_logits),
            )
        return self._results

    def run(self, calls: CallList, step: Step) -> None:
        """Runs calls, which may be this program's several times."""
        if self.timer is None:
            library.run_all(calls.pointers, step)
        else:
            self.timer.run(calls, step)

    def set_timer(self, timer: CallTimer | None) -> None:
        """From now on, `timer` keeps the time of each call. With None nothing does."""
        self.timer = timer

    def fill_step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
        token_types: Tensor | None = None,
    ) -> Step:
        """Fills in the values that differ between steps. It raises what __call__ raises.

        The result is valid until the next step's, and while these tensors live.
        """
        inputs = (
            token_ids,
            positions,
            metadata.slot_mapping,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            logits_indices,
        )
        if tuple([tensor.dtype for tensor in inputs]) != INPUT_DTYPES:
            raise TypeError(  # kernels would read past the end of these
                f"a step's tensors must be of {INPUT_DTYPES}, not "
                f"{[tensor.dtype for tensor in inputs]}"
            )
        limits = self.limits
        # len() of a tensor is a Python function and slower.
        counts = token_ids.shape[0], metadata.seq_lens.shape[0], logits_indices.shape[0]
        if counts[0] > limits[0] or counts[1] > limits[1] or counts[2] > limits[2]:
            raise ValueError(
                f"the step is larger than the one that was recorded: {limits.exceeded_by(*counts)}"
            )
        step = self._step
        step.num_tokens, step.num_requests, step.num_logits = counts
        step.token_ids = token_ids.data_ptr()
        step.positions = positions.data_ptr()
        step.slot_mapping = metadata.slot_mapping.data_ptr()
        step.query_start_loc = metadata.query_start_loc.data_ptr()
        step.seq_lens = metadata.seq_lens.data_ptr()
        step.block_tables = metadata.block_tables.data_ptr()
        step.block_table_row = metadata.block_tables.stride(0)
        step.logits_indices = logits_indices.data_ptr()
        if self._has_more:
            self._fill_more(step, metadata, token_types)
        return step

    def _fill_more(
        self, step: Step, metadata: AttentionMetadata, token_types: Tensor | None
    ) -> None:
        """Fills in what only some models read."""
        if self.has_token_types:
            if token_types is None or token_types.dtype != torch.int32:
                raise TypeError("token_types must be a tensor of torch.int32 for this model")
            step.token_types = token_types.data_ptr()
        if self.has_adapters:
            adapters = metadata.adapters
            if (
                adapters is None
                or adapters.dtype != torch.int32
                or len(adapters) != step.num_tokens
            ):
                raise TypeError("metadata.adapters must be a torch.int32 of each token")
            step.adapters = adapters.data_ptr()
        if self.has_states:
            self._fill_states(step, metadata.states)
        if self.has_images:
            self._fill_images(step, metadata.images)
        if self._has_groups:
            slots, tables = metadata.groups[1].slot_mapping, metadata.groups[1].block_tables
            step.slot_mapping_group = (slots.data_ptr() - step.slot_mapping) // slots.itemsize
            step.block_table_group = (tables.data_ptr() - step.block_tables) // tables.itemsize

    def _fill_images(self, step: Step, images: ImageRows | None) -> None:
        columns = [] if images is None else [images.rows, images.offsets, images.later]
        if [(column.dtype, column.shape[-1]) for column in columns] != [
            (torch.int32, step.num_tokens)
        ] * 3:
            raise TypeError(
                f"metadata.images must be tensors of torch.int32, each of {step.num_tokens} tokens"
            )
        rows, offsets, later = columns
        step.image_rows, step.later_tokens = rows.data_ptr(), later.data_ptr()
        step.position_offsets, step.position_offset_row = offsets.data_ptr(), offsets.stride(0)

    def _fill_states(self, step: Step, rows: StateRows | None) -> None:
        columns = () if rows is None else tuple(vars(rows).values())
        if [(column.dtype, column.shape[0]) for column in columns] != [
            (dtype, step.num_requests) for dtype in STATE_DTYPES
        ]:
            raise TypeError(
                f"metadata.states must be tensors of {STATE_DTYPES}, each of "
                f"{step.num_requests} requests"
            )
        step.state_places, step.last_positions, step.copy_positions, step.copy_places = (
            column.data_ptr() for column in columns
        )
