"""One embedding engine as a process of its own, for bench_embed.py: `embed_engines.py ENGINE MODEL
--dtype D --threads N`.

It runs in the engine's virtual environment, so it needs nothing of Quire. Each line of standard
input is a JSON object: {"calls": [[text, ...], ...], "save": path or null}. The answer is a line
{"seconds": [per call]}; vectors of the last call are saved at `save` as fp32 [texts, hidden].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

FASTEMBED_NAME = "local/model"


class Quire:
    def __init__(self, model: str, dtype: str, threads: int):
        import quire

        precision = {"quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
        self.llm = quire.LLM(model, runner="pooling", num_threads=threads, **precision)
        self.version = f"quire {quire.__version__}"

    def embed(self, texts: list[str]) -> Any:
        outputs = self.llm.embed(texts, use_tqdm=False)
        return [output.outputs.embedding for output in outputs]


class SentenceTransformers:
    """Its backends: torch in fp32 or bf16, ONNX and OpenVINO in fp32 (OpenVINO also bf16) or
    int8.
    """

    def __init__(self, model: str, dtype: str, threads: int, backend: str):
        import sentence_transformers

        arguments = getattr(self, f"_{backend}")(dtype, threads)
        self.model = sentence_transformers.SentenceTransformer(
            model, backend=backend, device="cpu", model_kwargs=arguments
        )
        self.version = f"sentence-transformers {sentence_transformers.__version__}"

    def _torch(self, dtype: str, threads: int) -> dict[str, Any]:
        import torch

        torch.set_num_threads(threads)
        return {"torch_dtype": getattr(torch, dtype)}

    def _onnx(self, dtype: str, threads: int) -> dict[str, Any]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        name = "model_qint8_avx512_vnni" if dtype == "int8" else "model"
        return {
            "file_name": f"onnx/{name}.onnx",
            "provider": "CPUExecutionProvider",
            "session_options": options,
        }

    def _openvino(self, dtype: str, threads: int) -> dict[str, Any]:
        precision = {"bfloat16": "bf16", "float32": "f32", "int8": "bf16"}[dtype]
        name = "openvino_model_int8" if dtype == "int8" else "openvino_model"
        config = {"INFERENCE_NUM_THREADS": str(threads), "INFERENCE_PRECISION_HINT": precision}
        return {"file_name": f"openvino/{name}.xml", "ov_config": config}

    def embed(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=32, show_progress_bar=False)


class FastEmbed:
    """onnxruntime without torch."""

    def __init__(self, model: str, dtype: str, threads: int):
        from importlib.metadata import version

        from fastembed import TextEmbedding
        from fastembed.common.model_description import ModelSource, PoolingType

        TextEmbedding.add_custom_model(
            FASTEMBED_NAME,
            pooling=PoolingType.CLS if pools_cls(model) else PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf=FASTEMBED_NAME),
            dim=384,
            model_file="onnx/model_qint8_avx512_vnni.onnx"
            if dtype == "int8"
            else "onnx/model.onnx",
        )
        self.model = TextEmbedding(FASTEMBED_NAME, specific_model_path=model, threads=threads)
        self.version = f"fastembed {version('fastembed')}"

    def embed(self, texts: list[str]) -> Any:
        return list(self.model.embed(texts, batch_size=32))


class Infinity:
    """Its engine without the server: torch, or onnxruntime for int8."""

    def __init__(self, model: str, dtype: str, threads: int):
        from importlib.metadata import version

        import torch
        from infinity_emb import AsyncEmbeddingEngine, EngineArgs

        torch.set_num_threads(threads)
        pooling = "cls" if pools_cls(model) else "mean"
        if dtype == "int8":
            os.chdir(f"{model}/onnx-int8")  # it finds ONNX files only in the working folder
            model = "."
        self.loop = asyncio.new_event_loop()
        self.engine = AsyncEmbeddingEngine.from_args(
            EngineArgs(
                model_name_or_path=model,
                engine="optimum" if dtype == "int8" else "torch",
                device="cpu",
                dtype="auto" if dtype == "int8" else dtype,
                bettertransformer=False,
                onnx_disable_optimize=True,
                pooling_method=pooling,
            )
        )
        self.loop.run_until_complete(self.engine.astart())
        self.version = f"infinity_emb {version('infinity_emb')}"

    def embed(self, texts: list[str]) -> Any:
        return self.loop.run_until_complete(self.engine.embed(sentences=texts))[0]


def pools_cls(model: str) -> bool:
    config = json.loads((Path(model) / "1_Pooling/config.json").read_text())
    return config["pooling_mode_cls_token"]


def make_engine(name: str, model: str, dtype: str, threads: int) -> Any:
    if name.startswith("st-"):
        return SentenceTransformers(model, dtype, threads, name.removeprefix("st-"))
    kinds = {"quire": Quire, "fastembed": FastEmbed, "infinity": Infinity}
    return kinds[name](model, dtype, threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine")
    parser.add_argument("model", help="a model's folder")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, int8")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an engine prints is no answer
    engine = make_engine(args.engine, args.model, args.dtype, args.threads)
    engine.embed(["one text"])
    print(json.dumps({"version": engine.version}), file=answers)
    for line in sys.stdin:
        work = json.loads(line)
        seconds = []
        for texts in work["calls"]:
            begin = time.perf_counter()
            vectors = engine.embed(texts)
            seconds.append(time.perf_counter() - begin)
        if work["save"]:
            np.save(work["save"], np.asarray(vectors, np.float32))
        print(json.dumps({"seconds": seconds}), file=answers)


if __name__ == "__main__":
    main()
