"""Runs several rounds at once: passes of a head or model that drafts, one of the model that
verifies.

Must not know: models, requests, who chooses the number of rounds and drafts.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...ops import AttentionMetadata
from .calls import (
    ALL_LOGITS,
    BF16,
    F32,
    Call,
    CallList,
    Drafts,
    GatherRows,
    NextTokens,
    Op,
    Sample,
    Step,
)
from .draw import sample_call
from .replay import Program

Draw = tuple[Tensor | None, ...]


class Drafting:
    """`model` verifies what `draft` drafts; both end with argmax over their logits.

    Of a head, `hidden` and `state`, both [tokens, hidden_size]: what the model computes for it, and
    what it reads and leaves for its next pass. is_sum: the model adds to `hidden`, so that it has
    to be zeroed before each pass.
    """

    def __init__(
        self,
        model: Program,
        draft: Program,
        block_size: int,
        hidden: Tensor | None = None,
        state: Tensor | None = None,
        is_sum: bool = False,
    ):
        self._model, self._draft = model, draft
        self._hidden, self._state = hidden, state
        self._block_size = block_size
        self._zeros = None
        if hidden is not None and state is not None:
            assert hidden.dtype == state.dtype and hidden.stride() == state.stride()
            self._zeros = torch.zeros_like(hidden[0]) if is_sum else None
        # by number of rounds, of drafts, and whether they sample
        self._runs: dict[tuple[int, int, bool], _Run] = {}

    def fits(self, num_requests: int, num_drafts: int) -> bool:
        """Whether so many requests may have so many drafts each; no run is traced call by call."""
        rows, limits = num_requests * (num_drafts + 1), self._model.limits
        return (
            rows <= min(limits.num_tokens, limits.num_logits, self._draft.limits.num_tokens)
            and num_requests <= min(limits.num_requests, self._draft.limits.num_logits)
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

        The arguments are the first drafting step as its Program takes them, with one row of logits
        for each request; the `state` of a head is filled. Block tables have room for all rounds.
        `draw` holds `sample_tokens`' columns for the first draft; None takes the largest logits.

        Returns token_ids [num_rounds, B, num_drafts + 1] i64, what the model draws after each
        request's last token and after each of its drafts, is_finite of the same shape bool, and
        num_accepted [num_rounds, B] i64. `state` then has the rows of the last round's accepted
        positions, 1 + num_accepted of each request. The next run overwrites all results.
        """
        step = self._draft.fill_step(token_ids, positions, metadata, logits_indices)
        num_requests, width = step.num_requests, num_drafts + 1
        rows = max(len(token_ids), num_requests * width)
        arrays = make_room(step, rows, token_ids, positions, metadata, logits_indices)
        key = num_rounds, num_drafts, draw is not None
        if (run := self._runs.get(key)) is None:
            run = self._runs[key] = _Run(self, *key)
        kept = [] if draw is None else run.set_draw(draw, num_requests, width)
        self._draft.run(run.calls, step)
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
        model, draft = drafting._model, drafting._draft
        of_model, of_draft = model.of_logits, draft.of_logits
        most_rows, most_requests = len(of_model[1]), len(of_draft[1])

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64)

        self.drawn, self.accepted = (
            integers(num_rounds, most_rows),
            integers(num_rounds, most_requests),
        )
        self.drawn_finite = torch.zeros(num_rounds, most_rows, dtype=torch.bool)
        self._last, self._kept = integers(most_requests), integers(num_drafts, most_requests)
        self._kept_finite = torch.zeros(most_requests, dtype=torch.bool)
        # of what is sampled, of drafts and verification: logits, tokens, positions
        self._sampled = [
            (program.of_logits[0], integers(count), integers(count))
            for program, count in ((draft, most_requests), (model, most_rows))
        ]
        self._samples = Sample.zeros(), Sample.zeros()
        hidden, state = drafting._hidden, drafting._state
        is_bf16, places, row_bytes = False, (None, None), 0
        if hidden is not None and state is not None:
            is_bf16, row_bytes = state.dtype == torch.bfloat16, state.stride(0) * state.itemsize
            places = hidden.data_ptr(), state.data_ptr()
        chosen = [
            tokens if draws else program.of_logits[1]
            for program, (_, tokens, _) in zip((draft, model), self._sampled)
        ]
        of_draws = [positions.data_ptr() if draws else None for _, _, positions in self._sampled]

        def drafts(op: Op, by: int, next_by: int, kept: Tensor, round: int = 0) -> Drafts:
            return Drafts(
                op=op,
                dtype=BF16 if is_bf16 else F32,
                rows=ALL_LOGITS,
                token_ids=chosen[by].data_ptr(),
                is_finite=(of_draft, of_model)[by][2].data_ptr(),
                last=self._last.data_ptr(),
                kept=kept.data_ptr(),
                kept_finite=self.drawn_finite[round].data_ptr(),
                accepted=self.accepted[round].data_ptr(),
                draw_positions=of_draws[next_by],
                hidden=places[0],
                state=places[1],
                row_bytes=row_bytes,
                depth=num_drafts,
                kept_row=most_requests,
                block_size=drafting._block_size,
                is_last=round == num_rounds - 1,
            )

        between: list[Call] = [drafts(Op.FIRST_DRAFTS, 0, 0, self._kept)]
        between += [
            NextTokens(
                op=Op.NEXT_TOKENS,
                dtype=F32,
                rows=ALL_LOGITS,
                token_ids=chosen[0].data_ptr(),
                is_finite=of_draft[2].data_ptr(),
                kept=self._kept[i].data_ptr(),
                kept_finite=self._kept_finite.data_ptr(),
                draw_positions=of_draws[0],
                block_size=drafting._block_size,
                is_last=False,
            )
            for i in range(1, num_drafts)
        ]
        placed = drafts(Op.PLACE_DRAFTS, 0, 1, self._kept)
        zeroed: list[Call] = []
        if hidden is not None and (zeros := drafting._zeros) is not None:
            # every row is a copy of one
            zeroed = [
                GatherRows(
                    op=Op.GATHER_ROWS,
                    dtype=placed.dtype,
                    rows=ALL_LOGITS,
                    x=zeros.data_ptr(),
                    out=hidden.data_ptr(),
                    x_row=0,
                    out_row=hidden.stride(0),
                    size=len(zeros),
                )
            ]
        samples = [[sample] if draws else [] for sample in self._samples]
        calls: list[Any] = []
        for round in range(num_rounds):
            for end in between:
                calls += [*draft.calls, *samples[0], end]
            accepted = drafts(Op.ACCEPT_DRAFTS, 1, 0, self.drawn[round], round)
            calls += [placed, *zeroed, *model.calls, *samples[1], accepted]
        self.calls = CallList(calls)

    def set_draw(self, draw: Draw, num_requests: int, width: int) -> list[Any]:
        """Fills in the columns; returns what must live until the calls have run."""
        *parameters, first = draw
        assert first is not None
        self._sampled[0][2][:num_requests] = first
        kept = []
        for sample, (logits, tokens, positions), count in zip(
            self._samples, self._sampled, (1, width)
        ):
            repeated: list[Any] = [
                None if column is None else column.repeat_interleave(count) for column in parameters
            ]
            columns: Any = (*repeated, positions)
            call, of_call = sample_call(ALL_LOGITS, logits, columns, tokens)
            ctypes.pointer(sample)[0] = call
            kept += [columns, of_call]
        return kept
