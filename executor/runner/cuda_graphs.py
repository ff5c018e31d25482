"""Decode steps from CUDA graphs: the launches of a whole model, replayed as one.

Must not know: architectures, requests, how rows are sampled.

A decode of a small model takes the CPU longer to launch than the GPU to compute. A graph keeps the
launches with their addresses, so all graphs share one set of input buffers, of which each step
fills the first rows. A graph serves every batch up to its size: the remaining rows compute stale
tokens with a context of one and store nothing.

     step of decodes ──▶ buffers[:size] ──▶ graph[size] ──▶ results[:number of requests]
     any other step  ──▶ another Forward (padded_graphs.py), or operation by operation
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...ipc.platform_tuning import without_collections
from ...kernels.ops import AttentionMetadata, ImageRows, StateRows, make_metadata
from ...kernels.registry import OpTable
from ..model import Forward, Model, padded, uncounted
from ..program.fused_pass import FusedPass
from ..program.step_program import OpByOp
from .image_table import NO_ROW, no_images
from .state_table import NO_STATE, no_states

logger = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]
# Captures a function of no arguments -> (function that replays it, its results, which every replay
# overwrites)
Capture = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]
NOT_STORED = -1  # in a slot_mapping
NO_ADAPTER = -1


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests with a graph: 1, 2, 4, multiples of 8 up to 256, of 16 up to 512, of 32
    beyond, and max_num_seqs.

    A step therefore computes few unused rows.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class GraphedStep:
    """A Forward that replays graphs of decodes.

    Holds addresses of weights and caches: make it again when any of them moves.
    """

    def __init__(
        self,
        model: Model,
        ops: OpTable,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        capture: Capture,
        num_groups: int = 1,
        has_adapters: bool = False,
        has_states: bool = False,
        has_images: bool = False,
        other_steps: Forward | None = None,
    ):
        """num_groups: of layers that have block tables of their own. has_adapters: whether the
        model's layers take LoRA adapters. has_states: whether they keep states. has_images: whether
        the model reads images. other_steps: runs steps that have no graph here; None: operation by
        operation.
        """
        self._run = FusedPass(model, ops)
        self._other_steps = other_steps or OpByOp(model, ops)
        self._uncounted, self._padded = partial(uncounted, model), partial(padded, model)
        self._capture = capture
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, tuple[Callable[[], None], Tensors]] = {}
        self._max_model_len = max_model_len
        self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        self._slot_mapping = torch.full(
            (num_groups, max_num_seqs), NOT_STORED, dtype=torch.int64, device=device
        )
        self._block_tables = torch.zeros(
            num_groups,
            max_num_seqs,
            -(-max_model_len // block_size),
            dtype=torch.int32,
            device=device,
        )
        self._adapters = (
            torch.full((max_num_seqs,), NO_ADAPTER, dtype=torch.int32, device=device)
            if has_adapters
            else None
        )
        self._states = no_states(max_num_seqs, device) if has_states else None
        self._images = no_images(max_num_seqs, device) if has_images else None
        self._counts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_num_seqs, dtype=torch.int64, device=device)

    def prepare(self) -> None:
        """Captures the largest graph and the smallest; the others are captured at their first step.

        The largest comes first, so that the others reuse its memory.
        """
        for size in dict.fromkeys((self._sizes[-1], self._sizes[0])):
            self._graph(size)

    def buffers(self, count: int) -> Tensors | None:
        """The input buffers of a step of `count` sampled decodes, including the padding rows of its
        graph.

        They are token_ids, positions, slot_mapping [groups, rows], seq_lens, block_tables
        [groups, rows, max_blocks], and adapters if there are any. Inputs written there are not
        copied. None: there is no graph for this many.
        """
        if not 0 < count <= self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        return (
            self._token_ids[:size],
            self._positions[:size],
            self._slot_mapping[:, :size],
            self._seq_lens[:size],
            self._block_tables[:, :size],
            *(() if self._adapters is None else (self._adapters[:size],)),
        )

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        token_types: torch.Tensor | None = None,
    ) -> Tensors:
        """See Forward. The next replayed step overwrites a graph's results."""
        count = len(metadata.query_lens)
        if not count == metadata.num_decodes == len(logits_indices) or count > self._sizes[-1]:
            return self._other_steps(token_ids, positions, metadata, logits_indices, token_types)
        size = self._sizes[bisect_left(self._sizes, count)]
        if token_ids.data_ptr() != self._token_ids.data_ptr():
            self._copy(count, size, token_ids, positions, metadata)
        replay, results = self._graph(size)
        if self._states is not None and metadata.states is not None:
            put_states(self._states, metadata.states, size)
        self._copy_images(count, size, metadata.images)
        replay()
        return results if count == size else tuple(result[:count] for result in results)

    def _copy(
        self,
        count: int,
        size: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        self._seq_lens[:count].copy_(metadata.seq_lens)
        for slot_mapping, block_tables, group in zip(
            self._slot_mapping, self._block_tables, metadata.groups or (metadata,), strict=True
        ):
            slot_mapping[:count].copy_(group.slot_mapping)
            block_tables[:count, : group.block_tables.shape[1]].copy_(group.block_tables)
        if self._adapters is not None and metadata.adapters is not None:
            self._adapters[:count].copy_(metadata.adapters)
            self._adapters[count:size] = NO_ADAPTER
        self._seq_lens[count:size] = 1
        self._slot_mapping[:, count:size] = NOT_STORED

    def _copy_images(self, count: int, size: int, images: ImageRows | None) -> None:
        """These are not among the buffers that inputs are written to. A decode sees no later
        token.
        """
        if self._images is None or images is None:
            return
        self._images.rows[:count].copy_(images.rows)
        self._images.offsets[:, :count].copy_(images.offsets)
        self._images.rows[count:size] = NO_ROW
        self._images.offsets[:, count:size] = 0

    def _graph(self, size: int) -> tuple[Callable[[], None], Tensors]:
        if size not in self._graphs:
            if self._states is not None:
                hide_states(self._states)
            # Kernels take sizes from the host lists; they must hold for every later step, so these
            # are the longest possible contexts.
            metadata = make_metadata(
                self._counts[: size + 1],
                self._seq_lens[:size],
                self._block_tables[:, :size].unbind(),
                self._slot_mapping[:, :size].unbind(),
                size,
                [1] * size,
                [self._max_model_len] * size,
                None if self._adapters is None else self._adapters[:size],
                None if self._states is None else first_rows(self._states, size),
                None if self._images is None else first_images(self._images, size),
            )

            def step() -> Tensors:
                # a replay would not derive again what the run before the capture has derived
                for group in (metadata, *metadata.groups):
                    group.scratch.clear()
                with self._padded(self._slot_mapping[0, :size]):
                    return self._run(
                        self._token_ids[:size], self._positions[:size], metadata, self._rows[:size]
                    )

            with self._uncounted():
                self._graphs[size] = self._capture(step)
            logger.debug("captured a CUDA graph for up to %d requests", size)
        return self._graphs[size]


def first_images(images: ImageRows, size: int) -> ImageRows:
    return ImageRows(images.rows[:size], images.offsets[:, :size], images.later[:size])


def first_rows(states: StateRows, size: int) -> StateRows:
    return StateRows(
        states.places[:size],
        states.last_positions[:size],
        states.copy_positions[:size],
        states.copy_places[:size],
    )


def hide_states(rows: StateRows) -> None:
    """Before a capture, which runs the step, too: that stores the same keys and values again, but a
    state would go on by the same tokens again.
    """
    rows.places.fill_(NO_STATE)


def put_states(buffers: StateRows, rows: StateRows, size: int) -> None:
    """Puts the `rows` [B] of a step into the buffers of a graph of `size` rows, of which the others
    are padding.
    """
    count = len(rows.places)
    for name in ("places", "last_positions", "copy_positions", "copy_places"):
        getattr(buffers, name)[:count].copy_(getattr(rows, name))
    buffers.places[count:size] = NO_STATE


def keeping(capture: Capture, tensors: Sequence[torch.Tensor]) -> Capture:
    """A capture that runs functions which change `tensors`, and leaves there what the first replay
    has to find.
    """

    def run(function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        kept = [tensor.clone() for tensor in tensors]
        captured = capture(function)
        for tensor, before in zip(tensors, kept):
            tensor.copy_(before)
        return captured

    return run


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool.

    No two of them run at once, and only the last one's results are valid.
    """

    # the first run compiles kernels and sets up libraries, which a capture does not allow
    WARM_UPS = 2

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A capture fails if anything else calls CUDA in its way: what other threads do does not
        # count, and no garbage collection may free another engine's memory meanwhile.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with capture, without_collections():
            results = function()
        return graph.replay, results
