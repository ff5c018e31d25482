"""Runs several decoding steps of a recorded model at once, feeding each sampled token to the next.

Must not know: models, requests, who chooses the number of steps.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops import AttentionMetadata
from .calls import ALL_LOGITS, F32, NextTokens, Op, Sample
from .draw import sample_call
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
        draw: tuple[Tensor | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs `count` decoding steps.

        The arguments are the step's tensors as a Program takes them; all rows are decodes whose
        block tables have room for `count` tokens. The tensors are overwritten. `draw` holds
        `sample_tokens`' columns for the first step; None takes the largest logits.

        Returns token_ids [count, B] i64 and is_finite [count, B] bool. From a row's first False on,
        its tokens are meaningless. The next run overwrites both.
        """
        step = self._program.fill_step(token_ids, positions, metadata, logits_indices)
        run = self._runs.get((count, draw is not None))
        if run is None:
            run = self._runs[count, draw is not None] = _Run(
                self._program, self._block_size, count, draw is not None
            )
        if draw is not None:
            *parameters, positions = draw
            run.positions[: len(positions)] = positions
            call, _columns = sample_call(
                ALL_LOGITS, run.logits, *parameters, run.positions, run.drawn
            )
            ctypes.pointer(run.sample)[0] = call
        self._program.run(run.pointers, step)
        num_rows = step.num_logits
        return run.kept[:, :num_rows], run.kept_finite[:, :num_rows]


class _Run:
    """The calls of `count` steps, and the memory of their tokens."""

    def __init__(self, program: Program, block_size: int, count: int, draws: bool):
        self.logits, largest, is_finite = program.of_logits
        max_rows = len(largest)
        self.kept, self.kept_finite = (
            torch.zeros(count, max_rows, dtype=torch.int64),
            torch.zeros(count, max_rows, dtype=torch.bool),
        )
        # used for sampling
        self.drawn, self.positions = torch.zeros(2, max_rows, dtype=torch.int64)
        self.sample = Sample()
        chosen, positions = (self.drawn, self.positions.data_ptr()) if draws else (largest, None)
        self._between = [
            NextTokens(
                Op.NEXT_TOKENS,
                F32,
                ALL_LOGITS,
                chosen.data_ptr(),
                is_finite.data_ptr(),
                self.kept[i].data_ptr(),
                self.kept_finite[i].data_ptr(),
                positions,
                block_size,
                i == count - 1,
            )
            for i in range(count)
        ]
        calls = [
            call
            for end in self._between
            for call in (*program.calls, *([self.sample] if draws else []), end)
        ]
        self.pointers = (ctypes.c_void_p * len(calls))(*map(ctypes.addressof, calls))
