"""Fills the parameters of a model whose checkpoint has other names or shapes than the model.

Must not know: architectures, what a parameter is for, requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ...ipc.models.checkpoint import StoredWeights, read_stored_weights
from ...ipc.models.quantization_config import MXFP4, CheckpointQuantization
from ...ipc.models.stacked_experts import MXFP4_NUMBERS, MXFP4_SCALES
from .packed_rows import PackedRows
from .quantized import QuantizedWeights, unpack_mxfp4

logger = logging.getLogger(__name__)

Report = Callable[[str, float], None]
Fill = Callable[[torch.Tensor, torch.Tensor | PackedRows], None]


@dataclass
class Conversion:
    """How tensors of the checkpoint become tensors of the model."""

    sources: list[str]
    # takes the values of the sources in order, and returns values by name in the model
    convert: Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]
    target: str  # the first of its names
    is_plain: bool = False  # one tensor under another name


def load_converted_weights(
    model: Any,
    directory: Path,
    report: Report,
    fill: Fill,
    quantization: CheckpointQuantization | None = None,
) -> None:
    """Does what loader.load_weights does, for a model with `plan_conversions(stored names)`.

    A quantized weight that is a tensor of the model by itself reaches `fill` as blocks. Others,
    such as those of experts, are unpacked to the model's dtype, and the log says so.

    Raises ModelLoadError, naming file and tensor, for a name that is missing, unexpected or there
    twice, and for a wrong shape or type.
    """
    missing, tied = dict(model.weights()), model.tied_weights()
    stored = read_stored_weights(directory, quantization)
    try:
        conversions = model.plan_conversions(list(stored.shapes))
    except ModelLoadError as error:
        raise ModelLoadError(f"{directory}: {error}") from error
    num_loaded, num_expected = 0, sum(tensor.numel() for tensor in missing.values())
    dtype = next(iter(missing.values())).dtype
    sources: dict[str, str] = {}  # name in the model -> the first stored tensor of it
    try:
        with ExitStack() as stack:
            read = _SourceReader(stored, stack, quantization, dtype)
            for source, name, values in _conversions(conversions, read):
                source = sources.setdefault(name, source)
                if name in tied:
                    continue
                if name not in missing:
                    raise ModelLoadError(f"{directory}: tensor {name:.100} is there twice")
                tensor = missing.pop(name)
                is_packed = isinstance(values, PackedRows)
                shape = stored.shapes[source] if is_packed else list(values.shape)
                if shape != list(tensor.shape):
                    raise ModelLoadError(
                        f"{stored.origin.get(source, directory)}: tensor {source} has shape "
                        f"{shape}, the model needs {list(tensor.shape)}"
                    )
                num_loaded += tensor.numel()
                fill(tensor, values)
                report("load weights", num_loaded / num_expected)
            _check_tied(directory, tied, sources, read)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{directory}: not readable safetensors files: {error}") from error
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{directory}: no file has the tensor {next(iter(missing))}{more}")


def _conversions(
    conversions: list[Conversion], read: _SourceReader
) -> Iterator[tuple[str, str, torch.Tensor | PackedRows]]:
    """Yields (first stored tensor, name in the model, values)."""
    for conversion in conversions:
        source = conversion.sources[0]
        if conversion.is_plain:
            yield source, conversion.target, read(source)
        else:
            found = conversion.convert([read.unpacked(name) for name in conversion.sources])
            yield from ((source, name, values) for name, values in found.items())


def _check_tied(
    directory: Path, tied: dict[str, str], sources: dict[str, str], read: _SourceReader
) -> None:
    for name, original in tied.items():
        if name not in sources or original not in sources:
            continue
        if not torch.equal(read.unpacked(sources[name]), read.unpacked(sources[original])):
            raise ModelLoadError(
                f"{directory}: tensor {sources[name]} differs from the embedding, yet the "
                f"config says tie_word_embeddings"
            )


class _SourceReader:
    """Reads weights, each of which may be stored as several tensors."""

    def __init__(
        self,
        stored: StoredWeights,
        stack: ExitStack,
        quantization: CheckpointQuantization | None,
        dtype: torch.dtype,
    ):
        """Weights are unpacked to `dtype`. The files stay open until `stack` ends."""
        self._stored, self._dtype = stored, dtype
        self._files = {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in dict.fromkeys(stored.origin.values())
        }
        shapes = {name: stored.shapes[name] for name in stored.quantized}
        self._quantized = QuantizedWeights(shapes, quantization, set(stored.origin))
        self._is_mxfp4 = quantization is not None and quantization.method == MXFP4
        self._has_logged = False

    def __call__(self, name: str) -> torch.Tensor | PackedRows:
        if name not in self._stored.quantized:
            return self._tensor(name)
        if self._is_mxfp4:
            self._log(name, "no kernel multiplies MXFP4 of this layout")
            numbers, scales = (self._tensor(name + part) for part in (MXFP4_NUMBERS, MXFP4_SCALES))
            return unpack_mxfp4(numbers, scales, self._dtype)
        values = None
        for part in self._stored.quantized[name]:
            values = self._quantized.add(part, self._tensor(part), self._dtype)
        assert values is not None
        return values

    def unpacked(self, name: str) -> torch.Tensor:
        values = self(name)
        if not isinstance(values, PackedRows):
            return values
        self._log(name, "the model has several weights in one tensor")
        return values.dequantized(self._dtype)

    def _log(self, name: str, reason: str) -> None:
        if not self._has_logged:
            logger.info("%s and others are unpacked to %s: %s", name, self._dtype, reason)
            self._has_logged = True

    def _tensor(self, name: str) -> torch.Tensor:
        return self._files[self._stored.origin[name]].get_tensor(name)
