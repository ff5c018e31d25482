"""Reads the weights of a head that drafts (models/draft_heads.py).

Must not know: how a head computes, requests.

It reads EAGLE-3 as its authors and SpecForge write it: fc, midlayer, norm, lm_head, and d2t, which
maps the head's tokens to the model's. It reads multi-token prediction under the names of
ipc/models/draft_heads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ...ipc.json_files import check_regular_file
from ...ipc.models.draft_heads import HeadNames, quantization_of_head
from ...ipc.models.gguf import is_gguf
from ...ipc.models.quantization_config import CheckpointQuantization
from .load_times import LoadTimes
from .loader import Fill as LoaderFill
from .loader import fill_from_safetensors

Fill = Callable[[torch.Tensor, torch.Tensor], None]
Table = Iterator[tuple[str, torch.Tensor]]  # the head's `weights`


class HeadWeights:
    """The tensors of a directory's safetensors files, read one by one."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, Path] = {}  # by name of the tensor
        try:
            for path in sorted(directory.glob("*.safetensors")):
                check_regular_file(path)
                with safe_open(path, "pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{directory}: {error}") from error
        if not self._files:
            raise ModelLoadError(f"{directory}: there is no safetensors file")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ModelLoadError(f"{self.directory}: lacks the tensor {name}")
        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)


def read_known_tokens(
    weights: HeadWeights, hf_config: dict[str, Any], vocab_size: int
) -> torch.Tensor | None:
    """Returns the model's token of each token of an EAGLE-3 head's own vocabulary, [D] i64; d2t
    holds the differences. None: both have the same vocabulary.

    Raises ModelLoadError for a map that does not fit.
    """
    own_size = hf_config.get("draft_vocab_size") or vocab_size
    if "d2t" not in weights:
        if own_size != vocab_size:
            raise ModelLoadError(
                f"{weights.directory}: lacks the tensor d2t, which maps the draft_vocab_size="
                f"{own_size} tokens of the head to the model's {vocab_size}"
            )
        return None
    offsets = weights["d2t"].long()
    if list(offsets.shape) != [own_size]:
        raise ModelLoadError(
            f"{weights.directory}: d2t must have the shape [{own_size}], as draft_vocab_size in "
            f"config.json says, got {list(offsets.shape)}"
        )
    tokens = torch.arange(own_size) + offsets
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ModelLoadError(f"{weights.directory}: d2t names tokens that the model lacks")
    if len(tokens.unique()) != own_size:
        raise ModelLoadError(f"{weights.directory}: d2t maps two tokens of the head to one")
    return tokens


def fill_eagle3(
    table: Table,
    size: int,
    layers: list[int],
    weights: HeadWeights,
    tokens: torch.Tensor | None,
    fill: Fill,
) -> None:
    """Fills an Eagle3Head. `size` is hidden_size, `layers` are those of the model that it reads,
    and `tokens` comes from read_known_tokens. Raises ModelLoadError for what is missing or has
    another shape.
    """

    def values_of(name: str) -> torch.Tensor:
        if name.startswith("fc."):
            part = layers.index(int(name.split(".")[1]))
            return weights["fc.weight"][:, part * size : (part + 1) * size]
        if name == "lm_head.weight" and tokens is not None:
            rows = weights[name]
            return rows[tokens.argsort()] if len(rows) == len(tokens) else rows
        return _columns(weights, *_part(name), size)

    _fill(table, values_of, fill, weights.directory)


def load_mtp(
    head: Any,
    names: HeadNames,
    directory: Path,
    report: Callable[[str, float], None],
    fill: LoaderFill,
    quantization: CheckpointQuantization | None,
) -> None:
    """Fills an MTPHead from the tensors of `directory`, or of the GGUF file of this path, that have
    these names, as loader.load_weights does. Raises ModelLoadError for what is missing or has
    another shape.
    """
    times, experts = LoadTimes(), head.config.experts
    if is_gguf(directory):
        from .gguf import load_gguf_weights

        load_gguf_weights(head, directory, report, fill, times, names)
        return
    tensors = {names.of(name): tensor for name, tensor in head.weights()}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    num_experts = 0 if experts is None else experts.count
    fill_from_safetensors(
        tensors,
        {},
        directory,
        report,
        fill,
        quantization_of_head(quantization, directory, shapes, num_experts),
        lambda name: True,  # the model's own tensors
        num_experts,
        times,
    )


def _part(name: str) -> tuple[str, str]:
    own, _, part = name.partition("#")
    return own, part


def _columns(weights: HeadWeights, name: str, part: str, size: int) -> torch.Tensor:
    """Returns the tensor. Of a weight over a concatenation it returns the columns for "token" or
    "hidden".
    """
    values = weights[name]
    if not part:
        return values
    if values.shape[1] != 2 * size:
        raise ModelLoadError(
            f"{weights.directory}: {name} must have {2 * size} columns, got {values.shape[1]}"
        )
    return values[:, size:] if part == "hidden" else values[:, :size]


def _fill(
    table: Table,
    values_of: Callable[[str], torch.Tensor],
    fill: Fill,
    directory: Path,
) -> None:
    for name, tensor in list(table):
        values: Any = values_of(name)
        if values.shape != tensor.shape:
            raise ModelLoadError(
                f"{directory}: {name.partition('#')[0]} must have the shape {list(tensor.shape)}, "
                f"got {list(values.shape)}"
            )
        fill(tensor, values.contiguous())
