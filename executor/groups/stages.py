"""The stages that share the stack of a model: says which layers each has, and sends the residual
stream from one to the next.

Must not know: layers, models, steps, how the ranks were started, what carries the tensors
(ranks/shared_links.py, ranks/torch_links.py).

    stage 0   embedding, layers ── residual stream ─▶ stage 1   layers, head

The last stage samples. Nothing goes back: a stage begins the next step while those after it compute
this one, and gets the tokens of a step from the engine (Sampled in ranks/messages.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.ranks import stages_of


class StageLinks(Protocol):
    """What connects a stage to the others."""

    @property
    def stage(self) -> int: ...

    @property
    def count(self) -> int: ...

    def send(self, x: Tensor) -> None:
        """Sends a tensor to the next stage."""
        ...

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Waits for a tensor of the stage before, which the caller owns. Raises RuntimeError if
        that stage is gone.
        """
        ...


class Stages:
    """A rank's view of the stages. Without links it is the only one."""

    def __init__(self, links: StageLinks | None = None):
        self.stage = 0 if links is None else links.stage
        self.count = 1 if links is None else links.count
        self.is_first, self.is_last = self.stage == 0, self.stage == self.count - 1
        self._links = links

    def layers_of(self, config: DecoderConfig, readers: int = 0) -> range:
        """This stage's layers; see stages_of."""
        return stages_of(config, self.count, readers)[self.stage]

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Waits for the residual stream [num_tokens, hidden_size] of the stage before."""
        assert self._links is not None
        return self._links.receive((num_tokens, hidden_size), dtype)

    def send(self, residual: Tensor) -> None:
        """Sends the residual stream to the next stage."""
        assert self._links is not None
        self._links.send(residual)


WHOLE = Stages()
