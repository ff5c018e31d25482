"""Computes the products of experts in Triton: tiles of pairs of token and expert, of one expert
each, times weights that lie at addresses.

Must not know: routing, models, requests.

The weight of an expert consists of parts: ranges of rows of one kind, which are dense, of int8 or
int4, or blocks of a type. Where all experts have one part of one kind, one launch computes the
products and activates them. Otherwise each kind of part has a launch, and one more activates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..moe import UNGATED, ClampedSwiGLU
from ..reference import gguf_linear
from ..reference.gguf_blocks import FP8_TYPES, block_type
from ..reference.quantized import GROUP
from . import blocks, quantized
from .blocks import BlockLinear, products
from .device import PLAIN, TILE
from .e4m3 import e4m3_products, rows_for, tile_shape
from .quantized import QuantizedLinear, group_products, quantize

ROWS = 64  # pairs of a tile: the least of Hopper's widest products
COLUMNS, DEPTH = 64, 64  # outputs of a program, and inputs per step
QUANTIZED_WARPS = 8  # with fewer, sm_80 spills the products of a gate and an up in int8
ACTIVATIONS = ("silu", "gelu_tanh")
CLAMPED, RELU_SQUARED = 3, 4
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
DENSE, BITS = "dense", {"int8": 8, "int4": 4}  # kinds of parts; the others are types of blocks


@triton.jit
def activated(
    gate,
    up,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
):
    """Gate and up, f32 with values of DTYPE -> f32. ACTIVATION is 1 for SiLU, 2 for GELU, 3 for
    ClampedSwiGLU, and 4 for the square of ReLU, which has no up.
    """
    if ACTIVATION == 4:
        relu = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return relu * relu
    if ACTIVATION == 3:
        gate = tl.minimum(gate, GATE_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -GATE_LIMIT, GATE_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(GATE_SCALE * gate) * (up + 1)
    inner = gate
    if ACTIVATION == 2:  # as gate_kernel in activation.py
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate * tl.sigmoid(inner)).to(DTYPE).to(tl.float32) * up


@triton.jit
def finish(
    total,
    up_total,
    pair,
    column,
    bias_address,
    out_ptr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
):
    """Adds the bias to a tile's sums, [ROWS, COLUMNS] f32, and stores what the activation makes of
    them; see experts_kernel.
    """
    if HAS_BIAS:
        bias_ptrs = tl.load(bias_address).to(tl.pointer_type(DTYPE)) + column
        total += tl.load(bias_ptrs, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up_bias = tl.load(bias_ptrs + OUT, mask=column < OUT, other=0.0)
            up_total += up_bias.to(tl.float32)[None, :]
    if ACTIVATION != 0:
        gate, up = total.to(DTYPE).to(tl.float32), up_total.to(DTYPE).to(tl.float32)
        total = activated(gate, up, DTYPE, ACTIVATION, GATE_SCALE, GATE_LIMIT)
    tl.store(
        out_ptr + pair.to(tl.int64)[:, None] * STRIDE + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(pair >= 0)[:, None] & (column < OUT)[None, :],
    )


@triton.jit
def experts_kernel(
    x_ptr,
    pairs_ptr,
    experts_ptr,
    weights_ptr,
    biases_ptr,
    out_ptr,
    x_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [pairs, OUT] with a STRIDE = x [., IN], row pair // TOP_K, times the weight of the tile's
    expert, plus its bias. Experts whose address is 0 have no such part. ACTIVATION is 0 for none,
    see `activated`. Those of a gate and an up are IS_GATED: the weight has 2 * OUT rows. Grid
    (tiles, blocks of outputs).
    """
    expert = tl.load(experts_ptr + tl.program_id(0))
    address = tl.load(weights_ptr + expert, mask=expert < COUNT, other=0)
    if address != 0:
        pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + depth[None, :]
        weight_ptrs = address.to(tl.pointer_type(DTYPE)) + column[None, :] * IN + depth[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, IN, DEPTH):
            here = depth < IN - start
            x = tl.load(x_ptrs + start, mask=(pair >= 0)[:, None] & here[None, :], other=0.0)
            mask = here[:, None] & (column < OUT)[None, :]
            w = tl.load(weight_ptrs + start, mask=mask, other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
            if IS_GATED:
                up = tl.load(weight_ptrs + OUT * IN + start, mask=mask, other=0.0)
                up_total = tl.dot(x, up, up_total, input_precision="ieee")
        finish(
            total,
            up_total,
            pair,
            column,
            biases_ptr + expert,
            out_ptr,
            OUT,
            STRIDE,
            DTYPE,
            HAS_BIAS,
            ACTIVATION,
            IS_GATED,
            GATE_SCALE,
            GATE_LIMIT,
        )


@triton.jit
def quantized_experts_kernel(
    numbers_ptr,
    scales_ptr,
    pairs_ptr,
    experts_ptr,
    weights_ptr,
    factors_ptr,
    of_weights_ptr,
    biases_ptr,
    out_ptr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Does what experts_kernel does with weights of int8 or int4, whose numbers, factors and scales
    are at the addresses (quantized.py), and x as quantize_kernel leaves it.
    """
    expert = tl.load(experts_ptr + tl.program_id(0))
    address = tl.load(weights_ptr + expert, mask=expert < COUNT, other=0)
    if address != 0:
        pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        row = (pair // TOP_K).to(tl.int64)
        weight = address.to(tl.pointer_type(tl.int8))
        factors = tl.load(factors_ptr + expert).to(tl.pointer_type(tl.int8))
        of_weight = tl.load(of_weights_ptr + expert).to(tl.pointer_type(tl.bfloat16))
        total = group_products(
            numbers_ptr,
            scales_ptr,
            row,
            pair >= 0,
            weight,
            factors,
            of_weight,
            column,
            column < OUT,
            GROUPS,
            G,
            BITS,
        )
        up_total = total
        if IS_GATED:
            up_total = group_products(
                numbers_ptr,
                scales_ptr,
                row,
                pair >= 0,
                weight,
                factors,
                of_weight,
                column + OUT,
                column < OUT,
                GROUPS,
                G,
                BITS,
            )
        finish(
            total,
            up_total,
            pair,
            column,
            biases_ptr + expert,
            out_ptr,
            OUT,
            STRIDE,
            DTYPE,
            HAS_BIAS,
            ACTIVATION,
            IS_GATED,
            GATE_SCALE,
            GATE_LIMIT,
        )


@triton.jit
def block_experts_kernel(
    numbers_ptr,
    scales_ptr,
    sums_ptr,
    pairs_ptr,
    experts_ptr,
    weights_ptr,
    biases_ptr,
    out_ptr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TYPE: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Does what experts_kernel does with weights of blocks of TYPE, whose planes are at the
    addresses (blocks.py), and x as quantize_kernel leaves it.
    """
    expert = tl.load(experts_ptr + tl.program_id(0))
    address = tl.load(weights_ptr + expert, mask=expert < COUNT, other=0)
    if address != 0:
        pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        weight = address.to(tl.pointer_type(tl.uint8))
        row = (pair // TOP_K).to(tl.int64)
        total = products(
            numbers_ptr,
            scales_ptr,
            sums_ptr,
            row,
            pair >= 0,
            weight,
            column,
            column < OUT,
            OUT * (1 + IS_GATED),
            BLOCKS,
            TYPE,
            UNROLLED,
        )
        up_total = total
        if IS_GATED:
            up_total = products(
                numbers_ptr,
                scales_ptr,
                sums_ptr,
                row,
                pair >= 0,
                weight,
                column + OUT,
                column < OUT,
                OUT * 2,
                BLOCKS,
                TYPE,
                UNROLLED,
            )
        finish(
            total,
            up_total,
            pair,
            column,
            biases_ptr + expert,
            out_ptr,
            OUT,
            STRIDE,
            DTYPE,
            HAS_BIAS,
            ACTIVATION,
            IS_GATED,
            GATE_SCALE,
            GATE_LIMIT,
        )


@triton.jit
def e4m3_experts_kernel(
    x_ptr,
    x_scales_ptr,
    pairs_ptr,
    experts_ptr,
    weights_ptr,
    biases_ptr,
    out_ptr,
    x_stride,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Does what experts_kernel does with weights of blocks of FP8_SIZE, whose planes are at the
    addresses, and x as rows_for leaves it (e4m3.py).
    """
    expert = tl.load(experts_ptr + tl.program_id(0))
    address = tl.load(weights_ptr + expert, mask=expert < COUNT, other=0)
    if address != 0:
        pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        weight = address.to(tl.pointer_type(tl.uint8))
        row = (pair // TOP_K).to(tl.int64)
        total = e4m3_products(
            x_ptr,
            x_scales_ptr,
            x_stride,
            row,
            pair >= 0,
            weight,
            column,
            column < OUT,
            OUT * (1 + IS_GATED),
            BLOCKS,
            SIZE,
            SCALES,
        )
        up_total = total
        if IS_GATED:
            up_total = e4m3_products(
                x_ptr,
                x_scales_ptr,
                x_stride,
                row,
                pair >= 0,
                weight,
                column + OUT,
                column < OUT,
                OUT * 2,
                BLOCKS,
                SIZE,
                SCALES,
            )
        finish(
            total,
            up_total,
            pair,
            column,
            biases_ptr + expert,
            out_ptr,
            OUT,
            STRIDE,
            DTYPE,
            HAS_BIAS,
            ACTIVATION,
            IS_GATED,
            GATE_SCALE,
            GATE_LIMIT,
        )


@triton.jit
def activate_kernel(
    x_ptr,
    out_ptr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [pairs, OUT] = activated x [pairs, 2 * OUT], gates first, or [pairs, OUT] if it is not
    IS_GATED. Grid (pairs, blocks of outputs).
    """
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < OUT
    x_ptrs = x_ptr + pair * (OUT * (1 + IS_GATED)) + column
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if IS_GATED:
        up = tl.load(x_ptrs + OUT, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    value = activated(gate, up, dtype, ACTIVATION, GATE_SCALE, GATE_LIMIT)
    tl.store(out_ptr + pair * OUT + column, value.to(dtype), mask=mask)


class _Part(NamedTuple):
    """Rows of an expert's weight."""

    kind: str
    begin: int
    num_rows: int
    tensors: tuple[Tensor, ...]  # the numbers first


class PartTable(NamedTuple):
    """A part of one kind, at the same rows, of all experts that have it."""

    kind: str
    begin: int
    num_rows: int
    addresses: tuple[Tensor, ...]  # [E] i64 each; the first is 0 where an expert has no such part
    biases: Tensor | None  # [E] i64


class Tiles(NamedTuple):
    """Pairs of token and expert; see align_kernel in moe.py."""

    pairs: Tensor  # [tiles, ROWS] i32
    experts: Tensor  # [tiles] i32
    expert_of_pair: Tensor  # [pairs] i32


class ExpertLayers(NamedTuple):
    """One linear layer of all experts. The packed layers own the weights."""

    tables: list[PartTable]
    shape: tuple[int, int]  # outputs, inputs


def tables_of(layers: Sequence[Any], device: torch.device) -> ExpertLayers:
    """All have the same shape, and all have a bias or none has."""
    shape = _shape_of(layers[0])
    has_bias = layers[0].bias is not None
    if any(_shape_of(layer) != shape or (layer.bias is not None) != has_bias for layer in layers):
        raise ValueError("the experts of a layer must have one shape, and all a bias or none")
    by_kind: dict[tuple[str, int, int], dict[int, _Part]] = {}
    for expert, layer in enumerate(layers):
        for part in _parts_of(layer):
            by_kind.setdefault(part[:3], {})[expert] = part

    def to_device(addresses: list[int]) -> Tensor:
        found = torch.tensor(addresses)
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found

    def table(key: tuple[str, int, int], parts: dict[int, _Part]) -> PartTable:
        every = range(len(layers))
        held = next(iter(parts.values())).tensors
        addresses = tuple(
            to_device([_address(parts[e].tensors[i]) if e in parts else 0 for e in every])
            for i in range(len(held))
        )
        biases = [_address(layer.bias[key[1] :]) for layer in layers] if has_bias else None
        return PartTable(*key, addresses, None if biases is None else to_device(biases))

    return ExpertLayers([table(*item) for item in by_kind.items()], shape)


def _shape_of(layer: Any) -> tuple[int, int]:
    if isinstance(layer, BlockLinear):
        return layer.out_features, layer.num_blocks * gguf_linear.GROUP
    if isinstance(layer, QuantizedLinear):
        return layer.num_columns, layer.in_features
    return tuple(layer.weight.shape)


def _parts_of(layer: Any) -> list[_Part]:
    if isinstance(layer, QuantizedLinear):
        tensors = layer.numbers, layer.factors, layer.scales
        return [_Part(f"int{layer.bits}", 0, layer.num_columns, tensors)]
    if not isinstance(layer, BlockLinear):
        return [_Part(DENSE, 0, len(layer.weight), (layer.weight,))]
    found, begin = [], 0
    for part in layer.parts:
        tensors = (part.data,) if part.x_scale is None else (part.data, part.x_scale)
        found.append(_Part(part.type, begin, part.num_rows, tensors))
        begin += part.num_rows
    return found


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("weights and biases of experts must be contiguous")
    return tensor.data_ptr()


def multiply(
    x: Tensor,
    layers: ExpertLayers,
    out: Tensor,
    tiles: Tiles,
    count: int,
    top_k: int,
    activation: str | ClampedSwiGLU | None = None,
) -> None:
    """out [pairs, outputs] = activated x [pairs / top_k, inputs] times the layer of each pair's
    expert.
    """
    options = _activation(activation)
    if len(layers.tables) == 1 or activation is None:
        for table in layers.tables:
            _multiply(x, table, out, tiles, count, top_k, options)
        return
    product = x.new_empty(len(out), layers.shape[0])
    for table in layers.tables:
        _multiply(x, table, product, tiles, count, top_k, _activation(None))
    block = min(TILE, triton.next_power_of_2(out.shape[1]))
    grid = len(out), triton.cdiv(out.shape[1], block)
    activate_kernel[grid](product, out, OUT=out.shape[1], **options, BLOCK=block, **PLAIN)


def _activation(activation: str | ClampedSwiGLU | None) -> dict[str, Any]:
    number, scale, limit = 0, 0.0, 0.0
    if isinstance(activation, ClampedSwiGLU):
        number, scale, limit = CLAMPED, activation.scale, activation.limit
    elif activation in UNGATED:
        number = RELU_SQUARED
    elif activation is not None:
        number = 1 + ACTIVATIONS.index(activation)
    return {
        "ACTIVATION": number,
        "IS_GATED": number not in (0, RELU_SQUARED),
        "GATE_SCALE": scale,
        "GATE_LIMIT": limit,
    }


def _multiply(
    x: Tensor,
    table: PartTable,
    out: Tensor,
    tiles: Tiles,
    count: int,
    top_k: int,
    activation: dict[str, Any],
) -> None:
    pairs, of_tiles, of_pairs = tiles
    num_columns = table.num_rows // (1 + activation["IS_GATED"])
    options: dict[str, Any] = {
        "OUT": num_columns,
        "STRIDE": out.stride(0),
        "TOP_K": top_k,
        "HAS_BIAS": table.biases is not None,
        "COUNT": count,
        "DTYPE": DTYPES[x.dtype],
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        **activation,
    }
    grid = len(of_tiles), triton.cdiv(num_columns, COLUMNS)
    out = out[:, table.begin :]
    biases = table.addresses[0] if table.biases is None else table.biases
    is_static = table.kind.endswith("_STATIC")
    addresses = table.addresses[:1] if is_static else table.addresses
    places = pairs, of_tiles, *addresses, biases, out
    if table.kind == DENSE:
        experts_kernel[grid](x, *places, x.stride(0), IN=x.shape[1], DEPTH=DEPTH, **options)
        return
    if (bits := BITS.get(table.kind)) is not None:
        group = GROUP[bits]
        numbers, scales, _ = quantize(x, group, has_sums=False)
        groups = {"GROUPS": scales.shape[1], "G": group, "BITS": bits}
        shape = quantized.multiply_shape(ROWS) | {"num_warps": QUANTIZED_WARPS}
        options = shape | options | groups
        quantized_experts_kernel[grid](numbers, scales, *places, **options, **PLAIN)
        return
    if table.kind in FP8_TYPES:
        size = block_type(table.kind).columns
        if is_static:  # each pair has a row, since the scale is its expert's
            rows = rows_for(x, table.kind, table.addresses[1], of_pairs, top_k)
            options["TOP_K"] = 1
        else:
            rows = rows_for(x, table.kind)
        options = tile_shape(ROWS, rows.scales is not None) | options
        options |= {"BLOCKS": x.shape[1] // size, "SIZE": size, "SCALES": rows.num_scales}
        x_stride = rows.numbers.stride(0)
        e4m3_experts_kernel[grid](*rows.places, *places, x_stride, **options, **PLAIN)
        return
    num_blocks = x.shape[1] // gguf_linear.GROUP
    options = blocks.multiply_shape(ROWS, num_blocks, table.kind) | options
    block_experts_kernel[grid](
        *quantize(x, gguf_linear.GROUP),
        *places,
        BLOCKS=num_blocks,
        TYPE=table.kind,
        **options,
        **PLAIN,
    )
