"""Gemma 4 beside transformers through the engine, and what is in its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quire import LLM, SamplingParams
from quire.executor.models import find_model
from quire.executor.models.layers import LayerFactory
from quire.executor.weights.loader import load_weights
from quire.kernels import registry
from quire.tests.tiny_models import GEMMA4_EXPERTS, save_tiny_model
from safetensors.torch import load_file, save_file

MODELS: dict[str, dict[str, Any]] = {
    "layer inputs and shared keys": {},
    "experts": GEMMA4_EXPERTS,
    "keys as values": {**GEMMA4_EXPERTS, "enable_moe_block": False},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_gives_tokens_and_log_probabilities_of_transformers(name, tmp_path):
    """Three requests, whose prompts exceed the window and share a prefix, in chunks."""
    from transformers import AutoModelForCausalLM

    directory = save_tiny_model(tmp_path, "gemma4_text", **MODELS[name])
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(300, (64,), generator=generator).tolist()
    prompts = [
        shared + torch.randint(300, (size,), generator=generator).tolist() for size in (40, 3, 86)
    ]
    llm = LLM(
        str(directory),
        dtype="float32",
        engine="inproc",
        max_model_len=256,
        max_num_batched_tokens=37,
        max_num_seqs=3,
        enable_prefix_caching=True,
    )
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
    for _ in range(2):  # the second time, prefixes are cached
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for prompt, output in zip(prompts, outputs):
            tokens = list(output.outputs[0].token_ids)
            with torch.no_grad():
                logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)
            assert tokens == expected.argmax(-1).tolist()
            for found, row in zip(output.outputs[0].logprobs, expected):
                for token, one in found.items():
                    assert one.logprob == pytest.approx(row[token].item(), abs=1e-4)


def built(directory: Path, dtype: torch.dtype) -> Any:
    hf_config = json.loads((directory / "config.json").read_text())
    found, ops = find_model(hf_config), registry.select("cpu", dtype)
    make = LayerFactory(ops, dtype, torch.device("cpu"))
    model = found.build(found.parse_config(hf_config), make, 64)
    load_weights(model, directory, lambda *_: None, make.fill)
    return model


def test_only_owners_of_keys_and_values_have_a_part_of_the_cache(tmp_path):
    model = built(save_tiny_model(tmp_path, "gemma4_text"), torch.float32)
    attention = [layer.self_attn for layer in model.layers]
    assert model.attention_layers() == attention[:4]
    assert [attention[4].owner, attention[5].owner] == attention[2:4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_table_of_layer_inputs_stays_in_the_file(dtype, tmp_path):
    model = built(save_tiny_model(tmp_path, "gemma4_text", dtype="bfloat16"), dtype)
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens_per_layer.weight"]
    table = model.layer_inputs.table
    assert torch.equal(table.weight, stored.to(dtype))
    assert table.saved_bytes == (stored.nbytes if dtype == torch.bfloat16 else 0)


def test_tensors_that_a_text_does_not_need_are_ignored(tmp_path):
    """Those of towers, and keys and values of layers that read those of another one."""
    plain = save_tiny_model(tmp_path / "plain", "gemma4_text")
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((plain / "config.json").read_text())
    wrapper = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": config,
    }
    (whole / "config.json").write_text(json.dumps(wrapper))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (whole / name).write_bytes((plain / name).read_bytes())
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        tensors[f"model.{part}.x.weight"] = torch.ones(2, 2)
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.language_model.layers.4.self_attn.{part}.weight"] = torch.ones(2, 2)
    save_file(tensors, whole / "model.safetensors")
    prompt = {"prompt_token_ids": list(range(5, 60))}
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=1, ignore_eos=True)
    results = [
        LLM(str(directory), dtype="float32", engine="inproc", max_model_len=128)
        .generate([prompt], params)[0]
        .outputs[0]
        for directory in (plain, whole)
    ]
    assert results[0].logprobs == results[1].logprobs
