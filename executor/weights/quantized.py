"""Packs the tensors that a quantized checkpoint stores for a weight into blocks, or unpacks them.

Must not know: files, names, models, what a weight is for.

A weight is scale * (number - zero). Blocks hold it exactly (kernels/reference/gguf_blocks.py);
where they cannot, the product is computed in fp32 and rounded once. The scale of a ternary weight
is rounded to fp16 in its blocks, by at most 2**-11 of it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ipc.errors import ModelLoadError
from ...ipc.models.quantization_config import (
    AUTOBITLINEAR,
    BITLINEAR,
    MXFP4,
    ONLINE,
    CheckpointQuantization,
    WeightFormat,
)
from ...ipc.models.quantized_tensors import (
    BLOCKS,
    INT2_TYPES,
    INT8_TYPE,
    STATIC_SCALES,
    packed_type,
    parts_of,
    scale_names,
)
from ...ipc.models.stacked_experts import MXFP4_GROUP
from ...kernels.reference.gguf_blocks import PIECE, ZERO_BITS, fp4_numbers, mxfp4_scales
from ...kernels.reference.gguf_repack import as_int2
from ..device import release_mapped
from .packed_rows import PackedRows

logger = logging.getLogger(__name__)

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight outputs in a word
_LOW_HALVES = 0x0F0F0F0F0F0F0F0F  # of eight bytes
ROWS_BYTES = 2**18  # of packed numbers laid out at a time, so that temporary values stay in caches


class QuantizedWeights:
    """Collects the tensors of quantized weights, which may come in any order and from several
    files.
    """

    def __init__(
        self,
        shapes: dict[str, list[int]],
        quantization: CheckpointQuantization | None,
        stored: set[str],
    ):
        """`shapes` are those of the model's weights; `stored` names all tensors in the files."""
        self._shapes, self._quantization = shapes, quantization
        self._weights = {
            name: part.weight
            for name, part in parts_of(shapes, quantization).items()
            if name in stored
        }
        self._missing: dict[str, set[str]] = {}
        for name, weight in self._weights.items():
            self._missing.setdefault(weight, set()).add(name)
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._problems: set[str] = set()  # those in the log
        if quantization is not None and self._missing:
            formats = Counter(
                str(quantization.format_of(weight, shapes[weight])) for weight in self._missing
            )
            logger.info(
                "%s: %s",
                quantization.method,
                ", ".join(f"{found} ({count})" for found, count in formats.most_common()),
            )

    def weight_of(self, name: str) -> str | None:
        """The model's weight that a stored tensor is a part of."""
        return self._weights.get(name)

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> PackedRows | Tensor | None:
        """Returns the weight once its last tensor is there: blocks, or values of `dtype`."""
        weight = self._weights[name]
        parts = self._parts.setdefault(weight, {})
        parts[name.rpartition(".")[2]] = tensor
        self._missing[weight].discard(name)
        if self._missing[weight]:
            return None
        shape = self._shapes[weight]
        quantization = self._quantization
        found = quantization.format_of(weight, shape) if quantization else None
        assert quantization is not None and found is not None
        try:
            values, problem = pack_weight(found, shape, parts, dtype, quantization.keeps_fp8)
        except ValueError as error:
            raise ModelLoadError(f"the quantized tensors of {weight}: {error}") from None
        if problem is not None and problem not in self._problems:
            self._problems.add(problem)
            logger.info("%s and others are unpacked to %s: %s", weight, dtype, problem)
        for part in self._parts.pop(weight).values():
            release_mapped(part)
        return values


class Numbers(NamedTuple):
    """The parts of a weight [rows, columns]."""

    numbers: Tensor  # uint8, int8 or e4m3; of 4 bits [rows, columns / 2], the first in the low half
    scales: Tensor  # f32, a number for each group, see `group_of`
    zeros: Tensor | None  # as scales, i32; None: zero
    group_of: Tensor | None  # [columns]: the group of each column, where it is not in order
    group_rows: int  # rows with one scale
    group_size: int  # columns with one scale
    x_scale: Tensor | None = None  # f32, the stored scale of activations


def pack_weight(
    found: WeightFormat,
    shape: list[int],
    parts: dict[str, Tensor],
    dtype: torch.dtype,
    keeps_fp8: bool = False,
) -> tuple[PackedRows | Tensor, str | None]:
    """Returns the weight and, if it is not packed, the reason: it is then a tensor of `dtype`.

    `parts` are the stored tensors by the last part of their names
    (ipc/models/quantized_tensors.py). keeps_fp8: see CheckpointQuantization.

    Raises ValueError for indices that lead out of the tensors.
    """
    weight = _READERS[found.layout](found, shape, parts)
    kind, problem = packed_type(found, shape[1], keeps_fp8), None
    if found.is_float and not keeps_fp8:
        problem = "no kernel multiplies fp8"
    elif kind is None:
        problem = f"no kernel has groups of {weight.group_size} columns"
    elif weight.group_of is not None:
        problem = "columns of a group are not neighbours (act-order)"
    else:
        if found.is_float:
            rows = _pack_fp8(weight, *BLOCKS[kind])
        elif kind == INT8_TYPE:
            rows = _pack_int8(weight)
        elif found.bits == 2:
            rows = _pack_int2(weight, BLOCKS[kind][0])
        else:
            rows = _pack_int4(weight, BLOCKS[kind][0])
        if rows is not None:
            return PackedRows(rows, kind), None
        problem = f"blocks of {kind} do not hold its scales or zeros exactly"
    return _unpacked(weight, 4 if found.bits == 4 else 8, dtype), problem


# ---------------------------------------------------------------- formats


def _read_awq(found: WeightFormat, shape: list[int], parts: dict[str, Tensor]) -> Numbers:
    return Numbers(
        _by_output(parts["qweight"]).view(torch.uint8),
        parts["scales"].float().T,
        _spread(_by_output(parts["qzeros"]).view(torch.uint8), found.bits)[
            :, : len(parts["qzeros"])
        ].int(),
        *_in_groups(found, shape),
    )


def _by_output(words: Tensor) -> Tensor:
    """Turns words of eight outputs of one input, [inputs, outputs / 8] i32, into words of eight
    inputs of one output, [outputs, inputs / 8].
    """
    words = F.pad(words, (0, 0, 0, -len(words) % 8))
    words = words.unflatten(0, (-1, 8)).clone()
    # rows and nibbles change places: halves, then quarters, then eighths
    for apart, bits, mask in ((4, 16, 0xFFFF), (2, 8, 0xFF00FF), (1, 4, 0xF0F0F0F)):
        low, high = words.unflatten(1, (-1, 2, apart)).unbind(2)
        changed = (low >> bits ^ high) & mask
        high ^= changed
        low ^= changed << bits
    return words.permute(2, 1, 0)[:, _AWQ_PLACES].flatten(0, 1)


def _read_gptq(found: WeightFormat, shape: list[int], parts: dict[str, Tensor]) -> Numbers:
    words = parts["qweight"].T.contiguous()  # [rows, columns / numbers in a word]
    zeros = _spread(parts["qzeros"].contiguous().view(torch.uint8), found.bits)
    # the code drops what exceeds the bits, as the format's own code does
    zeros = (zeros.T.int() + found.zero_offset) & (1 << found.bits) - 1
    group_of, group_rows, group_size = _in_groups(found, shape)
    return Numbers(
        words.view(torch.uint8),
        parts["scales"].float().T,
        zeros,
        _group_of(parts.get("g_idx"), shape[1], group_size),
        group_rows,
        group_size,
    )


def _read_packed(found: WeightFormat, shape: list[int], parts: dict[str, Tensor]) -> Numbers:
    """compressed-tensors adds half of the range to numbers and zeros."""
    rows, columns = shape
    numbers = parts["weight_packed"].contiguous().view(torch.uint8)
    numbers = numbers[:, : -(-columns * found.bits // 8)]
    scales = parts["weight_scale"].float()
    scales = scales.reshape(1, 1) if found.group_rows == 0 else scales.reshape(rows, -1)
    middle = 1 << (found.bits - 1)
    if (stored := parts.get("weight_zero_point")) is None:
        zeros = torch.full(scales.shape, middle, dtype=torch.int32)
    else:
        by_group = stored.T.contiguous().view(torch.uint8)
        zeros = _spread(by_group, found.bits)[:, :rows].T.int()
    group_of, group_rows, group_size = _in_groups(found, shape)
    group_of = _group_of(parts.get("weight_g_idx"), columns, group_size)
    return Numbers(numbers, scales, zeros, group_of, group_rows, group_size)


def _read_plain(found: WeightFormat, shape: list[int], parts: dict[str, Tensor]) -> Numbers:
    stored = [parts[name] for name in scale_names(found) if name in parts]
    if not stored:
        raise ValueError(f"it has no {' or '.join(scale_names(found))}")
    scales = stored[0].float()
    if found.group_rows == 0:
        scales = scales.reshape(1, 1)
    elif found.group_rows == 1:
        scales = scales.reshape(shape[0], -1)
    numbers, zeros = parts["weight"], parts.get("weight_zero_point")
    if zeros is not None:
        zeros = zeros.int().reshape(scales.shape)
    if found.bits == 4:
        if bool(((numbers < -8) | (numbers > 7)).any()):
            raise ValueError("its numbers exceed 4 bits")
        numbers = (numbers + 8).view(torch.uint8)
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
        zeros = torch.full(scales.shape, 8, dtype=torch.int32) + (0 if zeros is None else zeros)
    return Numbers(numbers, scales, zeros, *_in_groups(found, shape), _static_scale(found, parts))


def _read_bitnet(found: WeightFormat, shape: list[int], parts: dict[str, Tensor]) -> Numbers:
    """A byte has the numbers of four rows, plus 1, which are a quarter of all rows apart."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1, 1)
    numbers = (parts["weight"] >> shifts & 3).flatten(0, 1).to(torch.int8) - 1
    scales = parts["weight_scale"].float().reshape(1, 1)
    if not (0 < float(scales) < math.inf):
        raise ValueError(f"its weight_scale must be positive and finite, not {float(scales)}")
    if found.layout == BITLINEAR:
        scales = 1 / scales
    return Numbers(numbers, scales, None, *_in_groups(found, shape))


def _read_online(found: WeightFormat, shape: list[int], parts: dict[str, Tensor]) -> Numbers:
    """The scale is the mean magnitude, as it is in transformers' code (WeightQuant)."""
    weight = parts["weight"].float()
    factor = 1 / weight.abs().mean().clamp(min=1e-5)
    numbers = (weight * factor).round().clamp(-1, 1).to(torch.int8)
    scales = (1 / factor).to(parts["weight"].dtype).float().reshape(1, 1)
    return Numbers(numbers, scales, None, *_in_groups(found, shape))


def _static_scale(found: WeightFormat, parts: dict[str, Tensor]) -> Tensor | None:
    if found.activations != "static":
        return None
    stored = [parts[name] for name in STATIC_SCALES if name in parts]
    if not stored:
        raise ValueError(f"its activations are static, and it has no {' or '.join(STATIC_SCALES)}")
    scale = stored[0].float().reshape(())
    if not 0 < float(scale) < torch.inf:
        raise ValueError(f"its activations' scale must be positive and finite, got {float(scale)}")
    return scale


_READERS = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "packed": _read_packed,
    "plain": _read_plain,
    BITLINEAR: _read_bitnet,
    AUTOBITLINEAR: _read_bitnet,
    ONLINE: _read_online,
}


def _in_groups(found: WeightFormat, shape: list[int]) -> tuple[None, int, int]:
    return None, found.group_rows or shape[0], found.group_size or shape[1]


def _group_of(stored: Tensor | None, columns: int, group_size: int) -> Tensor | None:
    """The index of each column's group, unless they are in order."""
    if stored is None or bool((stored < 0).all()):  # compressed-tensors writes -1 for "in order"
        return None
    if bool(((stored < 0) | (stored >= -(-columns // group_size))).any()):
        raise ValueError("its index of groups leads out of the scales")
    in_order = torch.equal(stored.long(), torch.arange(columns) // group_size)
    return None if in_order else stored.long()


def pack_mxfp4(numbers: Tensor, exponents: Tensor) -> PackedRows:
    """Makes blocks of a GGUF file from rows of one expert of gpt-oss. `numbers` [rows, groups, 16]
    and `exponents` [rows, groups] are as in unpack_mxfp4.
    """
    rows, groups = exponents.shape
    out = torch.empty(rows, groups, 1 + MXFP4_GROUP // 2, dtype=torch.uint8)
    out[..., 0] = exponents
    step = max(1, ROWS_BYTES // numbers[0].numel())
    for start in range(0, rows, step):
        _lay_out_nibbles(numbers[start : start + step], out[start : start + step, :, 1:])
    return PackedRows(out.flatten(1), MXFP4.upper())


def unpack_mxfp4(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpacks experts of gpt-oss to [E, 32 * groups, rows]. `numbers` is [E, rows, groups, 16]
    uint8: a byte has two of a group's 32 numbers, the first in the low half. `exponents` is [E,
    rows, groups] uint8.

    By OCP Microscaling Formats 1.0, a value is its FP4 number (E2M1) times 2**(exponent - 127).
    """
    experts, rows, groups, _ = numbers.shape
    out = torch.empty(experts, groups * MXFP4_GROUP, rows, dtype=dtype)
    for expert in range(experts):  # the values of one at a time are in fp32
        nibbles = _spread(numbers[expert].flatten(0, 1), 4)
        values = fp4_numbers(nibbles) * mxfp4_scales(exponents[expert].reshape(-1, 1))
        out[expert] = values.view(rows, -1).T
    for part in (numbers, exponents):
        release_mapped(part)
    return out


# ---------------------------------------------------------------- blocks


def _pack_int4(weight: Numbers, size: int) -> Tensor | None:
    """Makes blocks of INT4_`size`, [rows, bytes]; None where they are not exact."""
    bits = weight.scales.contiguous().view(torch.int32)
    zeros = weight.zeros
    if zeros is None or bool((bits & ZERO_BITS).any()) or bool((zeros & ~ZERO_BITS).any()):
        return None
    rows, blocks = len(weight.numbers), weight.numbers.shape[1] * 2 // size
    words = (bits | zeros).expand(rows, -1)
    words = words.repeat_interleave(blocks // words.shape[1], 1)
    out = torch.empty(rows, blocks, 4 + size // 2, dtype=torch.uint8)
    out[..., :4] = words.contiguous().view(torch.uint8).view(rows, blocks, 4)
    step = max(1, ROWS_BYTES // weight.numbers.shape[1])
    for start in range(0, rows, step):
        _lay_out_nibbles(
            weight.numbers[start : start + step].unflatten(1, (blocks, -1, 16)),
            out[start : start + step, :, 4:].unflatten(2, (-1, 16)),
        )
    return out.flatten(1)


def _lay_out_nibbles(numbers: Tensor, to: Tensor) -> None:
    """Lays out `numbers` [..., 16] uint8, in which a byte has two neighbours of 32 columns, in `to`
    of the same shape: the first 16 columns get the low halves of bytes, the others the high halves.
    """
    # words have eight bytes; they need a copy, because a view of a file may begin anywhere
    words = numbers.clone(memory_format=torch.contiguous_format).view(torch.int64)
    first, second = words[..., :1], words[..., 1:]
    low, high = _LOW_HALVES, ~_LOW_HALVES
    to[..., ::2] = (first & low | (second & low) << 4).view(torch.uint8)
    to[..., 1::2] = (first >> 4 & low | second & high).view(torch.uint8)


def _pack_int8(weight: Numbers) -> Tensor | None:
    """Makes blocks of Q8_0, [rows, bytes]; None where they are not exact."""
    is_signed = weight.numbers.dtype == torch.int8
    if weight.zeros is not None and bool((weight.zeros != (0 if is_signed else 128)).any()):
        return None
    halves = weight.scales.half()
    if not torch.equal(halves.float(), weight.scales):
        return None
    size, num_bytes = BLOCKS[INT8_TYPE]
    rows, columns = weight.numbers.shape
    halves = halves.expand(rows, -1)
    halves = halves.repeat_interleave(columns // size // halves.shape[1], 1).contiguous()
    out = torch.empty(rows, columns // size, num_bytes, dtype=torch.uint8)
    out[..., :2] = halves.view(torch.uint8).view(rows, -1, 2)
    numbers = weight.numbers.contiguous().view(torch.uint8)
    out[..., 2:] = (numbers if is_signed else numbers ^ 128).view(rows, -1, size)
    return out.flatten(1)


def _pack_int2(weight: Numbers, size: int) -> Tensor | None:
    """Makes blocks of INT2_`size`, [rows, bytes]; None where fp16 cannot hold the scale."""
    halves = weight.scales.half()
    if not torch.allclose(halves.float(), weight.scales, rtol=2**-11, atol=0):
        return None
    rows, columns = weight.numbers.shape
    scale = halves.view(torch.uint8).view(1, 2)
    out = torch.empty(rows, columns // size, BLOCKS[INT2_TYPES[size]][1], dtype=torch.uint8)
    for start in range(0, rows, step := max(1, ROWS_BYTES // columns)):
        stored = (weight.numbers[start : start + step] + 1).view(torch.uint8)
        out[start : start + step] = as_int2(stored, scale.expand(len(stored), 2), size)
    return out.flatten(1)


def _pack_fp8(weight: Numbers, size: int, num_bytes: int) -> Tensor:
    """Makes blocks of FP8_`size`*, [rows, bytes]. Each has the scale of activations, if there is
    one: so parts of rows and columns keep it.
    """
    rows, columns = weight.numbers.shape
    blocks = columns // size
    scales = weight.scales.repeat_interleave(weight.group_rows, 0)[:rows]
    scales = scales.repeat_interleave(weight.group_size // size, 1)[:, :blocks].contiguous()
    out = torch.empty(rows, blocks, num_bytes, dtype=torch.uint8)
    out[..., :4] = scales.view(torch.uint8).view(rows, blocks, 4)
    if weight.x_scale is not None:
        out[..., 4:8] = weight.x_scale.reshape(1).view(torch.uint8)
    out[..., -size:] = weight.numbers.contiguous().view(torch.uint8).view(rows, blocks, size)
    return out.flatten(1)


def _unpacked(weight: Numbers, bits: int, dtype: torch.dtype) -> Tensor:
    """Computes the weight [rows, columns] in pieces of rows."""
    rows, columns = len(weight.numbers), weight.numbers.shape[1] * 8 // bits
    out = torch.empty(rows, columns, dtype=dtype)
    step = max(1, PIECE // max(columns, 1))
    for start in range(0, rows, step):
        numbers = weight.numbers[start : start + step]
        values = (_spread(numbers, 4) if bits == 4 else numbers).float()
        of_rows = torch.arange(start, start + len(values)) // weight.group_rows
        if weight.zeros is not None:
            values -= _by_column(weight.zeros[of_rows], weight, columns)
        out[start : start + step] = values * _by_column(weight.scales[of_rows], weight, columns)
    return out


def _by_column(of_groups: Tensor, weight: Numbers, columns: int) -> Tensor:
    """[rows, groups] -> [rows, columns], or [rows, 1]."""
    if weight.group_of is not None:
        return of_groups[:, weight.group_of]
    if of_groups.shape[1] == 1:
        return of_groups
    return of_groups.repeat_interleave(weight.group_size, 1)[:, :columns]


def _spread(packed: Tensor, bits: int) -> Tensor:
    """[rows, bytes] -> [rows, numbers] uint8."""
    return packed if bits == 8 else torch.stack([packed & 15, packed >> 4], 2).flatten(1)
