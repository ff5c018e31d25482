"""The architecture table agrees with the executor's models.

It reads config.json alike and expects the same checkpoint tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire.executor import models
from quire.executor.models.layers import LayerFactory
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES, find_architecture, text_part
from quire.kernels import registry
from quire.tests.tiny_models import KINDS, make_tiny_config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "variant", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"mlp_bias": True}]
)
def test_tensors_equal_those_of_the_model(kind: str, variant: dict[str, Any]) -> None:
    hf_config = make_tiny_config(kind).to_dict() | variant
    name = find_architecture(hf_config)
    if not set(variant) <= {"tie_word_embeddings", *ARCHITECTURES[name].honours}:
        with pytest.raises(ModelLoadError, match="is not supported"):
            ARCHITECTURES[name].parse(hf_config)
        return
    found = models.find_model(hf_config)
    config = found.parse_config(hf_config)
    cpu = torch.device("cpu")
    make = LayerFactory(registry.select("cpu", torch.float32), torch.float32, cpu)
    model = found.build(config, make, 64)
    assert ARCHITECTURES[name].parse(hf_config) == config
    expected = {name: list(tensor.shape) for name, tensor in model.weights()}
    assert ARCHITECTURES[name].weight_shapes(config) == expected
    assert ARCHITECTURES[name].tied_weights(config) == model.tied_weights()


@pytest.mark.parametrize(
    "hf_config",
    [
        {},
        {"architectures": []},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": 7},
        {"model_type": "unheard_of"},
        {"model_type": ["llama"]},
        {"architectures": ["GPT2LMHeadModel"], "model_type": "llama"},
    ],
)
def test_an_unknown_architecture_has_the_same_error_message(hf_config: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"^[^\n]{,2000}$") as ours:
        find_architecture(hf_config)
    with pytest.raises(ModelLoadError) as theirs:
        models.find_model(hf_config)
    assert str(theirs.value).startswith(str(ours.value))


def test_the_first_supported_architecture_is_used() -> None:
    names = ["Other", "Qwen3ForCausalLM", "LlamaForCausalLM"]
    assert find_architecture({"architectures": names}) == "Qwen3ForCausalLM"


@pytest.mark.parametrize("kind", KINDS)
def test_model_type_stands_in_for_a_missing_architecture(kind: str) -> None:
    hf_config = make_tiny_config(kind).to_dict()
    hf_config["architectures"] = None
    name = find_architecture(hf_config)
    plain = kind.removesuffix("_text").replace("_", "")
    if kind.startswith("hunyuan_v1_"):
        plain = f"hunyuan{kind.removeprefix('hunyuan_v1_')}v1"
    assert name.lower().replace("_", "") == f"{plain}forcausallm"
    assert models.find_model(hf_config).name == name


def test_the_text_part_of_a_multimodal_model() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "vocab_size": None}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "vision_config": {"hidden_size": 1152},
        "text_config": text,
    }
    part = text_part(whole)
    assert part["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert (part["hidden_size"], part["vocab_size"]) == (64, 262_208)  # transformers' default
    assert part["tie_word_embeddings"] and part["eos_token_id"] == [1, 106]
    assert not text_part({**whole, "tie_word_embeddings": False})["tie_word_embeddings"]
    assert text_part(text) is text
    with pytest.raises(ModelLoadError, match="text_config of model_type gemma3_text, not 'llama'"):
        text_part({**whole, "text_config": {"model_type": "llama"}})
