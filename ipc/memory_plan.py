"""What memory is divided into, as pure arithmetic: the engine does it when it starts, `quire plan`
beforehand.

Must not know: how much memory there is, torch, models.
"""

from __future__ import annotations

import logging

from .config import EngineConfig, resolved
from .errors import NotEnoughMemoryError

logger = logging.getLogger(__name__)

# of what is free once the weights are loaded; the rest is for activations and for other programs
CPU_MEMORY_FRACTION = 0.4
SWAP_MEMORY_FRACTION = 0.25  # of what is free then: the most that swap_space takes


QUANTIZATION_BITS = {"int8": 8, "int4": 4}  # of a weight's numbers
# of a quantized model's head, whose table is the embedding's too where it is tied: 4 would lose too
# much
HEAD_BITS = 8
# rows and columns of a weight that are packed together; a rest takes as much as a whole one
QUANTIZED_PANEL, QUANTIZED_DEPTH = 16, 64
# columns of a row under one scale; of that, at 4 bits with two factors
QUANTIZED_GROUP, QUANTIZED_SCALE_BYTES = {8: 256, 4: 64}, {8: 2, 4: 4}


def quantized_bytes(rows: int, columns: int, bits: int) -> int:
    """Of a linear layer's packed weight (kernels/cpu/native/quantized.py): its numbers, and a scale
    for each group of a row.
    """
    depth = -(-columns // QUANTIZED_DEPTH) * QUANTIZED_DEPTH
    row_bytes = (
        depth * bits // 8 + -(-columns // QUANTIZED_GROUP[bits]) * QUANTIZED_SCALE_BYTES[bits]
    )
    return -(-rows // QUANTIZED_PANEL) * QUANTIZED_PANEL * row_bytes


def check_weights_fit(weights_bytes: int, dtype: str, free_bytes: int) -> None:
    """Raises NotEnoughMemoryError before the weights are read: a system that runs out of memory
    kills without a word.
    """
    if weights_bytes > free_bytes:
        raise NotEnoughMemoryError(
            "model",
            f"its weights take {weights_bytes} bytes as {dtype}, and {free_bytes} are free; quire "
            f"plan shows what a model needs",
        )


def free_of_share(free_bytes: int, total_bytes: int, share: float) -> int:
    """What is free of `share` of a GPU's memory: what others have in use counts as well.

    Can be negative.
    """
    return free_bytes - (total_bytes - int(total_bytes * share))


def affordable_blocks(config: EngineConfig, block_bytes: int, free_bytes: int) -> int:
    """KV-cache blocks that there is room for, however many are wanted: num_gpu_blocks_override, or
    what fits kv_cache_memory_bytes, or else `free_bytes`, on a CPU CPU_MEMORY_FRACTION of them.
    """
    cache_config = config.cache_config
    if cache_config.num_gpu_blocks_override is not None:
        return cache_config.num_gpu_blocks_override
    if cache_config.kv_cache_memory_bytes is not None:
        return cache_config.kv_cache_memory_bytes // block_bytes
    share = 1.0 if config.device_config.device == "cuda" else CPU_MEMORY_FRACTION
    return max(0, int(free_bytes * share)) // block_bytes


def fitting_tokens(config: EngineConfig, num_blocks: int) -> int:
    """The longest sequence that so many blocks hold; block 0 holds nothing."""
    return max(0, num_blocks - 1) * config.cache_config.block_size


def plan_num_blocks(config: EngineConfig, block_bytes: int, free_bytes: int) -> int:
    """KV-cache blocks to make, the null block included: what there is room for, but left to itself
    no more than max_num_seqs sequences of max_model_len need.

    Raises NotEnoughMemoryError when a sequence of max_model_len would not fit: with no other left
    to preempt, it could never end.
    """
    cache_config, max_model_len = config.cache_config, resolved(config.model_config.max_model_len)
    blocks_per_sequence = -(-max_model_len // cache_config.block_size)
    wanted = 1 + blocks_per_sequence * config.scheduler_config.max_num_seqs
    num_blocks = affordable_blocks(config, block_bytes, free_bytes)
    if cache_config.num_gpu_blocks_override is None and cache_config.kv_cache_memory_bytes is None:
        num_blocks = min(num_blocks, wanted)
    needed = 1 + blocks_per_sequence
    if num_blocks < needed:
        origin = (
            "kv_cache_memory_bytes"
            if cache_config.num_gpu_blocks_override is None
            else "num_gpu_blocks_override"
        )
        fitting = fitting_tokens(config, num_blocks)
        or_shorter = f", or lower max_model_len to at most {fitting}" if fitting else ""
        raise NotEnoughMemoryError(
            origin,
            f"one sequence of max_model_len={max_model_len} tokens needs {needed} KV-cache blocks "
            f"({needed * block_bytes} bytes), "
            f"there is room for {num_blocks} ({num_blocks * block_bytes} bytes), that is {fitting} "
            f"tokens; "
            f"give more memory through kv_cache_memory_bytes{or_shorter}",
        )
    return num_blocks


def plan_num_host_blocks(config: EngineConfig, block_bytes: int, free_bytes: int) -> int:
    """Host blocks for preempted requests: what fits swap_space and SWAP_MEMORY_FRACTION of
    `free_bytes`, no more than all requests need.
    """
    wanted_bytes = int(config.cache_config.swap_space * 2**30)
    num_bytes = min(wanted_bytes, int(free_bytes * SWAP_MEMORY_FRACTION))
    if num_bytes < wanted_bytes:
        sizes = wanted_bytes / 2**30, num_bytes / 2**30, 100 * SWAP_MEMORY_FRACTION
        logger.info("swap_space: %.1f GiB wanted, %.1f GiB taken, %d %% of the free memory", *sizes)
    blocks_per_sequence = -(
        -resolved(config.model_config.max_model_len) // config.cache_config.block_size
    )
    return min(num_bytes // block_bytes, blocks_per_sequence * config.scheduler_config.max_num_seqs)
