"""Multi-head latent attention: what its cache keeps, what it refuses, and files with more layers.
test_models.py compares the models with transformers, and the bits of chunks and batches.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from quire import LLM, EngineArgs, SamplingParams
from quire.frontend.model_info.model_files import read_hf_config
from quire.frontend.model_info.model_sizes import kv_bytes_per_token
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.tests.executor.driver import generate, greedy, start_executor
from quire.tests.tiny_models import LATENTS
from safetensors.torch import load_file, save_file

ROW = LATENTS["kv_lora_rank"] + LATENTS["qk_rope_head_dim"]
PROMPTS = [[7, 1, 200], list(range(20, 75))]


def test_the_cache_keeps_one_row_of_a_token(tiny):
    directory = tiny("deepseek_v3")
    executor = start_executor(directory, dtype="bfloat16", block_size=16)
    layers = executor.model.attention_layers()
    assert [layer.value_cache for layer in layers] == [None] * 3
    assert {layer.key_cache.shape[1:] for layer in layers} == {(16, 1, ROW)}
    assert executor.block_bytes == 3 * 16 * ROW * 2
    row = ARCHITECTURES["DeepseekV3ForCausalLM"]
    config = row.parse(read_hf_config(directory, {}))
    assert kv_bytes_per_token(config, "bfloat16") == 3 * ROW * 2


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_other_dtypes_of_the_cache_are_refused(tiny, kv_cache_dtype):
    with pytest.raises(InvalidParameterError, match="multi-head latent attention") as caught:
        start_executor(tiny("deepseek_v3"), kv_cache_dtype=kv_cache_dtype)
    assert caught.value.parameter == "kv_cache_dtype"


def test_layers_that_predict_further_tokens_are_not_read(tiny, tmp_path):
    directory = shutil.copytree(tiny("deepseek_v3"), tmp_path / "model")
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    expected = generate(start_executor(directory), PROMPTS, 8, greedy(logprobs=2))
    further = {"model.layers.3.eh_proj.weight": torch.ones(4, 8)}
    save_file(tensors | further, file, {"format": "pt"})
    found = generate(start_executor(directory), PROMPTS, 8, greedy(logprobs=2))
    assert [row.output for row in found] == [row.output for row in expected]
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(4, 8)}, file)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.4\.eh_proj"):
        start_executor(directory)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_have_the_tokens_of_others(tiny, mode):
    """Blocks are copied to host memory and back, or computed again."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(i * i + 3 * k) % 250 for i in range(30)]} for k in range(4)]
    options = {"dtype": "float32", "max_model_len": 128, "engine": "inproc", "block_size": 16}
    model = str(tiny("glm4_moe_lite"))
    tokens = []
    for more in (
        {"num_gpu_blocks_override": 100},
        {"num_gpu_blocks_override": 12, "preemption_mode": mode},
    ):
        with LLM(model=model, **options, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            metrics = llm.llm_engine.call_utility("get_metrics")
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert metrics["num_preemptions"] > 0
    assert tokens[0] == tokens[1]


def test_sleep_and_waking_up(tiny):
    """Sleep takes the cache away, and waking up brings it back."""
    executor = start_executor(tiny("deepseek_v2"))
    expected = generate(executor, PROMPTS, 6)
    executor.sleep(["kv_cache"])
    assert all(layer.key_cache is None for layer in executor.model.attention_layers())
    executor.wake_up(["kv_cache"])
    assert [r.output for r in generate(executor, PROMPTS, 6)] == [r.output for r in expected]


def test_contexts_are_as_long_as_an_indexer_would_choose_all_tokens(tiny):
    """Its weights are in the file, and not read."""
    directory = tiny("glm_moe_dsa", index_topk=48)
    assert any(".indexer." in name for name in load_file(directory / "model.safetensors"))
    settings = EngineArgs(str(directory), dtype="float32").create_engine_config()
    assert settings.model_config.max_model_len == 48
    with pytest.raises(InvalidParameterError, match="must be at most index_topk=48") as caught:
        EngineArgs(str(directory), max_model_len=49).create_engine_config()
    assert caught.value.parameter == "max_model_len"
    config = json.loads((directory / "config.json").read_text())
    del config["index_topk"]
    with pytest.raises(ModelLoadError, match="lacks index_topk"):
        ARCHITECTURES["GlmMoeDsaForCausalLM"].parse(config)
