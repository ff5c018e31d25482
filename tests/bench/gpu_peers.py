"""transformers and Quire on the same random weights and prompts: part of bench_gpu.py."""

from __future__ import annotations

import gc
import tempfile
import time
from typing import TYPE_CHECKING

import torch
from quire import LLM, SamplingParams
from quire.tests.bench.gpu_kernels import BLOCK_SIZE
from quire.tests.bench.gpu_shapes import SHAPES
from quire.tests.bench.timing import host_seconds

if TYPE_CHECKING:
    from quire.tests.bench.bench_gpu import Bench

COMPARED = 4  # prompts whose log-probabilities are compared with transformers'


def compare(bench: Bench, model: str) -> None:
    """Measures transformers' generate at batch size 1, its continuous batching of 64 prompts, and
    Quire.

    Without flash-attention installed, continuous batching is a weak comparison. Also compares both
    log-probabilities of the token after a prompt.
    """
    length, count, new = (64, 64, 64) if bench.is_gpu else (8, 4, 8)
    prompts = [[(31 * row + i) % 500 for i in range(length)] for row in range(count)]
    with tempfile.TemporaryDirectory() as directory:
        theirs, rate = transformers(bench, model, prompts, new, directory)
        gc.collect()
        if bench.is_gpu:
            torch.cuda.empty_cache()
        mine, my_rate = quire(bench, model, prompts, new, directory)
    differences = (theirs - mine).abs()
    bench.record(
        f"beside transformers {model}",
        times_continuous_batching=my_rate / rate,
        greatest_logprob_difference=differences.max().item(),
        mean_logprob_difference=differences.mean().item(),
        same_first_tokens=(theirs.argmax(-1) == mine.argmax(-1)).float().mean().item(),
    )


def transformers(
    bench: Bench, model: str, prompts: list[list[int]], new: int, directory: str
) -> tuple[torch.Tensor, float]:
    """Saves a model of random weights to `directory`.

    Returns the log-probabilities after the first prompts [N, vocab_size] and tokens per second.
    """
    from transformers import (
        GenerationConfig,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    kind, config = (
        (Qwen3ForCausalLM, Qwen3Config)
        if "architectures" in SHAPES[model]
        else (Qwen2ForCausalLM, Qwen2Config)
    )
    torch.manual_seed(0)
    with torch.device(bench.args.device):
        hf = kind(config(**SHAPES[model])).to(torch.bfloat16).eval()
    hf.save_pretrained(directory)
    generation = GenerationConfig(
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids = torch.tensor(prompts, device=bench.args.device)
    with torch.inference_mode():
        logprobs = hf(ids[:COMPARED]).logits[:, -1].float().log_softmax(-1).cpu()
    hf.generate(ids[:1], generation_config=generation)
    seconds = host_seconds(lambda: hf.generate(ids[:1], generation_config=generation).tolist())
    bench.record(f"transformers generate {model} b=1", ms_per_token=1e3 * seconds / new)
    sizes = (
        {"max_memory_percent": 0.5}
        if bench.is_gpu
        else {"num_blocks": 256, "block_size": BLOCK_SIZE, "max_batch_tokens": 256}
    )
    batching = {
        "generation_config": generation,
        "continuous_batching_config": ContinuousBatchingConfig(**sizes),
        "progress_bar": False,
    }
    hf.generate_batch(inputs=prompts[:4], **batching)
    begin = time.perf_counter()
    outputs = hf.generate_batch(inputs=prompts, **batching)
    rate = sum(len(output.generated_tokens) for output in outputs.values()) / (
        time.perf_counter() - begin
    )
    bench.record(
        f"transformers continuous batching {model} n={len(prompts)}",
        tokens_per_s=rate,
        attention=hf.config._attn_implementation,
    )
    return logprobs, rate


def quire(
    bench: Bench, model: str, prompts: list[list[int]], new: int, directory: str
) -> tuple[torch.Tensor, float]:
    """As `transformers`, with the model that it has saved."""
    sizes = {
        "max_model_len": len(prompts[0]) + new,
        "max_logprobs": -1,
        "skip_tokenizer_init": True,
        "async_scheduling": True,
    }
    with LLM(
        directory,
        engine="inproc",
        dtype="bfloat16",
        device=bench.args.device,
        enable_prefix_caching=False,
        **sizes,
    ) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        llm.generate(inputs, params, use_tqdm=False)
        seconds = host_seconds(lambda: llm.generate(inputs, params, use_tqdm=False))
        whole = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False)
        rows = [
            output.outputs[0].logprobs[0]
            for output in llm.generate(inputs[:COMPARED], whole, use_tqdm=False)
        ]
    logprobs = torch.tensor(
        [[row[token].logprob for token in range(SHAPES[model]["vocab_size"])] for row in rows]
    )
    rate = len(prompts) * new / seconds
    bench.record(f"quire {model} n={len(prompts)}", tokens_per_s=rate)
    return logprobs, rate
