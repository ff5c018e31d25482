"""Gemma 3 270M from its GGUF file (Q4_K_M), against transformers in fp32 with the weights that the
gguf package dequantizes.

    python tests/real_models/fetch.py gemma3 && pytest -m real_models tests/real_models
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from quire import LLM, SamplingParams
from quire.executor.worker import Worker
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.models.gguf import read_gguf
from quire.ipc.models.gguf_architectures import GGUF_ARCHITECTURES
from quire.ipc.models.gguf_config import gguf_config
from quire.tests.real_models.fetch import fetch
from quire.tests.real_models.greedy import PROMPTS, count_equal, start

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(1800)]

# Where the two differ, the logits of both tokens are nearer than this in transformers.
NEAR_TIE = 5e-3


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch("gemma3")


@pytest.fixture(scope="module")
def oracle(path):
    """transformers' Gemma 3 of the file's sizes; the file's norms hold 1 more than transformers'.

    The rest of its configuration is transformers' own default, which is that of this model.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    own = gguf_config(read_gguf(path))
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "sliding_window", "rms_norm_eps"),
        "max_position_embeddings",
    )
    config = Gemma3TextConfig(**{key: own[key] for key in keys}, tie_word_embeddings=True)
    assert config.query_pre_attn_scalar == config.head_dim
    model = Gemma3ForCausalLM._from_config(config, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    for stored in gguf.GGUFReader(path).tensors:
        name = GGUF_ARCHITECTURES["gemma3"].model_name(stored.name)
        values = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        parameters.pop(name).data.copy_(values - 1 if "norm" in name else values)
    assert not parameters
    return model


@pytest.fixture(scope="module")
def executor(path, tmp_path_factory) -> Worker:
    """With the configuration that the file's metadata gives."""
    return start(path, gguf_config(read_gguf(path)), tmp_path_factory.mktemp("config"))


def test_greedy_tokens_are_those_of_transformers(path, executor, oracle, record_property):
    tokenizer = Tokenizer(path)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert all(prompt[0] == tokenizer.bos_token_id for prompt in prompts)
    record_property("equal tokens", count_equal(executor, oracle, prompts, NEAR_TIE))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_completion_is_sensible(path, quantization):
    """The file is all that is named. It is a base model: no chat template, no answers."""
    greedy = SamplingParams(temperature=0, max_tokens=16)
    settings = {"engine": "inproc", "max_model_len": 256, "quantization": quantization}
    with LLM(str(path), **settings) as llm:
        (counted,) = llm.generate(["1, 2, 3, 4,"], greedy)
    assert counted.outputs[0].text.startswith(" 5, 6, 7")
