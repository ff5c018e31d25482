"""Every architecture against transformers with the same weights: greedy in fp32, token for token;
bf16 within transformers' own error.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from quire.executor.models import find_model, register_model
from quire.executor.models.decoder import Decoder
from quire.frontend import bundled_model
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.model_files import read_hf_config
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.kernels import registry
from quire.tests.engine_device import engine_device
from quire.tests.executor.driver import (
    Driver,
    Row,
    generate,
    greedy,
    start_executor,
    start_with,
)
from quire.tests.tiny_models import GEMMA4_EXPERTS, save_tiny_multimodal_model
from quire.tests.tiny_vision import KINDS as VISION_KINDS
from quire.tests.tiny_vision import save_tiny_vision_model

BLOCK_SIZE = 16
BUNDLED = Path(bundled_model.__file__).parent
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [0.9 + 0.05 * i for i in range(6)],
    "long_factor": [1.5 + 0.5 * i for i in range(6)],
}
GROWING_QUERIES = {
    **YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
needs_native = pytest.mark.skipif(
    registry.select("cpu", torch.bfloat16).chosen["pack_linear"] != "native",
    reason="the native library is not built",
)
VARIANTS = {
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", WINDOW),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-no-gqa": ("qwen2", {"num_key_value_heads": 4}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2-dynamic": (
        "qwen2",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-mqa": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-linear": (
        "qwen3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "qwen3-window": (
        "qwen3",
        {
            **WINDOW,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3-tied-mqa": (
        "gemma3_text",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "gemma3-old-rope": (
        "gemma3_text",
        {
            "rope_theta": 50000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3n": ("gemma3n_text", {}),
    "gemma3n-other-streams": (
        "gemma3n_text",
        {
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "gemma4-experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4-keys-as-values": ("gemma4_text", {**GEMMA4_EXPERTS, "enable_moe_block": False}),
    "phi3": ("phi3", {}),
    "phi3-window-partial": (
        "phi3",
        {
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-tied-biases": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo3": ("olmo3", {}),
    "olmo3-yarn": (
        "olmo3",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": ("granite", {}),
    "granite-tied-biases": (
        "granite",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "ministral3": ("ministral3", {}),
    "ministral3-beyond": ("ministral3", {"rope_parameters": GROWING_QUERIES}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 11, "num_experts_per_tok": 1}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-dense-layers": ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-all-experts": (
        "qwen3_moe",
        {"num_experts_per_tok": 8, "norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe-biases": ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-all-experts": (
        "gpt_oss",
        {
            "num_experts_per_tok": 5,
            "swiglu_alpha": 0.8,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "granite-hybrid": ("granitemoehybrid", {}),
    "granite-hybrid-dense-rope": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "tie_word_embeddings": True,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "falcon-h1": ("falcon_h1", {"attention_in_multiplier": 1.1}),
    "falcon-h1-norm": ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True}),
    "falcon-h1-gate-first": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "bamba": ("bamba", {}),
    "nemotron-h": ("nemotron_h", {}),
    "nemotron-h-plain": (
        "nemotron_h",
        {
            "moe_latent_size": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "use_bias": True,
        },
    ),
    "mamba2": ("mamba2", {}),
    "mamba2-tied-bias": ("mamba2", {"tie_word_embeddings": True, "use_bias": True}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-every-other": (
        "qwen3_next",
        {"layer_types": None, "full_attention_interval": 2, "attention_bias": True},
    ),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
    "lfm2": ("lfm2", {}),
    "lfm2-biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 5}),
    "lfm2-moe": ("lfm2_moe", {}),
    "lfm3": ("lfm3", {}),
    "kimi-linear": ("kimi_linear", {}),
    "glm4-moe": ("glm4_moe", {}),
    "glm4-moe-plain": ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-mlp-bias": ("seed_oss", {"mlp_bias": True, "attention_bias": False}),
    "seed-oss-out-bias": ("seed_oss", {"attention_out_bias": True, "attention_bias": False}),
    "ernie4-5": ("ernie4_5", {}),
    "ernie4-5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4-5-moe": ("ernie4_5_moe", {}),
    "ernie4-5-moe-interval": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 5,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "glm4": ("glm4", {}),
    "glm4-whole-heads": (
        "glm4",
        {"attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "hunyuan-dense-alpha": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 500.0,
                "alpha": 50.0,
                "factor": 1.0,
            },
            "attention_bias": True,
        },
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "bitnet": ("bitnet", {}),
    "bitnet-tied-biases": ("bitnet", {"tie_word_embeddings": True, "attention_bias": True}),
    "exaone4": ("exaone4", {}),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-greedy": (
        "deepseek_v2",
        {"topk_method": "greedy", "attention_bias": True, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v3.2": ("deepseek_v32", {"attention_bias": True}),
    "glm-5": ("glm_moe_dsa", {}),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-odd-vocab": ("llama", {"vocab_size": 307}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-old-rope": (
        "llama",
        {"rope_theta": 2000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "llama-yarn": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 16, "mscale": 1.2, "mscale_all_dim": 0.7}},
    ),
}


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@torch.inference_mode()
def oracle_logprobs(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """Return [output tokens, vocab] f32: transformers' distribution before each token that the row
    generated.
    """
    logits = model(torch.tensor([row.prompt + row.output])).logits[0].float()
    return logits.log_softmax(-1)[len(row.prompt) - 1 : -1]


def assert_same_as_oracle(row: Row, expected: torch.Tensor) -> None:
    """Check greedy outputs in one forward pass. If every token is the argmax after its
    predecessors, the whole is transformers' greedy output.
    """
    atol = 1e-4 if engine_device() == "cpu" else 2e-4  # a GPU's exp keeps fewer bits
    assert row.error is None
    assert row.output == expected.argmax(-1).tolist()
    for (ids, logprobs, rank), reference in zip(row.logprobs, expected.numpy(), strict=True):
        assert rank == 1
        np.testing.assert_allclose(logprobs, reference[ids], atol=atol)
        np.testing.assert_allclose(
            logprobs[1:], np.sort(reference)[::-1][: len(ids) - 1], atol=atol
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_token_exact_with_transformers(variant, tiny, oracle):
    kind, overrides = VARIANTS[variant]
    directory = tiny(kind, **overrides)
    executor = start_executor(directory, block_size=BLOCK_SIZE)
    rows = generate(executor, [random_prompt(n, seed=n) for n in LENGTHS], 20, greedy(logprobs=4))
    for row in rows:
        assert_same_as_oracle(row, oracle_logprobs(oracle(directory), row))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {}),
        ("mistral", {"sliding_window": 600}),
        ("deepseek_v3", {}),
        ("gemma3_text", {"sliding_window": 500}),
        # its long factors
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512}),
    ],
    ids=str,
)
def test_long_prompt_is_token_exact(kind, overrides, tiny, oracle):
    directory = tiny(kind, **overrides)
    executor = start_executor(directory, block_size=BLOCK_SIZE, max_model_len=2048)
    (row,) = generate(executor, [random_prompt(1500, seed=5)], 16, greedy(logprobs=2))
    assert_same_as_oracle(row, oracle_logprobs(oracle(directory), row))


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(
    "variant",
    [
        *("gemma3", "phi3", "smollm3", "olmo3", "granite", "ministral3-beyond"),
        *("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"),
        *("deepseek-v2", "deepseek-v3", "ernie4-5", "exaone4", "gemma4", "gemma4-experts"),
        *("gemma2", "glm4", "hunyuan-moe", "ernie4-5-moe", "gemma3n"),
    ],
)
def test_bits_depend_neither_on_the_batch_nor_on_chunks_nor_on_cached_prefixes(
    variant, quantization, tiny
):
    kind, overrides = VARIANTS[variant]
    executor = start_executor(
        tiny(kind, **overrides), dtype="bfloat16", quantization=quantization, block_size=BLOCK_SIZE
    )
    assert executor.runner.program is not None
    prompts = [random_prompt(n, seed=n) for n in (3, 40, 75)]

    def bits(rows: list[Row]) -> list[tuple[list[int], bytes]]:
        return [(row.output, b"".join(each[1].tobytes() for each in row.logprobs)) for row in rows]

    together = bits(generate(executor, prompts, 8, greedy(logprobs=4)))
    assert together == bits(generate(executor, prompts, 8, greedy(logprobs=4), lambda row: 9))
    for prompt, expected in zip(prompts, together):
        assert [expected] == bits(generate(executor, [prompt], 8, greedy(logprobs=4)))
    driver = Driver(executor)
    first = driver.add("first", prompts[2], greedy(logprobs=4))
    driver.run(8)
    again = driver.add("again", prompts[2], greedy(logprobs=4), cached_blocks=first.block_ids[:4])
    driver.run(8)
    assert bits([first, again]) == [together[2]] * 2


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(
    "variant",
    [
        *("granite-hybrid", "falcon-h1", "nemotron-h", "mamba2"),
        *("qwen3-next", "qwen3.5", "qwen3.5-moe", "lfm2-moe", "lfm3"),
    ],
)
def test_bits_of_states_depend_neither_on_the_batch_nor_on_chunks(variant, quantization, tiny):
    kind, overrides = VARIANTS[variant]
    executor = start_executor(
        tiny(kind, **overrides), dtype="bfloat16", quantization=quantization, block_size=BLOCK_SIZE
    )
    assert executor.runner.program is not None
    prompts = [random_prompt(n, seed=n) for n in (3, 40, 75)]

    def bits(rows: list[Row]) -> list[tuple[list[int], bytes]]:
        return [(row.output, b"".join(each[1].tobytes() for each in row.logprobs)) for row in rows]

    together = bits(generate(executor, prompts, 8, greedy(logprobs=4)))
    for size in (1, 9):
        in_chunks = generate(executor, prompts, 8, greedy(logprobs=4), lambda row: size)
        assert together == bits(in_chunks)
    for prompt, expected in zip(prompts, together):
        assert [expected] == bits(generate(executor, [prompt], 8, greedy(logprobs=4)))


@pytest.mark.sampled
@pytest.mark.parametrize("isa", ["auto", "none"])
@pytest.mark.parametrize(
    "variant",
    [
        *("qwen2-window", "mistral", "gemma3", "olmo3", "mixtral-window", "qwen2-moe", "gpt-oss"),
        *("granite-hybrid", "falcon-h1", "nemotron-h", "mamba2", "gemma4", "gemma4-experts"),
        *("qwen3-next", "qwen3.5", "lfm2-moe", "lfm3"),
        *("deepseek-v3", "glm4-moe-lite", "gemma2", "hunyuan-moe", "gemma3n"),
    ],
)
def test_windows_experts_and_states_are_token_exact_in_chunks_beside_decodes_and_after_preemption(
    variant, isa, tiny, oracle
):
    kind, overrides = VARIANTS[variant]
    directory = tiny(kind, **overrides)
    driver = Driver(start_executor(directory, block_size=BLOCK_SIZE, cpu_isa=isa))
    rows = [driver.add(f"r{n}", random_prompt(n, seed=n), greedy(logprobs=4)) for n in (5, 70, 90)]
    driver.run(12, chunk=lambda row: 7 + row.slot)
    driver.preempt(rows[1])
    driver.run(24)
    for row in rows:
        assert_same_as_oracle(row, oracle_logprobs(oracle(directory), row))


def test_bundled_model_is_token_exact(oracle):
    """The bundled model has trained weights. It runs in the dtype that allows an exact
    comparison.
    """
    executor = start_executor(BUNDLED, block_size=BLOCK_SIZE, max_model_len=2048)
    rows = generate(
        executor, [random_prompt(n, seed=n) for n in (*LENGTHS, 1500)], 16, greedy(logprobs=4)
    )
    for row in rows:
        assert_same_as_oracle(row, oracle_logprobs(oracle(BUNDLED), row))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("gemma3", {"mm_tokens_per_image": 4}),
        ("mistral3", {}),
        ("qwen3_5", {}),
        ("qwen3_5_moe", {}),
    ],
)
def test_the_text_part_of_a_multimodal_model_is_token_exact(kind, overrides, tmp_path):
    from transformers import AutoModelForImageTextToText

    directory = save_tiny_multimodal_model(tmp_path, kind, **overrides)
    hf_config = read_hf_config(directory, {})
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    executor = start_executor(directory, hf_config, block_size=BLOCK_SIZE)
    rows = generate(executor, [random_prompt(n, seed=n) for n in LENGTHS], 12, greedy(logprobs=4))
    for row in rows:
        assert_same_as_oracle(row, oracle_logprobs(model, row))


@pytest.mark.parametrize("kind", [one for one in VISION_KINDS if one not in ("gemma3", "qwen3_5")])
def test_the_text_part_of_a_model_that_reads_images_is_token_exact(kind, tmp_path):
    model = save_tiny_vision_model(tmp_path, kind)
    config = EngineArgs(
        str(tmp_path),
        dtype="float32",
        max_model_len=256,
        num_threads=1,
        block_size=BLOCK_SIZE,
        device=engine_device(),
        language_model_only=True,
        kv_cache_memory_bytes=2**24,
    ).create_engine_config()
    executor = start_with(config)
    assert executor.model.encoder is None
    for row in generate(
        executor, [random_prompt(n, seed=n) for n in (5, 90)], 8, greedy(logprobs=4)
    ):
        assert_same_as_oracle(row, oracle_logprobs(model, row))


def test_greedy_equals_generate_of_transformers(tiny, oracle):
    """Check the shortcut of assert_same_as_oracle once against transformers' own loop."""
    directory, prompt = tiny("qwen3"), random_prompt(40, seed=3)
    (row,) = generate(start_executor(directory), [prompt], 24)
    generated = oracle(directory).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 40, dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert row.output == generated[0, 40:].tolist()


def test_stages_equal_those_of_transformers(tiny, oracle):
    """Covers the stages that both define alike: repetition penalty, bad words, biases, min_tokens.
    Each alone, then all together.
    """
    directory, prompt = tiny("llama"), random_prompt(30, seed=8)
    executor = start_executor(directory)
    (plain,) = generate(executor, [prompt], 16)
    # the unconstrained output, so that forbidding it has an effect
    first, second, third = plain.output[:3]
    cases = [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        (
            {"bad_words_token_ids": [[first], [second, third]]},
            {"bad_words_ids": [[first], [second, third]]},
        ),
        ({"logit_bias": {7: 4.0, first: -3.0}}, {"sequence_bias": {(7,): 4.0, (first,): -3.0}}),
        (
            {"min_tokens": 9, "stop_token_ids": [first, third]},
            {"min_new_tokens": 9, "eos_token_id": [first, third]},
        ),
    ]
    everything = (
        {k: v for ours, _ in cases for k, v in ours.items()},
        {k: v for _, theirs in cases for k, v in theirs.items()},
    )
    for ours, theirs in [*cases, everything]:
        (row,) = generate(executor, [prompt], 16, greedy(**ours))
        generated = oracle(directory).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 30, dtype=torch.long),
            do_sample=False,
            pad_token_id=0,
            **{"max_new_tokens": 16, "eos_token_id": None, **theirs},
        )
        expected = generated[0, 30:].tolist()
        assert row.output[: len(expected)] == expected and row.output != plain.output, ours


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2", "qwen3", "llama", "gemma3_text", "olmo2", "granite", "bundled"),
        *("granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "mamba2"),
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "lfm3"),
        "kimi_linear",
    ],
)
def test_bfloat16_is_within_transformers_own_error(kind, tiny, oracle):
    """Compare both in bf16 with transformers in fp32, on the same tokens. Quire's error is not
    larger than transformers' by more than chance.
    """
    # where rounding decides which experts a token has, errors are as large as chance has it
    all_experts = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    options = all_experts if kind == "kimi_linear" else {}
    directory = BUNDLED if kind == "bundled" else tiny(kind, dtype="bfloat16", **options)
    executor = start_executor(directory, dtype="bfloat16")
    ours, theirs = [], []
    for row in generate(
        executor, [random_prompt(n, seed=n) for n in (1, 17, 60, 120)], 24, greedy(logprobs=8)
    ):
        exact, rounded = (
            oracle_logprobs(oracle(directory, dtype), row).numpy()
            for dtype in (torch.float32, torch.bfloat16)
        )
        for i, (ids, logprobs, _) in enumerate(row.logprobs):
            ours.append(logprobs - exact[i][ids])
            theirs.append(rounded[i][ids] - exact[i][ids])
    root_mean_square = [float(np.sqrt(np.mean(np.square(errors)))) for errors in (ours, theirs)]
    # transformers' own code of the recurrence returns fp32, its kernels bf16
    most = 1.35 if kind == "mamba2" else 1.15
    assert 0 < root_mean_square[0] <= most * root_mean_square[1]


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(
        ModelLoadError,
        match="MambaForCausalLM.*supported: .*BertModel.*Gemma3ForCausalLM, Gemma3ForCond",
    ):
        find_model({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ModelLoadError, match="names no architecture"):
        find_model({})


class MyLlama:
    parse_config = staticmethod(ARCHITECTURES["LlamaForCausalLM"].parse)

    def __new__(cls, config, make, max_model_len):
        return Decoder.of_row(ARCHITECTURES["LlamaForCausalLM"], config, make, max_model_len)


@pytest.mark.parametrize(
    "model", [MyLlama, ARCHITECTURES["LlamaForCausalLM"]], ids=["class", "row"]
)
def test_a_model_can_be_registered_from_outside(tiny, monkeypatch, model):
    monkeypatch.setattr("quire.executor.models._MODELS", {})
    register_model("MyLlama", model)
    (row,) = generate(
        start_executor(tiny("llama"), {"architectures": ["Unknown", "MyLlama"]}), [[1, 2, 3]], 4
    )
    assert len(row.output) == 4
