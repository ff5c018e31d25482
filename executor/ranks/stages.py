"""The stages that share the stack of a model: which layers each has, and what goes from one to the
next, in memory that they share.

Must not know: layers, models, steps, how the ranks were started.

    stage 0   embedding, layers ── residual stream ─▶ stage 1   layers, head
              logits ◀──────────────────────────────────────────┘

All stages have the logits, so all sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ring import RingReader, RingWriter, StageEnds


class Stages:
    """A rank's view of the stages. Without rings it is the only one."""

    def __init__(self, ends: StageEnds | None = None):
        self.stage = stage = 0 if ends is None else ends.stage
        self.count = 1 if ends is None else 1 + len(ends.links)
        self.is_first, self.is_last = stage == 0, stage == self.count - 1
        if ends is None:
            return
        links, logits = ends.links, ends.logits
        self._receive = None if self.is_first else RingReader(links[stage - 1])
        self._send = None if self.is_last else RingWriter(links[stage])
        self._write_logits = RingWriter(logits) if self.is_last else None
        self._read_logits = None if self.is_last else RingReader(logits, stage)

    def layers_of(self, num_layers: int) -> range:
        """This stage's layers: neighbours, the last stages have one less if they are not equally
        many.
        """
        size, more = divmod(num_layers, self.count)
        begin = size * self.stage + min(self.stage, more)
        return range(begin, begin + size + (self.stage < more))

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """The residual stream [num_tokens, hidden_size] of the stage before."""
        assert self._receive is not None
        return _tensor(self._receive.receive(), (num_tokens, hidden_size), dtype)

    def send(self, residual: Tensor) -> None:
        """To the next stage."""
        assert self._send is not None
        self._send.send(_bytes(residual))

    def share_logits(self, logits: Tensor) -> None:
        """Sends the last stage's to all others."""
        if self._write_logits is not None:
            self._write_logits.send(_bytes(logits))

    def take_logits(self, num_rows: int, vocab_size: int) -> Tensor:
        """Those of the last stage, [num_rows, vocab_size] f32."""
        assert self._read_logits is not None
        return _tensor(self._read_logits.receive(), (num_rows, vocab_size), torch.float32)


def _bytes(x: Tensor) -> memoryview:
    return x.contiguous().view(-1).view(torch.uint8).numpy().data


def _tensor(data: bytes, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise RuntimeError(f"{len(data)} bytes arrived from another stage, not {shape} {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


WHOLE = Stages()
