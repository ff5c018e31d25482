"""Fills an encoder of images from a GGUF file.

Must not know: families of models, what a parameter is for, requests.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path

import torch

from ...ipc.errors import ModelLoadError
from ...ipc.models.gguf import READABLE_TYPES, GGUFFile, GGUFTensor, read_gguf
from ...ipc.models.mmproj import mmproj_names
from ...ipc.models.vision_config import VisionConfig
from ...ipc.models.vision_families import tower_of
from ..model import ImageEncoder
from .gguf import halves_apart, map_file, rows_of
from .loader import Fill, Report
from .packed_rows import PackedRows
from .table import Rearranged, Weight, stored_shape

# Files of Pixtral have the rows of these in the order in which GGML rotates them.
_ROTATED = ".attention.q_proj.weight", ".attention.k_proj.weight"


def load_mmproj(encoder: ImageEncoder, vision: VisionConfig, report: Report, fill: Fill) -> None:
    """Fills the tensors of the encoder from the file that `vision` names. See load_weights.

    All tensors are checked before the first is read. Raises ModelLoadError, naming file and
    tensor, for one that is missing, has another size, or a type that cannot be read.
    """
    path, tower = Path(vision.file), tower_of(vision)
    file, names = read_gguf(path), mmproj_names(tower, vision.family)
    tensors = dict(encoder.weights())
    found = {name: _find(file, names[name], name, tensor) for name, tensor in tensors.items()}
    mapped: dict[Path, mmap.mmap] = {}
    num_heads = 0 if tower.layer is None else tower.layer.attention.heads
    for count, name in enumerate(list(tensors), 1):
        target, parts = tensors.pop(name), found[name]
        packed = [
            PackedRows(rows_of(map_file(mapped, part.path), part), part.type, is_mapped=True)
            for part in parts
        ]
        if vision.family in ("mistral3", "pixtral") and name.endswith(_ROTATED):
            packed = [halves_apart(packed[0], num_heads)]
        fill(target, _values(packed, parts, target))
        report("load weights", count / len(found))


def _find(
    file: GGUFFile, names: tuple[str, ...], own: str, target: torch.Tensor
) -> list[GGUFTensor]:
    if len(names) == 1 and names[0] not in file.tensors:  # some files have q, k and v apart
        names = tuple(names[0].replace(".attn_qkv.", f".attn_{x}.") for x in "qkv")
    parts = []
    for name in names:
        if name not in file.tensors:
            raise ModelLoadError(f"{file.paths[0]}: there is no tensor {name} for {own}")
        tensor = file.tensors[name]
        is_size = prod(tensor.shape) * len(names) == target.numel()
        if not is_size or tensor.type not in READABLE_TYPES:
            raise ModelLoadError(
                f"{tensor.path}: tensor {name} is {tensor.type:.20} of shape "
                f"{list(tensor.shape)!s:.100}, the encoder needs {stored_shape(target)}"
            )
        parts.append(tensor)
    return parts


def _values(
    packed: list[PackedRows], parts: list[GGUFTensor], target: torch.Tensor
) -> torch.Tensor | PackedRows:
    """What fills `target`: blocks of a matrix as they are, other numbers in fp32."""
    is_rearranged = isinstance(target, Weight) and isinstance(target.part, Rearranged)
    is_image = len(parts[0].shape) == 4  # [rows, channels, height, width] of a patch
    if target.dim() == 2 and len(parts) == 1 and not is_rearranged and not is_image:
        return packed[0]
    shape = stored_shape(target)
    numbers = [one.dequantized(torch.float32).view(part.shape) for one, part in zip(packed, parts)]
    if len(numbers) > 1:  # the frames of a patch, or q, k and v
        return torch.stack(numbers, 2) if is_image else torch.cat(numbers)
    values = numbers[0]
    if is_image and not is_rearranged:
        values = values.permute(0, 2, 3, 1)
    values = values.reshape(shape)
    if isinstance(target, Weight) and target.offset:  # files have the sum
        values = values - target.offset
    return values
