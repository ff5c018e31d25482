"""Mixtures of experts in a model: the experts are transformers', and stacked checkpoints give the
same weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.executor.models.experts import MixtureOfExperts
from quire.ipc.models.architectures import ARCHITECTURES, find_architecture
from quire.ipc.models.stacked_experts import stacked_pieces
from quire.kernels import registry
from quire.tests.executor.driver import generate, greedy, start_executor
from quire.tests.executor.models.fallback.test_gguf import start
from quire.tests.executor.on_device import use_forward
from quire.tests.gguf_fallbacks import write_fallback_gguf
from quire.tests.tiny_fallbacks import save_tiny_fallback
from quire.tests.tiny_models import make_tiny_config
from safetensors.torch import load_file, save_file

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"]
PROMPT = [5, 9, 250, 17, 100, 3, 3, 41, 77, 201, 6]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_token_has_the_experts_that_transformers_chooses(kind, tiny, oracle, monkeypatch):
    directory = tiny(kind)
    theirs: list[torch.Tensor] = []
    model = oracle(directory)
    routers = [m for name, m in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    hooks = [r.register_forward_hook(lambda _, __, out: theirs.append(out[2])) for r in routers]
    with torch.inference_mode():
        model(torch.tensor([PROMPT]))
    for hook in hooks:
        hook.remove()
    executor = start_executor(directory)
    ours: list[torch.Tensor] = []
    use_forward(executor, None)  # a record of calls cannot be watched
    for layer in executor.model.layers:
        if isinstance(block := layer.mlp, MixtureOfExperts):
            block.ops = _Watched(block.ops, ours)
    generate(executor, [PROMPT], 1)
    assert len(ours) == len(theirs) > 0
    for mine, expected in zip(ours, theirs):
        assert torch.equal(mine.long(), expected)


class _Watched:
    """An OpTable that keeps the experts of each call."""

    def __init__(self, ops: Any, ids: list[torch.Tensor]):
        self._ops, self._ids = ops, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route_experts(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = self._ops.route_experts(*args)
        self._ids.append(ids.clone())
        return ids, weights


def stacked_copy(directory: Path, target: Path, kind: str) -> Path:
    """The checkpoint with the experts of a layer in one tensor, as transformers 5 has them."""
    shutil.copytree(directory, target)
    hf_config = make_tiny_config(kind).to_dict()
    architecture = ARCHITECTURES[find_architecture(hf_config)]
    tensors = load_file(directory / "model.safetensors")
    shapes = architecture.weight_shapes(architecture.parse(hf_config))
    for name, piece in stacked_pieces(shapes).items():
        values = tensors.pop(name)
        if piece.expert is None:
            tensors[piece.stored] = values
            continue
        whole = tensors.setdefault(piece.stored, torch.zeros(piece.shape))
        whole[piece.expert, piece.rows] = values
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_stacked_checkpoints_give_the_same_tokens(kind, tiny, tmp_path):
    directory = tiny(kind)
    stacked = stacked_copy(directory, tmp_path / "stacked", kind)
    names = load_file(stacked / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    (expected,) = generate(start_executor(directory), [PROMPT], 8)
    (row,) = generate(start_executor(stacked), [PROMPT], 8)
    assert row.output == expected.output


@pytest.mark.skipif(
    registry.select("cpu", torch.bfloat16).chosen["fused_moe"] != "native",
    reason="the native library is not built",
)
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_experts_of_a_gguf_file_stay_blocks_in_one_recorded_step(kind, tmp_path):
    write_fallback_gguf(tmp_path / "m.gguf", save_tiny_fallback(tmp_path, kind))
    executor = start(tmp_path / "m.gguf", dtype="bfloat16")
    assert executor.runner.program is not None
    experts = executor.model.layers[-1].mlp.experts
    for layer in (*experts.gate_up, *experts.down):
        assert [part.type for part in layer.parts] == ["Q8_0"]
    prompts = [PROMPT, PROMPT[:2], PROMPT[3:8]]
    together = generate(executor, prompts, 6, greedy(logprobs=3))
    for prompt, expected in zip(prompts, together):
        (alone,) = generate(executor, [prompt], 6, greedy(logprobs=3))
        assert alone.output == expected.output
        for mine, other in zip(alone.logprobs, expected.logprobs, strict=True):
            assert mine[1].tobytes() == other[1].tobytes()
