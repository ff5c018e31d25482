"""The division of memory: number of blocks, the longest sequence, and refusals that contain the
figures.
"""

from __future__ import annotations

import msgspec
import pytest
from quire.ipc.config import CacheConfig, EngineConfig
from quire.ipc.errors import InvalidParameterError, NotEnoughMemoryError
from quire.ipc.failures import pack_exception, unpack_exception
from quire.ipc.models.memory_plan import check_cache_size, check_weights_fit, plan_num_blocks

BLOCK_BYTES = 1000
PLENTY = 10**12


def plan(
    free_bytes: int = PLENTY,
    max_model_len: int = 100,
    max_num_seqs: int = 4,
    device: str = "cpu",
    tensor_parallel_size: int = 1,
    **cache_arguments,
) -> int:
    sections = {
        "model_config": {"max_model_len": max_model_len},
        "scheduler_config": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048},
        "cache_config": cache_arguments,
        "device_config": {"device": device, "tensor_parallel_size": tensor_parallel_size},
    }
    return plan_num_blocks(msgspec.convert(sections, EngineConfig), BLOCK_BYTES, free_bytes)


def test_at_most_what_all_sequences_need():
    assert plan() == 1 + 4 * 7  # 100 tokens take 7 blocks of 16; block 0 is the null block
    assert plan(max_model_len=96) == 1 + 4 * 6
    assert plan(max_num_seqs=1, block_size=128) == 1 + 1


def test_at_most_two_fifths_of_free_memory():
    assert plan(free_bytes=50_000) == 20
    assert plan(free_bytes=49_999) == 19
    assert plan(free_bytes=20_000) == 8  # one sequence and the null block


def test_offloaded_blocks_in_memory_are_left_out():
    size = 10_240 / 2**30
    assert plan(free_bytes=60_240, kv_offloading_size=size) == 20
    assert plan(free_bytes=60_240, kv_offloading_size=size, kv_offloading_path="/kv") == 24
    # a rank, with its part of the memory, keeps its part of the blocks
    of_rank = dict(tensor_parallel_size=2, free_bytes=60_240)
    assert plan(kv_offloading_size=2 * size, **of_rank) == 20


def test_a_gpu_uses_all_of_the_engines_share():
    assert plan(free_bytes=20_000, device="cuda") == 20
    assert plan(free_bytes=PLENTY, device="cuda") == 1 + 4 * 7


def test_given_bytes_and_blocks_override():
    assert plan(free_bytes=0, kv_cache_memory_bytes=12_999) == 12
    # more than all sequences need: room for the prefix cache
    assert plan(kv_cache_memory_bytes=10**6) == 1000
    assert plan(free_bytes=0, num_gpu_blocks_override=9) == 9
    assert plan(kv_cache_memory_bytes=12_999, num_gpu_blocks_override=11) == 11


@pytest.mark.parametrize(
    ("arguments", "parameter", "blocks", "fitting"),
    [
        ({"free_bytes": 19_999}, "kv_cache_memory_bytes", 7, 96),
        ({"free_bytes": 0}, "kv_cache_memory_bytes", 0, 0),
        ({"kv_cache_memory_bytes": 7_999}, "kv_cache_memory_bytes", 7, 96),
        ({"num_gpu_blocks_override": 3}, "num_gpu_blocks_override", 3, 32),
    ],
)
def test_one_sequence_must_fit(arguments, parameter, blocks, fitting):
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(**arguments)
    assert caught.value.parameter == parameter
    for figure in (
        "max_model_len=100 tokens needs 8 KV-cache blocks (8000 bytes)",
        f"room for {blocks} ({blocks * 1000} bytes)",
        f"{fitting} tokens",
        "kv_cache_memory_bytes",
    ):
        assert figure in str(caught.value)


@pytest.mark.parametrize(
    "size", [{"kv_cache_memory_bytes": 1}, {"num_gpu_blocks_override": 1}], ids=str
)
def test_a_cache_of_a_given_size_must_fit_into_the_machine(size):
    """What is more than there is is refused; more than is free now gives a warning."""
    config, (name,) = CacheConfig(**size), size
    assert check_cache_size(config, 1000, free_bytes=1000, total_bytes=2000) == ""
    warning = check_cache_size(config, 2000, free_bytes=1000, total_bytes=2000)
    assert warning.startswith(
        f"{name}: the KV cache would take 2,000 bytes (0.0 GiB), but only 1,000 "
    )
    with pytest.raises(NotEnoughMemoryError, match=f"{name}: .* 2,001 bytes .* machine has 2,000 "):
        check_cache_size(config, 2001, free_bytes=1000, total_bytes=2000)
    assert check_cache_size(CacheConfig(), 2001, free_bytes=1000, total_bytes=2000) == ""


def test_weights_must_fit():
    check_weights_fit(1000, "float32", 1000)
    with pytest.raises(
        NotEnoughMemoryError,
        match="^model: its weights take 1001 bytes as bfloat16, 1000 bytes are free",
    ) as caught:
        check_weights_fit(1001, "bfloat16", 1000)
    again = unpack_exception(pack_exception(caught.value), RuntimeError)
    assert (
        type(again) is NotEnoughMemoryError
        and str(again) == str(caught.value)
        and isinstance(again, InvalidParameterError)
    )
