"""Specifies a step's state by slot: how differences are written, inputs prepared and tokens
appended.

Must not know: speed, who owns the tables.
"""

import torch
from torch import Tensor

from ..registry import register


@register("write_runs", name="reference", priority=0)
def write_runs(memory: Tensor, places: Tensor, starts: Tensor, values: Tensor) -> None:
    for place, start, stop in zip(places.tolist(), starts.tolist(), starts.tolist()[1:]):
        memory[place : place + stop - start] = values[start:stop]


@register("prepare_step_inputs", name="reference", priority=0)
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
    starts = query_start_loc.tolist()
    for row, (slot, computed) in enumerate(zip(slots.tolist(), num_computed.tolist())):
        tokens = slice(starts[row], starts[row + 1])
        length = computed + starts[row + 1] - starts[row]
        token_ids[tokens] = token_table[slot, computed:length]
        positions[tokens] = position = torch.arange(computed, length, device=positions.device)
        slot_mapping[tokens] = (
            block_table[slot, position // block_size].long() * block_size + position % block_size
        )
        num_blocks = -(-length // block_size)
        seq_lens[row], block_tables[row, :num_blocks] = length, block_table[slot, :num_blocks]
    padding = slice(len(slots), len(seq_lens))
    if len(seq_lens) > len(slots):
        token_ids[padding] = 0
        positions[padding] = 0
        slot_mapping[padding] = -1
        seq_lens[padding] = 1
        block_tables[padding, 0] = 0


@register("gather_sampling_parameters", name="reference", priority=0)
def gather_sampling_parameters(
    parameters: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    temperature, top_k, top_p, min_p, low, high = (
        column.contiguous() for column in parameters[slots.long(), :6].unbind(1)
    )
    floats = (column.view(torch.float32) for column in (temperature, top_p, min_p))
    temperature, top_p, min_p = floats
    return temperature, top_k, top_p, min_p, (high.long() << 32) | (low.long() & 0xFFFFFFFF)


@register("append_sampled_tokens", name="reference", priority=0)
def append_sampled_tokens(
    token_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    is_finite: Tensor,
    results: Tensor,
) -> None:
    token_table[slots.long(), positions] = torch.where(is_finite, token_ids, 0).int()
    results.copy_(torch.where(is_finite, token_ids, -1))
