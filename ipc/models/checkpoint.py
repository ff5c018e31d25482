"""A checkpoint in safetensors files or a GGUF file, read by its headers alone: which files there
are, and whether their tensors are those that a model expects.

Must not know: tensors' values, torch, the safetensors library, which architectures there are.
The format of safetensors: 8 bytes with the length of the header, little-endian; the header, a JSON
object from each tensor's name to its type, shape and place; the tensors' bytes, one behind the
other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from ..errors import ModelLoadError
from ..json_files import check_model_file, check_regular_file, read_json
from .gguf import is_gguf, read_gguf
from .quantization_config import MXFP4, CheckpointQuantization
from .quantized_tensors import UNUSED, StoredPart, parts_of, shape_of_weight
from .stacked_experts import MXFP4_GROUP, MXFP4_NUMBERS, MXFP4_SCALES, StackedPiece, stacked_pieces

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
DTYPE_BYTES = FLOAT_BYTES | {"F8_E4M3": 1, "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8}
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
METADATA = "__metadata__"

Natural = Annotated[int, msgspec.Meta(ge=0)]


class StoredTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[Natural]
    data_offsets: tuple[Natural, Natural]  # first byte and the one after the last, from the data's


def missing_weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that a load would look for and not find. A GGUF file is whole.

    Raises ModelLoadError for an index that cannot be read, and for what is no regular file.
    """
    if is_gguf(directory):
        check_regular_file(directory)
        return []
    names = _weight_file_names(directory)
    missing = [name for name in names if not (directory / name).exists()]
    for name in names:
        if name not in missing:
            check_model_file(directory / name)
    return missing


def find_weight_files(directory: Path) -> list[Path]:
    """The single file, or the index's shards in order.

    Raises ModelLoadError where there is neither, or a shard is missing.
    """
    if missing := missing_weight_files(directory):
        if missing == [SINGLE_FILE]:
            raise ModelLoadError(
                f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there, and no GGUF file; "
                f"Quire reads no other formats"
            )
        raise ModelLoadError(f"{directory / INDEX_FILE}: the shard {missing[0]} is not there")
    return [directory / name for name in _weight_file_names(directory)]


def _weight_file_names(directory: Path) -> list[str]:
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists() or not index.exists():
        return [SINGLE_FILE]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelLoadError(f"{index} has no weight_map of names")
    names = {str(shard) for shard in shards.values()}
    for name in names:
        # an index must not lead out of its directory
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index}: {name!r:.100} is not the name of a file beside it")
    if not names:
        raise ModelLoadError(f"{index}: names no shards")
    return sorted(names)


# of integers, that old checkpoints of encoders have
BUFFERS = ("position_ids", "token_type_ids")
# Tensors of multimodal models that their text part does not need. An encoder of images needs some.
OTHER_PARTS = re.compile(
    r"(module\.|_orig_mod\.)*(model\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|"
    r"embed_audio|multi_modal_projector|visual|vision_model|connector)\."
)


def check_checkpoint(
    directory: Path,
    shapes: dict[str, list[int]],
    tied: dict[str, str],
    quantization: CheckpointQuantization | None = None,
    is_ignored: Callable[[str], bool] | None = None,
    num_experts: int = 0,
) -> dict[str, Path]:
    """Tensor -> the file that holds it, file by file and sorted by name, once the headers of all
    files agree with the model. A weight may also lie in a tensor of several (stacked_experts.py).

    shapes: every tensor that must be there. tied: tensors that may be there besides, and the one
    that each is a copy of. quantization: of the weights that are stored as several tensors.
    is_ignored: of a name that the model has no place for. num_experts: see stacked_pieces.

    Raises ModelLoadError, naming file and tensor, for a name that is missing, unexpected or there
    twice, for a wrong shape, for a type that cannot be read, and for a file that is unsound.
    """
    if is_gguf(directory):
        from .gguf_weights import check_gguf_tensors

        found = check_gguf_tensors(read_gguf(directory), shapes)
        return {name: tensor.path for name, tensor in found.items()}
    expected = _expected_tensors(shapes, tied, quantization, num_experts)
    files = find_weight_files(directory)
    origin: dict[str, Path] = {}
    for path in files:
        for name, tensor in read_header(path).items():
            if OTHER_PARTS.match(name) and name not in expected.allowed:
                continue
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a buffer that old checkpoints saved; it follows from the config
            if name not in expected.allowed:
                if quantization is not None and name.endswith(UNUSED):
                    continue
                if is_ignored is not None and is_ignored(name):
                    continue
            _check_tensor(path, name, tensor, expected.allowed)
            for weight in expected.stacks.get(name, [name]):
                if weight in origin:
                    raise ModelLoadError(f"{path}: tensor {name} is also in {origin[weight].name}")
                origin[weight] = path
    if missing := [name for name in expected.required if name not in origin]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        read = ", ".join(path.name for path in files[:3]) + (", ..." if len(files) > 3 else "")
        raise ModelLoadError(
            f"{directory}: no file has the tensor {missing[0]}{more}; read: {read}"
        )
    return origin


class _ExpectedTensors(NamedTuple):
    allowed: dict[str, StoredPart]  # tensors that files may have
    required: list[str]
    stacks: dict[str, list[str]]  # stored tensor -> the weights that lie in it


def _expected_tensors(
    shapes: dict[str, list[int]],
    tied: dict[str, str],
    quantization: CheckpointQuantization | None,
    num_experts: int,
) -> _ExpectedTensors:
    parts = parts_of(shapes, quantization)
    quantized = {part.weight for part in parts.values()}
    plain = tuple(FLOAT_BYTES)
    allowed = {
        name: StoredPart(name, plain, (shape,))
        for name, shape in shapes.items()
        if name not in quantized
    } | parts
    required = [name for name, part in allowed.items() if part.is_required]
    for name, original in tied.items():
        allowed[name] = StoredPart(name, plain, (shapes[original],), is_required=False)
    stacks: dict[str, list[str]] = {}
    for weight, piece in stacked_pieces(shapes, num_experts).items():
        if weight in quantized:
            continue
        dtypes, stored = plain, {piece.stored: piece.shape}
        if quantization is not None and quantization.format_of(weight, shapes[weight]):
            dtypes, stored = ("U8",), _in_mxfp4(weight, piece)
            allowed.pop(weight)
            required += list(stored)[1:]
        stacks.setdefault(next(iter(stored)), []).append(weight)
        for name, shape in stored.items():
            allowed[name] = StoredPart(name, dtypes, (shape,), is_required=False)
    return _ExpectedTensors(allowed, required, stacks)


def _in_mxfp4(weight: str, piece: StackedPiece) -> dict[str, list[int]]:
    """Name -> shape of the numbers and of the scales that are stored in place of a tensor."""
    experts, columns, rows = piece.shape
    if columns % MXFP4_GROUP:
        raise ModelLoadError(
            f"config.json: quantization_config: {weight} has {columns} columns, MXFP4 needs a "
            f"multiple of {MXFP4_GROUP}"
        )
    scales = [experts, rows, columns // MXFP4_GROUP]
    numbers = [*scales, MXFP4_GROUP // 2]
    return {piece.stored + MXFP4_NUMBERS: numbers, piece.stored + MXFP4_SCALES: scales}


class StoredWeights(NamedTuple):
    """The tensors of a checkpoint, without a model's names to compare them with."""

    origin: dict[str, Path]  # stored tensor -> its file
    shapes: dict[str, list[int]]  # of all weights
    quantized: dict[str, list[str]]  # weight -> the tensors that are stored for it

    @property
    def kept(self) -> dict[str, list[int]]:
        """Shapes of the quantized weights that memory may hold as blocks: transformers has one
        tensor for all experts of a layer.
        """
        return {name: self.shapes[name] for name in self.quantized if ".experts." not in name}


def read_stored_weights(
    directory: Path, quantization: CheckpointQuantization | None
) -> StoredWeights:
    """Raises ModelLoadError, naming file and tensor, for a name that is there twice, a type that
    cannot be read, and a tensor of a quantized weight that is missing or has another shape.
    """
    stored: dict[str, tuple[Path, StoredTensor]] = {}
    shapes: dict[str, list[int]] = {}
    for path in find_weight_files(directory):
        for name, tensor in read_header(path).items():
            if name.endswith(BUFFERS):
                continue
            if name in stored:
                raise ModelLoadError(f"{path}: tensor {name} is also in {stored[name][0].name}")
            stored[name] = path, tensor
            layer, _, part = name.rpartition(".")
            weight = f"{layer}.weight"
            found = quantization.format_of(weight, [0, 0]) if quantization is not None else None
            if found and (shape := shape_of_weight(part, tensor.dtype, tensor.shape, found)):
                shapes[weight] = shape
    parts = parts_of(shapes, quantization)
    if quantization is not None and quantization.method == MXFP4:
        for name, (_, tensor) in stored.items():
            if name.endswith(MXFP4_NUMBERS):
                weight = name.removesuffix(MXFP4_NUMBERS)
                shapes[weight] = _shape_of_experts(directory, name, tensor)
                parts[name] = StoredPart(weight, ("U8",), (tensor.shape,))
                scales = weight + MXFP4_SCALES
                parts[scales] = StoredPart(weight, ("U8",), (tensor.shape[:3],))
    quantized: dict[str, list[str]] = {weight: [] for weight in shapes}
    origin: dict[str, Path] = {}
    for name, (path, tensor) in stored.items():
        if quantization is not None and name.endswith(UNUSED) and name not in parts:
            continue
        allowed = parts.get(name) or StoredPart(name, tuple(FLOAT_BYTES), (tensor.shape,))
        _check_tensor(path, name, tensor, {name: allowed})
        origin[name] = path
        if name in parts:
            quantized[allowed.weight].append(name)
        else:
            shapes[name] = tensor.shape
    for name, part in parts.items():
        if part.is_required and name not in origin:
            raise ModelLoadError(f"{directory}: no file has the tensor {name}")
    return StoredWeights(origin, shapes, quantized)


def _shape_of_experts(directory: Path, name: str, tensor: StoredTensor) -> list[int]:
    """[experts, columns, rows], the order of the model's tensor, of numbers [experts, rows, groups,
    16 bytes]
    """
    if len(tensor.shape) != 4 or tensor.shape[3] != MXFP4_GROUP // 2:
        raise ModelLoadError(
            f"{directory}: tensor {name:.100} has shape {tensor.shape!s:.100}, MXFP4 needs "
            f"[experts, rows, groups, {MXFP4_GROUP // 2}]"
        )
    experts, rows, groups, _ = tensor.shape
    return [experts, groups * MXFP4_GROUP, rows]


def _check_tensor(
    path: Path, name: str, tensor: StoredTensor, allowed: dict[str, StoredPart]
) -> None:
    if name not in allowed:
        raise ModelLoadError(f"{path}: the model has no place for tensor {name:.100}")
    part = allowed[name]
    if tensor.shape not in part.shapes:
        raise ModelLoadError(
            f"{path}: tensor {name} has shape {tensor.shape!s:.100}, the model needs "
            f"{' or '.join(map(str, part.shapes))}"
        )
    if tensor.dtype not in part.dtypes:
        is_plain = part.dtypes == tuple(FLOAT_BYTES)
        raise ModelLoadError(
            f"{path}: tensor {name} is of type {tensor.dtype:.20}; supported: "
            f"{', '.join(part.dtypes)}{' (no quantized weights)' if is_plain else ''}"
        )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors header, sorted by name; check them against the file size.

    Raises ModelLoadError for a file that is truncated, too long or no safetensors file.
    """
    check_model_file(path)
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8:
                raise _unsound(path, f"it has {file_bytes} bytes, a header needs 8")
            if header_bytes > MAX_HEADER_BYTES:
                raise _unsound(path, f"its header has {header_bytes:,} bytes")
            if header_bytes > file_bytes - 8:
                raise _unsound(path, "it ends within its header")
            header = file.read(header_bytes)
        entries = msgspec.json.decode(header.decode(), type=dict[str, msgspec.Raw])
        msgspec.json.decode(entries.pop(METADATA, b"null"), type=dict[str, str] | None)
        tensors = {
            name: msgspec.json.decode(entry, type=StoredTensor) for name, entry in entries.items()
        }
    except OSError as error:
        raise _unsound(path, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unsound(path, f"its header is malformed: {error}") from error
    except RecursionError:
        raise _unsound(path, "its header is nested too deeply") from None
    for name, tensor in tensors.items():  # a message has one line
        if not name.isprintable() or not tensor.dtype.isprintable():
            raise _unsound(path, f"tensor {name!r:.100} is of type {tensor.dtype!r:.20}")
    _check_places(path, tensors, file_bytes - 8 - header_bytes)
    return dict(sorted(tensors.items()))


def _check_places(path: Path, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    """The tensors lie one behind the other, and fill the file."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = tensor.data_offsets
        if start != end or stop < start:
            raise _unsound(path, f"tensor {name:.100} does not begin where the one before it ends")
        size = DTYPE_BYTES.get(tensor.dtype)
        if size is not None and stop - start != size * prod(tensor.shape):
            raise _unsound(path, f"tensor {name:.100} has {stop - start:,} bytes, not its shape's")
        end = stop
    if end > data_bytes:
        raise _unsound(path, f"it is truncated: {end - data_bytes:,} bytes are missing")
    if end < data_bytes:
        raise _unsound(path, f"{data_bytes - end:,} bytes belong to no tensor")


def _unsound(path: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: not a readable safetensors file: {problem}")
