"""The tensors that a quantized checkpoint stores in place of a weight, and the blocks that the
engine packs them into.

Must not know: tensors' values, torch, files.
"""

from __future__ import annotations

import re
from math import prod

import msgspec

from ..errors import ModelLoadError
from .quantization_config import (
    MXFP4,
    ONLINE,
    CheckpointQuantization,
    WeightFormat,
)

FLOATS = ("F32", "F16", "BF16")
E4M3 = "F8_E4M3"
# Suffixes of what static quantization of activations and of the cache leaves. Where activations are
# not in FP8, Quire quantizes them anew, in smaller groups; it has scales of its own in the cache.
STATIC_SCALES = ("input_scale", "activation_scale")  # the second in transformers' own checkpoints
UNUSED = (
    *STATIC_SCALES,
    "input_zero_point",
    "output_scale",
    "k_scale",
    "v_scale",
    "activation_scale_ub",
    "input_scale_ub",
)
# Columns of a block with one scale -> its type (kernels/reference/gguf_blocks.py). Groups that are
# a multiple of them become several blocks.
INT4_TYPES = {128: "INT4_128", 32: "INT4_32"}
INT2_TYPES = {128: "INT2_128", 64: "INT2_64"}
INT8_TYPE = "Q8_0"
FP8_TYPES = {128: "FP8_128", 32: "FP8_32"}
# how activations are quantized (WeightFormat) -> what the type ends with, bytes of a block's scales
_ACTIVATIONS = {
    "": ("", 4),
    "group": ("_GROUP", 4),
    "token": ("_TOKEN", 4),
    "static": ("_STATIC", 8),
}
FP8_BLOCKS = {
    type + ending: (size, size + num_bytes)
    for size, type in FP8_TYPES.items()
    for ending, num_bytes in _ACTIVATIONS.values()
}
# type -> columns and bytes of a block; native kernels multiply all but FP8_*
BLOCKS = FP8_BLOCKS | {
    "INT4_128": (128, 68),
    "INT4_32": (32, 20),
    "INT2_128": (128, 34),
    "INT2_64": (64, 18),
    "Q8_0": (32, 34),
    "MXFP4": (32, 17),
}

# these weights form one layer, whose blocks are kept if all of them can be
_MERGED = re.compile(r"\b(?:(?:[qkv]|gate|up)_proj|(?:gate|up)_linear|w[13])\.weight$")


class StoredPart(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint: the types and shapes that it may have."""

    weight: str  # the model's name
    dtypes: tuple[str, ...]
    shapes: tuple[list[int], ...]
    is_required: bool = True


def parts_of(
    shapes: dict[str, list[int]], quantization: CheckpointQuantization | None
) -> dict[str, StoredPart]:
    """stored_parts of all quantized weights among `shapes` that have tensors of their own."""
    parts: dict[str, StoredPart] = {}
    for name, shape in shapes.items() if quantization is not None else ():
        found = None if quantization is None else quantization.format_of(name, shape)
        if found is not None and found.layout != MXFP4:
            parts |= stored_parts(name, shape, found)
    return parts


def shape_of_weight(
    part: str, dtype: str, shape: list[int], found: WeightFormat
) -> list[int] | None:
    """The shape of the weight whose numbers are in the stored tensor LAYER.`part`; None for other
    tensors.
    """
    if len(shape) != 2:
        return None
    (rows, columns), per_word = shape, 32 // found.bits
    match found.layout, part:
        case "awq", "qweight":
            return [columns * per_word, rows]
        case "gptq", "qweight":
            return [columns, rows * per_word]
        case "packed", "weight_packed":
            return [rows, columns * per_word]
        case "plain", "weight" if dtype in (E4M3, "I8"):
            return shape
        case (("bitlinear" | "autobitlinear"), "weight") if dtype == "U8":
            return [4 * rows, columns]
        case "online", "weight":
            return shape
    return None


def stored_parts(name: str, shape: list[int], found: WeightFormat) -> dict[str, StoredPart]:
    """Name in the checkpoint -> tensor, for a weight [rows, columns] of the model.

    Raises ModelLoadError for a shape that the format cannot have.
    """
    if found.bits == 2:
        return _ternary_parts(name, shape, found)
    layer = name.removesuffix("weight")
    rows, columns = shape
    group = found.group_size or columns
    if found.layout != "plain" and columns % group:
        raise ModelLoadError(
            f"config.json: quantization_config: {name} has {columns} columns, not a multiple of "
            f"group_size={group}"
        )
    per_word, groups = 32 // found.bits, -(-columns // group)
    parts: dict[str, StoredPart] = {}

    def add(part: str, dtypes: tuple[str, ...], *shapes: list[int], is_required=True) -> None:
        parts[layer + part] = StoredPart(name, dtypes, shapes, is_required)

    if found.layout in ("awq", "gptq"):
        of_words = columns if found.layout == "gptq" else rows
        if of_words % per_word or rows % per_word:
            raise ModelLoadError(
                f"config.json: quantization_config: {name} of shape {shape} does not fill words of "
                f"{per_word} numbers"
            )
        is_gptq = found.layout == "gptq"
        qweight = [columns // per_word, rows] if is_gptq else [columns, rows // per_word]
        add("qweight", ("I32",), qweight)
        add("qzeros", ("I32",), [groups, rows // per_word])
        add("scales", FLOATS, [groups, rows])
        if is_gptq:
            add("g_idx", ("I32", "I64"), [columns], is_required=False)
        return parts
    if found.bits == 4 and columns % 2:
        raise ModelLoadError(
            f"config.json: quantization_config: {name} has {columns} columns, which are not pairs"
        )
    if found.layout == "packed":
        add("weight_packed", ("I32",), [rows, -(-columns // per_word)])
        add("weight_shape", ("I64", "I32"), [2], is_required=False)
        add("weight_g_idx", ("I32", "I64"), [columns], is_required=False)
        zeros, zero_dtypes = ([-(-rows // per_word), groups],), ("I32",)
    else:
        add("weight", (E4M3,) if found.is_float else ("I8",), shape)
        zeros, zero_dtypes = _scale_shapes(rows, groups, found), ("I8", "I32", "I64")
    names = scale_names(found)
    for scale_name in names:
        is_required = len(names) == 1
        add(scale_name, FLOATS, *_scale_shapes(rows, groups, found), is_required=is_required)
    if not found.is_float:
        add("weight_zero_point", zero_dtypes, *zeros, is_required=not found.is_symmetric)
    if found.activations == "static":
        for part in STATIC_SCALES:
            add(part, FLOATS, [], [1], [1, 1], is_required=False)
    return parts


def _ternary_parts(name: str, shape: list[int], found: WeightFormat) -> dict[str, StoredPart]:
    """stored_parts of BitNet."""
    if found.layout == ONLINE:
        return {name: StoredPart(name, FLOATS, (shape,))}
    rows, columns = shape
    if rows % 4:
        raise ModelLoadError(
            f"config.json: quantization_config: {name} has {rows} rows, not a multiple of 4"
        )
    scale = StoredPart(name, FLOATS, _scale_shapes(rows, 1, found))
    return {name: StoredPart(name, ("U8",), ([rows // 4, columns],)), f"{name}_scale": scale}


def scale_names(found: WeightFormat) -> tuple[str, ...]:
    """The names of which a weight has one: FP8 by tensor has that of vLLM or of transformers."""
    if found.is_float and found.group_rows == 0:
        return "weight_scale", "weight_scale_inv"
    return (found.scale_name,)


def _scale_shapes(rows: int, groups: int, found: WeightFormat) -> tuple[list[int], ...]:
    if found.group_rows == 0:
        return [], [1], [1, 1]
    if found.group_rows > 1:
        return ([-(-rows // found.group_rows), groups],)
    return ([rows, groups], [rows]) if groups == 1 else ([rows, groups],)


def packed_type(found: WeightFormat, columns: int, keeps_fp8: bool = False) -> str | None:
    """The type of blocks that hold such a weight exactly, if its scales and zeros allow it; None:
    it is unpacked to the model's dtype. keeps_fp8: see CheckpointQuantization.
    """
    if found.layout == MXFP4:
        return MXFP4.upper()
    group = found.group_size or columns
    if found.is_float:
        sizes = FP8_TYPES if keeps_fp8 else ()
        ending, _ = _ACTIVATIONS[found.activations]
        return next((FP8_TYPES[n] + ending for n in sizes if group % n == columns % n == 0), None)
    if found.bits == 8:
        return INT8_TYPE if group % BLOCKS[INT8_TYPE][0] == 0 else None
    types = INT2_TYPES if found.bits == 2 else INT4_TYPES
    return next((kind for size, kind in types.items() if group % size == 0), None)


def saved_bytes(
    shapes: dict[str, list[int]],
    quantization: CheckpointQuantization,
    itemsize: int,
) -> int:
    """How much less memory the weights take than in a dtype of `itemsize` bytes, where blocks are
    multiplied as they are.
    """
    layers: dict[str, list[int | None]] = {}
    for name, shape in shapes.items():
        found = quantization.format_of(name, shape)
        kind = None if found is None else packed_type(found, shape[1], quantization.keeps_fp8)
        saved = None
        if kind is not None:
            columns, num_bytes = BLOCKS[kind]
            saved = prod(shape) * itemsize - prod(shape) // columns * num_bytes
        if name.endswith(".weight"):
            layers.setdefault(layer_of(name), []).append(saved)
    return sum(
        sum(saved for saved in layer if saved is not None)
        for layer in layers.values()
        if None not in layer
    )


def layer_of(name: str) -> str:
    """The name of the layer that a weight is merged into. Its blocks are kept if all can be."""
    return _MERGED.sub(lambda found: "qkv" if found[0][0] in "qkv" else "gate_up", name)
