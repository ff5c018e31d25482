"""Blocks and states that several ranks keep outside their caches: the same bits as in a large cache,
over restarts, and where a rank fails to keep or to load its share.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from quire import LLMEngine
from quire.executor.offload import block_store
from quire.executor.offload.names import piece_name
from quire.executor.ranks.messages import Kept, MoveBlocks, OffloadOpened
from quire.executor.ranks.offload import RanksOffload
from quire.frontend.clients.inproc_client import InprocClient
from quire.kernels.cpu.native.library import library
from quire.tests.client_forms import closing as closing_engine
from quire.tests.client_forms import make_engine
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.test_kv_offload import LARGE, SETTINGS, conversations, damage, run

SIZES = [(2, 1), (1, 2), (2, 2)]
HYBRID, WINDOWED = "granitemoehybrid", "gemma3_text"


def settings_of(kind: str, **settings: Any) -> dict[str, Any]:
    """Room for few blocks, and for few checkpoints."""
    common = SETTINGS | dict(dtype="float32", num_threads=1, state_checkpoint_interval=16)
    if kind == HYBRID:
        common["state_cache_memory_bytes"] = 2**16
    if kind == WINDOWED:
        common["num_gpu_blocks_override"] = 60
    return common | settings


@contextmanager
def threads(model: Path, size: int, num_stages: int, **settings: Any) -> Iterator[LLMEngine]:
    """An engine whose ranks are threads of this process."""
    executor = RankThreads(model, size, num_stages, **settings)
    config = executor.config
    engine = LLMEngine(config, InprocClient(config, executor=executor))
    core_of(engine).scheduler.limits.least_samples = 1
    with closing_engine(engine):
        yield engine
        assert engine.call_utility("check_integrity")


def core_of(engine: LLMEngine) -> Any:
    return engine.client._engine.core


def counts(engine: LLMEngine, *names: str) -> list[int]:
    metrics = engine.get_metrics()
    return [metrics[name] for name in names]


@pytest.mark.skipif(library is None, reason="torch's kernels do not promise the same bits")
@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [
        ("qwen2", 2, 1),
        ("qwen2", 1, 2),
        (HYBRID, 2, 1),
        (HYBRID, 1, 3),  # states, blocks, states
        (WINDOWED, 2, 1),
        pytest.param("qwen2", 2, 2, marks=pytest.mark.slow),
        pytest.param(HYBRID, 1, 2, marks=pytest.mark.slow),
        pytest.param(WINDOWED, 1, 2, marks=pytest.mark.slow),
        pytest.param("lfm3", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_as_a_large_cache(tiny, kind, size, num_stages, tmp_path):
    layers = {"num_hidden_layers": 4} if kind == WINDOWED else {}
    model, prompts = tiny(kind, vocab_size=1000, **layers), conversations(11, 7)
    large = LARGE | dict(state_cache_memory_bytes=2**24)
    with threads(model, size, num_stages, **settings_of(kind, **large)) as engine:
        expected = run(engine, prompts)
    offload = dict(kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    for is_second in (False, True):
        with threads(model, size, num_stages, **settings_of(kind, **offload)) as engine:
            assert run(engine, prompts) == expected
            metrics = engine.get_metrics()
            assert is_second or metrics["num_blocks_offloaded"] > 20
            assert metrics["num_blocks_reloaded"] > 20
            assert not metrics["num_blocks_corrupt"]
            assert kind != HYBRID or metrics["num_states_reloaded"] > 3
            if is_second:  # all that was computed before the restart
                assert metrics["num_prompt_tokens"] <= len(prompts) * 3 * 16
    files = sorted(file.name.partition("-")[2] for file in tmp_path.glob("*.kv"))
    count = size * num_stages
    assert files == [f"{rank}of{count}.kv" for rank in range(1, count + 1)]
    assert sum(file.stat().st_size for file in tmp_path.glob("*.kv")) <= 0.02 * 2**30
