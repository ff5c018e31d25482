"""Quantized checkpoints made of a checkpoint's tensors, by the specifications of their formats:
AWQ, GPTQ, AutoRound, compressed-tensors, FP8.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each nibble of a word has
E4M3_MOST = 448.0


def write_quantized(
    directory: Path,
    checkpoint: Path,
    format: str,
    ignore: Sequence[str] = (),
    has_head: bool = False,
    unnamed: str = "$",
    **arguments: Any,
) -> dict[str, torch.Tensor]:
    """Copies a checkpoint and quantizes its linear layers, the head too if `has_head` (GPTQ and
    compressed-tensors), without those that `ignore` names (compressed-tensors). Layers that match
    the regular expression `unnamed` stay plain too, but config.json does not say so.

    Returns the fp32 tensors that it stands for, by the checkpoint's names.
    """
    shutil.copytree(checkpoint, directory)
    quantize, settings = FORMATS[format]
    stored: Tensors = {}
    meant: Tensors = {}
    file = directory / "model.safetensors"
    for name, tensor in load_file(file).items():
        layer = name.removesuffix(".weight")
        if (
            tensor.dim() != 2
            or layer == "model.embed_tokens"
            or (layer == "lm_head" and not has_head)
            or any(re.match(pattern.removeprefix("re:"), layer) for pattern in (*ignore, unnamed))
        ):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = quantize(tensor.float().numpy(), **arguments)
        stored |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, file, metadata={"format": "pt"})
    config = settings(**arguments)
    if ignore or (has_head and "ignore" in config):
        config["ignore"] = [*ignore, *(() if has_head else config["ignore"])]
    if has_head and "lm_head" in config:
        config["lm_head"] = True
    edit_config(directory, config)
    return meant


def write_mxfp4(directory: Path, checkpoint: Path) -> Tensors:
    """Copies a checkpoint of gpt-oss, with random experts in MXFP4, as OpenAI publishes them.

    Returns the fp32 tensors that it stands for, of which transformers unpacks the experts.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(checkpoint, directory)
    file = directory / "model.safetensors"
    meant = load_file(file)
    stored = dict(meant)
    generator = torch.Generator().manual_seed(5)
    for name, weight in meant.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, columns, rows = weight.shape
        shape = (experts, rows, columns // 32, 16)
        numbers = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        exponents = torch.randint(119, 124, shape[:3], dtype=torch.uint8, generator=generator)
        exponents[0, 0, 0] = 0  # the least, a subnormal number
        del stored[name]
        stored |= {f"{name}_blocks": numbers, f"{name}_scales": exponents}
        meant[name] = convert_moe_packed_tensors(numbers, exponents, dtype=torch.float32)
    save_file(stored, file, metadata={"format": "pt"})
    edit_config(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return meant


def edit_config(directory: Path, quantization: dict[str, Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(config))


def affine(
    weight: np.ndarray, bits: int, group: int, is_symmetric: bool, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """numbers [rows, columns] and zeros [rows, groups] from 0 to 2**bits - 1, scales
    [rows, groups] of `dtype`, and scale * (number - zero) in fp32.
    """
    rows, columns = weight.shape
    most = 2**bits - 1
    groups = weight.reshape(rows, -1, columns if group == -1 else group)
    low, high = groups.min(-1), groups.max(-1)
    if is_symmetric:
        step, zero = np.abs(groups).max(-1) / (most // 2), np.full(low.shape, (most + 1) // 2)
        step[step == 0] = 1  # of zeros alone
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        step = (high - low) / most
        step[step == 0] = 1  # of zeros alone
        zero = np.clip(np.rint(-low / step), 1, most)  # 1: GPTQ stores zeros less by one
    scales = torch.from_numpy(step).to(dtype)
    step = scales.float().numpy()
    numbers = np.clip(np.rint(groups / step[..., None]) + zero[..., None], 0, most)
    meant = step[..., None] * (numbers - zero[..., None]).astype(np.float32)
    return (
        numbers.reshape(rows, columns).astype(np.int64),
        zero.astype(np.int64),
        scales,
        torch.from_numpy(meant.astype(np.float32).reshape(rows, columns)),
    )


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] -> [n, ceil(m / numbers per word)] i32, the first number in the lowest bits"""
    per_word = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    by_word = padded.reshape(len(numbers), -1, per_word)
    total = np.zeros(by_word.shape[:2], dtype=np.uint32)
    for place, number in enumerate(order or range(per_word)):
        total |= by_word[..., number].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(total.view(np.int32).copy())


# ---------------------------------------------------------------- AWQ, GPTQ


def _awq(weight: np.ndarray, group_size: int = 32) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, meant = affine(weight, 4, group_size, False, torch.float16)
    parts = {
        "qweight": words(numbers.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T,
    }
    return parts, meant


def _awq_config(group_size: int = 32) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def _gptq(
    weight: np.ndarray,
    group_size: int = 32,
    bits: int = 4,
    sym: bool = True,
    desc_act: bool = False,
    version: int = 1,
) -> tuple[Tensors, torch.Tensor]:
    columns = weight.shape[1]
    size = columns if group_size == -1 else group_size
    order = np.random.default_rng(0).permutation(columns) if desc_act else np.arange(columns)
    numbers, zeros, scales, meant = affine(weight[:, order], bits, group_size, sym, torch.float16)
    back = np.argsort(order)  # the place of each column among the ordered ones
    parts = {
        "qweight": words(numbers[:, back], bits).T,
        "qzeros": words(zeros.T - (version == 1), bits),
        "scales": scales.T,
        "g_idx": torch.from_numpy((back // size).astype(np.int32)),
    }
    return parts, meant[:, back]


def _gptq_config(
    group_size: int = 32,
    bits: int = 4,
    sym: bool = True,
    desc_act: bool = False,
    version: int = 1,
) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
        "sym": sym,
        "lm_head": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


def _auto_round_config(group_size: int = 32) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": group_size,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {"lm_head": {"bits": 16}},
    }


# ---------------------------------------------------------------- compressed-tensors


def _packed(
    weight: np.ndarray, group_size: int = 32, bits: int = 4, symmetric: bool = True
) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, meant = affine(weight, bits, group_size, symmetric, torch.bfloat16)
    parts = {
        "weight_packed": words(numbers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(zeros.T, bits).T
    return parts, meant


def _int8(
    weight: np.ndarray, dtype: torch.dtype = torch.bfloat16, symmetric: bool = True
) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, meant = affine(weight, 8, -1, symmetric, dtype)
    parts = {
        "weight": torch.from_numpy((numbers - 128).astype(np.int8)),
        "weight_scale": scales,
        "input_scale": torch.tensor([0.01]),
    }
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    return parts, meant


def _weights(group_size: int = -1, **weights: Any) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        **weights,
    }


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": _weights(**weights),
        "input_activations": None if format == "pack-quantized" else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _packed_config(group_size: int = 32, bits: int = 4, symmetric: bool = True) -> dict[str, Any]:
    return _compressed("pack-quantized", group_size=group_size, num_bits=bits, symmetric=symmetric)


def _int8_config(dtype: Any = None, symmetric: bool = True) -> dict[str, Any]:
    return _compressed("int-quantized", symmetric=symmetric)


# ---------------------------------------------------------------- fp8


def _fp8(
    weight: np.ndarray,
    scales_of: str = "block",
    name: str = "weight_scale",
    activations: str = "token",
) -> Any:
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[
        scales_of
    ]
    padded = np.pad(weight, ((0, -rows % height), (0, -columns % width)))
    blocks = np.abs(padded).reshape(len(padded) // height, height, -1, width)
    scales = (blocks.max((1, 3)) / E4M3_MOST).astype(np.float32)
    of_weight = scales.repeat(height, 0).repeat(width, 1)[:rows, :columns]
    numbers = torch.from_numpy(weight / of_weight).to(torch.float8_e4m3fn)
    stored = scales.reshape(1) if scales_of == "tensor" else scales
    parts = {"weight": numbers, name: torch.from_numpy(stored)}
    if activations == "static":
        parts["input_scale"] = torch.tensor([0.25])
    return parts, numbers.float() * torch.from_numpy(of_weight)


def _fp8_config() -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }


def _float_config(scales_of: str = "tensor", activations: str = "token") -> dict[str, Any]:
    """activations: "token", "static", or none."""
    weights: dict[str, Any] = {"type": "float", "strategy": scales_of}
    if scales_of == "block":
        weights["block_structure"] = [128, 128]
    config = _compressed("float-quantized", **weights)
    strategy = "tensor" if activations == "static" else "token"
    of_group: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    of_group["dynamic"] = activations != "static"
    config["config_groups"]["group_0"]["input_activations"] = of_group if activations else None
    return config


# ---------------------------------------------------------------- BitNet


def _bitnet(weight: np.ndarray, linear_class: str = "bitlinear", mode: str = "offline") -> Any:
    """The scales are numbers of fp16, so that blocks are exact. `meant` is what transformers'
    WeightQuant computes, which would be compiled.
    """
    from transformers.integrations.bitnet import pack_weights

    stored = torch.from_numpy(weight).bfloat16()
    factor = 1 / stored.float().abs().mean()
    meant = ((stored.float() * factor).round().clamp(-1, 1) / factor).bfloat16().float()
    if mode == "online":
        return {"weight": stored}, meant
    numbers, scale = meant.sign(), meant.abs().max()
    if linear_class == "bitlinear":
        scale = torch.exp2(scale.log2().round())  # divided by, it is exact
    of_file = 1 / scale if linear_class == "bitlinear" else scale
    parts = {"weight": pack_weights(numbers.clone()), "weight_scale": of_file.reshape(1).bfloat16()}
    return parts, numbers * scale


def _bitnet_config(linear_class: str = "bitlinear", mode: str = "offline") -> dict[str, Any]:
    return {
        "quant_method": "bitnet",
        "linear_class": linear_class,
        "quantization_mode": mode,
        "modules_to_not_convert": None,
    }


FORMATS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "awq": (_awq, _awq_config),
    "gptq": (_gptq, _gptq_config),
    "auto-round": (_gptq, _auto_round_config),
    "pack-quantized": (_packed, _packed_config),
    "int-quantized": (_int8, _int8_config),
    "float-quantized": (_fp8, _float_config),
    "bitnet": (_bitnet, _bitnet_config),
    "fp8": (lambda weight: _fp8(weight, name="weight_scale_inv"), _fp8_config),
}
