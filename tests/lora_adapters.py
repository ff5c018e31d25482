"""Writes LoRA adapters of random numbers for a checkpoint, in PEFT's format and as GGUF files, and
merges them into its weights: W + scale * B A.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from quire.tests.gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "inference_mode": True,
    "lora_dropout": 0.0,
    "init_lora_weights": True,
    "base_model_name_or_path": "tiny",
}
_GGUF_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def adapted_weights(checkpoint: Path, modules: Collection[str] = PROJECTIONS) -> dict[str, Tensor]:
    """The weights of a checkpoint whose modules have these names, by the names of the modules."""
    weights = load_file(checkpoint / "model.safetensors")
    found = {name.removesuffix(".weight"): weight for name, weight in weights.items()}
    return {name: w for name, w in found.items() if name.rpartition(".")[2] in modules}


def random_pairs(
    weights: dict[str, Tensor], rank: int = 8, seed: int = 0, size: float = 0.2
) -> dict[str, tuple[Tensor, Tensor]]:
    """A [rank, in_features] and B [out_features, rank] of each module."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * size

    return {
        name: (random(rank, weight.shape[1]), random(weight.shape[0], rank))
        for name, weight in weights.items()
    }


def write_peft(
    directory: Path, pairs: dict[str, tuple[Tensor, Tensor]], rank: int = 8, **config: Any
) -> Path:
    """`config`: keys of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in pairs.items():
        is_embedding = name.endswith("embed_tokens")
        for letter, value in (("A", a), ("B", b)):
            ending = f"lora_embedding_{letter}" if is_embedding else f"lora_{letter}.weight"
            tensors[f"base_model.model.{name}.{ending}"] = value.contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    leaves = sorted({name.rpartition(".")[2] for name in pairs})
    values = _CONFIG | {"r": rank, "lora_alpha": 2 * rank, "target_modules": leaves} | config
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


def write_gguf_adapter(
    path: Path,
    architecture: str,
    pairs: dict[str, tuple[Tensor, Tensor]],
    alpha: float,
    heads: tuple[int, int] | None = None,
) -> Path:
    """As llama.cpp's convert_lora_to_gguf.py. heads: of queries and keys, whose rows it
    interleaves, if any.
    """
    tensors = {}
    for name, (a, b) in pairs.items():
        if name.endswith("embed_tokens"):
            stem, a = "token_embd", a.t()
        else:
            layer, leaf = name.split(".")[2], name.rpartition(".")[2]
            stem = f"blk.{layer}.{_GGUF_NAMES[leaf]}"
            if heads is not None and leaf in ("q_proj", "k_proj"):
                count = heads[0] if leaf == "q_proj" else heads[1]
                b = b.view(count, 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)
        for letter, value in (("a", a), ("b", b)):
            content = value.float().contiguous().numpy().tobytes()
            tensors[f"{stem}.weight.lora_{letter}"] = (tuple(value.shape), "F32", content)
    metadata = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    return write_gguf(path, metadata, tensors)


def merge(
    checkpoint: Path, out: Path, pairs: dict[str, tuple[Tensor, Tensor]], scale: float = 2.0
) -> Path:
    """A checkpoint with W + scale * B A in place of each W."""
    shutil.copytree(checkpoint, out)
    weights = load_file(out / "model.safetensors")
    for name, (a, b) in pairs.items():
        change = scale * (b.double() @ a.double())
        change = change.t() if name.endswith("embed_tokens") else change
        weight = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = (weight.double() + change).to(weight.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
