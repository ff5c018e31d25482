"""The stages that share the stack of a model: which layers each has, and what goes from one to the
next.

Must not know: layers, models, steps, how the ranks were started, what carries the tensors
(shared_links.py, gloo_links.py).

    stage 0   embedding, layers ── residual stream ─▶ stage 1   layers, head
              logits ◀──────────────────────────────────────────┘

All stages have the logits, so all sample.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class StageLinks(Protocol):
    """What connects a stage to the others."""

    @property
    def stage(self) -> int: ...

    @property
    def count(self) -> int: ...

    def send(self, x: Tensor) -> None:
        """To the next stage."""
        ...

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Of the stage before; the receiver's own. Raises RuntimeError if it is gone."""
        ...

    def send_logits(self, x: Tensor) -> None:
        """Of the last stage, to all others."""
        ...

    def receive_logits(self, shape: tuple[int, int]) -> Tensor:
        """Those of the last stage, f32; the receiver's own. Raises RuntimeError if it is gone."""
        ...


class Stages:
    """A rank's view of the stages. Without links it is the only one."""

    def __init__(self, links: StageLinks | None = None):
        self.stage = 0 if links is None else links.stage
        self.count = 1 if links is None else links.count
        self.is_first, self.is_last = self.stage == 0, self.stage == self.count - 1
        self._links = links

    def layers_of(self, num_layers: int) -> range:
        """This stage's layers: neighbours, the last stages have one less if they are not equally
        many.
        """
        size, more = divmod(num_layers, self.count)
        begin = size * self.stage + min(self.stage, more)
        return range(begin, begin + size + (self.stage < more))

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """The residual stream [num_tokens, hidden_size] of the stage before."""
        assert self._links is not None
        return self._links.receive((num_tokens, hidden_size), dtype)

    def send(self, residual: Tensor) -> None:
        """To the next stage."""
        assert self._links is not None
        self._links.send(residual)

    def share_logits(self, logits: Tensor) -> None:
        """Sends the last stage's to all others."""
        if self._links is not None and self.is_last:
            self._links.send_logits(logits)

    def take_logits(self, num_rows: int, vocab_size: int) -> Tensor:
        """Those of the last stage, [num_rows, vocab_size] f32."""
        assert self._links is not None
        return self._links.receive_logits((num_rows, vocab_size))


WHOLE = Stages()
