"""Engines on a fake GPU (tests/fake_gpu.py) that sleep, take other weights, share it and leave it:
the tokens of a fresh engine, no graph of weights or caches that are gone, and all memory back.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire import LLM, SamplingParams
from quire.executor import worker
from quire.executor.models.vision.encoder import VisionEncoder
from quire.ipc.config import EngineConfig
from quire.ipc.errors import NotEnoughMemoryError
from quire.tests.bundled_model import heads
from quire.tests.executor.driver import generate, start_executor
from quire.tests.fake_gpu import FREE_BYTES, TOTAL_BYTES, FakeGpu, fake_gpu
from quire.tests.seeing_models import save_seeing_model

KINDS = "qwen3", "qwen3_next"
PROMPTS = [{"prompt_token_ids": ids} for ids in ([1, 2, 3], list(range(5, 45)), [7, 8])]
PARAMS = [
    SamplingParams(temperature=0.9 * i, seed=i, max_tokens=5, ignore_eos=True, detokenize=False)
    for i in range(len(PROMPTS))
]
SIZES = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4, "num_threads": 1}
DRAFTS = {"method": "eagle3", "num_speculative_tokens": 2, "adaptive": False}


@pytest.fixture
def gpu(tiny: Callable[..., Path]) -> Iterator[FakeGpu]:
    for kind, seed in itertools.product(KINDS, (0, 1)):  # on the host, where transformers is
        tiny(kind, seed=seed)
    with fake_gpu() as gpu:
        yield gpu


def start(model: str | Path, **settings: Any) -> LLM:
    sizes = SIZES | {"num_gpu_blocks_override": 40, "dtype": "float32"}
    return LLM(str(model), engine="inproc", device="cuda", **sizes | settings)


def tokens(llm: LLM) -> list[list[int]]:
    answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    gc.collect()  # the graphs of a fake are in circles
    return [list(answer.outputs[0].token_ids) for answer in answers]


def fresh(model: str | Path, **settings: Any) -> list[list[int]]:
    with start(model, **settings) as llm:
        return tokens(llm)


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(("level", "kind"), [(1, "qwen3"), (2, "qwen3_next")])
def test_an_engine_sleeps_and_wakes_up(
    level: int, kind: str, tiny: Callable[..., Path], gpu: FakeGpu
) -> None:
    with start(tiny(kind)) as llm:
        expected, awake, graphs = tokens(llm), gpu.allocated, gpu.num_graphs
        memory = llm.collective_rpc("memory_usage")[0]
        assert graphs == 3
        llm.sleep(level)
        assert gpu.num_graphs == 0
        freed = memory["kv_cache_bytes"] + (level == 2) * memory["weights_bytes"]
        assert gpu.allocated <= awake - freed
        llm.wake_up()
        assert tokens(llm) == expected
        assert (gpu.allocated, gpu.num_graphs) == (awake, graphs)
    assert gpu.allocated == gpu.num_graphs == 0


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(("kind", "sleeps"), [("qwen3_next", False), ("qwen3", True)])
def test_new_weights_have_new_graphs(
    kind: str, sleeps: bool, tiny: Callable[..., Path], gpu: FakeGpu
) -> None:
    """Also those that an engine loads instead of its own as it wakes up."""
    expected = fresh(tiny(kind, seed=1))
    with start(tiny(kind)) as llm:
        assert tokens(llm) != expected
        awake, graphs = gpu.allocated, gpu.num_graphs
        if sleeps:
            llm.sleep(2)
        llm.load_weights(str(tiny(kind, seed=1)))
        if sleeps:
            llm.wake_up(["kv_cache"])
        assert tokens(llm) == expected
        assert (gpu.allocated, gpu.num_graphs) == (awake, graphs)
    assert gpu.allocated == 0


def test_a_cache_for_which_there_is_no_room(tiny: Callable[..., Path], gpu: FakeGpu) -> None:
    with pytest.raises(NotEnoughMemoryError, match="num_gpu_blocks_override: the KV cache would"):
        start(tiny("qwen3"), num_gpu_blocks_override=FREE_BYTES // 2**10)


@pytest.mark.slow
def test_what_drafts_sleeps_too(gpu: FakeGpu) -> None:
    with start("bundled", speculative_config=DRAFTS | {"model": heads.trained("eagle3")}) as llm:
        expected, awake, graphs = tokens(llm), gpu.allocated, gpu.num_graphs
        llm.sleep(2)
        assert gpu.num_graphs == 0
        llm.wake_up()
        assert tokens(llm) == expected
        assert (gpu.allocated, gpu.num_graphs) == (awake, graphs)
        llm.load_weights(llm.llm_engine.config.model_config.model)
        assert tokens(llm) == expected and gpu.allocated == awake
    assert gpu.allocated == gpu.num_graphs == 0


@pytest.mark.slow
def test_two_engines_share_a_gpu(tiny: Callable[..., Path], gpu: FakeGpu) -> None:
    """The second has what the first leaves of its share, and both compute in turn."""
    models = [tiny("qwen3"), tiny("qwen3", seed=1)]
    expected = [fresh(model) for model in models]
    # other processes use half of the GPU, and an engine wants as much as many requests need
    used, mib = TOTAL_BYTES - FREE_BYTES, 2**20
    settings = {"num_gpu_blocks_override": None, "max_num_seqs": 256}
    engines, sizes = [], []
    for model, wanted in zip(models, (8 * mib, 12 * mib)):
        share = (used + wanted) / TOTAL_BYTES
        engines.append(start(model, gpu_memory_utilization=share, **settings))
        sizes.append(engines[-1].collective_rpc("memory_usage")[0]["kv_cache_bytes"])
        assert gpu.allocated <= wanted
    assert sizes[0] > 4 * mib and sizes[1] < 4 * mib
    assert [tokens(llm) for llm in engines] == expected
    engines[0].__exit__()
    assert gpu.allocated < 8 * mib
    assert tokens(engines[1]) == expected[1]
    engines[1].__exit__()
    assert gpu.allocated == 0


def test_a_traced_step_is_timed_by_events(tiny: Callable[..., Path], gpu: FakeGpu) -> None:
    """On the clock of the GPU, each operation takes a millisecond."""
    worker = start_executor(tiny("qwen3"), device="cuda")
    expected = [row.output for row in generate(worker, [[1, 2, 3]], 3)]
    worker.start_trace(3)
    assert [row.output for row in generate(worker, [[1, 2, 3]], 3)] == expected
    recorded = worker.tracer or worker._stopped_tracer
    assert recorded is not None
    for step in recorded.take().values():
        milliseconds = {span.name: round(1e3 * span.seconds) for span in step.spans}
        kernels = [kernel for kernel in step.kernels if kernel.seconds > 0]
        assert all(round(kernel.seconds, 6) == 1e-3 for kernel in kernels)
        of_model = [kernel for kernel in kernels if kernel.module != "sampler"]
        assert milliseconds["model"] == len(of_model) > 20
        assert milliseconds["inputs"] < 10
    worker.shutdown()


def test_the_cache_leaves_room_for_the_encoding_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of as many rows as a step encodes."""
    directory = save_seeing_model(tmp_path / "model", "qwen3_5")
    asked: list[int] = []

    def encode_largest(encoder: VisionEncoder, num_rows: int) -> None:
        asked.append(num_rows)
        torch.empty(num_rows * 10_000, dtype=torch.uint8, device="cuda")

    def plan(config: EngineConfig, block_bytes: int, free_bytes: int, windows: Any) -> int:
        found.append(free_bytes)
        return 40

    monkeypatch.setattr(VisionEncoder, "encode_largest", encode_largest)
    monkeypatch.setattr(worker, "plan_num_blocks", plan)
    found: list[int] = []
    with fake_gpu():
        for most in (1, 20_000):
            sizes = {"max_encoder_tokens": most, "num_gpu_blocks_override": None}
            start(directory, **sizes).close()
    assert asked == [1, 20_000]
    assert 150_000_000 < found[0] - found[1] <= 200_000_000, found
