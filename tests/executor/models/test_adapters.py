"""The layers of a model that take adapters, and what adapters are put into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quire.executor.loras import adapted_modules
from quire.executor.models import find_model
from quire.executor.models.adapters import AdapterRows, LinearAdapters
from quire.executor.models.layers import LayerFactory
from quire.executor.weights.lora_files import AdapterWeights
from quire.ipc.config import LoRAConfig
from quire.kernels import registry
from quire.kernels.lora import in_blocks

CONFIG = LoRAConfig(enable_lora=True, max_loras=2, max_lora_rank=8)


def adapted(directory: Path, dtype: torch.dtype = torch.float32):
    hf_config = json.loads((directory / "config.json").read_text())
    found = find_model(hf_config)
    ops = registry.select("cpu", dtype, head_dim=16)
    make = LayerFactory(ops, dtype, torch.device("cpu"), loras=CONFIG)
    model = found.build(found.parse_config(hf_config), make, 64)
    model.use_adapters(make.adapter_rows, adapted_modules(model))
    return model


def test_every_linear_layer_and_the_embedding_take_adapters(tiny):
    model = adapted(tiny("qwen2"))
    weights = {name.removesuffix(".weight"): t for name, t in model.weights() if t.dim() == 2}
    assert model.adapted_modules.keys() == weights.keys()
    for name, (adapters, index) in model.adapted_modules.items():
        module = adapters.adapted(index)
        shape = module.out_features, module.in_features
        assert shape[:: -1 if module.is_embedding else 1] == tuple(weights[name].shape)
    merged = [
        model.adapted_modules[f"model.layers.0.self_attn.{name}_proj"] for name in ("q", "k", "v")
    ]
    assert len({id(adapters) for adapters, _ in merged}) == 1
    assert [index for _, index in merged] == [0, 1, 2]


def test_a_tied_head_has_adapters_of_its_own(tiny):
    modules = adapted(tiny("gemma3_text")).adapted_modules
    head, table = modules["lm_head"][0], modules["model.embed_tokens"][0]
    assert isinstance(head, LinearAdapters) and not isinstance(table, LinearAdapters)


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss"])
def test_experts_and_routers_take_none(tiny, kind):
    names = list(adapted(tiny(kind)).adapted_modules)
    assert any("self_attn" in name for name in names)
    routed = ("mlp.gate", "mlp.router", "shared_expert_gate")
    assert [name for name in names if ".experts." in name or name.endswith(routed)] == []


def test_a_place_keeps_nothing_of_the_adapter_before():
    ops = registry.select("cpu", torch.float32)
    rows = AdapterRows(torch.device("cpu"))
    adapters = LinearAdapters(ops, rows, 2, 8, 6, [4, 2], torch.float32)
    x = torch.randn(3, 6)

    def weights(rank: int, columns: int) -> AdapterWeights:
        return AdapterWeights(torch.randn(rank, 6), in_blocks(torch.randn(columns, rank)), 0.5)

    adapters.put(1, 0, weights(8, 4))
    adapters.put(1, 1, weights(8, 2))
    adapters.clear(1)
    new = weights(3, 2)
    adapters.put(1, 1, new)
    rows.begin(torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([2]))
    y = torch.zeros(3, 6)
    adapters.add(y, x)
    expected = torch.zeros(3, 6)
    expected[0, 4:] = 0.5 * (x[0] @ new.a.t()) @ new.b[0, :, :2]
    torch.testing.assert_close(y, expected)
    assert torch.equal(y[1:], torch.zeros(2, 6))
    logits = torch.zeros(1, 6)
    adapters.add(logits, x[2:], is_logits=True)
    assert torch.equal(logits, torch.zeros(1, 6))  # row 2, place 0
    rows.use_one(1, 1)
    adapters.add(logits, x[:1], is_logits=True)
    assert torch.equal(logits, y[:1])
