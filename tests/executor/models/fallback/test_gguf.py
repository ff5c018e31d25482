"""GGUF files of models that run in transformers' code, against transformers with the weights that
the file stands for: greedy in fp32, token for token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quire import LLM, SamplingParams
from quire.executor.models.fallback.model import TransformersModel
from quire.executor.worker import Worker
from quire.frontend.diagnosis.model import check_model
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.plan import make_plan
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import NATIVE
from quire.ipc.models.fallback_architectures import FALLBACKS
from quire.ipc.models.gguf import read_gguf
from quire.ipc.models.gguf_architectures import GGUF_ARCHITECTURES, MIXTRAL
from quire.tests.executor.driver import Driver, greedy
from quire.tests.executor.models.fallback.test_model import NUM_TOKENS, assert_greedy, prompt, seen
from quire.tests.executor.weights.test_gguf import needs_native
from quire.tests.gguf_checkpoints import frequency_factors
from quire.tests.gguf_fallbacks import ARCHITECTURES, write_fallback_gguf
from quire.tests.gguf_files import write_gguf
from quire.tests.tiny_fallbacks import save_tiny_fallback

SPECIAL: dict[str, dict[str, Any]] = {
    # llama.cpp knows these without a key
    "gemma2": {"query_pre_attn_scalar": 16},
    "starcoder2": {"sliding_window": None, "tie_word_embeddings": True},
    "exaone4": {"sliding_window_pattern": 2},
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {"sliding_window": None},
    "olmo": {"clip_qkv": 0.8},
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
}


def test_every_architecture_is_compared():
    known = {name for name, known in GGUF_ARCHITECTURES.items() if known.architecture not in NATIVE}
    assert known <= set(ARCHITECTURES.values())
    assert MIXTRAL.model_type in ARCHITECTURES


def start(path: Path, **arguments: Any) -> Worker:
    args = EngineArgs(
        str(path),
        **{
            "dtype": "float32",
            "max_model_len": 128,
            "block_size": 16,
            "kv_cache_memory_bytes": 2**22,
            "num_threads": 1,
            "skip_tokenizer_init": True,
            **arguments,
        },
    )
    executor = Worker(args.create_engine_config())
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    return executor


def assert_same(oracle: Any, path: Path, model_impl: str = "transformers") -> None:
    executor = start(path, model_impl=model_impl)
    assert isinstance(executor.model, TransformersModel) == (model_impl == "transformers")
    driver = Driver(executor)
    row = driver.add("row", prompt(37, 1), greedy(logprobs=2))
    driver.run(NUM_TOKENS)
    assert_greedy(oracle, row)


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    oracle = save_tiny_fallback(tmp_path, model_type, **SPECIAL.get(model_type, {}))
    write_fallback_gguf(tmp_path / "m.gguf", oracle)
    if model_type != "ernie4_5_moe":  # transformers' code has another name for the routers' biases
        assert_same(oracle, tmp_path / "m.gguf")
    if FALLBACKS[model_type].architecture in NATIVE:
        assert_same(oracle, tmp_path / "m.gguf", "quire")


@pytest.mark.parametrize("model_type", ["gemma2", "cohere2", "exaone4", "gpt_oss"])
def test_plans_know_the_windows(model_type: str, tmp_path: Path) -> None:
    oracle = save_tiny_fallback(tmp_path, model_type, **SPECIAL.get(model_type, {}))
    write_fallback_gguf(tmp_path / "m.gguf", oracle)
    model = start(tmp_path / "m.gguf").model
    windows = tuple(layer.sliding_window for layer in model.attention_layers())
    assert sum(windows) > 0 and model.config.sliding_windows == windows


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """There parts of torch are missing until something needs them, as transformers does."""
    oracle = save_tiny_fallback(tmp_path, "gemma2", **SPECIAL["gemma2"])
    write_fallback_gguf(tmp_path / "m.gguf", oracle)
    token_ids = prompt(20, 1)
    expected = oracle.generate(
        torch.tensor([token_ids]), do_sample=False, max_new_tokens=6, eos_token_id=None
    )[0, 20:].tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    path = str(tmp_path / "m.gguf")
    with LLM(path, engine="process", skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate([{"prompt_token_ids": token_ids}], params)
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("model_type", ["phi", "glm"])
def test_q_k_and_v_in_one_tensor(model_type: str, tmp_path: Path) -> None:
    """As files have them that were made of checkpoints with code of their own."""
    oracle = save_tiny_fallback(tmp_path, model_type)
    write_fallback_gguf(tmp_path / "m.gguf", oracle, is_fused=True)
    assert "blk.0.attn_qkv.bias" in read_gguf(tmp_path / "m.gguf").tensors
    assert_same(oracle, tmp_path / "m.gguf")


def test_without_a_window_and_with_divided_frequencies(tmp_path: Path) -> None:
    """EXAONE 4 of 1.2B: no window, and Llama 3's scaling, which the file stores as divisors."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    oracle = save_tiny_fallback(
        tmp_path,
        "exaone4",
        rope_parameters=rope,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
    )
    config = oracle.config.to_dict() | {"head_dim": 16}
    write_fallback_gguf(tmp_path / "m.gguf", oracle, factors=frequency_factors(config))
    assert_same(oracle, tmp_path / "m.gguf")


@needs_native
@pytest.mark.parametrize("model_type", ["gemma", "starcoder2", "qwen2_moe", "mixtral"])
def test_blocks_are_kept_and_planned(model_type: str, tmp_path: Path) -> None:
    """In bf16 memory holds the file's blocks; plan and doctor say so without torch."""
    oracle = save_tiny_fallback(tmp_path, model_type, **SPECIAL.get(model_type, {}))
    write_fallback_gguf(tmp_path / "m.gguf", oracle)
    executor = start(tmp_path / "m.gguf", dtype="bfloat16")
    args = EngineArgs(str(tmp_path / "m.gguf"), dtype="bfloat16", max_model_len=128)
    assert make_plan(args).weights_bytes == executor._builder.weights_bytes
    findings = {finding.name: finding for finding in check_model(args)}
    assert findings["weights"].status == "pass" and "GGUF" in findings["weights"].detail
    driver = Driver(executor)
    alone = driver.add("alone", prompt(30, 3), greedy(logprobs=2))
    driver.run(4)
    again, _ = driver.add("again", prompt(30, 3), greedy(logprobs=2)), driver.add("b", prompt(9, 4))
    driver.run(4, chunk=lambda row: 7)
    assert again.output == alone.output
    if not getattr(executor.model, "torch_products", None):
        assert seen(again) == seen(alone)


@pytest.mark.parametrize(
    ("architecture", "changes", "problem"),
    [
        ("stablelm", {}, "'stablelm' is not supported: transformers does not declare"),
        ("mamba", {}, "'mamba' is not supported; supported: llama, .*, gpt-oss"),
        ("gemma", {"rope.dimension_count": 8}, "must be the size of a head, 16, for GemmaFor"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    architecture: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    own = {"embedding_length": 64, "attention.head_count": 4, **changes}
    metadata = {f"{architecture}.{key}": value for key, value in own.items()}
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": architecture} | metadata)
    with pytest.raises(ModelLoadError, match=problem):
        EngineArgs(str(path)).create_engine_config()
