"""Runs several rounds of drafts and verification at once: passes of a head, then of the model.

Must not know: models, requests, who chooses the number of rounds and drafts.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...ops import AttentionMetadata
from .calls import ALL_LOGITS, BF16, F32, Call, GatherRows, NextTokens, Op, Sample, Step
from .draft_calls import Drafts
from .draw import sample_call
from .replay import Program

Draw = tuple[Tensor | None, ...]


class Drafting:
    """`hidden` and `state`, both [tokens, hidden_size]: what the model computes for the head, and
    what the head reads and leaves for its next pass. is_sum: the model adds to `hidden`, so that it
    has to be zeroed before each pass.
    """

    def __init__(
        self,
        model: Program,
        head: Program,
        hidden: Tensor,
        state: Tensor,
        block_size: int,
        is_sum: bool = False,
    ):
        assert hidden.dtype == state.dtype and hidden.stride() == state.stride()
        self._model, self._head = model, head
        self._hidden, self._state = hidden, state
        self._block_size = block_size
        self._zeros = torch.zeros_like(hidden[0]) if is_sum else None
        # by number of rounds, of drafts, and whether they sample
        self._runs: dict[tuple[int, int, bool], _Run] = {}

    def fits(self, num_requests: int, num_drafts: int) -> bool:
        """Whether so many requests may have so many drafts each; no run is traced call by call."""
        rows, limits = num_requests * (num_drafts + 1), self._model.limits
        return (
            rows <= min(limits.num_tokens, limits.num_logits, self._head.limits.num_tokens)
            and num_requests <= min(limits.num_requests, self._head.limits.num_logits)
            and self._model.timer is None
        )

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
        num_rounds: int,
        num_drafts: int,
        draw: Draw | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs `num_rounds` rounds of `num_drafts` drafts for each of B requests.

        The arguments are the first step of the head as its Program takes them, with one row of
        logits for each request, whose `state` is filled; block tables have room for all rounds.
        `draw` holds `sample_tokens`' columns for the first draft; None takes the largest logits.

        Returns token_ids [num_rounds, B, num_drafts + 1] i64, what the model draws after each
        request's last token and after each of its drafts, is_finite of the same shape bool, and
        num_accepted [num_rounds, B] i64. `state` then has the rows of the last round's accepted
        positions, 1 + num_accepted of each request. The next run overwrites all results.
        """
        step = self._head.fill_step(token_ids, positions, metadata, logits_indices)
        num_requests, width = step.num_requests, num_drafts + 1
        rows = max(len(token_ids), num_requests * width)
        arrays = make_room(step, rows, token_ids, positions, metadata, logits_indices)
        key = num_rounds, num_drafts, draw is not None
        if (run := self._runs.get(key)) is None:
            run = self._runs[key] = _Run(self, *key)
        kept = [] if draw is None else run.set_draw(draw, num_requests, width)
        self._head.run(run.pointers, step)
        del kept, arrays
        count = num_requests * width
        return (
            run.drawn[:, :count].view(num_rounds, num_requests, width),
            run.drawn_finite[:, :count].view(num_rounds, num_requests, width),
            run.accepted[:, :num_requests],
        )


def make_room(
    step: Step,
    num_rows: int,
    token_ids: Tensor,
    positions: Tensor,
    metadata: AttentionMetadata,
    logits_indices: Tensor,
) -> dict[str, Tensor]:
    """Gives the step arrays of its own with room for `num_rows` tokens, which must outlive it."""
    tables = [metadata, *metadata.groups[1:]] if metadata.groups else [metadata]
    arrays = {
        "token_ids": torch.empty(num_rows, dtype=torch.int32),
        "positions": torch.empty(num_rows, dtype=torch.int64),
        "slot_mapping": torch.empty(len(tables), num_rows, dtype=torch.int64),
        "query_start_loc": metadata.query_start_loc.clone(),
        "seq_lens": metadata.seq_lens.clone(),
        "logits_indices": torch.empty(num_rows, dtype=torch.int64),
    }
    arrays["token_ids"][: len(token_ids)] = token_ids
    arrays["positions"][: len(positions)] = positions
    arrays["logits_indices"][: len(logits_indices)] = logits_indices
    for group, of_group in enumerate(tables):
        arrays["slot_mapping"][group, : len(token_ids)] = of_group.slot_mapping
    for name, array in arrays.items():
        setattr(step, name, array.data_ptr())
    step.slot_mapping_group = num_rows
    return arrays


class _Run:
    """The calls of all rounds, and the memory of their results."""

    def __init__(self, drafting: Drafting, num_rounds: int, num_drafts: int, draws: bool):
        model, head = drafting._model, drafting._head
        of_model, of_head = model.of_logits, head.of_logits
        most_rows, most_requests = len(of_model[1]), len(of_head[1])

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64)

        self.drawn, self.accepted = (
            integers(num_rounds, most_rows),
            integers(num_rounds, most_requests),
        )
        self.drawn_finite = torch.zeros(num_rounds, most_rows, dtype=torch.bool)
        self._last, self._kept = integers(most_requests), integers(num_drafts, most_requests)
        self._kept_finite = torch.zeros(most_requests, dtype=torch.bool)
        # of what is sampled, by head and model: logits, tokens, positions
        self._sampled = [
            (program.of_logits[0], integers(count), integers(count))
            for program, count in ((head, most_requests), (model, most_rows))
        ]
        self._samples = Sample(), Sample()
        is_bf16 = drafting._state.dtype == torch.bfloat16
        chosen = [
            tokens if draws else program.of_logits[1]
            for program, (_, tokens, _) in zip((head, model), self._sampled)
        ]
        of_draws = [positions.data_ptr() if draws else None for _, _, positions in self._sampled]

        def drafts(op: Op, by: int, next_by: int, kept: Tensor, round: int = 0) -> Drafts:
            return Drafts(
                op,
                BF16 if is_bf16 else F32,
                ALL_LOGITS,
                chosen[by].data_ptr(),
                (of_head, of_model)[by][2].data_ptr(),
                self._last.data_ptr(),
                kept.data_ptr(),
                self.drawn_finite[round].data_ptr(),
                self.accepted[round].data_ptr(),
                of_draws[next_by],
                drafting._hidden.data_ptr(),
                drafting._state.data_ptr(),
                drafting._state.stride(0) * drafting._state.itemsize,
                num_drafts,
                most_requests,
                drafting._block_size,
            )

        between: list[Call] = [drafts(Op.FIRST_DRAFTS, 0, 0, self._kept)]
        between += [
            NextTokens(
                Op.NEXT_TOKENS,
                F32,
                ALL_LOGITS,
                chosen[0].data_ptr(),
                of_head[2].data_ptr(),
                self._kept[i].data_ptr(),
                self._kept_finite.data_ptr(),
                of_draws[0],
                drafting._block_size,
                False,
            )
            for i in range(1, num_drafts)
        ]
        placed = drafts(Op.PLACE_DRAFTS, 0, 1, self._kept)
        zeroed: list[Call] = []
        if (zeros := drafting._zeros) is not None:  # every row is a copy of one
            rows = 0, drafting._hidden.stride(0), len(zeros)
            place = zeros.data_ptr(), drafting._hidden.data_ptr()
            zeroed = [GatherRows(Op.GATHER_ROWS, placed.dtype, ALL_LOGITS, *place, *rows)]
        samples = [[sample] if draws else [] for sample in self._samples]
        calls: list[Any] = []
        for round in range(num_rounds):
            for end in between:
                calls += [*head.calls, *samples[0], end]
            accepted = drafts(Op.ACCEPT_DRAFTS, 1, 0, self.drawn[round], round)
            calls += [placed, *zeroed, *model.calls, *samples[1], accepted]
        self._calls = calls  # the pointers do not keep them
        self.pointers = (ctypes.c_void_p * len(calls))(*map(ctypes.addressof, calls))

    def set_draw(self, draw: Draw, num_requests: int, width: int) -> list[Any]:
        """Fills in the columns; returns what must live until the calls have run."""
        *parameters, first = draw
        assert first is not None
        self._sampled[0][2][:num_requests] = first
        kept = []
        for sample, (logits, tokens, positions), count in zip(
            self._samples, self._sampled, (1, width)
        ):
            columns: list[Any] = [
                None if column is None else column.repeat_interleave(count) for column in parameters
            ]
            call, of_call = sample_call(ALL_LOGITS, logits, *columns, positions, tokens)
            ctypes.pointer(sample)[0] = call
            kept += [columns, of_call]
        return kept
