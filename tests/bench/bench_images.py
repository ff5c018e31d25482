"""The encoder of images on a CPU, beside the machine's products; the first token of a question
about an image, and of another one about the same image.

    python tests/bench/bench_images.py [--shape siglip-400m] [--dtype bfloat16] [--side 896]
    [--quantization int8] [--threads 2] [--rounds 5] [--layers 2]
    python tests/bench/bench_images.py --model DIRECTORY [--questions 3]

A shape has random weights, and `--layers` of its layers; a directory is that of a model that reads
images. Runs of the encoder take turns with the fastest products of matrices in its dtype, so that a
neighbour on the machine disturbs both. Images are noise. `--json FILE` writes the figures. With
`chrt -f 10` before it, other programs do not interrupt a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from quire.executor.models.layers import LayerFactory
from quire.executor.models.vision.encoder import VisionEncoder
from quire.executor.models.vision.tower import VisionTower
from quire.executor.program.encoder_program import RecordedTower, is_recordable
from quire.executor.weights.table import stored_shape
from quire.executor.worker import Worker
from quire.frontend.engine_args import EngineArgs
from quire.ipc.models.vision_config import VisionConfig
from quire.ipc.models.vision_families import tower_of
from quire.kernels import registry
from quire.kernels.cpu.limits import Multiplier
from quire.kernels.cpu.native.library import library
from quire.kernels.cpu.native.timing import CallTimer, timed_calls
from quire.tests.bench.report import hardware, write_result

PRODUCTS_OF_TURN = 3
QUESTION_TOKENS = 16


class Shape(NamedTuple):
    """A family, the hidden size of its text model, vision_config and the side of its images."""

    family: str
    hidden_size: int
    tower: dict[str, Any]
    unit: int
    side: int = 896


SHAPES = {
    "siglip-400m": Shape(  # Gemma 3 4B
        "gemma3",
        2560,
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 896,
        },
        56,
    ),
    "qwen3-vl-2b": Shape(
        "qwen3_vl",
        2048,
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "num_heads": 16,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        32,
    ),
    "qwen2.5-vl-3b": Shape(
        "qwen2_5_vl",
        2048,
        {
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "depth": 32,
            "num_heads": 16,
            "patch_size": 14,
            "out_hidden_size": 2048,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        28,
    ),
    "gemma4-e2b": Shape(
        "gemma4",
        1536,
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "patch_size": 16,
            "use_clipped_linears": True,
        },
        48,
        768,
    ),
}


def encoder_of_shape(
    shape: Shape,
    dtype: torch.dtype,
    quantization: str | None,
    layers: int | None,
    device: str = "cpu",
) -> VisionEncoder:
    """The shape's encoder with random weights. layers: how many it has; None: all."""
    keys = dict(shape.tower)
    if layers is not None:
        depth = "depth" if "depth" in keys else "num_hidden_layers"
        keys[depth] = min(layers, keys[depth])
        deep = [layer for layer in keys.get("deepstack_visual_indexes", []) if layer < layers]
        keys["deepstack_visual_indexes"] = deep
    vision = VisionConfig(
        family=shape.family,
        hidden_size=shape.hidden_size,
        tower=keys,
        image_token_id=0,
        unit=shape.unit,
    )
    tower = tower_of(vision)
    assert tower.layer is not None
    attention = tower.layer.attention
    heads = {"num_heads": attention.heads, "num_kv_heads": attention.kv_heads}
    ops = registry.select(device, dtype, head_dim=attention.head_dim, **heads)
    make = LayerFactory(ops, dtype, torch.device(device), quantization)
    model = VisionTower(make, tower)
    for name, tensor in model.weights():
        sizes = stored_shape(tensor)
        if not sizes:  # a bound
            values = torch.tensor(-30.0 if name.endswith("_min") else 30.0)
        else:
            values = torch.randn(sizes) / sizes[-1] ** 0.5
        make.fill(tensor, values)
    run = RecordedTower(model) if is_recordable(model, ops) else model
    return VisionEncoder(model, run, make)


def encoder_of_model(args: argparse.Namespace) -> VisionEncoder:
    config = engine_args(args).create_engine_config()
    worker = Worker(config)
    worker.load_model(lambda stage, fraction: None)
    encoder = worker.model.encoder
    assert isinstance(encoder, VisionEncoder), "the model reads no images"
    return encoder


def engine_args(args: argparse.Namespace) -> EngineArgs:
    return EngineArgs(
        args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=args.threads,
        max_model_len=args.max_model_len,
    )


def noise(height: int, width: int) -> torch.Tensor:
    return torch.randint(256, (height, width, 3), dtype=torch.uint8)


def time_encoder(encoder: VisionEncoder, args: argparse.Namespace, side: int) -> dict[str, Any]:
    """Seconds of whole images and of their native call, and operations of the products beside."""
    pixels = noise(side, side)
    is_native = isinstance(encoder._run, RecordedTower)
    dtypes = [torch.int8] if args.quantization == "int8" else [getattr(torch, args.dtype)]
    products = Multiplier(dtypes, 2.0)
    whole, rates, runs = [], [], []
    timer = CallTimer(args.threads)
    encoder.encode([pixels])
    if is_native:
        encoder._run._program.set_timer(timer)
    for _ in range(args.rounds):
        rates += products.rates(PRODUCTS_OF_TURN)
        encoder.encode([pixels])  # not timed: what took its turn before has the caches
        timer.take()
        begin = time.perf_counter()
        encoder.encode([pixels])
        whole.append(time.perf_counter() - begin)
        runs += timer.take()
    calls = [list(timed_calls(run)) for run in runs]
    figures = {
        "is_native": is_native,
        "ms": round(1e3 * statistics.median(whole), 2),
        "least_ms": round(1e3 * min(whole), 2),
        "gflops_of_products": round(statistics.median(rates) / 1e9, 1),
        "most_gflops_of_products": round(max(rates) / 1e9, 1),
    }
    if calls:
        figures |= shares_of(calls, statistics.median(whole), statistics.median(rates))
    return figures


def shares_of(runs: list[list[Any]], whole: float, limit: float) -> dict[str, Any]:
    """The kernels' medians over runs, added by name: ms, part of the image's time, and which part
    of the product limit they reach. limit: operations per second.
    """
    kinds: dict[str, list[float]] = {}  # seconds, operations on numbers
    for calls in zip(*runs):
        spans = []
        for call in calls:
            begins, ends = zip(*((begin, end) for _, begin, end in call.threads))
            spans.append(max(ends) - min(begins))
        kind = kinds.setdefault(f"{calls[0].op} {calls[0].work.shape}", [0.0, 0.0])
        kind[0] += statistics.median(spans)
        kind[1] += calls[0].work.flops
    seconds, flops = (sum(kind[i] for kind in kinds.values()) for i in (0, 1))
    rows = sorted(kinds.items(), key=lambda item: -item[1][0])
    return {
        "gflop": round(flops / 1e9, 1),
        "share_of_products": round(flops / whole / limit, 4),
        "ms_beside_native_call": round(1e3 * (whole - seconds), 2),
        "kernels": [
            {
                "kernel": name,
                "ms": round(1e3 * of, 2),
                "part": round(of / whole, 4),
                "share_of_products": round(operations / of / limit, 4),
            }
            for name, (of, operations) in rows
        ],
    }


def time_questions(args: argparse.Namespace, side: int) -> dict[str, Any]:
    """Milliseconds to the first token of a question about a new image, and of another one about the
    same image; how many images the engine encoded for each.
    """
    from PIL import Image
    from quire import LLM, SamplingParams

    vision = engine_args(args).create_engine_config().model_config.vision
    assert vision is not None
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times: dict[str, list[float]] = {"first": [], "second": []}
    encoded: dict[str, int] = dict.fromkeys(times, 0)
    generator = np.random.default_rng(0)
    with LLM(**vars(engine_args(args))) as llm:

        def ask(name: str, image: Any) -> None:
            tokens = generator.integers(5, 200, QUESTION_TOKENS).tolist()
            prompt = {
                "prompt_token_ids": [vision.image_token_id, *tokens],
                "multi_modal_data": {"image": image},
            }
            before = llm.get_metrics()["num_images_encoded"]
            begin = time.perf_counter()
            llm.generate(prompt, params, use_tqdm=False)
            times[name].append(time.perf_counter() - begin)
            encoded[name] += llm.get_metrics()["num_images_encoded"] - before

        for _ in range(args.questions + 1):  # the first one is a warm-up
            image = Image.fromarray(noise(side, side).numpy())
            for name in times:
                ask(name, image)
    return {
        f"{name}_question": {
            "ms": round(1e3 * statistics.median(of[1:]), 2),
            "images_encoded": encoded[name],
        }
        for name, of in times.items()
    }


def show(figures: dict[str, Any]) -> None:
    """Prints what time_encoder returned."""
    print(
        f"{figures['ms']} ms an image (least {figures['least_ms']}); products "
        f"{figures['gflops_of_products']} GFLOP/s (most {figures['most_gflops_of_products']})"
    )
    if not figures["is_native"]:
        print("operation by operation")
        return
    print(
        f"{figures['gflop']} GFLOP, {figures['share_of_products']:.1%} of the products; "
        f"{figures['ms_beside_native_call']} ms beside the native call"
    )
    print("       ms   part of image   of products")
    for row in figures["kernels"]:
        print(
            f"{row['ms']:9.2f} {row['part']:8.1%} {row['share_of_products']:14.1%}    "
            f"{row['kernel']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="times an encoder of images")
    parser.add_argument("--shape", choices=SHAPES, default="siglip-400m")
    parser.add_argument("--model", help="a directory in the place of a shape")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--side", type=int, help="of the image, in pixels")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, help="of a shape")
    parser.add_argument("--questions", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library.set_num_threads(args.threads)
    if args.model:
        encoder, side = encoder_of_model(args), args.side or 896
    else:
        shape = SHAPES[args.shape]
        dtype = getattr(torch, args.dtype)
        encoder = encoder_of_shape(shape, dtype, args.quantization, args.layers)
        side = args.side or shape.side
    name = Path(args.model).name if args.model else args.shape
    print(f"{name}, {library.isa}, {args.threads} threads, {side} x {side}", flush=True)
    figures = {
        "threads": args.threads,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "side": side,
        "layers": encoder.config.num_layers,
        **time_encoder(encoder, args, side),
    }
    show(figures)
    if args.model:
        del encoder
        figures |= time_questions(args, side)
        for question in ("first_question", "second_question"):
            print(question, figures[question])
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    if args.write:
        print(hardware(), write_result(name, "images", figures))


if __name__ == "__main__":
    main()
