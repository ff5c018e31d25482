"""Fills the parameters of a model from safetensors or GGUF files, or with random values. Weights of
quantized checkpoints are packed on the way.

Must not know: architectures, what a parameter is for, requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ...ipc.models.checkpoint import check_checkpoint
from ...ipc.models.gguf import is_gguf
from ...ipc.models.quantization_config import CheckpointQuantization
from ...ipc.models.stacked_experts import (
    MXFP4_NUMBERS,
    MXFP4_SCALES,
    StackedPiece,
    stacked_pieces,
)
from ...ipc.models.stored_names import find_stored_names, is_ignored
from ..device import release_mapped
from .converted import load_converted_weights
from .load_times import LoadTimes
from .packed_rows import PackedRows, copy_weights
from .quantized import QuantizedWeights, pack_mxfp4
from .table import stored_shape

_NUM_RANDOM = 2**24 - 3  # a prime, so that the rows of a matrix differ
_STAGE = "load weights"

Report = Callable[[str, float], None]
# takes a tensor of the weight-name table, and its values
Fill = Callable[[torch.Tensor, torch.Tensor | PackedRows], None]


def load_weights(
    model: Any,
    directory: Path,
    report: Report,
    fill: Fill = copy_weights,
    quantization: CheckpointQuantization | None = None,
) -> None:
    """Fills every tensor of model.weights() from `directory`, or from the GGUF file of this path,
    cast to the parameter's dtype.

    `quantization` is that of the safetensors files, from their config.json.

    It reports the loaded fraction of all elements. `fill(tensor, stored)` does the work and may
    keep both arguments; they are not read again. Files are mapped and read once, and pages that
    were read are released, so memory never holds more than the model and one layer.

    All headers are checked before the first tensor is read. Raises what check_checkpoint does, and
    ModelLoadError for a file that cannot be read.
    """
    times = LoadTimes()
    if is_gguf(directory):
        from .gguf import load_gguf_weights

        load_gguf_weights(model, directory, report, fill, times)
        times.log()
        return
    if model.IS_FALLBACK:
        load_converted_weights(model, directory, report, fill, quantization)
        return
    _load_safetensors(model, directory, report, fill, quantization, times)
    times.log()


def _load_safetensors(
    model: Any,
    directory: Path,
    report: Report,
    fill: Fill,
    quantization: CheckpointQuantization | None,
    times: LoadTimes,
) -> None:
    missing, tied = dict(model.weights()), model.tied_weights()
    in_files = find_stored_names(missing, model.config, directory)
    missing = {in_files.of(name): tensor for name, tensor in missing.items()}
    tied = {in_files.of(name): in_files.of(original) for name, original in tied.items()}

    def is_not_needed(stored: str) -> bool:
        own = in_files.own(stored)
        return is_ignored(own, model.config) or model.is_of_another_rank(own)

    num_experts = 0 if model.config.experts is None else model.config.experts.count
    fill_from_safetensors(
        missing, tied, directory, report, fill, quantization, is_not_needed, num_experts, times
    )


def fill_from_safetensors(
    missing: dict[str, torch.Tensor],
    tied: dict[str, str],
    directory: Path,
    report: Report,
    fill: Fill,
    quantization: CheckpointQuantization | None,
    is_not_needed: Callable[[str], bool],
    num_experts: int,
    times: LoadTimes,
) -> None:
    """Fills the tensors of `missing`, by their names in the files of `directory`, and removes them
    from it. See load_weights, and check_checkpoint for tied, is_not_needed and num_experts.
    """
    dtype = next(iter(missing.values())).dtype
    shapes = {name: stored_shape(tensor) for name, tensor in missing.items()}
    origin = check_checkpoint(directory, shapes, tied, quantization, is_not_needed, num_experts)
    read = _WeightReader(shapes, origin, quantization, num_experts, dtype)
    num_loaded, num_expected = 0, sum(tensor.numel() for tensor in missing.values())
    for path, names in groupby(origin, key=origin.__getitem__):
        wanted = (name for name in names if name in missing or read.is_part(name))
        try:
            with safe_open(path, framework="pt") as file:
                for name, stored in times.reading(read.stored(file, wanted)):
                    with times.converting():
                        weight, values = read.weight(name, stored, file, path)
                        if values is None:
                            continue
                        num_loaded += missing[weight].numel()
                        fill(missing.pop(weight), values)
                    report(_STAGE, num_loaded / num_expected)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error
    _check_tied(tied, origin, dtype)


class _WeightReader:
    """Makes weights from the tensors that files have in their place. A quantized weight has several
    tensors; all experts of a layer may have one.
    """

    def __init__(
        self,
        shapes: dict[str, list[int]],
        origin: dict[str, Path],
        quantization: CheckpointQuantization | None,
        num_experts: int,
        dtype: torch.dtype,
    ):
        """`origin` comes from check_checkpoint. Weights are unpacked to `dtype`."""
        self._origin, self._dtype = origin, dtype
        self._quantized = QuantizedWeights(shapes, quantization, set(origin))
        self._pieces = stacked_pieces(shapes, num_experts)

    def is_part(self, name: str) -> bool:
        """Whether a stored tensor is one of several that make up a weight."""
        return self._quantized.weight_of(name) is not None

    def stored(self, file: Any, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of an open file by these names. If a name is not in the file, it
        yields the part of another tensor that holds the weight.
        """
        in_file = set(file.keys())
        for name in names:
            if name in in_file:
                yield name, file.get_tensor(name)
            else:
                yield name, _piece(file, self._pieces[name], in_file)

    def weight(
        self, name: str, stored: torch.Tensor, file: Any, path: Path
    ) -> tuple[str, torch.Tensor | PackedRows | None]:
        """The weight that a stored tensor belongs to, and its values once all parts are there."""
        if (weight := self._quantized.weight_of(name)) is not None:
            return weight, self._quantized.add(name, stored, self._dtype)
        piece = self._pieces.get(name)
        if piece is None or stored.dtype != torch.uint8:
            return name, stored
        scales = self._origin[piece.stored + MXFP4_SCALES]
        return name, _in_mxfp4(stored, piece, file, None if scales == path else scales)


def _piece(file: Any, piece: StackedPiece, stored_names: set[str]) -> torch.Tensor:
    """Returns a weight that lies in a stored tensor with others. It is a view of the mapped file,
    or a copy of rows that are not neighbours there. For a weight in MXFP4 it is the numbers of the
    whole expert.
    """
    if (numbers := piece.stored + MXFP4_NUMBERS) in stored_names:
        return file.get_tensor(numbers)[piece.expert]
    whole = file.get_tensor(piece.stored)
    if piece.expert is None:
        return whole
    expert = whole[piece.expert].t() if piece.is_transposed else whole[piece.expert]
    return expert[piece.rows].contiguous()


def _in_mxfp4(
    numbers: torch.Tensor, piece: StackedPiece, file: Any, scales_path: Path | None
) -> PackedRows:
    """Returns the piece of the numbers [rows, groups, 16] of an expert. Their scales are in `file`,
    or in the file at `scales_path`.
    """
    opened = nullcontext(file) if scales_path is None else safe_open(scales_path, framework="pt")
    with opened as file_of_scales:
        exponents = file_of_scales.get_tensor(piece.stored + MXFP4_SCALES)[piece.expert]
    packed = pack_mxfp4(numbers[piece.rows], exponents[piece.rows])
    release_mapped(numbers)
    return packed


def _check_tied(tied: dict[str, str], origin: dict[str, Path], dtype: torch.dtype) -> None:
    """Checks that a stored head equals the embedding that it is tied to. Otherwise nobody would
    notice a difference.
    """
    for name, original in tied.items():
        if name not in origin:
            continue
        with (
            safe_open(origin[name], framework="pt") as file,
            safe_open(origin[original], framework="pt") as originals,
        ):
            if not torch.equal(
                file.get_tensor(name).to(dtype), originals.get_tensor(original).to(dtype)
            ):
                raise ModelLoadError(
                    f"{origin[name]}: tensor {name} differs from the embedding, yet the config "
                    f"says tie_word_embeddings"
                )


def fill_with_random_weights(
    model: Any,
    seed: int,
    report: Report,
    fill: Fill = torch.Tensor.copy_,  # type: ignore[assignment]
) -> None:
    """Fills a model for load_format="dummy". Values are normal with standard deviation 0.02 (those
    of norms around 1). They depend only on `seed`, and are the same on every machine. They repeat
    after _NUM_RANDOM values: one thread draws 150 million in a second, and models have billions.

    `fill` is that of load_weights.
    """
    # torch cannot make another generator in an engine's own process (lean_import.py)
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        unfilled = dict(model.weights())
        # of the tensors as they are stored: ranks, which have parts of them, draw the same values
        num_drawn, num_stored = 0, sum(math.prod(stored_shape(one)) for one in unfilled.values())
        values = torch.empty(min(num_stored, _NUM_RANDOM)).normal_(0.0, 0.02)
        for name in list(unfilled):
            tensor = unfilled.pop(name)
            values = values.to(tensor.device)  # a GPU repeats them faster than they get there
            shape = stored_shape(tensor)
            found = _repeated(values, num_drawn % len(values), math.prod(shape)).view(shape)
            num_drawn += found.numel()
            fill(tensor, found + 1 if name.lower().endswith("norm.weight") else found)
            report(_STAGE, num_drawn / num_stored)
    finally:
        generator.set_state(state)


def _repeated(values: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` values [count] from `start` on, where the first follows the last."""
    end = start + count
    return (
        values[start:end]
        if end <= len(values)
        else values.repeat(-(-end // len(values)))[start:end]
    )
