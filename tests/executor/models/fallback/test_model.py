"""Every model type that runs in transformers' code, against transformers' own attention: greedy in
fp32, token for token, however a prompt is cut and whatever runs beside it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire import SamplingParams
from quire.executor.models.fallback.faster import (
    QuireMLP,
    QuireNorm,
    gated_form,
    is_norm,
    norm_form,
)
from quire.executor.models.fallback.model import TransformersModel
from quire.executor.models.layers import LayerFactory
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.model_sizes import kv_bytes_per_token, measure_model
from quire.frontend.model_info.plan import make_plan
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.models.fallback_architectures import FALLBACKS
from quire.ipc.models.kv_layout import KVLayout
from quire.kernels.cpu.native.library import library
from quire.tests.client_forms import make_engine
from quire.tests.executor.driver import Driver, Row, greedy, start_executor
from quire.tests.tiny_fallbacks import HEAD_DIM, VOCAB_SIZE, save_tiny_fallback
from safetensors.torch import load_file, save_file

BLOCK_SIZE = 16
NUM_TOKENS = 6
# of each kind one: the others carry a marker
USUAL = (
    "gemma3_text",  # scaled embedding, (1 + w) norms, windows in some layers
    "gpt2",  # Conv1D, learned positions, a prefix in names
    "gpt_bigcode",  # one KV head, joined projections
    "cohere2",  # parallel blocks, scaled logits, layers without positions
    "phi",  # a head with a bias, partial rotation
    "qwen3_moe",  # experts
    "gemma2",  # soft caps
    "gpt_oss",  # sinks
)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


@torch.inference_mode()
def assert_greedy(model: torch.nn.Module, row: Row) -> None:
    """If every token is the argmax after its predecessors, the whole is the greedy output."""
    assert row.error is None
    logits = model(torch.tensor([row.prompt + row.output]), use_cache=False).logits[0].float()
    expected = logits.log_softmax(-1)[len(row.prompt) - 1 : -1]
    assert row.output == expected.argmax(-1).tolist()
    for (ids, logprobs, _), reference in zip(row.logprobs, expected.numpy(), strict=True):
        np.testing.assert_allclose(logprobs, reference[ids], atol=2e-4)


def seen(row: Row) -> list[tuple]:
    """Tokens and log-probabilities, bit for bit."""
    return [(ids.tolist(), logprobs.tobytes()) for ids, logprobs, _ in row.logprobs]


def start(directory: Path, **arguments: Any) -> Any:
    return start_executor(
        directory,
        **{
            "model_impl": "transformers",
            "block_size": BLOCK_SIZE,
            "max_model_len": 128,
            **arguments,
        },
    )


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.all_models)
        for name in FALLBACKS
    ],
)
def test_exact_whole_chunked_cached_alone_and_batched(model_type, tmp_path):
    oracle = save_tiny_fallback(tmp_path, model_type)
    executor = start(tmp_path)
    model = executor.model
    assert isinstance(model, TransformersModel)
    # the plan, which does not run the model, has the same groups of layers
    layers = model.attention_layers()
    assert model.config.sliding_windows == tuple(layer.sliding_window for layer in layers)
    driver, params = Driver(executor), greedy(logprobs=2)

    alone = driver.add("alone", prompt(37, 1), params)
    driver.run(NUM_TOKENS)
    assert_greedy(oracle, alone)

    cached = driver.add(
        "cached", alone.prompt, params, cached_blocks=alone.block_ids[: 2 * driver.num_groups]
    )
    driver.run(NUM_TOKENS)
    chunked = driver.add("chunked", alone.prompt, params)
    beside = driver.add("beside", prompt(21, 2), params)
    driver.run(NUM_TOKENS, chunk=lambda row: 5 + 4 * row.slot)
    assert_greedy(oracle, beside)
    for row in (cached, chunked):
        assert row.output == alone.output
        if not model.torch_products:
            assert seen(row) == seen(alone)
    executor.shutdown()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[..., tuple[Path, Any]]:
    """made(model_type) is a checkpoint's directory and its model."""
    known: dict[str, tuple[Path, Any]] = {}

    def make(model_type: str) -> tuple[Path, Any]:
        if model_type not in known:
            directory = tmp_path_factory.mktemp(model_type)
            known[model_type] = directory, save_tiny_fallback(directory, model_type)
        return known[model_type]

    return make


def copy(directory: Path, to: Path, **changes: Any) -> Path:
    """A checkpoint with other keys in config.json."""
    to.mkdir(exist_ok=True)
    for path in directory.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_auto_prefers_quires_own_page(tiny):
    directory = tiny("qwen2")
    assert not isinstance(start_executor(directory).model, TransformersModel)
    forced = start(directory)
    assert isinstance(forced.model, TransformersModel)
    with pytest.raises(ModelLoadError, match="GemmaForCausalLM is not supported"):
        changes = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
        start_executor(directory, changes, model_impl="quire")


def test_quantized_layers_give_the_same_bits_in_any_batch(made):
    """int4 of such small weights is far from fp32; the bits are what matters."""
    directory, _ = made("gemma3_text")
    executor = start(directory, quantization="int8", dtype="bfloat16")
    assert executor.model.torch_products == []
    params = greedy(logprobs=2)
    driver = Driver(executor)
    alone = driver.add("alone", prompt(30, 3), params)
    driver.run(4)
    again, _ = driver.add("again", prompt(30, 3), params), driver.add("other", prompt(9, 4))
    driver.run(4, chunk=lambda row: 7)
    assert seen(again) == seen(alone)


def test_random_weights(made):
    directory, _ = made("gemma3_text")
    executor = start(directory, load_format="dummy")
    driver = Driver(executor)
    row = driver.add("a", prompt(5, 1))
    driver.run(3)
    assert row.error is None and len(row.output) == 3


def test_a_missing_tensor_is_named(made, tmp_path):
    directory, _ = made("gpt2")
    broken = copy(directory, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.attn.c_proj.weight"))
    tensors.pop(name)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelLoadError, match="no file has the tensor transformer.h.1.attn.c_proj"):
        start(broken)


def test_an_unexpected_tensor_is_named(made, tmp_path):
    directory, _ = made("gpt2")
    broken = copy(directory, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors") | {"extra.weight": torch.ones(2)}
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelLoadError, match="the model has no place for tensor extra.weight"):
        start(broken)


def test_a_tensor_of_another_shape_is_named(made, tmp_path):
    directory, _ = made("gpt2")
    broken = copy(directory, tmp_path / "broken", n_embd=32)
    with pytest.raises(ModelLoadError, match=r"has shape .* the model needs"):
        start(broken)


def test_a_head_that_differs_from_a_tied_embedding_is_refused(made, tmp_path):
    directory, _ = made("gemma3_text")
    broken = copy(directory, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = torch.ones(VOCAB_SIZE, 64)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelLoadError, match="lm_head.weight differs from the embedding"):
        start(broken)


def test_heads_that_the_plan_did_not_expect_are_refused(made, monkeypatch):
    """Memory is planned from config.json without torch; a mistake there must not be silent."""
    directory, _ = made("gpt_bigcode")
    executor = start(directory)
    with pytest.raises(ModelLoadError, match="config.json says"):
        executor.model._check(executor.model.attention_layers()[:2])


def test_code_beside_a_checkpoint_does_not_run(made, tmp_path):
    directory, _ = made("gemma3_text")
    remote = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    copied = copy(directory, tmp_path / "with-code", auto_map=remote)
    (copied / "code.py").write_text("raise SystemExit('the code of a checkpoint ran')")
    start(copied)


def test_layers_know_their_windows(made):
    directory, oracle = made("gemma3_text")
    layers = start(directory).model.attention_layers()
    assert [layer.head_dim for layer in layers] == [HEAD_DIM] * 3
    windows = {"full_attention": 0, "sliding_attention": oracle.config.sliding_window}
    assert [layer.sliding_window for layer in layers] == [
        windows[kind] for kind in oracle.config.layer_types
    ]


def test_a_window_that_is_only_in_the_mask_is_found(tmp_path):
    """Phimoe's attention does not pass its window."""
    save_tiny_fallback(tmp_path, "phimoe", sliding_window=9)
    assert {layer.sliding_window for layer in start(tmp_path).model.attention_layers()} == {9}


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")]
)
@pytest.mark.parametrize("model_type", ["cohere2", "phi"])
def test_the_plan_knows_the_bytes(model_type, dtype, quantization, made):
    directory, _ = made(model_type)
    worker = start(directory, dtype=dtype, quantization=quantization)
    hf_config = json.loads((directory / "config.json").read_text())
    sizes = measure_model(hf_config, directory)
    # merged projections round up to whole panels once, not once each
    assert sizes.weights_bytes(dtype, quantization) == pytest.approx(
        worker._builder.weights_bytes, rel=0.02 if quantization else 0
    )
    assert kv_bytes_per_token(sizes.config, dtype) * BLOCK_SIZE == worker.block_bytes
    planned = make_plan(EngineArgs(str(directory), dtype=dtype, quantization=quantization))
    assert planned.weights_bytes == sizes.weights_bytes(dtype, quantization)


@pytest.mark.parametrize(("model_type", "windows"), [("gpt_oss", (0, 8, 8)), ("gemma3_text", (8,))])
def test_windows_return_blocks(model_type, windows, made):
    """There are as many blocks as one sequence needs if it returns them. Two sequences, which
    preempt each other, have transformers' tokens.
    """
    directory, oracle = made(model_type)
    most = KVLayout(8, windows, max_new_tokens=16).most_blocks(128)
    assert most < len(windows) * 128 // 8
    engine = make_engine(
        model=str(directory),
        skip_tokenizer_init=True,
        model_impl="transformers",
        max_model_len=128,
        block_size=8,
        max_num_batched_tokens=16,
        num_scheduler_steps=1,
        async_scheduling=False,
        num_gpu_blocks_override=most + 1,
    )
    try:
        assert engine.client._engine.core.executor.kv_cache_windows == windows
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        prompts = {"a": prompt(112, 5), "b": prompt(90, 6)}
        for request_id, token_ids in prompts.items():
            engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)
        answers: dict[str, list[int]] = {name: [] for name in prompts}
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
        for name, answer in answers.items():
            with torch.inference_mode():
                whole = torch.tensor([prompts[name] + answer])
                expected = oracle(whole, use_cache=False).logits[0].argmax(-1)
            assert answer == expected[len(prompts[name]) - 1 : -1].tolist()
    finally:
        engine.shutdown()


def test_longrope_beyond_its_original_length_is_refused(made, tmp_path):
    """transformers would choose the angles by the longest sequence of a batch."""
    directory, _ = made("phi")
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    long = copy(
        directory, tmp_path / "long", rope_parameters={**rope, "partial_rotary_factor": 0.5}
    )
    with pytest.raises(InvalidParameterError, match="max_model_len: must be at most 64"):
        start(long)
    start(long, max_model_len=64)


@pytest.mark.parametrize(
    ("model_type", "norms", "mlps"),
    [("gemma3_text", 3 * 6 + 1, 3), ("cohere2", 0, 3), ("gpt2", 0, 0)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_and_gated_mlps_are_quires_where_they_are_equal(model_type, norms, mlps, dtype, made):
    modules = list(start(made(model_type)[0], dtype=dtype).model._model.modules())
    assert sum(isinstance(module, QuireNorm) for module in modules) == norms
    assert sum(isinstance(module, QuireMLP) for module in modules) == mlps


@pytest.mark.skipif(library is None, reason="native kernels are not built here")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_gated_mlp_is_two_calls_with_the_bits_of_three(quantization, made):
    settings = {"dtype": "bfloat16", "quantization": quantization, "device": "cpu"}
    model = start(made("cohere2")[0], **settings).model
    mlps = [module for module in model._model.modules() if isinstance(module, QuireMLP)]
    assert len(mlps) == 3
    for mlp in mlps:
        assert mlp.gated == mlp.gate_up.silu_and_mul != mlp._gated
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        assert torch.equal(mlp.gated(x), mlp._gated(x))


class OddRMSNorm(torch.nn.Module):
    """Divides by the mean of absolute values."""

    def __init__(self, size: int):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class OddMLP(torch.nn.Module):
    """Its factor is behind the last projection."""

    def forward(self, x: torch.Tensor) -> Any:
        inner: Any = torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return 1.5 * self.down_proj(inner)


def test_other_formulas_stay_as_they_are(made):
    ops = start(made("gpt2")[0], device="cpu").ops
    make = LayerFactory(ops, torch.bfloat16, torch.device("cpu"))
    odd = OddRMSNorm(8)
    assert is_norm(odd) and norm_form(odd, make) is None
    assert gated_form(OddMLP(), make) is None
