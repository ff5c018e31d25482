"""Reads the Dense modules of sentence-transformers, each from a folder of its own.

Must not know: requests, what is pooled, the base model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ...ipc.models.checkpoint import SINGLE_FILE, read_header
from ...ipc.models.forms import HeadLayer
from ...ipc.models.pooling import Dense
from .heads import PoolingHead, filled_head

_NAME = "linear"  # of a module's tensors


def load_dense(modules: Sequence[Dense], directory: Path | None) -> PoolingHead:
    """directory: the model's; None: weights are random, the same on every machine.

    Raises ModelLoadError, naming the file, for one that cannot be read, and for tensors that the
    module's config.json does not describe.
    """
    head = tuple(
        HeadLayer(_NAME, one.in_features, one.out_features, one.has_bias, one.activation)
        for one in modules
    )
    if directory is None:
        random = np.random.default_rng(0)
        values = [
            {
                name: torch.from_numpy(random.normal(0, 0.02, shape).astype(np.float32))
                for name, shape in layer.shapes()
            }
            for layer in head
        ]
        return filled_head(head, values)
    return filled_head(head, [_read(directory / one.folder / SINGLE_FILE) for one in modules])


def _read(path: Path) -> dict[str, torch.Tensor]:
    names = read_header(path)  # checks the file
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error
