"""Fills the parameters of a model from a GGUF file, with blocks as they lie in the file.

Must not know: architectures, what a parameter is for, requests.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...ipc.errors import ModelLoadError
from ...ipc.models.checkpoint import OTHER_PARTS
from ...ipc.models.draft_heads import HeadNames
from ...ipc.models.gguf import TYPES_OF_TENSORS, GGUFFile, GGUFTensor, read_gguf
from ...ipc.models.gguf_families import rotated_part
from ...ipc.models.gguf_weights import (
    architecture_of,
    check_gguf_tensors,
    is_permuted,
    parts_in_files,
    read_rope_factors,
    weights_in_memory,
    whole_of_heads,
)
from ...kernels.reference.gguf_repack import from_i2_s
from ..device import release_mapped
from .load_times import LoadTimes
from .packed_rows import PackedRows
from .table import RowOrder, Weight, stored_shape

logger = logging.getLogger(__name__)

_RELEASED_AT_ONCE = 16 * 2**20  # bytes: pages of a layer are released before it is complete

A_LOG = ".A_log.weight"  # what the name of a mixer's A_log ends with in files
# as in loader.py
Report = Callable[[str, float], None]
Fill = Callable[[torch.Tensor, torch.Tensor | PackedRows], None]


def load_gguf_weights(
    model: Any,
    path: Path,
    report: Report,
    fill: Fill,
    times: LoadTimes,
    head: HeadNames | None = None,
) -> None:
    """Does what loader.load_weights does, from a GGUF file. head: the names of a head for
    multi-token prediction, which `model` is then.

    The file is mapped and its pages are released once they are read, so that memory holds the
    model and one tensor.
    """
    file = read_gguf(path)
    missing = tensors_of_file(model, head)
    offset_of = architecture_of(file).offset_of
    origin = _found_tensors(model, file, missing, head)
    _check_rope(path, getattr(model.config, "rope", {}), read_rope_factors(file))
    num_elements = {name: tensor.numel() for name, tensor in missing.items()}
    kinds = Counter(origin[name].type for name in origin if len(origin[name].shape) > 1)
    logger.info(
        "%s: matrices in %s",
        path.name,
        ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common()),
    )
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    num_loaded, num_expected = 0, sum(num_elements.values())
    maps: dict[Path, mmap.mmap] = {}
    released, heads_of = 0, _PartsOfHeads(model.config)
    stored = (
        (name, rows_of(map_file(maps, tensor.path), tensor)) for name, tensor in origin.items()
    )
    for name, rows in times.reading(stored):
        tensor, packed = origin[name], PackedRows(rows, origin[name].type, is_mapped=True)
        with times.converting():
            if tensor.type in TYPES_OF_TENSORS:
                packed = _ternary(rows, tensor, name)
            if is_permuted(file, name):
                packed = halves_apart(packed, heads[name.split("_proj")[0][-1]])
            values: torch.Tensor | PackedRows | None = packed
            if whole := whole_of_heads(name):
                name, values = whole, heads_of.add(whole, tensor, packed)
            if values is not None:
                target = missing.pop(name)
                if target.dim() == 1 or name.endswith(A_LOG):
                    values = _vector(packed, name, offset_of(name)).view(stored_shape(target))
                fill(target, values)
                del target
        # it releases all tensors so far: a layer's blocks are read when the last of them is there
        if times.num_bytes - released >= _RELEASED_AT_ONCE:
            release_mapped(_bytes(maps[tensor.path], tensor.offset + tensor.num_bytes))
            released = times.num_bytes
        num_loaded += 0 if values is None else num_elements[name]
        report("load weights", num_loaded / num_expected)


def _found_tensors(
    model: Any, file: GGUFFile, tensors: dict[str, torch.Tensor], head: HeadNames | None = None
) -> dict[str, GGUFTensor]:
    """What the file has for the tensors that tensors_of_file has returned."""
    shapes = {name: stored_shape(tensor) for name, tensor in tensors.items()}
    if head is not None:
        return check_gguf_tensors(file, shapes, head.layers[0])
    if model.IS_FALLBACK:
        return check_gguf_tensors(file, shapes)
    experts = getattr(model.config, "experts", None)  # text encoders have no such field
    num_experts = 0 if experts is None else experts.count
    return check_gguf_tensors(file, shapes, "", model.is_of_another_rank, num_experts)


class _PartsOfHeads:
    """Joins the two parts in which files have the weight that makes keys and values of latent
    vectors: [heads, rank, key_dim], which is transposed, and [heads, value_dim, rank].
    """

    def __init__(self, config: Any):
        self._config = config
        self._waiting: dict[str, dict[bool, torch.Tensor]] = {}  # by weight

    def add(self, name: str, tensor: GGUFTensor, packed: PackedRows) -> torch.Tensor | None:
        """The weight, [heads * (key_dim + value_dim), rank] fp32, once both parts are there."""
        num_heads, rows, columns = tensor.shape
        of_keys, own = "attn_k_b" in tensor.name, self._config.latent
        wanted = own.key_dim if of_keys else own.value_dim
        if (columns if of_keys else rows) != wanted:
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, heads need "
                f"{wanted}"
            )
        part = packed.dequantized(torch.float32).view(num_heads, rows, columns)
        parts = self._waiting.setdefault(name, {})
        parts[of_keys] = part.transpose(1, 2) if of_keys else part
        if len(parts) < 2:
            return None
        del self._waiting[name]
        return torch.cat([parts[True], parts[False]], dim=1).flatten(0, 1)


def _check_rope(path: Path, rope: dict[str, Any], factors: list[float] | None) -> None:
    """Checks the file's factors against the configuration, which may come from another file. Text
    encoders have no such parameters.
    """
    known: Any = rope.get("factors")
    found: Any = factors
    if rope.get("rope_type") == "proportional":
        known = rope.get("partial_rotary_factor", 1.0)
        found = None if factors is None else rotated_part(factors)
    if found != known:
        raise ModelLoadError(
            f"{path}: the configuration ignores its rope_freqs.weight"
            if factors
            else f"{path}: it has no rope_freqs.weight, which the configuration names"
        )


def tensors_of_file(model: Any, head: HeadNames | None = None) -> dict[str, torch.Tensor]:
    """The tensors to fill, under the names and in the shapes of a GGUF file. All names end with
    weight or bias. Stacked experts have gate and up apart, [experts, rows, columns] each. head: see
    load_gguf_weights.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.weights():
        if OTHER_PARTS.match(name):
            continue  # an encoder of images, which has a file of its own
        name = name if head is None else head.of(name)
        named = parts_in_files(name, stored_shape(tensor))
        if len(named) > 1:
            tensors |= zip(named, _Halves(tensor).weights(), strict=True)
            continue
        stem, _, kind = next(iter(named)).rpartition(".")
        parts = {stem: tensor}
        if stem.endswith(".experts.gate_up_proj"):
            gate, up = _gate_and_up(tensor, model.has_transposed_experts)
            parts = {stem.replace("gate_up_proj", "gate_proj"): gate}
            parts[stem.replace("gate_up_proj", "up_proj")] = up
        elif stem.endswith(".experts.down_proj") and kind == "weight":
            parts = {stem: tensor.transpose(1, 2) if model.has_transposed_experts else tensor}
        tensors |= {f"{part}.{kind}": values for part, values in parts.items()}
    return tensors


def bytes_of_blocks(model: Any, path: Path, dtype: str) -> int:
    """Bytes of the model's weights, where matrices stay the blocks of the file."""
    tensors = tensors_of_file(model)
    found = {
        # a rank may keep a part
        name: of_file._replace(shape=tuple(tensors[name].shape)) if name in tensors else of_file
        for name, of_file in _found_tensors(model, read_gguf(path), tensors).items()
    }
    return weights_in_memory(found, dtype, keeps_blocks=True)


class _Halves:
    """Fills a tensor of the weight-name table that lies in the file as two, gate before up. A rank
    keeps as many rows of each.
    """

    def __init__(self, whole: torch.Tensor):
        assert isinstance(whole, Weight)
        self._whole, self._halves = whole, dict[int, torch.Tensor | PackedRows]()

    def weights(self) -> list[torch.Tensor]:
        halves, part = self._whole.chunk(2), self._whole.part
        if part is None:
            return [Weight(half, self, i) for i, half in enumerate(halves)]
        assert isinstance(part, RowOrder)
        size = part.size // 2
        kept = [RowOrder(rows - i * size, size) for i, rows in enumerate(part.rows.chunk(2))]
        return [Weight(half, self, i, kept[i]) for i, half in enumerate(halves)]

    @property
    def saved_bytes(self) -> int:
        """By blocks that are kept, once both halves are there."""
        return self._whole.layer.saved_bytes if len(self._halves) == 2 else 0

    def fill(self, tensor: Weight, values: torch.Tensor | PackedRows) -> None:
        """See LayerFactory.fill. Blocks are kept where those of both halves are of one type."""
        self._halves[tensor.shard] = values
        if len(self._halves) < 2:
            return
        halves = [self._halves[0], self._halves[1]]
        packed = [half for half in halves if isinstance(half, PackedRows)]
        if len(packed) == 2 and packed[0].type == packed[1].type:
            rows = torch.cat([half.rows for half in packed])
            self._whole.layer.fill(self._whole, PackedRows(rows, packed[0].type))
            return
        dtype = self._whole.dtype
        values = torch.cat(
            [
                half.dequantized(dtype) if isinstance(half, PackedRows) else half.to(dtype)
                for half in halves
            ]
        )
        self._whole.layer.fill(self._whole, values)


def _gate_and_up(tensor: torch.Tensor, is_transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of gate_up_proj, [experts, 2 * rows, columns]. That of gpt-oss is [experts, columns,
    2 * rows]; there, and in its bias, gate and up alternate.
    """
    if not is_transposed:
        gate, up = tensor.chunk(2, 1)
        return gate, up
    gate, up = tensor[..., ::2], tensor[..., 1::2]
    return (gate, up) if tensor.dim() == 2 else (gate.transpose(1, 2), up.transpose(1, 2))


def _ternary(rows: torch.Tensor, tensor: GGUFTensor, name: str) -> PackedRows:
    try:
        return PackedRows(from_i2_s(rows[0], tensor.shape[0]), "INT2_128")
    except ValueError as error:
        raise ModelLoadError(f"{tensor.path}: {name}: {error}") from None


def _vector(packed: PackedRows, name: str, offset: float) -> torch.Tensor:
    """Returns a norm's weight, a bias or the like. The conversion to GGUF adds `offset` to it, and
    stores -exp(A_log) of a mixer. Raises ModelLoadError where that is not negative.
    """
    values = packed.dequantized(torch.float32).flatten()
    if name.endswith(A_LOG):
        if not bool((values < 0).all()):
            raise ModelLoadError(f"the GGUF file's tensor for {name}, ssm_a, is not negative")
        return (-values.double()).log()
    return values.double() - offset if offset else values


def halves_apart(packed: PackedRows, num_heads: int) -> PackedRows:
    """Undoes the permutation of the conversion to GGUF.

    The conversion interleaves the two halves of a head, because GGML rotates neighbouring rows.
    Quire rotates rows of the two halves, as transformers does.
    """
    order = torch.arange(len(packed.rows)).view(num_heads, -1, 2).transpose(1, 2).flatten()
    return packed._replace(rows=packed.rows[order], is_mapped=False)


def map_file(maps: dict[Path, mmap.mmap], path: Path) -> mmap.mmap:
    """Returns a private mapping, which torch takes for writable memory. Nothing writes to it."""
    if path not in maps:
        with path.open("rb") as file:
            maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return maps[path]


def rows_of(mapped: mmap.mmap, tensor: GGUFTensor) -> torch.Tensor:
    """[rows, bytes] uint8. A row of a vector is one element; a row of experts is one expert. A
    tensor with a single scale is one row.
    """
    num_rows = 1 if tensor.type in TYPES_OF_TENSORS else tensor.shape[0]
    return _bytes(mapped, tensor.num_bytes, tensor.offset).view(num_rows, -1)


def _bytes(mapped: mmap.mmap, count: int, offset: int = 0) -> torch.Tensor:
    return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=offset)
