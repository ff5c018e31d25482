"""Reads LoRA adapters: directories in PEFT's format, and GGUF files of llama.cpp.

Must not know: layers, requests, which adapters are in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.errors import ModelLoadError
from ...ipc.json_files import read_json
from ...ipc.models.checkpoint import read_header
from ...ipc.models.gguf import READABLE_TYPES, GGUFFile, GGUFTensor, is_gguf, read_gguf
from ...ipc.models.lora_config import CONFIG_NAME, LoraConfig, parse_lora_config
from ...kernels.lora import in_blocks
from .packed_rows import PackedRows
from .table import Part, Slice

WEIGHTS_NAME = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_PEFT_ENDINGS = {  # what PEFT calls A and B
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
}
_FLOATS = ("F64", "F32", "F16", "BF16")
# the prefixes that a model's names may have within another model
_OUTER = ("model.", "language_model.")
_GGUF_TYPE_KEY, _GGUF_ALPHA_KEY = "adapter.type", "adapter.lora.alpha"


class Adapted(NamedTuple):
    """A module that may have an adapter, whole."""

    in_features: int  # for an embedding, the size of the vocabulary
    out_features: int
    is_embedding: bool = False
    part: Part | None = None  # what a rank keeps of the module's weight, if not all


class AdapterWeights(NamedTuple):
    """The adapter of one module, in the layout that add_lora and add_lora_embedding take; of what a
    rank keeps, its inputs or its outputs.
    """

    a: torch.Tensor  # [rank, in_features]; of an embedding [in_features, rank]
    b: torch.Tensor  # [blocks, rank, LORA_BLOCK]: kernels.lora.in_blocks
    scale: float

    @property
    def rank(self) -> int:
        return self.b.shape[1]


class _Pair(NamedTuple):
    """A and B as PEFT has them, [rank, in_features] and [out_features, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    name: str  # of A, for messages

    def kept(self, part: Part | None) -> _Pair:
        """What a rank needs of it that keeps this part of the weight: some columns of A, or some
        rows of B.
        """
        if part is None:
            return self
        if isinstance(part, Slice) and part.dim:
            return self._replace(a=part.of(self.a))
        return self._replace(b=part.of(self.b))


def read_adapter(
    path: Path,
    modules: Mapping[str, Adapted],
    heads: tuple[int, int],
    max_rank: int,
    dtype: torch.dtype,
    is_elsewhere: Callable[[str], bool] = lambda name: False,
) -> dict[str, AdapterWeights]:
    """Reads the adapter's weights by the names of `modules`, which are those of the model.

    `path` is a directory in PEFT's format or a GGUF file. `heads` are the numbers of query heads
    and of key heads. is_elsewhere: whether another rank has the module of this name.

    Raises ModelLoadError, naming file and tensor, for an adapter that is malformed, not supported,
    of another model, or of a higher rank than `max_rank`.
    """
    is_file = is_gguf(path)
    pairs = _read_gguf(path, heads) if is_file else _read_peft(path)
    named = {inner_name(name): name for name in modules}
    found: dict[str, AdapterWeights] = {}
    is_empty = True
    with _as_one_sentence(path):
        for module, pair in pairs:
            name, is_empty = named.get(inner_name(module)), False
            if name is None and is_elsewhere(module):
                continue
            if name is None:
                raise ModelLoadError(f"{path}: {pair.name:.200}: {_no_place(module)}")
            if name in found:
                raise ModelLoadError(f"{path}: {pair.name:.200}: the module has two adapters")
            found[name] = _checked(path, pair, modules[name], max_rank, dtype)
    if is_empty:
        raise ModelLoadError(f"{path}: the adapter has no tensors")
    return found


def inner_name(name: str) -> str:
    """The name of a module without the prefix that an outer model puts in front."""
    while name.startswith(_OUTER):
        name = name.partition(".")[2]
    return name


def _no_place(module: str) -> str:
    if ".experts" in module or module.endswith((".router", ".gate", "shared_expert_gate")):
        return "adapters of mixture-of-experts layers are not supported"
    return "the model has no such module that an adapter could change"


def _checked(
    path: Path, pair: _Pair, module: Adapted, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    shapes = list(pair.a.shape), list(pair.b.shape)
    rank = pair.a.shape[0] if pair.a.dim() == 2 else 0
    if shapes != ([rank, module.in_features], [module.out_features, rank]) or not rank:
        raise ModelLoadError(
            f"{path}: {pair.name:.200}: A and B have shapes {shapes[0]!s:.100} and "
            f"{shapes[1]!s:.100}, the module takes [rank, {module.in_features}] and "
            f"[{module.out_features}, rank]"
        )
    if rank > max_rank:
        raise ModelLoadError(
            f"{path}: {pair.name:.200}: its rank {rank} is higher than max_lora_rank={max_rank}"
        )
    own = pair.kept(module.part)
    a = (own.a.t() if module.is_embedding else own.a).to(dtype).contiguous()
    b = in_blocks(own.b.to(dtype))
    if not (torch.isfinite(a.sum()) and torch.isfinite(b.sum()) and math.isfinite(pair.scale)):
        raise ModelLoadError(f"{path}: {pair.name:.200}: A or B is not finite in {dtype}")
    # contiguous() returns views of the file where nothing was converted
    a, b = (
        x.clone() if x.data_ptr() == of.data_ptr() else x for x, of in ((a, pair.a), (b, pair.b))
    )
    return AdapterWeights(a, b, pair.scale)


@contextmanager
def _as_one_sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ModelLoadError):
            raise
        text = str(error).partition("\n")[0]
        raise ModelLoadError(f"{path}: not a readable adapter: {text:.200}") from error


def _read_peft(directory: Path) -> Iterator[tuple[str, _Pair]]:
    """Yields the names of modules, as transformers' code of the model has them, with adapters."""
    config_path, path = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    config = parse_lora_config(read_json(config_path), config_path)
    if not path.exists() and (directory / "adapter_model.bin").exists():
        raise ModelLoadError(
            f"{directory} has its weights in adapter_model.bin, a pickle, which is never read; "
            f"save them as {WEIGHTS_NAME}"
        )
    parts: dict[str, dict[str, str]] = {}  # module -> "a" and "b" -> name of the tensor
    for name, tensor in read_header(path).items():
        module, part = _part_of(name, path)
        if tensor.dtype not in _FLOATS:
            raise ModelLoadError(f"{path}: tensor {name:.200} is of type {tensor.dtype:.20}")
        parts.setdefault(module, {})[part] = name
    with _as_one_sentence(path), safe_open(path, framework="pt") as file:
        for module, names in parts.items():
            _check_module(config, module, names, path)
            pair = _Pair(
                file.get_tensor(names["a"]),
                file.get_tensor(names["b"]),
                config.scale(module),
                names["a"],
            )
            if pair.a.dim() == 2 and len(pair.a) != config.rank(module):
                raise ModelLoadError(
                    f"{path}: {names['a']:.200} has rank {len(pair.a)}, {CONFIG_NAME} says "
                    f"{config.rank(module)}"
                )
            yield module, pair


def _part_of(name: str, path: Path) -> tuple[str, str]:
    """The module that a tensor belongs to, and "a" or "b"."""
    for ending, part in _PEFT_ENDINGS.items():
        if name.startswith(_PEFT_PREFIX) and name.endswith(ending):
            return name[len(_PEFT_PREFIX) : -len(ending)], part
    problem = "is none of a LoRA adapter"
    if "lora_magnitude_vector" in name:
        problem = "belongs to a DoRA adapter, which is not supported"
    raise ModelLoadError(f"{path}: tensor {name:.200} {problem}")


def _check_module(config: LoraConfig, module: str, names: dict[str, str], path: Path) -> None:
    if len(names) != 2:
        raise ModelLoadError(f"{path}: {next(iter(names.values())):.200} has no counterpart")
    try:
        config.check_module(module)
    except ValueError as error:
        raise ModelLoadError(f"{path}: {names['a']:.200}: {error} in {CONFIG_NAME}") from None


def _read_gguf(path: Path, heads: tuple[int, int]) -> Iterator[tuple[str, _Pair]]:
    """Does what _read_peft does, for a GGUF file. There, A of an embedding is transposed."""
    from ...ipc.models.gguf_weights import architecture_of

    file = read_gguf(path)
    kinds = file.metadata.get("general.type"), file.metadata.get(_GGUF_TYPE_KEY, "lora")
    if kinds != ("adapter", "lora"):
        raise ModelLoadError(
            f"{path}: it must be a LoRA adapter, with general.type = adapter and adapter.type = "
            f"lora, not {kinds[0]!r:.50} and {kinds[1]!r:.50}"
        )
    alpha = file.metadata.get(_GGUF_ALPHA_KEY, 0.0)
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ModelLoadError(f"{path}: {_GGUF_ALPHA_KEY} must be a finite number")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ModelLoadError(f"{path}: activated LoRA (aLoRA) is not supported")
    architecture = architecture_of(file)
    parts: dict[str, dict[str, GGUFTensor]] = {}
    for name, tensor in file.tensors.items():
        base, _, part = name.rpartition(".")
        model_name = architecture.model_name(base)
        if part not in ("lora_a", "lora_b") or model_name is None:
            raise ModelLoadError(f"{path}: tensor {name:.100} is none of a LoRA adapter")
        if len(tensor.shape) != 2 or tensor.type not in READABLE_TYPES:
            raise ModelLoadError(
                f"{path}: tensor {name:.100} must be a matrix of a type that can be read, not of "
                f"{tensor.type:.20} with {len(tensor.shape)} dimensions"
            )
        parts.setdefault(model_name, {})[part[-1]] = tensor
    for name, of_module in parts.items():
        if len(of_module) != 2:
            raise ModelLoadError(
                f"{path}: {next(iter(of_module.values())).name:.100} has no counterpart"
            )
        yield name.removesuffix(".weight"), _pair(file, name, of_module, alpha, heads)


def _pair(
    file: GGUFFile, name: str, parts: dict[str, GGUFTensor], alpha: float, heads: tuple[int, int]
) -> _Pair:
    from ...ipc.models.gguf_weights import is_permuted
    from .gguf import halves_apart

    a, b = (_rows(parts[part]) for part in "ab")
    if is_permuted(file, name):
        count = heads[0] if "q_proj" in name else heads[1]
        if len(b.rows) % (2 * count):
            raise ModelLoadError(f"{file.paths[0]}: {parts['b'].name:.100} has {len(b.rows)} rows")
        b = halves_apart(b, count)
    of_a, of_b = a.dequantized(torch.float32), b.dequantized(torch.float32)
    if "embed_tokens" in name:
        of_a = of_a.t()
    rank = of_b.shape[1]
    return _Pair(of_a, of_b, alpha / rank if alpha else 1.0, parts["a"].name)


def _rows(tensor: GGUFTensor) -> PackedRows:
    """A copy of the tensor's bytes."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        content = bytearray(file.read(tensor.num_bytes))
    rows = torch.frombuffer(content, dtype=torch.uint8).view(tensor.shape[0], -1)
    return PackedRows(rows, tensor.type)


def stamp_of(path: str) -> str:
    """The names, sizes, inodes and times of change of a file, or of the files in a directory. The
    stamp of what does not exist is "".
    """
    place = Path(path)
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return ";".join(
        f"{file.name}:{status.st_size}:{status.st_ino}:{status.st_mtime_ns}"
        for file in files
        if (status := _status(file)) is not None
    )


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:  # someone has just removed it
        return None
