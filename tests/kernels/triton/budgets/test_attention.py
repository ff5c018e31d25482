"""Budgets of attention: no spills in any shape, tensor cores, and keys and values copied 16 bytes
at a time without passing through registers.
"""

import pytest
import torch
from quire.kernels.ops import AttentionMetadata, kv_cache_row
from quire.kernels.triton.attention import attend
from quire.tests.kernels.triton.budget import Budget, combinations, compile_launches, i32, i64

SEVEN_B, HALF_B = (28, 4, 128), (14, 2, 64)  # query heads, KV heads, head dimension
TENSOR_CORES = {
    "decode": {80: (r"\bHMMA\b",), 90: (r"\bHMMA\b",)},
    "prefill": {80: (r"\bHMMA\b",), 90: (r"\bHGMMA\b",)},
}
ASYNCHRONOUS = r"\bLDGSTS\S*\.128\b"

# In this order: states are stored, a barrier of all threads, release, counter, acquire, a barrier;
# a state is loaded only then.
HAND_OVER = (
    r"(?s)STG\.E.*?BAR\.SYNC.*?MEMBAR\.\w+\.GPU.*?ATOMG\.E\.ADD\.STRONG\.GPU"
    r".*?CCTL\.IVALL.*?BAR\.SYNC.*?LDGSTS.*?STG\.E"
)


def call(
    kind: str,
    heads: tuple[int, int, int],
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    **options,
):
    num_heads, num_kv_heads, head_dim = heads
    query_lens, num_decodes = ([1] * 8, 8) if kind == "decode" else ([300], 0)
    query = torch.empty(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)[
        :, :num_heads
    ]
    cache_dtype = cache_dtype or dtype
    row = kv_cache_row(head_dim, cache_dtype)
    caches = torch.empty(2, 9, block_size, num_kv_heads, row, dtype=cache_dtype)
    starts, lengths, tables, slots = (
        i32(len(query_lens) + 1),
        i32(len(query_lens)),
        i32(len(query_lens), 256),
        i64(len(query)),
    )
    metadata = AttentionMetadata(
        starts, lengths, tables, slots, num_decodes, query_lens, query_lens
    )
    return lambda: attend(query, *caches, metadata, 0.1, num_programs=4, **options)


def budget(
    name: str,
    registers: int,
    shared_kib: int,
    kind: str,
    *args,
    launches: int = 1,
    archs: tuple[int, ...] = (80, 90),
    **options,
) -> Budget:
    more = (ASYNCHRONOUS, HAND_OVER) if kind == "decode" and launches == 1 else (ASYNCHRONOUS,)
    contains = {arch: (*patterns, *more) for arch, patterns in TENSOR_CORES[kind].items()}
    return Budget(
        f"{kind} {name}",
        call(kind, *args, **options),
        registers,
        shared_kib * 1024,
        launches,
        contains=contains,
        archs=archs,
    )


def int8_budgets(kind: str, registers: int, shared_kib: int) -> list[Budget]:
    """Over int8 caches. The launch before attention turns the queries."""
    return [
        Budget(
            f"{kind} {heads}, int8 cache",
            call(kind, heads, cache_dtype=torch.int8),
            registers,
            shared_kib * 1024,
            launches=2,
            contains={arch: (*has, ASYNCHRONOUS) for arch, has in TENSOR_CORES[kind].items()},
        )
        for heads in (SEVEN_B, HALF_B)
    ]


def invariant_budgets() -> list[Budget]:
    """Two sums of a row leave room for one program per multiprocessor. The plan has few loads."""
    options = {"is_invariant": True}
    contains = (*TENSOR_CORES["prefill"][90], ASYNCHRONOUS)
    return [
        Budget(
            f"{kind} 7B, invariant",
            call(kind, SEVEN_B, **options),
            255,
            shared_kib * 1024,
            launches,
            wide_loads=launches == 1,
            contains={90: (*contains, *more)},
            archs=(90,),
        )
        for kind, shared_kib, launches, more in (
            ("decode", 113, 2, (HAND_OVER,)),
            ("prefill", 113, 1, ()),
        )
    ]


# Decodes: at most 168 registers and 77 KiB, so that at least two programs share a multiprocessor,
# each with two tiles in flight.
BUDGETS = [
    budget("7B", 168, 77, "decode", SEVEN_B, archs=(90,)),
    budget(
        "0.5B, two launches", 128, 40, "decode", HALF_B, one_launch=False, launches=2, archs=(80,)
    ),
    budget("7B", 232, 97, "prefill", SEVEN_B),
    *invariant_budgets(),
]
OTHERS = [
    budget("7B", 168, 77, "decode", SEVEN_B, archs=(80,)),
    budget("0.5B", 128, 40, "decode", HALF_B),
    budget("0.5B", 176, 49, "prefill", HALF_B),
    budget(
        "7B, window and soft-cap",
        208,
        78,
        "decode",
        SEVEN_B,
        8,
        torch.float16,
        sliding_window=4096,
        softcap=50.0,
    ),
    budget(
        "7B, window and soft-cap",
        232,
        97,
        "prefill",
        SEVEN_B,
        32,
        sliding_window=4096,
        softcap=50.0,
    ),
    budget("0.5B, sinks", 128, 40, "decode", HALF_B, sinks=torch.empty(HALF_B[0]), archs=(90,)),
    budget("0.5B, sinks", 176, 49, "prefill", HALF_B, sinks=torch.empty(HALF_B[0]), archs=(90,)),
    budget(
        "7B, fp8 cache", 176, 46, "decode", SEVEN_B, cache_dtype=torch.float8_e4m3fn, archs=(90,)
    ),
    budget(
        "7B, fp8 cache", 232, 65, "prefill", SEVEN_B, cache_dtype=torch.float8_e4m3fn, archs=(90,)
    ),
    *int8_budgets("decode", 248, 47),
    *int8_budgets("prefill", 255, 66),
    budget("96", 168, 78, "decode", (32, 32, 96)),
    budget("96", 232, 97, "prefill", (32, 32, 96)),
    budget("256", 208, 90, "decode", (8, 4, 256)),
    budget("256", 232, 97, "prefill", (8, 4, 256)),
    budget("512", 176, 113, "decode", (8, 1, 512), archs=(90,)),
    Budget(
        "prefill 512",
        call("prefill", (8, 1, 512)),
        200,
        100 * 1024,
        contains={90: (r"\bHMMA\b", ASYNCHRONOUS)},
        archs=(90,),
    ),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)


def test_two_launches_hand_nothing_over():
    launches = compile_launches(call("decode", HALF_B, one_launch=False), 80)
    assert [launch.kernel for launch in launches] == ["decode_kernel", "merge_kernel"]
    assert not any(launch.count("ATOM") for launch in launches)


def test_an_old_gpu_refuses_an_fp8_cache():
    with pytest.raises(ValueError, match="needs sm_89 or newer, this GPU is sm_80"):
        compile_launches(call("decode", HALF_B, cache_dtype=torch.float8_e4m3fn), 80)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(OTHERS), ids=str)
def test_budget_of_other_shapes(budget, arch):
    budget.check(arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "arch"),
    [
        (Budget(f"{kind} fp32 {dim}", call(kind, (8, 4, dim), 16, torch.float32)), arch)
        for kind in ("decode", "prefill")
        for dim in (64, 128, 256)
        for arch in (80, 90)
    ],
    ids=str,
)
def test_nothing_spills_in_fp32(budget, arch):
    budget.check(arch)
