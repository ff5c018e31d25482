"""Runs a vision tower as one native call.

Must not know: families of models, images, requests, what a program consists of.
"""

from __future__ import annotations

import logging

import torch

from ...kernels.cpu.native.program import recording
from ...kernels.cpu.native.recorder import Guard, Limits, Recorder, Unrecordable
from ...kernels.cpu.native.replay import Program
from ...kernels.registry import OpTable
from ..models.vision.tower import Places, VisionTower

logger = logging.getLogger(__name__)
LEAST_ROWS = 256  # of the encoder's result: smaller images use the program of such a one


class RecordedTower:
    """Calls a tower through its program. It is recorded by the first image that is larger than
    those before, so that what lies between its calls is as large as the images are.
    """

    def __init__(self, tower: VisionTower):
        self._tower = tower
        self._square = tower.config.merge**2
        self._inputs: tuple[torch.Tensor, Places] | None = None  # of the program, as large as it
        self._program: Program | None = None
        self._is_recordable = True

    def __call__(self, patches: torch.Tensor, places: Places) -> list[torch.Tensor]:
        """See VisionTower. The results are valid until the next call."""
        num_patches = len(patches)
        if self._program is None or num_patches > self._program.limits.num_tokens:
            self._record(patches, places)
        if self._program is None or self._inputs is None:
            return self._tower(patches, places)
        inputs, there = self._inputs
        inputs[:num_patches].copy_(patches)
        if there.added is not None and places.added is not None:
            there.added[:num_patches].copy_(places.added)
        for kept, angles in zip(there.angles, places.angles):
            kept[:num_patches].copy_(angles)
        ids = torch.zeros(num_patches, dtype=torch.int32)
        rows = torch.zeros(num_patches // self._square, dtype=torch.int64)
        return list(self._program(ids, places.positions, places.windows, rows))

    def _record(self, patches: torch.Tensor, places: Places) -> None:
        """Makes a program for this many patches, or more."""
        if not self._is_recordable:
            return
        rows = max(LEAST_ROWS, 1 << (len(patches) // self._square - 1).bit_length())
        # a class token is one more; a window has one row of the result at least
        limits = Limits(rows * self._square + len(patches) % self._square, rows, rows)
        recorder = Recorder(limits)

        def as_large(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(limits.num_tokens, x.shape[1], dtype=x.dtype)

        there = Places(
            None if places.added is None else as_large(places.added),
            [as_large(angles) for angles in places.angles],
            recorder.positions,
            recorder.whole(),
            recorder.metadata,
        )
        inputs = as_large(patches)
        try:
            with torch.inference_mode(), recording(recorder, Guard()):
                results = self._tower(inputs, there)
            self._program = Program(recorder, *results, owners=(self._tower, inputs, there))
        except Unrecordable as error:
            self._is_recordable, self._program = False, None
            logger.info("the encoder of images runs operation by operation: %s", error)
            return
        self._inputs = inputs, there


def is_recordable(tower: VisionTower, ops: OpTable) -> bool:
    """Whether all that the tower calls is native."""
    layer = tower.config.layer
    used = {"pack_linear", "add", "layer_norm", "rms_norm", "multiply", "clamp"}
    activations = [dense.activation for one in tower.config.projectors for dense in one.dense]
    if layer is not None:
        used |= {"encoder_attention", "rotary_embedding"}
        activations.append(layer.activation + "_and_mul" * (len(layer.up) > 1))
    return used.union(filter(None, activations)) <= set(ops.native)
