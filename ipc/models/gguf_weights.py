"""The tensors of a GGUF file under the names that models give them.

Must not know: tensors' values, torch, how blocks are computed with, how the file is read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from math import prod

from ..errors import ModelLoadError
from .gguf import (
    BLOCK_SIZES,
    MEMORY_TYPES,
    READABLE_TYPES,
    TYPES_OF_TENSORS,
    VECTOR_TYPES,
    GGUFFile,
    GGUFTensor,
)
from .gguf_architectures import (
    GGUF_ARCHITECTURES,
    REFUSED_ARCHITECTURES,
    GGUFArchitecture,
)
from .gguf_hybrids import DRAFT_LAYERS
from .quantized_tensors import BLOCKS, layer_of
from .stacked_experts import stacked_pieces

ARCHITECTURE_KEY = "general.architecture"
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "mixer.q_proj", "mixer.k_proj")

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_PART_OF_HEADS = re.compile(r"\b[kv]_b_proj\.weight$")
_KEYS_OR_VALUES = re.compile(r"(.*\.self_attn\.)(?:[kv]_proj|k_norm)\.weight")
_OF_STREAM = re.compile(r"(model\.altup_(?:unembed_)?projections)\.\d+\.weight")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_GATE_OR_UP = re.compile(r"\b(?:gate|up)_proj\b")
ROPE_FACTORS = "rope_freqs.weight"
LONG_ROPE_FACTORS = {  # Phi-3's tensors, with the rope parameter that each is
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
MAX_ROPE_FACTORS = 65_536
HEAD = "lm_head.weight"
_KEPT = MEMORY_TYPES | {type: blocks for type, (_, blocks) in TYPES_OF_TENSORS.items()}
# Maps the name of gate and up in one tensor to those of each.
_HALVES = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_linear", "up_linear"),
}


def check_gguf_tensors(
    file: GGUFFile,
    shapes: dict[str, list[int]],
    of_head: str = "",
    is_elsewhere: Callable[[str], bool] = lambda name: False,
    num_experts: int = 0,
) -> dict[str, GGUFTensor]:
    """Returns the file's tensors by the model's names (parts_in_files), in the order of the file's
    bytes, after a check that all agree with the model. `shapes` has every tensor that must be
    there. Layers that only predict tokens ahead are left out; or, for a head, which is the layer
    `of_head`, all others. is_elsewhere: whether another rank has the tensor of this name, which is
    left out. num_experts: of a layer, where `shapes` may have some of them.

    Raises ModelLoadError, naming file and tensor, for an architecture whose names are unknown, a
    tensor that is missing or unexpected, a wrong shape, and a type that cannot be read.
    """
    architecture, path = architecture_of(file), file.paths[0]
    shapes = {
        part: part_shape
        for name, shape in shapes.items()
        for part, part_shape in parts_in_files(name, shape).items()
    }
    wanted, shapes = shapes, _with_all_experts(shapes, num_experts)
    stacks, is_draft = _stacks(shapes), _draft_layers(file)
    found: dict[str, GGUFTensor] = {}
    for tensor in sorted(file.tensors.values(), key=lambda t: (t.path, t.offset)):
        if tensor.name == ROPE_FACTORS or tensor.name in LONG_ROPE_FACTORS:
            continue  # read_rope_factors reads it for the configuration
        if architecture.is_unread(tensor.name):
            continue
        name = architecture.model_name(tensor.name)
        is_own = name is not None and name.startswith(f"{of_head}.")
        if not is_own if of_head else is_draft(tensor.name):
            continue
        if name == HEAD and HEAD not in shapes:
            continue  # the model pools, or it generates with tied weights
        if architecture.shares_keys and _is_unused(name, shapes):
            continue
        names = _weights_in(name, stacks, shapes)
        if name is not None and (whole := whole_of_heads(name)) in shapes:
            found[name] = tensor
            _check_part_of_heads(tensor, shapes[whole][1])
            continue
        if not names and name is not None and is_elsewhere(name):
            continue
        if not names:
            raise ModelLoadError(
                f"{tensor.path}: the model has no place for tensor {tensor.name:.100}"
            )
        for one, part in zip(names, _parts(tensor, [shapes[one] for one in names]), strict=True):
            _check_tensor(part, one, shapes)
            found[one] = part
    _check_heads(found, shapes)
    wholes = {whole_of_heads(name) for name in found}
    if missing := [name for name in wanted if name not in found and name not in wholes]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{path}: there is no tensor for {missing[0]}{more}")
    others = shapes.keys() - wanted.keys()
    return {name: tensor for name, tensor in found.items() if name not in others}


def _weights_in(
    name: str | None, stacks: Mapping[str, list[str]], shapes: Mapping[str, list[int]]
) -> list[str]:
    """The model's names of the weights that a tensor of this name has; none if one is no weight of
    the model.
    """
    if name is None:
        return []
    names = stacks.get(name, [name])
    if name not in shapes and ".qkv_proj." in name:
        names = [name.replace("qkv_proj", f"{part}_proj") for part in "qkv"]
    return names if all(one in shapes for one in names) else []


def _with_all_experts(shapes: Mapping[str, list[int]], count: int) -> dict[str, list[int]]:
    """The shapes, and those of the experts that other engines have."""
    all_shapes = dict(shapes)
    for name, shape in shapes.items():
        for expert in range(count if _EXPERT.search(name) else 0):
            all_shapes.setdefault(_EXPERT.sub(f".experts.{expert}.", name), shape)
    return all_shapes


def whole_of_heads(name: str) -> str:
    """The model's name for the weight of which k_b_proj and v_b_proj are the two parts, and "" for
    other names.
    """
    whole = _PART_OF_HEADS.sub("kv_b_proj.weight", name)
    return "" if whole == name else whole


def _check_part_of_heads(tensor: GGUFTensor, rank: int) -> None:
    """k_b_proj is [heads, rank, key_dim], and v_b_proj [heads, value_dim, rank]."""
    dim = 1 if "attn_k_b" in tensor.name else 2
    if len(tensor.shape) != 3 or tensor.shape[dim] != rank or tensor.type not in READABLE_TYPES:
        raise ModelLoadError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.type:.20} of shape "
            f"{list(tensor.shape)!s:.100}, the model needs {rank} in dimension {dim}"
        )


def _check_heads(found: Mapping[str, GGUFTensor], shapes: Mapping[str, list[int]]) -> None:
    """Checks that both parts of a weight are there and have its rows together."""
    for name, tensor in found.items():
        whole = whole_of_heads(name)
        if not whole:
            continue
        keys, values = (
            found.get(whole.replace("kv_b_proj", part)) for part in ("k_b_proj", "v_b_proj")
        )
        if keys is None or values is None or keys.shape[0] != values.shape[0]:
            raise ModelLoadError(f"{tensor.path}: there is no second part for {tensor.name}")
        if keys.shape[0] * (keys.shape[2] + values.shape[1]) != shapes[whole][0]:
            raise ModelLoadError(
                f"{tensor.path}: {keys.name} and {values.name} have shapes {list(keys.shape)} and "
                f"{list(values.shape)}, the model needs {shapes[whole]}"
            )


def _is_unused(name: str | None, shapes: Mapping[str, list[int]]) -> bool:
    """Whether it is of the keys and values of a layer that makes none."""
    found = None if name is None else _KEYS_OR_VALUES.fullmatch(name)
    return found is not None and f"{found[1]}k_proj.weight" not in shapes


def parts_in_files(name: str, shape: list[int]) -> dict[str, list[int]]:
    """The names and shapes under which a tensor of a model lies in a GGUF file. All names end with
    weight or bias, and gate and up lie apart.
    """
    stem, kind = name, "weight"
    if name.endswith((".weight", ".bias")):
        stem, _, kind = name.rpartition(".")
    elif name.endswith("_bias"):
        stem, kind = name.removesuffix("_bias"), "bias"
    for pair, halves in _HALVES.items():
        if stem.endswith(f"shared_mlp.{pair}"):
            rows = [shape[0] // 2, *shape[1:]]
            return {f"{stem.removesuffix(pair)}{half}.{kind}": rows for half in halves}
    return {f"{stem}.{kind}": shape}


def _draft_layers(file: GGUFFile) -> Callable[[str], bool]:
    """Whether a tensor, by its name in the file, is of a layer that only predicts tokens ahead."""
    prefix = f"{file.metadata[ARCHITECTURE_KEY]}."
    num_layers = file.metadata.get(f"{prefix}block_count")
    num_drafts = file.metadata.get(f"{prefix}{DRAFT_LAYERS}", 0)
    if not isinstance(num_layers, int) or not isinstance(num_drafts, int):
        return lambda name: False

    def is_draft(name: str) -> bool:
        block, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        if block != "blk" or not layer.isdecimal() or len(layer) > 9:
            return False
        return num_layers - num_drafts <= int(layer) < num_layers

    return is_draft


def _stacks(shapes: Mapping[str, list[int]]) -> dict[str, list[str]]:
    """Maps the name of a projection of all experts to the model's names of each expert's, in order;
    likewise those of all streams. It also maps other names that differ in models with a tensor per
    expert.
    """
    experts: dict[str, list[str]] = {}
    for name in shapes:
        if found := _OF_STREAM.fullmatch(name):
            experts.setdefault(f"{found[1]}.weight", []).append(name)
    for weight, piece in stacked_pieces(shapes).items():
        stored = piece.stored
        if piece.expert is not None:
            stored = stored.removesuffix("_bias").removesuffix(".weight")
            for pair, halves in _HALVES.items():
                stored = stored.replace(pair, halves[piece.is_second])
            stored += f".{weight.rpartition('.')[2]}"
        experts.setdefault(stored, []).append(weight)
        if (both := _GATE_OR_UP.sub("gate_up_proj", stored)) != stored:
            experts.setdefault(both, []).append(weight)
    return experts


def _parts(tensor: GGUFTensor, shapes: list[list[int]]) -> list[GGUFTensor]:
    """The tensor, or the weights of these shapes that it consists of, one after the other."""
    if len(shapes) == 1:
        # A matrix of one row is stored as a vector. A convolution has no dimension of one, while a
        # vector of a mixer has a second one: of one, or of the groups of its norm.
        is_matrix = len(shapes[0]) == 2 and shapes[0][0] > 1
        is_same = prod(shapes[0]) == prod(tensor.shape)
        return [tensor._replace(shape=tuple(shapes[0])) if is_same and not is_matrix else tensor]
    is_stack = len(tensor.shape) > len(shapes[0])
    if is_stack and len(shapes) == 2 * tensor.shape[0] and tensor.shape[1] % 2 == 0:
        count, height, *columns = tensor.shape  # gate, then up, of each expert
        tensor = tensor._replace(shape=(2 * count, height // 2, *columns))
    rows = [1 if is_stack else shape[0] for shape in shapes]
    if sum(rows) != tensor.shape[0]:
        raise ModelLoadError(
            f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)!s:.100}, the "
            f"model needs {sum(rows)} {'matrices' if is_stack else 'rows'}"
        )
    if tensor.type in TYPES_OF_TENSORS:
        raise ModelLoadError(
            f"{tensor.path}: tensor {tensor.name} has several weights, {tensor.type} a single one"
        )
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return [
        tensor._replace(
            shape=tensor.shape[1:] if is_stack else (count, *tensor.shape[1:]),
            offset=tensor.offset + sum(rows[:i]) * row_bytes,
            num_bytes=count * row_bytes,
        )
        for i, count in enumerate(rows)
    ]


def _check_tensor(tensor: GGUFTensor, name: str, shapes: Mapping[str, list[int]]) -> None:
    if list(tensor.shape) != shapes[name]:
        raise ModelLoadError(
            f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)!s:.100}, the "
            f"model needs {shapes[name]}"
        )
    types = (*READABLE_TYPES, *TYPES_OF_TENSORS) if len(tensor.shape) == 2 else READABLE_TYPES
    types = types if len(tensor.shape) > 1 else VECTOR_TYPES
    if tensor.type not in types:
        raise ModelLoadError(
            f"{tensor.path}: tensor {tensor.name} is of type {tensor.type:.20}; supported: "
            f"{', '.join(types)}"
        )


def architecture_of(file: GGUFFile) -> GGUFArchitecture:
    """The file's architecture. Raises ModelLoadError, naming the file, for an unsupported one."""
    name = file.metadata.get(ARCHITECTURE_KEY)
    if isinstance(name, str) and name in GGUF_ARCHITECTURES:
        return GGUF_ARCHITECTURES[name]
    problem = f"{file.paths[0]}: {ARCHITECTURE_KEY} {name!r:.100} is not supported"
    if isinstance(name, str) and name in REFUSED_ARCHITECTURES:
        raise ModelLoadError(f"{problem}: {REFUSED_ARCHITECTURES[name]}")
    raise ModelLoadError(f"{problem}; supported: {', '.join(GGUF_ARCHITECTURES)}")


def tensors_by_name(file: GGUFFile) -> dict[str, GGUFTensor]:
    """The tensors of a file by the names of a model in transformers' code. Only that code knows
    whether they are the ones that it needs.
    """
    architecture = architecture_of(file)
    named = {architecture.model_name(name): tensor for name, tensor in file.tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def bytes_in_memory(tensor: GGUFTensor, dtype: str, keeps_blocks: bool) -> int:
    """The bytes that a tensor of a file takes in a model of this dtype.

    keeps_blocks: whether matrices stay blocks where there is a kernel for them (MEMORY_TYPES,
    TYPES_OF_TENSORS).
    """
    num_elements = prod(tensor.shape)
    if not (keeps_blocks and len(tensor.shape) == 2 and tensor.type in _KEPT):
        return num_elements * DTYPE_BYTES[dtype]
    elements, block_bytes = (BLOCK_SIZES | BLOCKS)[_KEPT[tensor.type]]
    return num_elements // elements * block_bytes


def weights_in_memory(tensors: Mapping[str, GGUFTensor], dtype: str, keeps_blocks: bool) -> int:
    """The sum of bytes_in_memory over all tensors of a model, given by the model's names."""
    layers: dict[str, list[GGUFTensor]] = {}
    for name, tensor in tensors.items():
        layers.setdefault(layer_of(name), []).append(tensor)
    return sum(
        bytes_in_memory(tensor, dtype, keeps_blocks and _are_kept(layer))
        for layer in layers.values()
        for tensor in layer
    )


def _are_kept(tensors: Iterable[GGUFTensor]) -> bool:
    return all(tensor.type in _KEPT for tensor in tensors)


def is_permuted(file: GGUFFile, name: str) -> bool:
    """Whether the rows of the model's tensor `name` are interleaved in the file."""
    return architecture_of(file).is_permuted and name.rpartition(".")[0].endswith(_ROTATED)


def read_rope_factors(file: GGUFFile, name: str = ROPE_FACTORS) -> list[float] | None:
    """The divisor of each frequency of the rotary embedding (Llama 3), if the file has them."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    count = tensor.num_bytes // 4
    if tensor.type != "F32" or len(tensor.shape) != 1 or not 0 < count <= MAX_ROPE_FACTORS:
        raise ModelLoadError(
            f"{tensor.path}: {name} must be a vector of F32, not {tensor.type} of shape "
            f"{list(tensor.shape)}"
        )
    with tensor.path.open("rb") as file_bytes:
        file_bytes.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", file_bytes.read(4 * count)))
