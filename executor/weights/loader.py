"""Fills the parameters of a model from safetensors files, or with random values.

Must not know: architectures, what a parameter is for, requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ..device import copy_mapped

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_STAGE = "load weights"

Report = Callable[[str, float], None]
# a tensor of the weight-name table, and its values
Fill = Callable[[torch.Tensor, torch.Tensor], None]


def load_weights(model: Any, directory: Path, report: Report, fill: Fill = copy_mapped) -> None:
    """Fills every tensor of model.weights() from `directory`, cast to the parameter's dtype.

    Reports the loaded fraction of all elements. `fill(tensor, stored)` does the work and may keep
    both arguments; they are not read again. Files are mapped and read once, and pages that were
    read are released, so memory never holds more than the model and one layer.

    Raises ModelLoadError, naming file and tensor, for a missing, unexpected or duplicate name, a
    wrong shape, a type that is not a float, and an unreadable file.
    """
    missing = dict(model.weights())
    tied = model.tied_weights()
    dtype, shapes = (
        next(iter(missing.values())).dtype,
        {name: list(tensor.shape) for name, tensor in missing.items()},
    )
    shapes |= {name: shapes[original] for name, original in tied.items()}
    origin: dict[str, str] = {}  # tensor -> its file
    files = find_weight_files(directory)
    num_loaded, num_expected = 0, sum(tensor.numel() for tensor in missing.values())
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                    if name.endswith("rotary_emb.inv_freq"):
                        continue  # a buffer that old checkpoints saved; it follows from the config
                    _check(file.get_slice(name), name, path, shapes, origin)
                    origin[name] = path.name
                    if name in missing:
                        num_loaded += missing[name].numel()
                        fill(missing.pop(name), file.get_tensor(name))
                        report(_STAGE, num_loaded / num_expected)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"{directory}: no file has the tensor {next(iter(missing))}{more}; read: "
            f"{', '.join(path.name for path in files)}"
        )
    _check_tied(tied, origin, directory, dtype)


def _check(
    tensor: Any, name: str, path: Path, shapes: dict[str, list[int]], origin: dict[str, str]
) -> None:
    if name in origin:
        raise ModelLoadError(f"{path}: tensor {name} is also in {origin[name]}")
    if name not in shapes:
        raise ModelLoadError(f"{path}: the model has no place for tensor {name}")
    if list(tensor.get_shape()) != shapes[name]:
        raise ModelLoadError(
            f"{path}: tensor {name} has shape {list(tensor.get_shape())}, the model needs "
            f"{shapes[name]}"
        )
    if tensor.get_dtype() not in _FLOATS:
        raise ModelLoadError(
            f"{path}: tensor {name} is of type {tensor.get_dtype()}; supported: "
            f"{', '.join(_FLOATS)} (no quantized weights)"
        )


def _check_tied(
    tied: dict[str, str], origin: dict[str, str], directory: Path, dtype: torch.dtype
) -> None:
    """Checks that a stored head equals the embedding it is tied to: ignoring a difference would be
    silent.
    """
    for name, original in tied.items():
        if name not in origin:
            continue
        with (
            safe_open(directory / origin[name], framework="pt") as file,
            safe_open(directory / origin[original], framework="pt") as originals,
        ):
            if not torch.equal(
                file.get_tensor(name).to(dtype), originals.get_tensor(original).to(dtype)
            ):
                raise ModelLoadError(
                    f"{directory / origin[name]}: tensor {name} differs from the embedding, yet "
                    f"the config says tie_word_embeddings"
                )


def find_weight_files(directory: Path) -> list[Path]:
    """The single file, or the index's shards in order.

    Raises ModelLoadError if there is neither, or if a shard is missing.
    """
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ModelLoadError(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; Quire reads "
            f"safetensors only"
        )
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise ModelLoadError(f"{index}: not a readable index of shards: {error!r}") from error
    if not shards:
        raise ModelLoadError(f"{index}: names no shards")
    for shard in shards:
        # an index must not lead out of its directory
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelLoadError(f"{index}: {shard!r} is not the name of a file beside it")
        if not (directory / shard).is_file():
            raise ModelLoadError(f"{index}: the shard {shard} is not there")
    return [directory / shard for shard in shards]


def fill_with_random_weights(
    model: Any,
    seed: int,
    report: Report,
    fill: Fill = torch.Tensor.copy_,  # type: ignore[assignment]
) -> None:
    """load_format="dummy": normal with standard deviation 0.02 (norms around 1), the same on every
    machine.

    Depends only on `seed`. `fill` as in load_weights.
    """
    generator = torch.Generator().manual_seed(seed)
    unfilled = dict(model.weights())
    num_filled, num_elements = 0, sum(tensor.numel() for tensor in unfilled.values())
    for name in list(unfilled):
        tensor = unfilled.pop(name)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        num_filled += tensor.numel()
        fill(tensor, torch.empty(tensor.shape).normal_(mean, 0.02, generator=generator))
        report(_STAGE, num_filled / num_elements)
