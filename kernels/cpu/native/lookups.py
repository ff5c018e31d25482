"""Runs several rounds of prompt lookup and verification at once.

Must not know: models, requests beyond their texts, who chooses the number of rounds and drafts.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...ops import AttentionMetadata
from .calls import ALL_LOGITS, F32, CallList, Lookups, Op, Sample
from .drafting import Draw, make_room
from .draw import sample_call
from .replay import Program


class LookupPasses:
    """`program` ends with argmax over its logits. A draft follows the latest place where the
    longest end of a text stands, of least_equal to most_equal tokens.
    """

    def __init__(self, program: Program, block_size: int, least_equal: int, most_equal: int):
        self._program = program
        self._sizes = least_equal, most_equal, block_size
        # by number of rounds, and whether they sample
        self._runs: dict[tuple[int, bool], _Run] = {}

    def fits(self, num_requests: int, num_rows: int) -> bool:
        """Whether a pass may have so many requests and tokens; no run is traced call by call."""
        limits = self._program.limits
        return (
            num_rows <= min(limits.num_tokens, limits.num_logits)
            and num_requests <= limits.num_requests
            and self._program.timer is None
        )

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
        texts: Tensor,
        slots: Tensor,
        num_known: Tensor,
        most: Tensor,
        num_rounds: int,
        draw: Draw | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs `num_rounds` rounds of lookup and verification for B requests.

        The arguments are a step of decodes as a Program takes them, whose block tables have room
        for all rounds. texts [slots, N] i32: what is accepted is appended to them. slots, num_known
        and most [B] i64: the rows of texts, their known tokens, and the most drafts of a round;
        num_known is changed. `draw` holds `sample_tokens`' columns [B] without positions; None
        takes the largest logits.

        Returns starts [num_rounds, B + 1] i64, the first row of each request in each round,
        token_ids [num_rounds, rows] i64, what the model draws after the last token and after each
        draft, is_finite [num_rounds, rows] bool, and num_accepted [num_rounds, B] i64. The next run
        overwrites them.
        """
        step = self._program.fill_step(token_ids, positions, metadata, logits_indices)
        num_requests, num_rows = step.num_requests, int(most.sum()) + step.num_requests
        arrays = make_room(step, num_rows, token_ids, positions, metadata, logits_indices)
        key = num_rounds, draw is not None
        if (run := self._runs.get(key)) is None:
            run = self._runs[key] = _Run(self._program, *key, *self._sizes)
        kept = run.fill(texts, slots, num_known, most, draw)
        self._program.run(run.calls, step)
        del kept, arrays
        return (
            run.starts[:, : num_requests + 1],
            run.drawn[:, :num_rows],
            run.drawn_finite[:, :num_rows],
            run.accepted[:, :num_requests],
        )


class _Run:
    """The calls of all rounds, and the memory of their results."""

    def __init__(
        self,
        program: Program,
        num_rounds: int,
        draws: bool,
        least_equal: int,
        most_equal: int,
        block_size: int,
    ):
        logits, largest, is_finite = program.of_logits[:3]
        rows, requests = len(largest), program.limits.num_requests
        self._logits = logits
        self.starts = torch.zeros(num_rounds, requests + 1, dtype=torch.int64)
        self.drawn = torch.zeros(num_rounds, rows, dtype=torch.int64)
        self.drawn_finite = torch.zeros(num_rounds, rows, dtype=torch.bool)
        self.accepted = torch.zeros(num_rounds, requests, dtype=torch.int64)
        self._columns = Sample.zeros()  # by request; the call that draws has them by row
        tokens, calls = largest, list[Any](program.calls)
        addresses: list[int | None] = [None, None]
        if draws:
            tokens = torch.zeros(rows, dtype=torch.int64)
            self._by_row = [
                torch.zeros(rows, dtype=dtype)
                for dtype in (*(torch.float32, torch.int32), *[torch.float32] * 2)
            ]
            integers = [torch.zeros(rows, dtype=torch.int64) for _ in range(2)]
            columns: Any = (*self._by_row, *integers)
            sample, self._of_sample = sample_call(ALL_LOGITS, logits, columns, tokens)
            calls.append(sample)
            addresses = [ctypes.addressof(self._columns), ctypes.addressof(sample)]
        self._tokens = tokens
        self._lookups = [
            Lookups(
                op=op,
                dtype=F32,
                rows=ALL_LOGITS,
                texts=None,
                slots=None,
                num_known=None,
                most=None,
                columns=addresses[0],
                sample=addresses[1],
                token_ids=tokens.data_ptr(),
                is_finite=is_finite.data_ptr(),
                kept=self.drawn[round].data_ptr(),
                kept_finite=self.drawn_finite[round].data_ptr(),
                starts=self.starts[round].data_ptr(),
                accepted=self.accepted[round].data_ptr(),
                text_row=0,
                least_equal=least_equal,
                most_equal=most_equal,
                block_size=block_size,
            )
            for round in range(num_rounds)
            for op in (Op.LOOKUP_DRAFTS, Op.ACCEPT_LOOKUPS)
        ]
        in_order: list[Any] = []
        for lookup, accept in zip(self._lookups[::2], self._lookups[1::2]):
            in_order += [lookup, *calls, accept]
        self.calls = CallList(in_order)

    def fill(
        self, texts: Tensor, slots: Tensor, num_known: Tensor, most: Tensor, draw: Draw | None
    ) -> list[Any]:
        """Returns what must live until the calls have run."""
        for call in self._lookups:
            call.texts, call.text_row = texts.data_ptr(), texts.stride(0)
            call.slots, call.num_known = slots.data_ptr(), num_known.data_ptr()
            call.most = most.data_ptr()
        if draw is None:
            return []
        columns: Any = (*draw, num_known)
        call, kept = sample_call(ALL_LOGITS, self._logits, columns, self._tokens)
        ctypes.pointer(self._columns)[0] = call
        return kept
