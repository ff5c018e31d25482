"""LoRA adapters of models in transformers' code, against transformers with merged weights."""

from __future__ import annotations

import copy

import pytest
import torch
from quire.executor.models.adapters import LinearAdapters
from quire.ipc.lora import LoRARequest
from quire.ipc.models.fallback_architectures import FALLBACKS
from quire.tests.executor.driver import Driver, greedy
from quire.tests.executor.models.fallback.test_model import (
    NUM_TOKENS,
    USUAL,
    assert_greedy,
    prompt,
    seen,
    start,
)
from quire.tests.lora_adapters import write_peft
from quire.tests.tiny_fallbacks import save_tiny_fallback
from transformers.pytorch_utils import Conv1D

RANK, SIZE = 4, 0.1


def pairs_for(model, oracle, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Adapters of all modules that take one; a tied head and its embedding are one weight, whose
    adapters cannot be merged.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = {oracle.get_input_embeddings(), oracle.get_output_embeddings()}
    is_tied = len({module.weight.data_ptr() for module in tied}) == 1
    pairs = {}
    for name, (adapters, index) in model.adapted_modules.items():
        if is_tied and oracle.get_submodule(name) in tied:
            continue
        shape = adapters.adapted(index)
        a = torch.randn(RANK, shape.in_features, generator=generator)
        b = torch.randn(shape.out_features, RANK, generator=generator)
        pairs[name] = SIZE * a, SIZE * b
    return pairs


@torch.no_grad()
def merged(oracle, pairs) -> torch.nn.Module:
    oracle = copy.deepcopy(oracle)
    for name, (a, b) in pairs.items():
        module, change = oracle.get_submodule(name), 2.0 * (b @ a)
        is_transposed = isinstance(module, Conv1D | torch.nn.Embedding)
        module.weight += change.t() if is_transposed else change
    return oracle


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.all_models)
        for name in FALLBACKS
    ],
)
def test_rows_are_those_of_merged_weights_and_of_the_base(model_type, tmp_path):
    oracle = save_tiny_fallback(tmp_path / "model", model_type)
    executor = start(tmp_path / "model", enable_lora=True, max_loras=2)
    model = executor.model
    oracles, loras = [oracle], [None]
    for number in (1, 2):
        pairs = pairs_for(model, oracle, number)
        attention = [name for name in pairs if "attn" in name or "attention" in name]
        assert len(attention) >= 3, pairs.keys()  # a layer has at least one
        path = write_peft(tmp_path / str(number), pairs, RANK)
        loras.append(LoRARequest(f"a{number}", number, str(path)))
        assert executor.add_lora(loras[-1])
        oracles.append(merged(oracle, pairs))
    with torch.inference_mode():
        logits = [one(torch.tensor([prompt(9, 5)]), use_cache=False).logits for one in oracles]
    assert min(float((one - logits[0]).abs().max()) for one in logits[1:]) > 0.02
    params = greedy(logprobs=2)
    rows, driver = [], Driver(executor)
    for together in (False, True):
        for number, lora in enumerate(loras):
            name, ids = f"{number}-{together}", prompt(13 + 9 * number, number)
            rows.append(driver.add(name, ids, params, lora_request=lora))
            if not together:
                driver.run(NUM_TOKENS)
                driver.free(rows[-1])
        driver.run(NUM_TOKENS, chunk=lambda row: 7 + row.slot)
    for alone, row, of_row in zip(rows[:3], rows[3:], oracles, strict=True):
        assert_greedy(of_row, alone)
        assert row.output == alone.output
        if not model.torch_products:
            assert seen(row) == seen(alone)
    executor.shutdown()


def test_modules_of_experts_take_none(tmp_path):
    save_tiny_fallback(tmp_path, "qwen2_moe")
    executor = start(tmp_path, enable_lora=True)
    modules = executor.model.adapted_modules
    assert "model.layers.0.mlp.shared_expert.down_proj" in modules
    assert not {name for name in modules if name.endswith("mlp.gate") or ".experts" in name}
    assert isinstance(modules["model.layers.0.self_attn.q_proj"][0], LinearAdapters)
    executor.shutdown()
