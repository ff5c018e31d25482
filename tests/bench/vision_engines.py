"""One engine's encoder of images in a process of its own, asked line by line: for each line it
encodes a new image of noise and prints the seconds.

    python tests/bench/vision_engines.py quire DIRECTORY --side 896 [--quantization int8]
    python tests/bench/vision_engines.py openvino DIRECTORY --side 896

DIRECTORY is the checkpoint of a Gemma 3 or Qwen3-VL model. quire computes in bf16 or int8, openvino
in bf16, from the modules of transformers; the environment of each needs its engine alone. The
seconds are those from pixels to rows: openvino gets normalised pixels or patches, quire pixels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def quire(args: argparse.Namespace) -> Callable[[torch.Tensor], Any]:
    from quire.executor.worker import Worker
    from quire.frontend.engine_args import EngineArgs
    from quire.kernels.cpu.native.library import library

    library.set_num_threads(args.threads)
    made = EngineArgs(
        str(args.directory),
        dtype="bfloat16",
        quantization=args.quantization,
        num_threads=args.threads,
        max_model_len=1024,
    )
    worker = Worker(made.create_engine_config())
    worker.load_model(lambda stage, fraction: None)
    return lambda pixels: worker.model.encoder.encode([pixels])


class Tower(torch.nn.Module):
    """The tower and projector of transformers, for images of one size."""

    def __init__(self, model: Any, side: int):
        super().__init__()
        self.model, self.side = model, side
        self.is_qwen = model.config.model_type == "qwen3_vl"

    def inputs(self, pixels: torch.Tensor) -> torch.Tensor:
        image = (pixels.float() / 127.5 - 1).permute(2, 0, 1)
        if not self.is_qwen:
            return image[None]
        size, merge = 16, 2
        n = self.side // size // merge
        cells = image.reshape(3, n, merge, size, n, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
        cells = cells.reshape(-1, 3, 1, size, size).expand(-1, 3, 2, size, size)
        return cells.reshape(len(cells), -1)

    def forward(self, values: torch.Tensor) -> Any:
        if not self.is_qwen:
            return self.model.get_image_features(values).pooler_output
        grid = torch.tensor([[1, self.side // 16, self.side // 16]])
        found = self.model.visual(values, grid_thw=grid)
        return found.pooler_output, *found.deepstack_features


def openvino(args: argparse.Namespace) -> Callable[[torch.Tensor], Any]:
    import openvino as ov
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(args.directory, dtype=torch.float32)
    tower = Tower(model.model.eval(), args.side).eval()
    path = args.directory / f"openvino-{args.side}.xml"
    if not path.exists():
        example = tower.inputs(torch.zeros(args.side, args.side, 3, dtype=torch.uint8))
        with torch.inference_mode():
            ov.save_model(ov.convert_model(tower, example_input=example), path)
    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": args.threads}
    compiled = ov.Core().compile_model(path, "CPU", options)
    request = compiled.create_infer_request()
    if args.check:
        pixels = torch.randint(256, (args.side, args.side, 3), dtype=torch.uint8)
        with torch.inference_mode():
            wanted = tower(tower.inputs(pixels))
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        found = request.infer([tower.inputs(pixels).numpy()])[0]
        error = (torch.from_numpy(found).flatten() - wanted.flatten()).norm() / wanted.norm()
        print(f"relative error {float(error):.4f}", file=sys.stderr)
    return lambda pixels: request.infer([tower.inputs(pixels).numpy()])


ENGINES = {"quire": quire, "openvino": openvino}


def main() -> None:
    parser = argparse.ArgumentParser(description="times an encoder of images")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--side", type=int, default=896)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantization")
    parser.add_argument("--check", action="store_true", help="compares rows with transformers'")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    encode = ENGINES[args.engine](args)
    for _ in sys.stdin:
        pixels = torch.randint(256, (args.side, args.side, 3), dtype=torch.uint8)
        begin = time.perf_counter()
        encode(pixels)
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
