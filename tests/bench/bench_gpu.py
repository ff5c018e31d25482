"""Measures a GPU's limits, then every kernel, steps and complete workloads relative to them.

    python -P -m quire.tests.bench.bench_gpu [--out DIR] [--models 0.5B 0.6B 1.5B 7B]
    [--seconds 1] [--skip peers ...]
    python -P -m quire.tests.bench.bench_gpu --device cpu --models tiny --seconds 0.05

The second command is a dry run without a GPU. One call takes some minutes. Weights are random, of
the models' real shapes, in bfloat16; not zeros, which a GPU multiplies with less power. "floor" is
the time in which the GPU, at the limits measured in the same call, reads the weights and the
context and does the arithmetic. Kernels are timed within CUDA graphs, with their data outside the
L2 cache. A part that fails is reported and does not end the others. Every part prints its line of
JSON as soon as it is known, so a call that is cut off keeps its results.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from quire import LLM, EngineArgs, SamplingParams, __version__
from quire.executor.device import capability
from quire.executor.step_costs import StepTimer, Times
from quire.executor.worker import Worker
from quire.frontend import bundled_model
from quire.kernels import registry
from quire.kernels.ops import AttentionMetadata
from quire.tests.bench import bench_images, gpu_peers
from quire.tests.bench.bench_attention import metadata_of
from quire.tests.bench.gpu_kernels import BLOCK_SIZE, KernelCall, Sizes, kernel_calls
from quire.tests.bench.gpu_shapes import SHAPES, cost
from quire.tests.bench.report import write_result
from quire.tests.bench.timing import GraphTimer, gpu_seconds, host_seconds

BUNDLED = Path(bundled_model.__file__).parent
PARTS = ("steps", "attention", "kernels", "workload", "peers")  # of each model
ENCODERS = "encoders"  # of images, a part by itself
BATCHES, CONTEXT, PROMPTS = (1, 8, 64, 256), 1024, (512, 1024, 2048, 8192)
# nano-vllm's workload: prompts and outputs uniform in this range, seed 0
NANO_REQUESTS, NANO_LENGTHS = 256, (100, 1024)


class Bench:
    """One call of the benchmark. limits: bytes and operations per second of the GPU."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.is_gpu = args.device == "cuda"
        # an H200's, until this GPU's own are measured
        self.limits = {"bytes": 4.0e12, "flops": 790e12}
        self.found: dict[str, Any] = {}
        self._begin = time.perf_counter()

    def run(self) -> None:
        self.record("machine", **machine(self.is_gpu))
        self.attempt("ceilings", self.ceilings)
        for part in PARTS:
            for model in self.args.models if part not in self.args.skip else ():
                self.attempt(f"{part} {model}", getattr(self, part), model)
        for shape in ("siglip-400m", "qwen3-vl-2b") if ENCODERS not in self.args.skip else ():
            self.attempt(f"encoder {shape}", self.encoder, shape)

    def attempt(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self.record(
                name,
                failed=f"{type(error).__name__}: {error}"[:300],
                where=traceback.format_exc()[-800:],
            )
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def record(self, name: str, **numbers: Any) -> None:
        self.found[name] = numbers
        print(
            json.dumps({"t": round(time.perf_counter() - self._begin, 1), "name": name, **numbers}),
            flush=True,
        )
        if self.args.out:
            Path(self.args.out, "gpu.json").write_text(json.dumps(self.found, indent=1) + "\n")

    # ------------------------------------------------------------ the GPU's limits

    def seconds_of(self, function: Callable[[], Any]) -> float:
        """The median of some calls; on a GPU by its own clock."""
        times = []
        for run in range(3 + (20 if self.is_gpu else 3)):
            seconds = gpu_seconds(function) if self.is_gpu else host_seconds(function)
            times += [seconds] if run >= 3 else []
        return statistics.median(times)

    def seconds_of_kernel(self, function: Callable[[], Any]) -> float:
        """On a GPU from a graph, as in a decode: the host's launches take longer than most
        kernels.
        """
        return self._graphs.seconds(function) if self.is_gpu else self.seconds_of(function)

    @cached_property
    def _graphs(self) -> GraphTimer:
        return GraphTimer()

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
        self.record(
            "ceilings",
            copy_gb_per_s=copied / 1e9,
            read_gb_per_s=read / 1e9,
            gemm_tflops=self.limits["flops"] / 1e12,
        )

    def floor_s(self, model: str, tokens: int, context: int, is_prefill: bool) -> float:
        """Lower bound in seconds of a decode step of `tokens` requests with `context` tokens each,
        or of a prompt of `tokens`.
        """
        s, (body, layers, state_bytes) = SHAPES[model], cost(model)
        heads, kv_heads, size = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
        head = s["hidden_size"] * s["vocab_size"]
        if is_prefill:
            # two products, half of each masked
            attention = 2 * layers * heads * size * tokens * tokens
            return (2 * tokens * body + 2 * head + attention) / self.limits["flops"]
        cached = tokens * (4 * context * kv_heads * size * layers + 2 * state_bytes)
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
        """Decode steps and prompts as the executor's caller sees them: all parts of a step except
        the scheduler and the frontend.
        """
        context, batches, prompts = (
            (CONTEXT, BATCHES, PROMPTS) if self.is_gpu else (64, (1, 4), (32, 128))
        )
        config = EngineArgs(**self.engine_args(model)).create_engine_config()
        executor = Worker(config)
        executor.load_model(lambda stage, fraction: None)
        executor.initialize_kv_cache(executor.determine_num_blocks())
        timer = StepTimer(executor, config, SHAPES[model]["vocab_size"])
        for batch in batches:
            # captures a graph of this size, or compiles kernels
            timer.decode(batch, context, 0.0)
            self.record_times(
                f"decode {model} b={batch} ctx={context}",
                model,
                batch,
                timer.decode(batch, context, self.args.seconds),
                is_prefill=False,
            )
        for length in prompts:
            timer.prefill(length, 0.0)
            self.record_times(
                f"prefill {model} {length}",
                model,
                length,
                timer.prefill(length, self.args.seconds),
                is_prefill=True,
            )
        executor.shutdown()

    def record_times(
        self, name: str, model: str, tokens: int, times: Times, *, is_prefill: bool
    ) -> None:
        floor = self.floor_s(model, tokens, times.context, is_prefill)
        median, fastest = statistics.median(times.seconds), min(times.seconds)
        self.record(
            name,
            ms=1e3 * median,
            fastest_ms=1e3 * fastest,
            floor_ms=1e3 * floor,
            times_floor=median / floor,
            tokens_per_s=tokens / median,
        )

    def attention(self, model: str) -> None:
        """The attention kernels alone: decodes relative to the GPU's read bandwidth, prompts
        relative to its operations per second.
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
            seconds = self.seconds_of_kernel(
                lambda: paged_attention(query, *caches, metadata, size**-0.5)
            )
            done = (
                {"bytes": caches.nbytes}
                if query_len == 1
                else {"flops": 2 * heads * size * context * context}
            )
            ((limit, amount),) = done.items()
            name = f"attention {model} " + (
                f"decode b={batch} ctx={context}" if query_len == 1 else f"prefill {context}"
            )
            self.record(
                name,
                ms=1e3 * seconds,
                **{f"{limit}_per_s": amount / seconds},
                of_the_limit=amount / seconds / self.limits[limit],
            )

    def kernels(self, model: str) -> None:
        """All other kernels, relative to the GPU's bandwidth or operations per second."""
        s, (tokens, rows) = SHAPES[model], (65536, 64) if self.is_gpu else (64, 4)
        facts = {
            "head_dim": s["head_dim"],
            "num_heads": s["num_attention_heads"],
            "num_kv_heads": s["num_key_value_heads"],
            "block_size": BLOCK_SIZE,
            "capability": capability(torch.device(self.args.device)),
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
            self.attempt(f"kernel {model} {kernel.name}", self.kernel, model, kernel)

    def kernel(self, model: str, kernel: KernelCall) -> None:
        measure = self.seconds_of if kernel.waits else self.seconds_of_kernel
        seconds = measure(kernel.call)
        rate = kernel.amount / seconds
        self.record(
            f"kernel {model} {kernel.name}",
            us=1e6 * seconds,
            **{f"{kernel.limit}_per_s": rate},
            of_the_limit=rate / self.limits[kernel.limit],
        )

    def workload(self, model: str) -> None:
        """nano-vllm's workload: all requests at once, ends of sequence ignored; in this process and
        in a child process.
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
        self.record(
            f"workload {model}",
            **{f"{engine}_tokens_per_s": rate for engine, rate in best.items()},
            process_of_inproc=best["process"] / best["inproc"],
        )

    def encoder(self, shape: str) -> None:
        """An encoder of images on one of its largest images, and its attention alone, relative to
        the operations of its products.
        """
        layers, side = (None, bench_images.SHAPES[shape].side) if self.is_gpu else (1, 224)
        tower = bench_images.SHAPES[shape]
        if not self.is_gpu and "image_size" in tower.tower:  # the only size that it takes
            tower = tower._replace(tower=tower.tower | {"image_size": side})
        encoder = bench_images.encoder_of_shape(
            tower, torch.bfloat16, None, layers, self.args.device
        )
        pixels, layer = bench_images.noise(side, side), encoder.config.layer
        assert layer is not None
        num_patches, own = (side // encoder.config.patch_size) ** 2, layer.attention
        dense = sum(one.in_features * one.out_features for one in (*own.qkv, own.out))
        dense += sum(one.in_features * one.out_features for one in (*layer.up, layer.down))
        flops = 4 * own.heads * own.head_dim * num_patches**2
        whole = encoder.config.num_layers * (2 * num_patches * dense + flops)
        seconds = self.seconds_of(lambda: encoder.encode([pixels]))
        self.record(
            f"encoder {shape} {side}",
            ms=1e3 * seconds,
            images_per_s=1 / seconds,
            host_ms=1e3 * host_seconds(lambda: encoder.encode([pixels])),
            flops_per_s=whole / seconds,
            of_the_limit=whole / seconds / self.limits["flops"],
        )
        shape_of_heads = 3, num_patches, own.heads, own.head_dim
        query, key, value = torch.randn(
            shape_of_heads, dtype=torch.bfloat16, device=self.args.device
        )
        step = on_device(metadata_of(num_patches, [num_patches]), self.args.device)
        attend = encoder.tower.ops.encoder_attention
        seconds = self.seconds_of(lambda: attend(query, key, value, step, own.scale))
        self.record(
            f"encoder attention {shape} {num_patches}",
            ms=1e3 * seconds,
            flops_per_s=flops / seconds,
            of_the_limit=flops / seconds / self.limits["flops"],
        )

    def peers(self, model: str) -> None:
        gpu_peers.compare(self, model)


def on_device(step: AttentionMetadata, device: str) -> AttentionMetadata:
    tensors = {
        name: value.to(device)
        for name, value in vars(step).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(step, **tensors, scratch={})


def machine(is_gpu: bool) -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0) if is_gpu else None
    about = {name: version(name) for name in ("torch", "triton", "transformers", "numpy")}
    about |= {"quire": __version__, "cuda": torch.version.cuda}
    return about | (
        {
            "gpu": card.name,
            "multiprocessors": card.multi_processor_count,
            "bytes": card.total_memory,
        }
        if card
        else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), default=["0.5B", "0.6B", "1.5B", "7B"]
    )
    parser.add_argument("--skip", nargs="*", choices=[*PARTS, ENCODERS], default=[])
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
