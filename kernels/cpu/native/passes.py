"""Runs several decoding steps of a recorded model at once, feeding each sampled token to the next.

Must not know: models, requests, who chooses the number of steps.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops import AttentionMetadata
from .calls import ALL_LOGITS, F32, Call, CallList, NextTokens, Op, Sample
from .draw import Columns, sample_call
from .replay import Program


class Passes:
    """Runs a program that ends with argmax over its logits.

    The thread pool starts once, and Python waits once, for all steps.
    """

    def __init__(self, program: Program, block_size: int):
        self._program = program
        self._block_size = block_size
        self._runs: dict[tuple[int, bool], _Run] = {}  # by number of steps, and whether they sample

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
        count: int,
        draw: Columns | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs `count` decoding steps.

        The arguments are the step's tensors as a Program takes them; all rows are decodes whose
        tables have room for `count` tokens, of which no last_position of states lies before the
        last. The tensors are overwritten. `draw` holds `sample_tokens`' columns for the first step;
        None takes the largest logits.

        Returns token_ids [count, B] i64 and is_finite [count, B] bool. From a row's first False on,
        its tokens are meaningless. The next run overwrites both.
        """
        step = self._program.fill_step(token_ids, positions, metadata, logits_indices)
        key = count, draw is not None
        if (run := self._runs.get(key)) is None:
            run = self._runs[key] = _Run(self._program, self._block_size, *key)
        kept = run.set_draw(draw) if draw is not None else ()
        self._program.run(run.calls, step)
        del kept  # the calls have read it
        num_rows = step.num_logits
        return run.kept[:, :num_rows], run.kept_finite[:, :num_rows]


class _Run:
    """The calls of `count` steps, and the memory of their tokens."""

    def __init__(self, program: Program, block_size: int, count: int, draws: bool):
        self._logits, largest, is_finite = program.of_logits
        max_rows = len(largest)
        self.kept = torch.zeros(count, max_rows, dtype=torch.int64)
        self.kept_finite = torch.zeros(count, max_rows, dtype=torch.bool)
        # These are used for sampling.
        self._drawn, self._positions = torch.zeros(2, max_rows, dtype=torch.int64)
        self._sample = Sample.zeros()
        chosen = self._drawn if draws else largest
        samples = [self._sample] if draws else []
        calls: list[Call] = []
        for i in range(count):
            end = NextTokens(
                op=Op.NEXT_TOKENS,
                dtype=F32,
                rows=ALL_LOGITS,
                token_ids=chosen.data_ptr(),
                is_finite=is_finite.data_ptr(),
                kept=self.kept[i].data_ptr(),
                kept_finite=self.kept_finite[i].data_ptr(),
                draw_positions=self._positions.data_ptr() if draws else None,
                block_size=block_size,
                is_last=i == count - 1,
            )
            calls += [*program.calls, *samples, end]
        self.calls = CallList(calls)

    def set_draw(self, draw: Columns) -> list[Tensor]:
        """Sets the columns of the calls that sample. Returns what must live until they have run."""
        positions = draw[-1]
        self._positions[: len(positions)] = positions
        columns = (*draw[:-1], self._positions)
        call, kept = sample_call(ALL_LOGITS, self._logits, columns, self._drawn)
        ctypes.pointer(self._sample)[0] = call
        return kept
