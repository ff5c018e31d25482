"""How memory is divided, as pure arithmetic, used by the engine at start-up and by `quire plan`.

Must not know: how much memory there is, torch, models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..config import CacheConfig, EngineConfig, resolved
from ..errors import NotEnoughMemoryError
from .kv_layout import make_layout
from .ranks import num_ranks

logger = logging.getLogger(__name__)

# of the memory that is free after loading the weights; activations and other programs use the rest
CPU_MEMORY_FRACTION = 0.4
SWAP_MEMORY_FRACTION = 0.25  # of the memory that is free then; upper bound of swap_space
# Of the same memory, for recurrent states of requests that run, and for checkpoints of states.
STATES_MEMORY_FRACTION = 0.25
CHECKPOINTS_MEMORY_FRACTION = 0.1
MOST_CHECKPOINTS = 65_536  # of tiny states more would only cost time
QUANTIZATION_BITS = {"int8": 8, "int4": 4}  # per weight
# of a quantized model's head, which may also be the embedding's table: 4 bits lose too much
HEAD_BITS = 8
# rows and columns of a weight that are packed together; a remainder takes as much as a whole one
QUANTIZED_PANEL, QUANTIZED_DEPTH = 16, 64
# columns of a row with one scale; at 4 bits, with two factors
QUANTIZED_GROUP, QUANTIZED_SCALE_BYTES = {8: 256, 4: 64}, {8: 2, 4: 4}


def quantized_bytes(rows: int, columns: int, bits: int) -> int:
    """Size of a packed quantized weight: its integers, and a scale for each group of a row.

    See kernels/cpu/native/quantized.py.
    """
    depth = -(-columns // QUANTIZED_DEPTH) * QUANTIZED_DEPTH
    row_bytes = (
        depth * bits // 8 + -(-columns // QUANTIZED_GROUP[bits]) * QUANTIZED_SCALE_BYTES[bits]
    )
    return -(-rows // QUANTIZED_PANEL) * QUANTIZED_PANEL * row_bytes


def check_weights_fit(weights_bytes: int, kind: str, free_bytes: int) -> None:
    """Raises NotEnoughMemoryError before the weights are read: the system's OOM killer gives no
    reason.
    """
    if weights_bytes > free_bytes:
        raise NotEnoughMemoryError(
            "model",
            f"its weights take {weights_bytes} bytes as {kind}, {free_bytes} bytes are free; "
            f"quire plan shows what a model needs",
        )


def free_of_share(free_bytes: int, total_bytes: int, share: float) -> int:
    """What is free of `share` of a GPU's memory, counting memory that other processes use.

    Can be negative.
    """
    return free_bytes - (total_bytes - int(total_bytes * share))


def affordable_blocks(config: EngineConfig, block_bytes: int, free_bytes: int) -> int:
    """KV-cache blocks that fit: num_gpu_blocks_override, or what fits kv_cache_memory_bytes, or
    else `free_bytes` (on a CPU CPU_MEMORY_FRACTION of them, without those of offloaded blocks).
    Blocks of a model without attention that is cached have no bytes: as many as its requests need.
    """
    cache_config = config.cache_config
    if cache_config.num_gpu_blocks_override is not None:
        return cache_config.num_gpu_blocks_override
    if not block_bytes:
        return _most_blocks(config, (0,))
    if cache_config.kv_cache_memory_bytes is not None:
        return cache_config.kv_cache_memory_bytes // block_bytes
    device_config = config.device_config
    share = CPU_MEMORY_FRACTION / device_config.data_parallel_size
    if device_config.device == "cuda":  # engines have GPUs of their own
        share = 1.0
    elif cache_config.kv_offloading_size and cache_config.kv_offloading_path is None:
        # all ranks of an engine share it, as they share the memory
        of_rank = int(cache_config.kv_offloading_size * 2**30) // num_ranks(config)
        free_bytes -= of_rank * device_config.data_parallel_size
    return max(0, int(free_bytes * share)) // block_bytes


def fitting_tokens(
    config: EngineConfig, num_blocks: int, windows: Sequence[int] = (0,), limit: int | None = None
) -> int:
    """The longest sequence in tokens that this many blocks hold; block 0 is the null block.

    `windows`: see KVLayout; `limit`: where no number of tokens needs more blocks, default
    max_model_len.
    """
    layout = make_layout(config, windows)
    if not layout.has_windows:
        return max(0, num_blocks - 1) * layout.block_size
    return layout.longest(
        max(0, num_blocks - 1), limit or resolved(config.model_config.max_model_len)
    )


def plan_num_blocks(
    config: EngineConfig, block_bytes: int, free_bytes: int, windows: Sequence[int] = (0,)
) -> int:
    """The number of KV-cache blocks to allocate, including the null block. `windows`: see KVLayout.

    This is what fits, but by default at most what max_num_seqs sequences of max_model_len need.
    Raises NotEnoughMemoryError if one sequence of max_model_len does not fit: it could never
    finish.
    """
    cache_config, max_model_len = config.cache_config, resolved(config.model_config.max_model_len)
    blocks_per_sequence = make_layout(config, windows).most_blocks(max_model_len)
    wanted = _most_blocks(config, windows)
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
        fitting = fitting_tokens(config, num_blocks, windows)
        or_shorter = f", or lower max_model_len to at most {fitting}" if fitting else ""
        raise NotEnoughMemoryError(
            origin,
            f"one sequence of max_model_len={max_model_len} tokens needs {needed} KV-cache blocks "
            f"({needed * block_bytes} bytes), there is room for {num_blocks} "
            f"({num_blocks * block_bytes} bytes), that is {fitting} tokens; give more memory "
            f"through kv_cache_memory_bytes{or_shorter}",
        )
    return num_blocks


def _most_blocks(config: EngineConfig, windows: Sequence[int]) -> int:
    """What max_num_seqs sequences of max_model_len need, and the null block."""
    max_model_len = resolved(config.model_config.max_model_len)
    blocks_per_sequence = make_layout(config, windows).most_blocks(max_model_len)
    return 1 + blocks_per_sequence * config.scheduler_config.max_num_seqs


def plan_states(config: EngineConfig, place_bytes: int, free_bytes: int) -> tuple[int, int]:
    """How many requests can run at a time, at most max_num_seqs, and how many checkpoints of their
    states are kept. place_bytes: of the states of one request.

    Raises NotEnoughMemoryError where not even one request has room.
    """
    wanted, number = config.scheduler_config.max_num_seqs, config.device_config.data_parallel_size
    fitting = int(free_bytes * STATES_MEMORY_FRACTION / number) // place_bytes
    if not fitting:
        raise NotEnoughMemoryError(
            "model", f"the states of one request take {place_bytes} bytes, {free_bytes} are free"
        )
    if fitting < wanted:
        logger.warning(
            "max_num_seqs=%d: the states of %d requests fit the memory, %.1f MiB each",
            *(wanted, fitting, place_bytes / 2**20),
        )
    budget = config.cache_config.state_cache_memory_bytes
    if budget is None:
        budget = int(free_bytes * CHECKPOINTS_MEMORY_FRACTION / number)
    return min(wanted, fitting), min(budget // place_bytes, MOST_CHECKPOINTS)


def check_cache_size(
    cache_config: CacheConfig, num_bytes: int, free_bytes: int, total_bytes: int
) -> str:
    """Checks a KV cache whose size the user sets; others follow from the free memory. Its pages are
    allocated when they are written, so the system would accept any size, and end the process later.

    num_bytes: of the caches of all engines and ranks that share this memory. total_bytes: that
    there is at all. Returns a warning if it is more than is free, or "". Raises
    NotEnoughMemoryError if it is more than there is.
    """
    name = "num_gpu_blocks_override"
    if cache_config.num_gpu_blocks_override is None:
        name = "kv_cache_memory_bytes"
        if cache_config.kv_cache_memory_bytes is None:
            return ""
    asked = f"the KV cache would take {num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB)"
    if num_bytes > total_bytes:
        raise NotEnoughMemoryError(
            name,
            f"{asked}, but this machine has {total_bytes:,} bytes ({total_bytes / 2**30:.1f} GiB) "
            f"of memory for it; without {name} the KV cache follows from the free memory",
        )
    if num_bytes > free_bytes:
        free = max(0, free_bytes)
        return (
            f"{name}: {asked}, but only {free:,} bytes ({free / 2**30:.1f} GiB) are free: the "
            f"system may end the engine when the cache fills"
        )
    return ""


def plan_num_host_blocks(
    config: EngineConfig, block_bytes: int, free_bytes: int, windows: Sequence[int] = (0,)
) -> int:
    """Host blocks for preempted requests: what fits swap_space and SWAP_MEMORY_FRACTION of
    `free_bytes`, but at most what all requests need. `windows`: see KVLayout. Blocks without bytes,
    of a model whose layers all keep states, are as many as all requests need, unless swap_space is
    0.
    """
    most = _most_blocks(config, windows) - 1
    if not block_bytes:
        return most if config.cache_config.swap_space else 0
    wanted_bytes = int(config.cache_config.swap_space * 2**30)
    number = config.device_config.data_parallel_size  # of engines that share this memory
    num_bytes = min(wanted_bytes, int(free_bytes * SWAP_MEMORY_FRACTION / number))
    if num_bytes < wanted_bytes:
        sizes = wanted_bytes / 2**30, num_bytes / 2**30, 100 * SWAP_MEMORY_FRACTION
        logger.info("swap_space: %.1f GiB wanted, %.1f GiB taken, %d %% of the free memory", *sizes)
    return min(num_bytes // block_bytes, most)
