"""Engines on a GPU that is not there (tests/fake_gpu.py): nothing mixes tensors of host and device,
and tokens are those of the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quire import LLM, EngineArgs, SamplingParams
from quire.executor.offload.block_memory import DeviceMemory
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.model_info.plan import make_plan
from quire.tests.bundled_model import heads
from quire.tests.executor.driver import generate as generate_rows
from quire.tests.executor.driver import start_executor
from quire.tests.fake_gpu import OnGpu, fake_gpu
from quire.tests.gguf_files import Tensor, write_gguf
from quire.tests.gpu import test_device_state as device_state
from quire.tests.kernels.case import random_blocks
from quire.tests.mtp_checkpoints import save_with_head
from quire.tests.quantized_checkpoints import write_quantized
from quire.tests.tiny_fallbacks import save_tiny_fallback
from quire.tests.tiny_models import save_tiny_model

PROMPTS = [
    "Once upon a time, there was a little dog. The dog liked to play. " * 3,
    "One day a bird",
    "It was a",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=9, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=40, max_tokens=10, repetition_penalty=1.1),
]
DRAFTS = {"num_speculative_tokens": 3, "adaptive": False}
SPECULATION = {
    "draft_model": {"method": "draft_model", "model": "bundled"},
    "mtp": {"method": "mtp", "model": heads.trained("mtp")},
    "eagle3": {"method": "eagle3", "model": heads.trained("eagle3")},
}


def generate(device: str, **settings: Any) -> tuple[list[Any], dict[str, int]]:
    """Tokens and log-probabilities of all prompts, and the engine's counters."""
    sizes: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "num_gpu_blocks_override": 60}
    with LLM(
        engine="inproc",
        device=device,
        **{"model": "bundled", "dtype": "float32", "num_threads": 1, **sizes, **settings},
    ) as llm:
        found = [
            (answer.outputs[0].token_ids, answer.outputs[0].cumulative_logprob)
            for answer in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        ]
        return found, llm.get_metrics()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return generate("cpu")[0]


def test_a_fake_gpu_refuses_what_a_gpu_refuses() -> None:
    with fake_gpu():
        x, y = torch.ones(2, 3, device="cuda"), torch.ones(2, 3)
        assert isinstance(x, OnGpu) and x.device.type == "cuda" and (x + x)[1].is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(x, y)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        torch.cuda.set_sync_debug_mode("error")
        for waits in (x.tolist, x[0, 0].item, lambda: x[0].copy_(y[0]), lambda: y.to(x.device)):
            with pytest.raises(RuntimeError, match="synchronizing"):
                waits()
        with pytest.raises(RuntimeError, match="synchronizing"):
            x[0, 0] = 3.0
        x[0, :1] = 1.0
        x[0].copy_(y[0], non_blocking=True)
        torch.cuda.set_sync_debug_mode("default")
        there = y.to(x.device)
        there += x
        assert y.sum() == 6 and x.cpu().sum() == 6 and there.tolist() == [[2.0] * 3] * 2


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize("method", SPECULATION)
def test_drafts_are_the_cpus_and_change_no_token(method: str, expected: list[Any]) -> None:
    """From graphs: what a head or its model reads is there after a capture, which runs the pass."""
    settings = {"speculative_config": SPECULATION[method] | DRAFTS}
    _, of_cpu = generate("cpu", **settings)
    with fake_gpu():
        found, counters = generate("cuda", **settings)
    assert found == expected
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert counters[name] == of_cpu[name] > 1


HYBRIDS = {
    "multi": {"num_scheduler_steps": 4},
    "overlapped": {"num_scheduler_steps": 4, "async_scheduling": True},
    **{
        f"{method}{' overlapped' * overlaps}": {
            "speculative_config": {"method": method} | more | DRAFTS,
            "async_scheduling": overlaps,
        }
        for method, more in (
            ("ngram", {"prompt_lookup_min": 1}),
            ("draft_model", {"model": "a tiny qwen2"}),
            ("mtp", {}),
        )
        for overlaps in (False, True)
    },
}


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_next"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that keeps states, one that drafts for it, and the CPU's tokens."""
    directory = tmp_path_factory.mktemp(request.param)
    model = str(save_with_head(directory / "model", request.param, is_right=True))
    draft = str(save_tiny_model(directory / "draft", "qwen2"))
    return model, draft, generate_with_states("cpu", model)[0]


def generate_with_states(
    device: str, model: str, **settings: Any
) -> tuple[list[Any], dict[str, int]]:
    """As `generate`, of prompts in chunks; the second time they start from checkpoints."""
    text = list(range(20, 90))
    prompts = [{"prompt_token_ids": ids} for ids in ([*text, *text[:30]], [5, 6, 7])]
    settings = {"max_model_len": 160, "max_num_seqs": 4, "num_gpu_blocks_override": 60} | settings
    settings |= {"max_num_batched_tokens": 64, "state_checkpoint_interval": 32}
    arguments = {"model": model, "dtype": "float32", "num_threads": 1, "device": device}
    with LLM(engine="inproc", **arguments, **settings) as llm:
        found = [
            (answer.outputs[0].token_ids, answer.outputs[0].cumulative_logprob)
            for _ in range(2)
            for answer in llm.generate(prompts, PARAMS[:2], use_tqdm=False)
        ]
        return found, llm.get_metrics()


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_with_several_passes_and_drafts(name: str, hybrid: Any) -> None:
    """From graphs, of decodes, chunks and passes that verify."""
    model, draft, expected = hybrid
    settings = dict(HYBRIDS[name])
    drafting = settings.get("speculative_config")
    if drafting is not None and "model" in drafting:
        settings["speculative_config"] = drafting | {"model": draft}
    with fake_gpu() as gpu:
        found, counters = generate_with_states("cuda", model, **settings)
    assert found == expected and counters["num_states_restored"]
    assert sum(capture.num_replays for capture in gpu.captures) > 20
    assert (counters["num_draft_tokens"] > 9) == (drafting is not None)
    assert name.startswith("mtp") <= (counters["num_accepted_tokens"] > 5)


@pytest.mark.slow
def test_a_quantized_checkpoint_stays_packed(tmp_path: Path) -> None:
    """Weights are laid out on the host and packed on the GPU."""
    write_quantized(tmp_path / "model", find_model_directory("bundled"), "awq", group_size=128)
    settings = {"dtype": "bfloat16", "model": str(tmp_path / "model")}
    wanted, _ = generate("cpu", **settings)
    with fake_gpu():
        assert generate("cuda", **settings)[0] == wanted
    args = [EngineArgs(settings["model"], device=d, dtype="bfloat16") for d in ("cpu", "cuda")]
    plans = [make_plan(each, memory_bytes=2**33) for each in args]
    assert plans[1].keeps_blocks and plans[1].weights_bytes == plans[0].weights_bytes


@pytest.mark.slow
def test_fp8_stays_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The CPU unpacks it and rounds the weights, so that probabilities differ a little."""
    write_quantized(tmp_path / "model", find_model_directory("bundled"), "fp8")
    settings: dict[str, Any] = {"dtype": "bfloat16", "model": str(tmp_path / "model")}
    settings["kernels"] = {"pack_gguf_linear": "triton"}  # which leaves activations in bf16
    caplog.set_level(logging.INFO)
    wanted, _ = generate("cpu", **settings | {"kernels": {}})
    with fake_gpu():
        found, _ = generate("cuda", **settings)
    assert [tokens for tokens, _ in found[:2]] == [tokens for tokens, _ in wanted[:2]]
    assert 0 < abs(found[1][1] - wanted[1][1]) < 0.01
    args = [EngineArgs(settings["model"], device=d, dtype="bfloat16") for d in ("cpu", "cuda")]
    plans = [make_plan(each, memory_bytes=2**33) for each in args]
    assert plans[1].keeps_blocks and not plans[0].keeps_blocks
    assert plans[1].weights_bytes < 0.6 * plans[0].weights_bytes
    size = plans[1].weights_bytes / 2**30
    assert f"the weights take {size:.2f} GiB on cuda:0, as fp8 weights" in caplog.text


@pytest.mark.parametrize(
    "activations", ["group", "static", pytest.param("token", marks=pytest.mark.slow)]
)
def test_activations_are_in_fp8_where_the_checkpoint_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, activations: str
) -> None:
    """So they are by default, and probabilities are near those of the CPU, whose are in bf16."""
    arguments = {"activations": activations, "scales_of": "channel"}
    format, arguments = ("fp8", {}) if activations == "group" else ("float-quantized", arguments)
    write_quantized(tmp_path / "model", find_model_directory("bundled"), format, **arguments)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)
    sizes: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 1, "num_gpu_blocks_override": 2}

    def run(device: str) -> tuple[list[int], float]:
        settings = sizes | {"device": device, "dtype": "bfloat16", "enforce_eager": True}
        settings["max_num_batched_tokens"] = 16
        with LLM(str(tmp_path / "model"), engine="inproc", num_threads=1, **settings) as llm:
            [answer] = llm.generate(PROMPTS[1:2], params, use_tqdm=False)
            return answer.outputs[0].token_ids, answer.outputs[0].cumulative_logprob

    caplog.set_level(logging.INFO)
    tokens, logprob = run("cpu")
    assert "activations too" not in caplog.text
    with fake_gpu():
        found, of_found = run("cuda")
    assert f"activations too, by {activations}" in caplog.text
    assert found == tokens and 0.002 < abs(of_found - logprob) < 0.5


def test_experts_in_int4(tmp_path: Path) -> None:
    """Weights are quantized on the GPU."""
    model = save_tiny_model(tmp_path, "qwen3_moe", seed=3)
    prompts, params = [[5, 6, 7], [40] * 9], SamplingParams(temperature=0.5, seed=3)

    def tokens(device: str) -> list[Any]:
        executor = start_executor(model, device=device, quantization="int4")
        return [row.output for row in generate_rows(executor, prompts, 6, params)]

    expected = tokens("cpu")
    with fake_gpu():
        assert tokens("cuda") == expected
    plans = [
        make_plan(EngineArgs(str(model), device="cuda", quantization=bits), memory_bytes=2**33)
        for bits in ("int4", None)
    ]
    assert plans[0].weights_bytes < plans[1].weights_bytes


def write_mixture(path: Path, types: Sequence[Sequence[str]]) -> Path:
    """A model of random experts. types: of the gates, the projections up and down, by layer."""
    size, inner, heads, experts = 256, 256, 4, 4
    metadata = {
        "general.architecture": "qwen3moe",
        "qwen3moe.context_length": 64,
        "qwen3moe.embedding_length": size,
        "qwen3moe.block_count": len(types),
        "qwen3moe.feed_forward_length": inner,
        "qwen3moe.expert_feed_forward_length": inner,
        "qwen3moe.expert_count": experts,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.attention.head_count": heads,
        "qwen3moe.attention.head_count_kv": heads,
        "qwen3moe.attention.key_length": size // heads,
        "qwen3moe.attention.value_length": size // heads,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.rope.freq_base": 1e6,
    }
    tensors: dict[str, Tensor] = {"output_norm.weight": ((size,), "F32", ones(size))}

    def add(name: str, type: str, *shape: int) -> None:
        blocks = random_blocks(shape[0] if len(shape) == 2 else shape[0] * shape[1], size, type)
        tensors[f"{name}.weight"] = shape, type, blocks.numpy().tobytes()

    add("token_embd", "Q8_0", 100, size)
    for index, (gate, up, down) in enumerate(types):
        layer = f"blk.{index}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{layer}.{name}", "Q8_0", size, size)
        for name, length in (("attn_q_norm", 64), ("attn_k_norm", 64), ("attn_norm", size)):
            tensors[f"{layer}.{name}.weight"] = (length,), "F32", ones(length)
        tensors[f"{layer}.ffn_norm.weight"] = (size,), "F32", ones(size)
        router = torch.randn(experts, size).numpy().tobytes()
        tensors[f"{layer}.ffn_gate_inp.weight"] = (experts, size), "F32", router
        for name, type in (("gate", gate), ("up", up), ("down", down)):
            add(f"{layer}.ffn_{name}_exps", type, experts, inner, size)
    return write_gguf(path, metadata, tensors)


def ones(length: int) -> bytes:
    return torch.ones(length).numpy().tobytes()


def test_experts_of_several_types_of_blocks(tmp_path: Path) -> None:
    """As in files of Q4_K_M: other layers have other types, and parts of a layer."""
    torch.manual_seed(0)
    types = [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q5_K", "Q4_K")]
    model = write_mixture(tmp_path / "model.gguf", types)
    prompts, params = [[5, 6, 7], [40] * 9], SamplingParams(temperature=0.5, seed=3)

    def run(device: str) -> list[Any]:
        executor = start_executor(model, device=device, dtype="bfloat16", max_model_len=64)
        mixtures: list[Any] = [layer.mlp for layer in executor.model.layers]  # type: ignore[attr-defined]
        for mixture, (gate, up, down) in zip(mixtures, types, strict=True):
            for layer, parts in ((mixture.gate_up[0], {gate, up}), (mixture.down[0], {down})):
                assert {part.type for part in layer.packed.parts} == parts
        return [row.output for row in generate_rows(executor, prompts, 6, params)]

    expected = run("cpu")
    with fake_gpu():
        assert run("cuda") == expected
    assert len({token for row in expected for token in row}) > 6


def test_a_cache_in_int8() -> None:
    expected, _ = generate("cpu", kv_cache_dtype="int8")
    with fake_gpu():
        assert generate("cuda", kv_cache_dtype="int8")[0] == expected


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_blocks_that_the_host_keeps(kv_cache_dtype: str) -> None:
    """The second time, few of them are on the GPU."""
    prompts = [{"prompt_token_ids": [7 * i + j for j in range(32)]} for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)

    def run(device: str, **settings: Any) -> tuple[list[Any], dict[str, int]]:
        sizes = {"max_model_len": 48, "block_size": 8, "num_gpu_blocks_override": 8}
        settings |= sizes | {"max_num_seqs": 1, "num_threads": 1, "dtype": "float32"}
        settings |= {"kv_cache_dtype": kv_cache_dtype}
        with LLM("bundled", engine="inproc", device=device, **settings) as llm:
            answers = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            tokens = [[one.outputs[0].token_ids for one in answer] for answer in answers]
            return tokens, llm.get_metrics()

    expected, _ = run("cpu")
    with fake_gpu():
        found, counters = run("cuda", kv_offloading_size=0.01, enforce_eager=True)
    assert found == expected
    assert counters["num_blocks_reloaded"] > 5


def test_states_pass_through_the_host() -> None:
    with fake_gpu():
        states = torch.arange(40, dtype=torch.uint8, device="cuda").view(4, 10)
        memory = DeviceMemory(list, lambda: states, [], lambda *_: None, states.device)
        kept = bytes(memory.fetch_state(2))
        memory.state_room(0)[:] = kept
        memory.put_state(0)
        assert states[0].tolist() == list(kept) == list(range(20, 30))
        assert memory.state_bytes == 10 and not memory.has_blocks


def test_transformers_code(tmp_path: Path) -> None:
    """A model with experts, for which it waits for the device, so there are no graphs."""
    save_tiny_fallback(tmp_path, "dots1", seed=3)
    prompts, params = [[5, 6, 7], [40] * 9], SamplingParams(temperature=0.5, seed=3)
    expected = generate_rows(start_executor(tmp_path, device="cpu"), prompts, 3, params)
    with fake_gpu():
        executor = start_executor(tmp_path, device="cuda")
        found = generate_rows(executor, prompts, 3, params)
    assert [row.output for row in found] == [row.output for row in expected]
    assert executor.model.IS_FALLBACK and executor.runner.program is None


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}], ids=str)
def test_a_launch_waits_for_nothing(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: Any
) -> None:
    model = save_tiny_model(tmp_path, "qwen3", seed=3)
    with fake_gpu():
        device_state.test_a_launch_does_not_synchronise(model, settings, False, monkeypatch)
