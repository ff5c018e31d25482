"""What the engine makes of a GPU, in one call of some minutes: the card's ceilings, then every
kernel, steps and whole workloads beside them.

    python -P -m quire.tests.bench.bench_gpu [--out DIR] [--models 0.5B 0.6B 1.5B 7B] [--seconds 1] [--skip peers ...]
    python -P -m quire.tests.bench.bench_gpu --device cpu --models tiny --seconds 0.05      # a dry run, without a GPU

Random weights of the models' real shapes, in bfloat16, never zeros, which a card multiplies with
less power. "floor": the time in which the card, at the ceilings measured in the same call, reads
the weights and the context and does the arithmetic. A part that fails is told and does not end the
others; every part has its line of JSON the moment it is known, so that a call that is cut off
leaves what it had.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from quire import LLM, EngineArgs, SamplingParams
from quire.executor.single_process import SingleProcessExecutor
from quire.executor.step_costs import StepTimer, Times
from quire.frontend import bundled_model
from quire.kernels import registry
from quire.kernels.ops import AttentionMetadata
from quire.tests.bench.bench_attention import metadata_of
from quire.tests.bench.gpu_kernels import BLOCK_SIZE, Sizes, kernel_calls
from quire.tests.bench.report import write_result

BUNDLED = Path(bundled_model.__file__).parent
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def shape(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    tied: bool,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        **more,
    }


SHAPES = {
    "tiny": shape(64, 2, 4, 2, 16, 128, 512, True),
    "0.5B": shape(896, 24, 14, 2, 64, 4864, 151936, True),
    "0.6B": shape(1024, 28, 16, 8, 128, 3072, 151936, True, **QWEN3),
    "1.5B": shape(1536, 28, 12, 2, 128, 8960, 151936, True),
    "7B": shape(3584, 28, 28, 4, 128, 18944, 152064, False),
}
PARTS = ("steps", "attention", "kernels", "workload", "peers")
BATCHES, CONTEXT, PROMPTS = (1, 8, 64, 256), 1024, (512, 1024, 2048, 8192)
COMPARED = 4  # prompts whose log-probabilities are held against transformers'
# nano-vllm's workload: prompts and outputs uniform in this range, seed 0
NANO_REQUESTS, NANO_LENGTHS = 256, (100, 1024)


class Bench:
    """One call. `limits`: bytes and operations per second of the card."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.is_gpu = args.device == "cuda"
        # an H200's, until the card's own are measured
        self.limits = {"bytes": 4.0e12, "flops": 790e12}
        self.found: dict[str, Any] = {}
        self._begin = time.perf_counter()

    def run(self) -> None:
        self.tell("machine", **machine(self.is_gpu))
        self.attempt("ceilings", self.ceilings)
        for part in PARTS:
            for model in self.args.models if part not in self.args.skip else ():
                self.attempt(f"{part} {model}", getattr(self, part), model)

    def attempt(self, name: str, function: Callable[..., None], *arguments: str) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self.tell(
                name,
                failed=f"{type(error).__name__}: {error}"[:300],
                where=traceback.format_exc()[-800:],
            )
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def tell(self, name: str, **numbers: Any) -> None:
        self.found[name] = numbers
        print(
            json.dumps({"t": round(time.perf_counter() - self._begin, 1), "name": name, **numbers}),
            flush=True,
        )
        if self.args.out:
            Path(self.args.out, "gpu.json").write_text(json.dumps(self.found, indent=1) + "\n")

    # ------------------------------------------------------------ the card

    def seconds_of(self, function: Callable[[], Any]) -> float:
        """The median of some calls; on a GPU by its own clock."""
        times = []
        for run in range(3 + (20 if self.is_gpu else 3)):
            seconds = gpu_seconds(function) if self.is_gpu else host_seconds(function)
            times += [seconds] if run >= 3 else []
        return statistics.median(times)

    def ceilings(self) -> None:
        size, n = (2**30, 8192) if self.is_gpu else (2**22, 256)
        source = torch.randn(size, device=self.args.device)
        copied = 2 * source.nbytes / self.seconds_of(source.clone)
        read = source.nbytes / self.seconds_of(lambda: source.view(-1, 4096).sum(1))
        a, b = (torch.randn(n, n, device=self.args.device, dtype=torch.bfloat16) for _ in range(2))
        self.limits = {
            "bytes": max(read, copied),
            "flops": 2 * n**3 / self.seconds_of(lambda: a @ b),
        }
        self.tell(
            "ceilings",
            copy_gb_per_s=copied / 1e9,
            read_gb_per_s=read / 1e9,
            gemm_tflops=self.limits["flops"] / 1e12,
        )

    def floor_s(self, model: str, tokens: int, context: int, is_prefill: bool) -> float:
        """Seconds: of a decode step of `tokens` requests with `context` tokens each, or of a prompt
        of `tokens`.
        """
        s = SHAPES[model]
        heads, kv_heads, size = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
        layer = s["hidden_size"] * ((2 * heads + 2 * kv_heads) * size + 3 * s["intermediate_size"])
        body, head, layers = (
            layer * s["num_hidden_layers"],
            s["hidden_size"] * s["vocab_size"],
            s["num_hidden_layers"],
        )
        if is_prefill:
            # two products, half of each masked
            attention = 2 * layers * heads * size * tokens * tokens
            return (2 * tokens * body + 2 * head + attention) / self.limits["flops"]
        cached = 4 * tokens * context * kv_heads * size * layers
        return (
            max(
                2 * (body + head) / self.limits["bytes"],
                2 * tokens * (body + head) / self.limits["flops"],
            )
            + cached / self.limits["bytes"]
        )

    # ------------------------------------------------------------ the engine

    def engine_args(self, model: str, **more: Any) -> dict[str, Any]:
        prompts = max(PROMPTS) if self.is_gpu else 256
        return {
            "model": str(BUNDLED),
            "load_format": "dummy",
            "hf_overrides": SHAPES[model],
            "dtype": "bfloat16",
            "device": self.args.device,
            "max_model_len": prompts + 256,
            "max_num_batched_tokens": prompts,
            "max_num_seqs": max(BATCHES),
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            **more,
        }

    def steps(self, model: str) -> None:
        """Decode steps and prompts, as the executor's caller sees them: all that a step takes but
        the scheduler and the frontend.
        """
        context, batches, prompts = (
            (CONTEXT, BATCHES, PROMPTS) if self.is_gpu else (64, (1, 4), (32, 128))
        )
        config = EngineArgs(**self.engine_args(model)).create_engine_config()
        executor = SingleProcessExecutor(config)
        executor.load_model(lambda stage, fraction: None)
        executor.initialize_kv_cache(executor.determine_num_blocks())
        timer = StepTimer(executor, config, SHAPES[model]["vocab_size"])
        for batch in batches:
            # a graph of this size is captured, or kernels are compiled
            timer.decode(batch, context, 0.0)
            self.tell_times(
                f"decode {model} b={batch} ctx={context}",
                model,
                batch,
                timer.decode(batch, context, self.args.seconds),
                is_prefill=False,
            )
        for length in prompts:
            timer.prefill(length, 0.0)
            self.tell_times(
                f"prefill {model} {length}",
                model,
                length,
                timer.prefill(length, self.args.seconds),
                is_prefill=True,
            )
        executor.shutdown()

    def tell_times(
        self, name: str, model: str, tokens: int, times: Times, *, is_prefill: bool
    ) -> None:
        floor = self.floor_s(model, tokens, times.context, is_prefill)
        median, fastest = statistics.median(times.seconds), min(times.seconds)
        self.tell(
            name,
            ms=1e3 * median,
            fastest_ms=1e3 * fastest,
            floor_ms=1e3 * floor,
            times_floor=median / floor,
            tokens_per_s=tokens / median,
        )

    def attention(self, model: str) -> None:
        """The kernels alone: decodes as a share of the bytes per second that the card reads,
        prompts of the operations that it does.
        """
        s = SHAPES[model]
        heads, kv_heads, size = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
        facts = {
            "head_dim": size,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "block_size": BLOCK_SIZE,
        }
        paged_attention = registry.select(self.args.device, torch.bfloat16, **facts).paged_attention
        decodes, prompts = (
            (((1, 1024), (1, 8192), (64, 1024), (64, 4096), (256, 1024)), (2048, 8192))
            if self.is_gpu
            else (((4, 64),), (64,))
        )
        for query_len, batch, context in [(1, *decode) for decode in decodes] + [
            (prompt, 1, prompt) for prompt in prompts
        ]:
            metadata = on_device(metadata_of(query_len, [context] * batch), self.args.device)
            num_blocks = metadata.block_tables.numel()
            caches = torch.randn(
                2, num_blocks, 16, kv_heads, size, dtype=torch.bfloat16, device=self.args.device
            )
            query = torch.randn(
                query_len * batch, heads, size, dtype=torch.bfloat16, device=self.args.device
            )
            seconds = self.seconds_of(lambda: paged_attention(query, *caches, metadata, size**-0.5))
            done = (
                {"bytes": caches.nbytes}
                if query_len == 1
                else {"flops": 2 * heads * size * context * context}
            )
            ((limit, amount),) = done.items()
            name = f"attention {model} " + (
                f"decode b={batch} ctx={context}" if query_len == 1 else f"prefill {context}"
            )
            self.tell(
                name,
                ms=1e3 * seconds,
                **{f"{limit}_per_s": amount / seconds},
                of_the_limit=amount / seconds / self.limits[limit],
            )

    def kernels(self, model: str) -> None:
        """All others, as shares of what the card reads and writes or computes per second."""
        s, (tokens, rows) = SHAPES[model], (65536, 64) if self.is_gpu else (64, 4)
        facts = {
            "head_dim": s["head_dim"],
            "num_heads": s["num_attention_heads"],
            "num_kv_heads": s["num_key_value_heads"],
            "block_size": BLOCK_SIZE,
        }
        sizes = Sizes(
            tokens,
            rows,
            s["hidden_size"],
            facts["num_heads"],
            facts["num_kv_heads"],
            facts["head_dim"],
            s["intermediate_size"],
            s["vocab_size"],
        )
        for kernel in kernel_calls(
            registry.select(self.args.device, torch.bfloat16, **facts), sizes, self.args.device
        ):
            seconds = self.seconds_of(kernel.call)
            rate = kernel.amount / seconds
            self.tell(
                f"kernel {model} {kernel.name}",
                us=1e6 * seconds,
                **{f"{kernel.limit}_per_s": rate},
                of_the_limit=rate / self.limits[kernel.limit],
            )

    def workload(self, model: str) -> None:
        """nano-vllm's: all requests at once, ends of sequence ignored; in this process and in a
        child.
        """
        count, (low, high) = (NANO_REQUESTS, NANO_LENGTHS) if self.is_gpu else (6, (5, 30))
        chance = random.Random(0)
        prompts = [
            {
                "prompt_token_ids": [
                    chance.randrange(3, 500) for _ in range(chance.randint(low, high))
                ]
            }
            for _ in range(count)
        ]
        params = [
            SamplingParams(
                temperature=0.6, seed=i, ignore_eos=True, max_tokens=chance.randint(low, high)
            )
            for i in range(count)
        ]
        rates: dict[str, list[float]] = {"inproc": [], "process": []}
        for engine, found in rates.items():
            with LLM(engine=engine, **self.engine_args(model, async_scheduling=True)) as llm:
                for run in range(3):
                    begin = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - begin
                    found += (
                        [sum(len(output.outputs[0].token_ids) for output in outputs) / seconds]
                        if run
                        else []
                    )
        best = {engine: max(found) for engine, found in rates.items()}
        self.tell(
            f"workload {model}",
            **{f"{engine}_tokens_per_s": rate for engine, rate in best.items()},
            process_of_inproc=best["process"] / best["inproc"],
        )

    # ------------------------------------------------------------ transformers, on the same weights

    def peers(self, model: str) -> None:
        """generate at batch 1, and continuous batching of 64 prompts, which on a bare machine runs
        without flash-attention: a weak peer. Then Quire on the same prompts and weights, and by how
        much the two differ in the log-probabilities of what follows a prompt.
        """
        length, count, new = (64, 64, 64) if self.is_gpu else (8, 4, 8)
        prompts = [[(31 * row + i) % 500 for i in range(length)] for row in range(count)]
        with tempfile.TemporaryDirectory() as directory:
            theirs, rate = self.transformers(model, prompts, new, directory)
            gc.collect()
            if self.is_gpu:
                torch.cuda.empty_cache()
            mine, my_rate = self.quire(model, prompts, new, directory)
        differences = (theirs - mine).abs()
        self.tell(
            f"beside transformers {model}",
            times_continuous_batching=my_rate / rate,
            greatest_logprob_difference=differences.max().item(),
            mean_logprob_difference=differences.mean().item(),
            same_first_tokens=(theirs.argmax(-1) == mine.argmax(-1)).float().mean().item(),
        )

    def transformers(
        self, model: str, prompts: list[list[int]], new: int, directory: str
    ) -> tuple[torch.Tensor, float]:
        """Saves a model of random weights to `directory`.

        Returns the log-probabilities behind the first prompts [N, vocab_size] and tokens per
        second.
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
        with torch.device(self.args.device):
            hf = kind(config(**SHAPES[model])).to(torch.bfloat16).eval()
        hf.save_pretrained(directory)
        generation = GenerationConfig(
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        ids = torch.tensor(prompts, device=self.args.device)
        with torch.inference_mode():
            logprobs = hf(ids[:COMPARED]).logits[:, -1].float().log_softmax(-1).cpu()
        hf.generate(ids[:1], generation_config=generation)
        seconds = host_seconds(lambda: hf.generate(ids[:1], generation_config=generation).tolist())
        self.tell(f"transformers generate {model} b=1", ms_per_token=1e3 * seconds / new)
        sizes = (
            {"max_memory_percent": 0.5}
            if self.is_gpu
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
        self.tell(
            f"transformers continuous batching {model} n={len(prompts)}",
            tokens_per_s=rate,
            attention=hf.config._attn_implementation,
        )
        return logprobs, rate

    def quire(
        self, model: str, prompts: list[list[int]], new: int, directory: str
    ) -> tuple[torch.Tensor, float]:
        """As `transformers`, of the model that it has saved."""
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
            device=self.args.device,
            enable_prefix_caching=False,
            **sizes,
        ) as llm:
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            params = SamplingParams(
                temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
            )
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
        self.tell(f"quire {model} n={len(prompts)}", tokens_per_s=rate)
        return logprobs, rate


def on_device(step: AttentionMetadata, device: str) -> AttentionMetadata:
    tensors = {
        name: value.to(device)
        for name, value in vars(step).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(step, **tensors, scratch={})


def machine(is_gpu: bool) -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0) if is_gpu else None
    about = {
        name: version(name) for name in ("quire", "torch", "triton", "transformers", "numpy")
    } | {"cuda": torch.version.cuda}
    return about | (
        {
            "gpu": card.name,
            "multiprocessors": card.multi_processor_count,
            "bytes": card.total_memory,
        }
        if card
        else {}
    )


def gpu_seconds(function: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def host_seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), default=["0.5B", "0.6B", "1.5B", "7B"]
    )
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement of a step")
    parser.add_argument("--out", help="directory for gpu.json, written anew with every figure")
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    bench = Bench(args)
    bench.run()
    if args.write:
        print(write_result("shapes", "gpu", bench.found))


if __name__ == "__main__":
    main()
