"""GGUF files of Gemma 4 answer as the safetensors files that they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quire import LLM, EngineArgs, ModelLoadError, SamplingParams
from quire.frontend.diagnosis.model import check_model
from quire.frontend.model_info.plan import make_plan
from quire.ipc.models.gguf_families import gemma4_config
from quire.tests.gguf_families import write_family_gguf
from quire.tests.tiny_models import GEMMA4_EXPERTS, save_tiny_model

SETTINGS: dict[str, Any] = dict(engine="inproc", max_model_len=256, num_threads=1)
PROMPTS = [{"prompt_token_ids": [3 + i % 290 for i in range(n)]} for n in (5, 90)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4, inputs of layers": ("gemma4_text", {"hidden_size_per_layer_input": 32}),
    "gemma4, experts": ("gemma4_text", GEMMA4_EXPERTS),
}


def answers(model: Path, dtype: str = "float32") -> list[list[int]]:
    with LLM(str(model), dtype=dtype, **SETTINGS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_its_safetensors(name: str, tmp_path: Path) -> None:
    """Only the metadata describes the model. Plan and doctor find every tensor as well."""
    kind, overrides = MODELS[name]
    directory, path = save_tiny_model(tmp_path / "model", kind, **overrides), tmp_path / "m.gguf"
    write_family_gguf(path, directory)
    assert answers(path) == answers(directory)
    args = EngineArgs(str(path), dtype="float32")
    of_directory = make_plan(EngineArgs(str(directory), dtype="float32"))
    assert make_plan(args).weights_bytes == of_directory.weights_bytes
    assert make_plan(args).kv_bytes_per_token == of_directory.kv_bytes_per_token
    findings = {finding.name: finding for finding in check_model(args)}
    assert {name for name, finding in findings.items() if finding.status == "fail"} == set()


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_multiplied_as_they_are(name: str, tmp_path: Path) -> None:
    """In bfloat16 memory holds blocks; in float32 the same numbers give much the same answers."""
    kind, overrides = MODELS[name]
    directory, path = save_tiny_model(tmp_path / "model", kind, **overrides), tmp_path / "m.gguf"
    write_family_gguf(path, directory, "Q8_0")
    exact, unpacked, blocks = answers(directory), answers(path), answers(path, "bfloat16")
    for one in (unpacked, blocks):
        assert one[0][0] == exact[0][0] and len(one[1]) == GREEDY.max_tokens
    plans = [make_plan(EngineArgs(str(path), dtype=dtype)) for dtype in ("float32", "bfloat16")]
    assert [plan.keeps_blocks for plan in plans] == [False, True]
    assert plans[1].weights_bytes < plans[0].weights_bytes / 2


GEMMA4 = {
    "block_count": 3,
    "attention.sliding_window_pattern": [True, True, False],
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.head_count_kv": [2, 2, 1],
    "attention.shared_kv_layers": 1,
    "feed_forward_length": [8, 8, 16],
}


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"attention.sliding_window_pattern": [True]}, [1.0], "sliding_window_pattern must be"),
        ({"attention.value_length": 16}, [1.0], "attention.value_length must be the size"),
        ({"rope.dimension_count_swa": 8}, [1.0], "rope.dimension_count_swa must be the size"),
        ({"attention.head_count_kv": [2, 1, 1]}, [1.0], "head_count_kv must be the same"),
        ({"attention.head_count_kv": [2, "1", 1]}, [1.0], "head_count_kv must be an integer"),
        ({"attention.shared_kv_layers": "1"}, [1.0], "shared_kv_layers must be an integer"),
        ({"feed_forward_length": [8, 9, 16]}, [1.0], "feed_forward_length must be equal"),
        ({}, None, "there is no tensor rope_freqs.weight"),
        ({}, [1.0, 2.0], "rope_freqs.weight must be 1"),
        ({}, [1e30, 1.0], "rope_freqs.weight must be 1"),
    ],
)
def test_metadata_that_gemma_4_cannot_have(
    changes: dict[str, Any], factors: list[float] | None, message: str
) -> None:
    found = gemma4_config({**GEMMA4}, {}, [1.0, 1e30])
    assert found["use_double_wide_mlp"] and found["intermediate_size"] == 8
    assert found["per_layer_config"] == {"2": {"head_dim": 32, "num_key_value_heads": 1}}
    with pytest.raises(ModelLoadError, match=message):
        gemma4_config(GEMMA4 | changes, {}, factors)
