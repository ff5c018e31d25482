"""Files of LoRA adapters: layouts, equality of the two formats, and refusals in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from quire.executor.weights.lora_files import Adapted, read_adapter
from quire.ipc.errors import ModelLoadError
from quire.kernels.lora import in_blocks
from quire.tests.gguf_files import write_gguf
from quire.tests.lora_adapters import write_gguf_adapter, write_peft
from safetensors.torch import save_file

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
EMBEDDING = "model.embed_tokens"
MODULES = {Q: Adapted(24, 32), K: Adapted(24, 16), EMBEDDING: Adapted(50, 24, is_embedding=True)}
HEADS = 4, 2


def pairs(rank: int = 4) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    sizes = {name: (module.in_features, module.out_features) for name, module in MODULES.items()}
    return {
        name: (
            torch.randn(rank, columns, generator=generator),
            torch.randn(rows, rank, generator=generator),
        )
        for name, (columns, rows) in sizes.items()
    }


def read(path: Path, max_rank: int = 16, dtype: torch.dtype = torch.float32):
    return read_adapter(path, MODULES, HEADS, max_rank, dtype)


def test_layout(tmp_path):
    made = pairs()
    found = read(write_peft(tmp_path, made, 4))
    assert found.keys() == MODULES.keys()
    for name, weights in found.items():
        a, b = made[name]
        assert torch.equal(weights.a, a.t() if name == EMBEDDING else a)
        assert torch.equal(weights.b, in_blocks(b))
        assert weights.a.is_contiguous() and weights.b.is_contiguous()
        assert (weights.rank, weights.scale) == (4, 2.0)


def test_ranks_and_scales_of_patterns(tmp_path):
    made = pairs() | {K: pairs(2)[K]}
    config = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"q_proj": 3}, "use_rslora": True}
    found = read(write_peft(tmp_path, made, 4, **config))
    assert {name: weights.rank for name, weights in found.items()} == {Q: 4, K: 2, EMBEDDING: 4}
    assert found[Q].scale == 3 / 2 and found[K].scale == 8 / math.sqrt(2)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_gguf_file_is_the_same_adapter(tmp_path, architecture):
    """Llama's conversion interleaves the rows of q and k."""
    made = pairs()
    heads = HEADS if architecture == "llama" else None
    path = write_gguf_adapter(tmp_path / "adapter.gguf", architecture, made, 8.0, heads)
    expected = read(write_peft(tmp_path / "peft", made, 4))
    found = read(path)
    assert found.keys() == expected.keys()
    for name, weights in found.items():
        assert torch.equal(weights.a, expected[name].a)
        assert torch.equal(weights.b, expected[name].b)
        assert weights.scale == expected[name].scale


def test_names_of_a_model_within_another(tmp_path):
    made = {"model.language_model.layers.0.self_attn.q_proj": pairs()[Q]}
    assert list(read(write_peft(tmp_path, made, 4))) == [Q]


def test_values_do_not_lie_in_the_file(tmp_path):
    path = write_peft(tmp_path, pairs(), 4)
    found = read(path)
    before = found[Q].a.clone()
    weights = path / "adapter_model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-4 * 24 * 4, 2)
        file.write(bytes(4 * 24 * 4))
    assert torch.equal(found[Q].a, before)


def _tensors(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    a, b = pairs()[Q]
    prefix = f"base_model.model.{Q}"
    return {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b} | {
        name.replace("__", "."): value for name, value in changes.items()
    }


@pytest.mark.parametrize(
    ("tensors", "config", "problem"),
    [
        ({}, {}, "the adapter has no tensors"),
        (_tensors(lora_magnitude_vector=torch.ones(1)), {}, "belongs to a DoRA adapter"),
        (_tensors(score__weight=torch.ones(1)), {}, "tensor score.weight is none of a LoRA"),
        (dict(list(_tensors().items())[:1]), {}, "lora_A.weight has no counterpart"),
        (_tensors(), {"r": 3}, "has rank 4, adapter_config.json says 3"),
        (_tensors(), {"target_modules": ["k_proj"]}, "target_modules does not name it"),
        (_tensors(), {"layers_to_transform": [1]}, "layers_to_transform does not have its layer"),
        (
            {name: torch.ones(4, 4) for name in _tensors()},
            {},
            r"q_proj.lora_A.weight: A and B have shapes \[4, 4\] and \[4, 4\], the module takes",
        ),
        ({name: torch.ones(4) for name in _tensors()}, {}, "A and B have shapes"),
        ({name: v * math.nan for name, v in _tensors().items()}, {}, "is not finite"),
        ({name: v.to(torch.int8) for name, v in _tensors().items()}, {}, "is of type I8"),
        (
            {name.replace("q_proj", "z_proj"): v for name, v in _tensors().items()},
            {"target_modules": None},
            "the model has no such module",
        ),
        (
            {
                name.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): v
                for name, v in _tensors().items()
            },
            {"target_modules": None},
            "adapters of mixture-of-experts layers are not supported",
        ),
        (
            _tensors() | {n.replace("model.model.", "model."): v for n, v in _tensors().items()},
            {},
            "the module has two adapters",
        ),
    ],
)
def test_what_is_refused(tmp_path, tensors, config, problem):
    write_peft(tmp_path, {Q: pairs()[Q]}, 4, **config)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=problem) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_rank_above_the_limit(tmp_path):
    with pytest.raises(ModelLoadError, match="q_proj.*its rank 4 is higher than max_lora_rank=3"):
        read(write_peft(tmp_path, {Q: pairs()[Q]}, 4), max_rank=3)


def test_files_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(ModelLoadError, match="has no adapter_config.json"):
        read(tmp_path)
    path = write_peft(tmp_path, pairs(), 4)
    weights = path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", whole[:7], whole[:100], whole[:-1], b"\xff" * 64):
        weights.write_bytes(content)
        with pytest.raises(ModelLoadError) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    weights.unlink()
    (path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="a pickle, which is never read"):
        read(path)
    (path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelLoadError, match="must hold a JSON object"):
        read(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.type": "model"}, "it must be a LoRA adapter"),
        ({"adapter.type": "control"}, "it must be a LoRA adapter"),
        ({"adapter.lora.alpha": "x"}, "adapter.lora.alpha must be a finite number"),
        ({"general.architecture": "nothing"}, "general.architecture 'nothing' is not supported"),
        ({"adapter.alora.invocation_tokens": [1]}, "activated LoRA"),
    ],
)
def test_gguf_files_that_are_refused(tmp_path, changes, problem):
    metadata = {
        "general.type": "adapter",
        "general.architecture": "qwen2",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    path = write_gguf(tmp_path / "adapter.gguf", metadata | changes)
    with pytest.raises(ModelLoadError, match=problem):
        read(path)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"blk.0.attn_q.weight": ((2, 2), "F32", bytes(16))}, "is none of a LoRA adapter"),
        ({"blk.0.attn_q.weight.lora_a": ((4, 24), "F32", bytes(384))}, "has no counterpart"),
        ({"blk.0.attn_q.weight.lora_a": ((4,), "F32", bytes(16))}, "must be a matrix"),
        ({"blk.0.attn_q.weight.lora_a": ((4, 1), "I32", bytes(16))}, "must be a matrix"),
    ],
)
def test_gguf_tensors_that_are_refused(tmp_path, tensors, problem):
    metadata = {
        "general.type": "adapter",
        "general.architecture": "qwen2",
        "adapter.lora.alpha": 8.0,
    }
    with pytest.raises(ModelLoadError, match=problem):
        read(write_gguf(tmp_path / "adapter.gguf", metadata, tensors))
