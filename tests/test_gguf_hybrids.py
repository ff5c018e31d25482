"""GGUF files of the families whose layers differ in kind answer as their safetensors do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quire import LLM, EngineArgs, ModelLoadError, SamplingParams
from quire.frontend.diagnosis.model import check_model
from quire.frontend.model_info.plan import make_plan
from quire.tests.executor.weights.test_gguf import needs_native
from quire.tests.gguf_files import write_gguf
from quire.tests.gguf_hybrids import write_hybrid_gguf
from quire.tests.tiny_models import save_tiny_model

PROMPTS = [{"prompt_token_ids": [3 + i % 290 for i in range(n)]} for n in (5, 90)]
SETTINGS: dict[str, Any] = dict(engine="inproc", max_model_len=256, max_logprobs=320)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5_text", {}),
    "qwen35moe": ("qwen3_5_moe_text", {}),
    "qwen3next": ("qwen3_next", {"mlp_only_layers": []}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", {"routed_scaling_factor": 1.0, "tie_word_embeddings": True}),
    "granitehybrid": ("granitemoehybrid", {}),
    "granitehybrid, dense and rotated": (
        "granitemoehybrid",
        {"num_local_experts": 0, "intermediate_size": 80, "position_embedding_type": "rope"},
    ),
    "falcon-h1": ("falcon_h1", {"mamba_norm_before_gate": False, "mamba_rms_norm": True}),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "mamba2": ("mamba2", {}),
    "kimi-linear": ("kimi_linear", {"linear_num_heads": 4, "n_group": 1, "topk_group": 1}),
}
# All columns are whole blocks.
WIDE: dict[str, dict[str, Any]] = {
    "qwen35": {"linear_value_head_dim": 16},
    "lfm2": {},
    "granitehybrid": {"shared_intermediate_size": 96},
    "falcon-h1": {},
    "nemotron_h": {},
    "kimi-linear": {"linear_head_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
}


def answers(model: Path, dtype: str, **params: Any) -> list[Any]:
    greedy = SamplingParams(temperature=0, ignore_eos=True, **params)
    with LLM(str(model), dtype=dtype, **SETTINGS) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_safetensors(name: str, tmp_path: Path) -> None:
    """Only the file describes the model: kinds of layers, sizes of mixers, orders, changed
    values.
    """
    kind, overrides = MODELS[name]
    directory = save_tiny_model(tmp_path / "model", kind, **overrides)
    write_hybrid_gguf(tmp_path / "m.gguf", directory)
    expected = [answer.token_ids for answer in answers(directory, "float32", max_tokens=16)]
    found = [answer.token_ids for answer in answers(tmp_path / "m.gguf", "float32", max_tokens=16)]
    assert found == expected


@needs_native
@pytest.mark.parametrize("name", WIDE)
def test_blocks_are_multiplied_as_they_are(name: str, tmp_path: Path) -> None:
    """In bf16, with log-probabilities close to those of the numbers in fp32."""
    kind, overrides = MODELS[name]
    directory = save_tiny_model(tmp_path / "model", kind, **overrides | WIDE[name])
    write_hybrid_gguf(tmp_path / "m.gguf", directory, "Q8_0")
    arguments = EngineArgs(str(tmp_path / "m.gguf"), dtype="bfloat16")
    plan = make_plan(arguments)
    assert plan.keeps_blocks
    findings = {finding.name: finding for finding in check_model(arguments)}
    assert {name for name, finding in findings.items() if finding.status == "fail"} == set()
    exact = answers(directory, "float32", max_tokens=1, logprobs=5)
    blocks = answers(tmp_path / "m.gguf", "bfloat16", max_tokens=1, logprobs=320)
    for one, other in zip(exact, blocks, strict=True):
        for token, logprob in one.logprobs[0].items():
            assert abs(logprob.logprob - other.logprobs[0][token].logprob) < 0.5


@pytest.mark.parametrize(
    ("architecture", "own", "message"),
    [
        ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func must be 2, sigmoid, got 1"),
        ("nemotron_h", {"feed_forward_length": 8}, "must be lists of one entry for each layer"),
    ],
)
def test_what_the_metadata_must_say(
    architecture: str, own: dict[str, Any], message: str, tmp_path: Path
) -> None:
    metadata = {f"{architecture}.{key}": value for key, value in own.items()}
    write_gguf(tmp_path / "m.gguf", {"general.architecture": architecture} | metadata)
    with pytest.raises(ModelLoadError, match=message):
        EngineArgs(str(tmp_path / "m.gguf")).create_engine_config()


def test_decays_that_are_not_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny_model(tmp_path / "model", "mamba2")
    monkeypatch.setattr(torch.Tensor, "exp", lambda values: -torch.ones_like(values))
    write_hybrid_gguf(tmp_path / "m.gguf", directory)
    monkeypatch.undo()
    with pytest.raises(ModelLoadError, match="A_log.weight, ssm_a, is not negative"):
        LLM(str(tmp_path / "m.gguf"), dtype="float32", **SETTINGS)
