"""Gemma 3n beside transformers, however its prompts are cut, and what is in its files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from quire import LLM, SamplingParams
from quire.executor.models.altup import AltUpDecoder
from quire.executor.models.gemma import SparseMLP
from quire.executor.program.narrowed import NarrowedForward
from quire.kernels import registry
from quire.tests.executor.driver import Driver, Row, generate, greedy, start_executor
from quire.tests.executor.test_models import (
    assert_same_as_oracle,
    oracle_logprobs,
    random_prompt,
)
from quire.tests.tiny_models import save_tiny_model
from safetensors.torch import load_file, save_file

KIND = "gemma3n_text"
LENGTHS = (3, 75, 104)  # the window has 24 tokens
needs_native = pytest.mark.skipif(
    registry.select("cpu", torch.bfloat16).chosen["pack_linear"] != "native",
    reason="the native library is not built",
)


def bits(rows: list[Row]) -> list[tuple[list[int], bytes]]:
    return [(row.output, b"".join(each[1].tobytes() for each in row.logprobs)) for row in rows]


@pytest.mark.slow
def test_log_probabilities_are_those_of_transformers_for_every_cut(tiny, oracle):
    """Prompts that exceed the window, whole and in chunks of 1 to 64 tokens, beside each other and
    alone.
    """
    directory = tiny(KIND)
    executor = start_executor(directory, block_size=16)
    assert isinstance(executor.model, AltUpDecoder)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    whole = generate(executor, prompts, 6, greedy(logprobs=4))
    for row in whole:
        assert_same_as_oracle(row, oracle_logprobs(oracle(directory), row))
    for size in range(1, 65):
        cut = generate(executor, prompts[2:], 2, greedy(logprobs=4), lambda row: size)
        assert cut[0].output == whole[2].output[:2]
        for mine, theirs in zip(cut[0].logprobs, whole[2].logprobs):
            np.testing.assert_allclose(mine[1], theirs[1], atol=1e-4)


@needs_native
def test_bits_are_the_same_for_every_cut(tiny):
    executor = start_executor(tiny(KIND), dtype="bfloat16", block_size=16)
    assert executor.runner.program is not None  # a step is one native call
    assert isinstance(executor.runner.run_pass, NarrowedForward)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    together = bits(generate(executor, prompts, 4, greedy(logprobs=4)))
    for size in range(1, 65):
        cut = generate(executor, prompts[2:], 4, greedy(logprobs=4), lambda row: size)
        assert bits(cut) == together[2:], size
    for prompt, expected in zip(prompts, together):
        assert bits(generate(executor, [prompt], 4, greedy(logprobs=4))) == [expected]


@needs_native
def test_a_step_is_one_native_call_with_the_new_operations(tiny):
    program = start_executor(tiny(KIND), dtype="bfloat16").runner.program
    names = [type(call).__name__ for call in program.calls]
    assert names.count("AltupPredict") == names.count("AltupCorrect") == 6
    assert names.count("GaussianTopK") == 2 and names.count("StackStreams") == 1
    assert names.count("MatchMagnitude") == 1 + 3


def test_only_layers_with_sparsity_drop_activations(tiny):
    model = start_executor(tiny(KIND)).model
    sparse = [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, SparseMLP)]
    assert sparse == [0, 3]
    # the deviations of a part of 0.8
    assert model.layers[0].mlp._deviations == pytest.approx(0.84162123, rel=1e-6)


def test_tokens_that_the_table_of_inputs_lacks_have_those_of_token_0(tiny, oracle):
    directory = tiny(KIND)
    executor = start_executor(directory, cpu_isa="none")
    native = start_executor(directory)
    for prompt in ([289, 290, 5, 319], [290], [5, 319, 0]):
        for one in (executor, native):
            driver = Driver(one)
            row = driver.add("r", prompt, greedy(logprobs=4))
            driver.run(3)
            driver.free(row)
            assert_same_as_oracle(row, oracle_logprobs(oracle(directory), row))


def test_tensors_that_a_text_does_not_need_are_ignored(tmp_path):
    """Those of towers, and keys and values of layers that read those of another one."""
    plain = save_tiny_model(tmp_path / "plain", KIND)
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((plain / "config.json").read_text())
    wrapper: dict[str, Any] = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
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
