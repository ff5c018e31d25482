"""Adapters of a rank, through the executor: reading, adding, removing, places; logits of adapted
models against models whose weights are merged.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quire import InvalidParameterError, LoRARequest
from quire.executor.loras import Loras
from quire.executor.single_process import SingleProcessExecutor
from quire.ipc.config import LoRAConfig
from quire.ipc.step_messages import SchedulerOutput
from quire.tests.executor.driver import Driver, Row, greedy, start_executor
from quire.tests.lora_adapters import (
    PROJECTIONS,
    adapted_weights,
    merge,
    random_pairs,
    write_peft,
)

REQUEST = LoRARequest("sql", 1, "/nowhere/sql")
PROMPTS = [[5, 9, 2, 7, 1, 8, 44, 3, 17], [11, 200, 30], [4] * 40]
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}


def start(model: Path, **arguments) -> SingleProcessExecutor:
    return start_executor(model, **{**LORA, **arguments})


def add(executor: SingleProcessExecutor, number: int, path: Path) -> LoRARequest:
    request = LoRARequest(f"adapter-{number}", number, str(path))
    assert executor.add_lora(request)
    return request


def run(
    executor: SingleProcessExecutor,
    requests: list[tuple[list[int], LoRARequest | None]],
    max_tokens: int = 6,
    chunk=None,
    params=None,
) -> list[Row]:
    driver = Driver(executor)
    rows = [
        driver.add(f"r{i}", prompt, params or greedy(logprobs=320), lora_request=adapter)
        for i, (prompt, adapter) in enumerate(requests)
    ]
    driver.run(max_tokens, chunk)
    leave = SchedulerOutput(0, [], [], [], [], freed_slots=[row.slot for row in rows])
    executor.execute_model(leave)
    assert [row.error for row in rows] == [None] * len(rows)
    return rows


def by_token(row: Row) -> np.ndarray:
    """[tokens, vocab_size]: the log-probabilities of each step, in the order of token ids."""
    out = []
    for ids, logprobs, _ in row.logprobs:
        values = np.zeros(int(ids.max()) + 1, np.float32)
        values[ids] = logprobs
        out.append(values)
    return np.array(out)


def bits(rows: list[Row]) -> list[tuple[list[int], bytes]]:
    return [(row.output, by_token(row).tobytes()) for row in rows]


def test_a_rank_without_adapters() -> None:
    loras = Loras(LoRAConfig(), torch.float32)
    assert loras.list() == set()
    assert loras.remove(1) is False
    with pytest.raises(InvalidParameterError, match="lora_request: needs an engine with"):
        loras.read(REQUEST)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "phi3", "gemma3_text", "granite", "olmo2"])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_logits_are_those_of_merged_weights(tiny, tmp_path, kind, kernels):
    base = tiny(kind)
    modules = (*PROJECTIONS, "qkv_proj", "gate_up_proj", "lm_head", "embed_tokens")
    if kind == "gemma3_text":  # its head is tied
        modules = PROJECTIONS
    pairs = random_pairs(adapted_weights(base, modules), size=0.1)
    for name in [name for name in pairs if name.endswith("embed_tokens")]:
        a, b = pairs[name]  # of W [vocab_size, hidden_size], B A is the transposed change
        pairs[name] = b.t().contiguous(), a.t().contiguous()
    chosen = {} if kernels == "native" else {"kernels": {"add_lora": "reference"}}
    executor = start(base, **chosen)
    adapter = add(executor, 1, write_peft(tmp_path / "adapter", pairs))
    mine = run(executor, [(prompt, adapter) for prompt in PROMPTS])
    merged = start_executor(merge(base, tmp_path / "merged", pairs))
    theirs = run(merged, [(prompt, None) for prompt in PROMPTS])
    for one, other in zip(mine, theirs, strict=True):
        assert one.output == other.output
        np.testing.assert_allclose(by_token(one), by_token(other), atol=1e-4)
    changed = run(executor, [(PROMPTS[0], None)])
    assert not np.allclose(by_token(changed[0]), by_token(mine[0]), atol=1e-2)
