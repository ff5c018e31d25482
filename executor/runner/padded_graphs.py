"""Prompts, chunks and verified drafts from CUDA graphs of padded numbers of tokens.

Must not know: architectures, requests, how rows are sampled, steps of decodes alone
(cuda_graphs.py).

Up to a few thousand tokens, the CPU takes longer to launch a small model's operations than the GPU
to compute them. A graph serves every step of up to `size` tokens, of up to `width` requests, of
which up to `width` rows have logits, fewer than tokens:

    tokens     [ request 0 | request 1 | … | padding ]   size, a multiple of 64
    requests   [ 0 | 1 | … | the padding | empty | … ]   width + 1

The padding is a request of its own, behind the step's, which stores nothing and has no state. All
requests go to the kernel for several query tokens, including decodes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from ...kernels.ops import AttentionMetadata, make_metadata
from ...kernels.registry import OpTable
from ..model import Model, padded, uncounted
from ..program.step_program import OpByOp
from .cuda_graphs import (
    NO_ADAPTER,
    NOT_STORED,
    Capture,
    GraphedStep,
    Tensors,
    first_images,
    first_rows,
    hide_states,
    keeping,
    put_states,
)
from .image_table import NO_ROW, no_images
from .state_table import no_states

logger = logging.getLogger(__name__)

STEP = 64  # tokens between sizes, so that less than 64 are padding
MOST_TOKENS = 2048  # beyond, a GPU computes for longer than the CPU launches
WIDTHS = (8, 64, 512)  # of one prompt or few, a busy server's step, verified drafts
# The kernel for several query tokens does not divide the context of a decode. Beside longer
# contexts than this, the CPU launches faster.
LONGEST_DECODE = 4096


def padded_sizes(max_num_batched_tokens: int, max_width: int, max_model_len: int) -> list[int]:
    """Numbers of tokens with a graph, up to MOST_TOKENS. There are none for contexts that the
    padding does not fit.
    """
    most = min(MOST_TOKENS, max_num_batched_tokens, max_width * max_model_len)
    return [*range(STEP, most, STEP), most] if max_model_len >= STEP else []


class PaddedStep:
    """A Forward that replays graphs of steps with several tokens of a request, as long as they are
    small. Others run operation by operation.

    Holds addresses of weights and caches: make it again when any of them moves.
    """

    def __init__(
        self,
        model: Model,
        ops: OpTable,
        max_num_batched_tokens: int,
        max_num_logits: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        capture: Capture,
        num_groups: int = 1,
        has_adapters: bool = False,
        has_states: bool = False,
        has_images: bool = False,
    ):
        """See GraphedStep. max_num_logits: of one step."""
        self._run = OpByOp(model, ops)
        self._uncounted, self._padded = partial(uncounted, model), partial(padded, model)
        self._capture = capture
        widest = min(WIDTHS[-1], max_num_logits)
        self._sizes = padded_sizes(max_num_batched_tokens, widest, max_model_len)
        self._max_model_len = max_model_len
        most = self._sizes[-1] if self._sizes else 0
        widest = min(widest, max(0, most - 1))
        self._widths = [width for width in WIDTHS if width < widest] + [widest]
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], Tensors]] = {}
        self._results: Tensors | None = None
        zeros = partial(torch.zeros, device=device)
        self._token_ids, self._positions = zeros(most, dtype=torch.int32), zeros(most).long()
        self._seq_lens = zeros(widest + 1, dtype=torch.int32)
        self._query_start_loc = zeros(widest + 2, dtype=torch.int32)
        self._logits_indices = zeros(widest, dtype=torch.int64)
        self._slot_mapping = torch.full(
            (num_groups, most), NOT_STORED, dtype=torch.int64, device=device
        )
        num_blocks = -(-max_model_len // block_size)
        self._block_tables = zeros(num_groups, widest + 1, num_blocks, dtype=torch.int32)
        self._adapters = zeros(most, dtype=torch.int32) + NO_ADAPTER if has_adapters else None
        self._states = no_states(widest + 1, device) if has_states else None
        self._images = no_images(most, device) if has_images else None

    def prepare(self) -> None:
        """Captures the largest graph, whose memory the others reuse; they are captured at their
        first step.
        """
        if self._sizes and not self._graphs:
            size, width = self._sizes[-1], self._widths[-1]
            starts = torch.arange(width + 1, device=self._seq_lens.device) * size // width
            self._query_start_loc[: width + 1].copy_(starts)
            self._query_start_loc[width + 1 :] = size
            self._seq_lens[:width].copy_(starts.diff())
            self._graph(size, width)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        token_types: torch.Tensor | None = None,
    ) -> Tensors:
        """See Forward. The next replayed step overwrites a graph's results."""
        chosen = self._choose(len(token_ids), len(logits_indices), metadata)
        if chosen is None:
            return self._run(token_ids, positions, metadata, logits_indices, token_types)
        self.prepare()
        self._copy(*chosen, token_ids, positions, metadata, logits_indices)
        replay, (hidden, *results) = self._graph(*chosen)
        if self._states is not None and metadata.states is not None:
            put_states(self._states, metadata.states, chosen[1] + 1)
        replay()
        return hidden[: len(token_ids)], *(result[: len(logits_indices)] for result in results)

    def _choose(
        self, num_tokens: int, num_logits: int, metadata: AttentionMetadata
    ) -> tuple[int, int] | None:
        """The size and the width of the graph of a step; None: there is none."""
        width = max(len(metadata.query_lens), num_logits)
        # one row with logits for each token would mean all of them in order (OpByOp)
        least = max(num_tokens, width + 1)
        if not self._sizes or least > self._sizes[-1] or width > self._widths[-1]:
            return None
        if max(metadata.seq_lens_list[: metadata.num_decodes], default=0) > LONGEST_DECODE:
            return None
        size = self._sizes[bisect_left(self._sizes, least)]
        return size, min(size - 1, self._widths[bisect_left(self._widths, width)])

    def _copy(
        self,
        size: int,
        width: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
    ) -> None:
        num_tokens, count = len(token_ids), len(metadata.query_lens)
        num_logits = len(logits_indices)
        self._token_ids[:num_tokens].copy_(token_ids)
        self._positions[:num_tokens].copy_(positions)
        self._logits_indices[:num_logits].copy_(logits_indices)
        self._logits_indices[num_logits:width] = 0
        for slot_mapping, block_tables, group in zip(
            self._slot_mapping, self._block_tables, metadata.groups or (metadata,), strict=True
        ):
            slot_mapping[:num_tokens].copy_(group.slot_mapping)
            block_tables[:count, : group.block_tables.shape[1]].copy_(group.block_tables)
        self._slot_mapping[:, num_tokens:size] = NOT_STORED
        # The padding reads block 0, which no request has. Entries past a request's blocks are
        # undefined, and a later step's padding must not follow them.
        self._block_tables[:, count] = 0
        self._query_start_loc[: count + 1].copy_(metadata.query_start_loc)
        self._query_start_loc[count + 1 : width + 2] = size
        self._seq_lens[:count].copy_(metadata.seq_lens)
        self._seq_lens[count : count + 1] = size - num_tokens  # an index alone would synchronise
        self._seq_lens[count + 1 : width + 1] = 0
        if self._adapters is not None and metadata.adapters is not None:
            self._adapters[:num_tokens].copy_(metadata.adapters)
            self._adapters[num_tokens:size] = NO_ADAPTER
        if self._images is not None and metadata.images is not None:
            images = metadata.images
            self._images.rows[:num_tokens].copy_(images.rows)
            self._images.offsets[:, :num_tokens].copy_(images.offsets)
            self._images.later[:num_tokens].copy_(images.later)
            self._images.rows[num_tokens:size] = NO_ROW
            self._images.offsets[:, num_tokens:size] = 0
            self._images.later[num_tokens:size] = 0

    def _graph(self, size: int, width: int) -> tuple[Callable[[], None], Tensors]:
        if (size, width) not in self._graphs:
            if self._states is not None:
                hide_states(self._states)
            # Kernels take sizes from the host's lists; no step has more blocks of query tokens than
            # one with these.
            metadata = make_metadata(
                self._query_start_loc[: width + 2],
                self._seq_lens[: width + 1],
                self._block_tables[:, : width + 1].unbind(),
                self._slot_mapping[:, :size].unbind(),
                0,
                [1] * width + [size - width],
                [self._max_model_len] * (width + 1),
                None if self._adapters is None else self._adapters[:size],
                None if self._states is None else first_rows(self._states, width + 1),
                None if self._images is None else first_images(self._images, size),
            )
            tokens = self._token_ids[:size], self._positions[:size]

            def step() -> Tensors:
                for group in (metadata, *metadata.groups):
                    group.scratch.clear()
                with self._padded(self._slot_mapping[0, :size]):
                    return self._keep(self._run(*tokens, metadata, self._logits_indices[:width]))

            with self._uncounted():
                self._graphs[size, width] = self._capture(step)
            logger.debug("captured a CUDA graph of %d tokens, %d requests", size, width)
        return self._graphs[size, width]

    def _keep(self, results: Tensors) -> Tensors:
        """All graphs put their results into the same memory, which the first makes: a graph's own
        results would keep theirs from the graphs captured after it.
        """
        if self._results is None:
            self._results = tuple(map(torch.empty_like, results))
        kept = tuple(kept[: len(one)] for kept, one in zip(self._results, results, strict=True))
        for place, result in zip(kept, results, strict=True):
            place.copy_(result)
        return kept


def make_graphs(
    model: Model,
    ops: OpTable,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_num_logits: int,
    max_model_len: int,
    block_size: int,
    device: torch.device,
    capture: Capture,
    num_groups: int = 1,
) -> GraphedStep:
    """The graphs of all steps of a model whose layers have their caches, with the largest ones
    captured. See PaddedStep.
    """
    kept = keeping(capture, model.pass_state())  # a capture also runs the pass
    sizes = max_model_len, block_size, device, kept, num_groups
    has_states, has_images = bool(model.state_layers()), model.images is not None
    has = model.adapter_rows is not None, has_states, has_images
    padded = PaddedStep(model, ops, max_num_batched_tokens, max_num_logits, *sizes, *has)
    padded.prepare()  # first, since it takes the most memory
    graphs = GraphedStep(model, ops, max_num_seqs, *sizes, *has, other_steps=padded)
    graphs.prepare()
    return graphs
