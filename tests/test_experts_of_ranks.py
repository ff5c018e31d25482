"""Mixtures of experts that pool or read images, with ranks and with experts that two engines
divide: the numbers and tokens of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from quire import LLM
from quire.core.engine_core import EngineCore
from quire.executor import executor
from quire.ipc.config import EngineConfig
from quire.tests.executor.engine_threads import SharingRanks
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.test_images import answers, configure, parts_of, request_of, start
from quire.tests.tiny_models import save_tiny_model
from quire.tests.tiny_vision import save_tiny_vision_model

RANKS = {
    "tensor ranks": (RankThreads, 2, 1),
    "stages": (RankThreads, 1, 2),
    "experts": (SharingRanks, 1, 1),
    "experts, tensor ranks": (SharingRanks, 2, 1),
    "experts, stages": (SharingRanks, 1, 2),
}
FAST = "experts, tensor ranks"
NAMES = [
    pytest.param(name, marks=() if name == FAST else pytest.mark.slow, id=name) for name in RANKS
]
TEXTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 2, 7], [11, 3], [4] * 30)]


def parts(name: str) -> tuple[Callable[[EngineConfig], Any], dict[str, int]]:
    make, size, num_stages = RANKS[name]
    return make, {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}


@pytest.mark.parametrize("name", NAMES)
def test_pooling(name: str, tmp_path, monkeypatch) -> None:
    model, (make, sizes) = str(save_tiny_model(tmp_path, "qwen3_moe")), parts(name)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_threads": 1}
    found = []
    for own in ({}, sizes):
        with LLM(model, runner="pooling", engine="inproc", **settings, **own) as llm:
            outputs = llm.embed(TEXTS, use_tqdm=False)
        found.append(np.stack([output.outputs.data for output in outputs]))
        monkeypatch.setattr(executor, "make_executor", make)
    tolerance = 0 if sizes["tensor_parallel_size"] == 1 else 1e-5
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_images(name: str, tmp_path) -> None:
    kind, (make, sizes) = "qwen3_vl_moe", parts(name)
    layers = {"num_hidden_layers": 6}  # two stages have three each, of which two add rows
    save_tiny_vision_model(tmp_path, kind, text=layers)
    config = configure(tmp_path, max_num_batched_tokens=48, **sizes)
    ranks, one = make(config), start(tmp_path, max_num_batched_tokens=48)
    core = EngineCore(config, ranks, check_every_step=True)
    requests = [request_of(one, name, own) for name, own in parts_of(kind).items()]
    try:
        assert answers(core, *requests) == answers(one, *requests)
    finally:
        ranks.shutdown()
