"""Fills the parameters of a model whose checkpoint has other names or shapes than the model.

Must not know: architectures, what a parameter is for, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ...ipc.models.checkpoint import FLOAT_BYTES, find_weight_files, read_header

Report = Callable[[str, float], None]
Fill = Callable[[torch.Tensor, torch.Tensor], None]


def load_converted_weights(model: Any, directory: Path, report: Report, fill: Fill) -> None:
    """As loader.load_weights, for a model with `plan_conversions(stored names)`.

    Raises ModelLoadError, naming file and tensor, for a name that is missing, unexpected or there
    twice, and for a wrong shape or type.
    """
    missing, tied = dict(model.weights()), model.tied_weights()
    origin: dict[str, Path] = {}
    for path in find_weight_files(directory):
        for name, tensor in read_header(path).items():
            if name in origin:
                raise ModelLoadError(f"{path}: tensor {name} is also in {origin[name].name}")
            if tensor.dtype not in FLOAT_BYTES:
                raise ModelLoadError(
                    f"{path}: tensor {name} is of type {tensor.dtype:.20}; supported: "
                    f"{', '.join(FLOAT_BYTES)} (no quantized weights)"
                )
            origin[name] = path
    try:
        conversions = model.plan_conversions(list(origin))
    except ModelLoadError as error:
        raise ModelLoadError(f"{directory}: {error}") from error
    num_loaded, num_expected = 0, sum(tensor.numel() for tensor in missing.values())
    sources: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in dict.fromkeys(origin.values())
            }

            def read(name: str) -> torch.Tensor:
                return files[origin[name]].get_tensor(name)

            for conversion in conversions:
                found = conversion.convert([read(name) for name in conversion.sources])
                for name, values in found.items():
                    sources.setdefault(name, conversion.sources[0])
                    if name in tied:
                        continue
                    if name not in missing:
                        raise ModelLoadError(f"{directory}: tensor {name:.100} is there twice")
                    tensor = missing.pop(name)
                    if values.shape != tensor.shape:
                        raise ModelLoadError(
                            f"{origin[conversion.sources[0]]}: tensor {conversion.sources[0]} has "
                            f"shape {list(values.shape)}, the model needs {list(tensor.shape)}"
                        )
                    num_loaded += tensor.numel()
                    fill(tensor, values)
                    report("load weights", num_loaded / num_expected)
            for name, original in tied.items():
                if (
                    name in sources
                    and original in sources
                    and not torch.equal(read(sources[name]), read(sources[original]))
                ):
                    raise ModelLoadError(
                        f"{origin[sources[name]]}: tensor {sources[name]} differs from the "
                        f"embedding, yet the config says tie_word_embeddings"
                    )
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{directory}: not readable safetensors files: {error}") from error
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{directory}: no file has the tensor {next(iter(missing))}{more}")
