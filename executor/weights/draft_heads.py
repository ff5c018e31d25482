"""Reads the weights of a head that drafts (models/draft_heads.py) from safetensors files.

Must not know: how a head computes, requests.

It reads EAGLE-3 as its authors and SpecForge write it: fc, midlayer, norm, lm_head, and d2t, which
maps the head's tokens to the model's. It reads multi-token prediction under the names of MiMo, of
DeepSeek and GLM, and of Qwen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ...ipc.json_files import check_regular_file

Fill = Callable[[torch.Tensor, torch.Tensor], None]
Table = Iterator[tuple[str, torch.Tensor]]  # the head's `weights`


class MTPNames(NamedTuple):
    """Names in a checkpoint. `is_hidden_first` is about the concatenation that fc reads."""

    fc: str
    token_norm: str
    hidden_norm: str
    norm: str
    layer: str
    is_hidden_first: bool = False


def mtp_names(num_layers: int) -> list[MTPNames]:
    """Lists the names. The model has `num_layers` layers; DeepSeek and GLM number the head's layer
    after them.
    """
    mimo, glm = "model.mtp_layers.0", f"model.layers.{num_layers}"
    return [
        MTPNames(
            f"{mimo}.input_proj",
            f"{mimo}.token_layernorm",
            f"{mimo}.hidden_layernorm",
            f"{mimo}.final_layernorm",
            mimo,
            is_hidden_first=True,
        ),
        MTPNames(f"{glm}.eh_proj", f"{glm}.enorm", f"{glm}.hnorm", f"{glm}.shared_head.norm", glm),
        MTPNames(
            "mtp.fc",
            "mtp.pre_fc_norm_embedding",
            "mtp.pre_fc_norm_hidden",
            "mtp.norm",
            "mtp.layers.0",
        ),
    ]


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

    def find_mtp_names(self, num_layers: int) -> MTPNames:
        """Finds the names that the files use. Raises ModelLoadError where there is no head."""
        known = mtp_names(num_layers)
        for names in known:
            if f"{names.fc}.weight" in self:
                return names
        tried = ", ".join(f"{names.fc}.weight" for names in known)
        raise ModelLoadError(f"{self.directory}: has no head for multi-token prediction ({tried})")


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
        return _columns(weights, *_part(name), size, is_hidden_first=False)

    _fill(table, values_of, fill, weights.directory)


def fill_mtp(table: Table, size: int, weights: HeadWeights, names: MTPNames, fill: Fill) -> None:
    """Fills an MTPHead; see fill_eagle3."""

    def values_of(name: str) -> torch.Tensor:
        own, part = _part(name)
        first, _, rest = own.partition(".")
        stored = f"{getattr(names, first)}.{rest}"
        return _columns(weights, stored, part, size, names.is_hidden_first)

    _fill(table, values_of, fill, weights.directory)


def _part(name: str) -> tuple[str, str]:
    own, _, part = name.partition("#")
    return own, part


def _columns(
    weights: HeadWeights, name: str, part: str, size: int, is_hidden_first: bool
) -> torch.Tensor:
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
    return values[:, size:] if (part == "hidden") != is_hidden_first else values[:, :size]


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
