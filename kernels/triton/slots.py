"""Keeps the tables of a step's state, by slot, in Triton: it writes differences, prepares inputs
and appends tokens.

Must not know: models, requests, who owns the tables.

These kernels run outside a step's graph, where the launch itself, some microseconds, dominates.
Each operation is therefore one launch. Numbers that change from step to step are not specialised,
so that no variant is compiled while requests wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, TILE, is_cuda

ROWS = 128  # rows per program, with one element per row
PADDING = tl.constexpr(-1)  # slot_mapping value of a token that is not stored
NOT_FINITE = tl.constexpr(-1)  # result of a row whose logits are not all finite


@triton.jit
def write_runs_kernel(memory_ptr, places_ptr, starts_ptr, values_ptr, BLOCK: tl.constexpr):
    run = tl.program_id(0)
    place = tl.load(places_ptr + run)
    first = tl.load(starts_ptr + run)
    stop = tl.load(starts_ptr + run + 1)
    for start in range(first, stop, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < stop
        tl.store(
            memory_ptr + place + (index - first), tl.load(values_ptr + index, mask=mask), mask=mask
        )


@register("write_runs", name="triton", predicate=is_cuda, priority=PRIORITY)
def write_runs(memory: Tensor, places: Tensor, starts: Tensor, values: Tensor) -> None:
    if len(places):
        write_runs_kernel[(len(places),)](memory, places, starts, values, BLOCK=TILE)


@triton.jit(do_not_specialize=["num_requests", "from_stride", "to_stride"])
def prepare_step_inputs_kernel(
    slots_ptr,
    num_computed_ptr,
    starts_ptr,
    token_table_ptr,
    block_table_ptr,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    num_requests,
    token_stride,
    from_stride,
    to_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program handles one row. Most rows have one token, and the longest prompt takes a few
    iterations, little next to what its model computes.
    """
    row = tl.program_id(0)
    block_tables_ptr += row.to(tl.int64) * to_stride
    if row >= num_requests:
        tl.store(token_ids_ptr + row, 0)
        tl.store(positions_ptr + row, 0)
        tl.store(slot_mapping_ptr + row, PADDING)
        tl.store(seq_lens_ptr + row, 1)
        tl.store(block_tables_ptr, 0)
        return
    slot, computed = tl.load(slots_ptr + row).to(tl.int64), tl.load(num_computed_ptr + row)
    first, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    length = computed + stop - first
    tl.store(seq_lens_ptr + row, length)
    tokens, blocks = token_table_ptr + slot * token_stride, block_table_ptr + slot * from_stride
    for start in range(first, stop, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < stop
        position = computed + index - first
        tl.store(token_ids_ptr + index, tl.load(tokens + position, mask=mask), mask=mask)
        tl.store(positions_ptr + index, position.to(tl.int64), mask=mask)
        block = tl.load(blocks + position // BLOCK_SIZE, mask=mask).to(tl.int64)
        tl.store(slot_mapping_ptr + index, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    for start in range(0, num_blocks, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < num_blocks
        tl.store(block_tables_ptr + index, tl.load(blocks + index, mask=mask), mask=mask)


@register("prepare_step_inputs", name="triton", predicate=is_cuda, priority=PRIORITY)
def prepare_step_inputs(
    slots: Tensor,
    num_computed: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    if len(seq_lens):
        prepare_step_inputs_kernel[(len(seq_lens),)](
            slots,
            num_computed,
            query_start_loc,
            token_table,
            block_table,
            token_ids,
            positions,
            slot_mapping,
            seq_lens,
            block_tables,
            len(slots),
            token_table.stride(0),
            block_table.stride(0),
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=TILE,
        )


@triton.jit(do_not_specialize=["num_rows"])
def gather_sampling_parameters_kernel(
    parameters_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    num_rows,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    words = parameters_ptr + tl.load(slots_ptr + row, mask=mask, other=0).to(tl.int64) * 8
    tl.store(
        temperature_ptr + row, tl.load(words, mask=mask).to(tl.float32, bitcast=True), mask=mask
    )
    tl.store(top_k_ptr + row, tl.load(words + 1, mask=mask), mask=mask)
    tl.store(top_p_ptr + row, tl.load(words + 2, mask=mask).to(tl.float32, bitcast=True), mask=mask)
    tl.store(min_p_ptr + row, tl.load(words + 3, mask=mask).to(tl.float32, bitcast=True), mask=mask)
    low = tl.load(words + 4, mask=mask).to(tl.int64)
    high = tl.load(words + 5, mask=mask).to(tl.int64)
    tl.store(seeds_ptr + row, (high << 32) | (low & 0xFFFFFFFF), mask=mask)


@register("gather_sampling_parameters", name="triton", predicate=is_cuda, priority=PRIORITY)
def gather_sampling_parameters(
    parameters: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtypes = torch.float32, torch.int32, torch.float32, torch.float32, torch.int64
    columns = [torch.empty(len(slots), dtype=dtype, device=slots.device) for dtype in dtypes]
    if len(slots):
        gather_sampling_parameters_kernel[(triton.cdiv(len(slots), ROWS),)](
            parameters, slots, *columns, len(slots), ROWS=ROWS
        )
    temperature, top_k, top_p, min_p, seeds = columns
    return temperature, top_k, top_p, min_p, seeds


@triton.jit(do_not_specialize=["num_rows"])
def append_sampled_tokens_kernel(
    token_table_ptr,
    slots_ptr,
    positions_ptr,
    token_ids_ptr,
    is_finite_ptr,
    results_ptr,
    num_rows,
    token_stride,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    slot = tl.load(slots_ptr + row, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions_ptr + row, mask=mask, other=0)
    token = tl.load(token_ids_ptr + row, mask=mask, other=0).to(tl.int32)
    is_finite = tl.load(is_finite_ptr + row, mask=mask, other=0) != 0
    tl.store(
        token_table_ptr + slot * token_stride + position, tl.where(is_finite, token, 0), mask=mask
    )
    tl.store(results_ptr + row, tl.where(is_finite, token, NOT_FINITE), mask=mask)


@register("append_sampled_tokens", name="triton", predicate=is_cuda, priority=PRIORITY)
def append_sampled_tokens(
    token_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    is_finite: Tensor,
    results: Tensor,
) -> None:
    if len(slots):
        grid = (triton.cdiv(len(slots), ROWS),)
        append_sampled_tokens_kernel[grid](
            token_table,
            slots,
            positions,
            token_ids,
            is_finite,
            results,
            len(slots),
            token_table.stride(0),
            ROWS=ROWS,
        )
