"""The tensors of a GGUF file under the names that models give them.

Must not know: tensors' values, torch, how blocks are computed with, how the file is read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from ..errors import ModelLoadError
from .gguf import BLOCK_SIZES, GGUFFile, GGUFTensor

# general.architecture. "llama" stands for Mistral too.
ARCHITECTURES = (*("llama", "qwen2", "qwen3", "gemma3", "phi3", "smollm3", "olmo2", "granite"),)
# Rows of these are interleaved by the conversion to GGUF: see executor/weights/gguf.py.
PERMUTED = dict.fromkeys(("llama", "smollm3", "granite"), ("self_attn.q_proj", "self_attn.k_proj"))
# The types that kernels/reference/gguf_blocks.py dequantizes.
READABLE_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K"),
    *("Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0"),
)
VECTOR_TYPES = READABLE_TYPES[:3]  # of norms and biases
# Type of blocks in a file -> their type in memory, which native kernels multiply. Types without
# kernels are packed again at load (kernels/reference/gguf_repack.py). Numbers of 16 and 32 bits
# become numbers of the model's dtype. tests/ipc/models/test_gguf_weights.py compares this table
# with the kernels.
_WITH_KERNELS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
MEMORY_TYPES = {type: type for type in _WITH_KERNELS} | {
    "Q2_K": "Q8_0",
    "Q3_K": "Q6_K",
    "IQ4_XS": "Q8_0",
    "MXFP4": "Q8_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# weights that are one layer, whose blocks are kept if all of them can be
_MERGED = re.compile(r"\b(?:[qkv]|gate|up)_proj\.weight$")
ROPE_FACTORS = "rope_freqs.weight"
LONG_ROPE_FACTORS = {  # of Phi-3: name -> rope parameter
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
MAX_ROPE_FACTORS = 65_536

_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {  # norms after the blocks as well
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PRE_NORMS = ("attn_norm", "ffn_norm")
_LAYER_OF = {
    "gemma3": _LAYER | _SANDWICH,
    "olmo2": {name: part for name, part in (_LAYER | _SANDWICH).items() if name not in _PRE_NORMS},
    "phi3": _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def model_name(name: str, architecture: str = ARCHITECTURES[0]) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; None for an unknown name"""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[stem]}.{kind}"
    parts = _LAYER_OF.get(architecture, _LAYER)
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or str(int(layer)) != layer or part not in parts:
        return None
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def check_gguf_tensors(file: GGUFFile, shapes: dict[str, list[int]]) -> dict[str, GGUFTensor]:
    """Model's name -> tensor of the file, in the order of the file's bytes, once all agree with
    the model.

    shapes: every tensor that must be there.

    Raises ModelLoadError, naming file and tensor, for an architecture whose names are unknown, a
    tensor that is missing or unexpected, a wrong shape, and a type that cannot be read.
    """
    architecture = file.metadata.get("general.architecture")
    path = file.paths[0]
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{path}: architecture {architecture!r:.50} is not supported in GGUF files; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    found: dict[str, GGUFTensor] = {}
    for tensor in sorted(file.tensors.values(), key=lambda t: (t.path, t.offset)):
        if tensor.name == ROPE_FACTORS or tensor.name in LONG_ROPE_FACTORS:
            continue  # part of the configuration: read_rope_factors
        name = model_name(tensor.name, architecture)
        if name is None or name not in shapes:
            raise ModelLoadError(
                f"{tensor.path}: the model has no place for tensor {tensor.name:.100}"
            )
        if list(tensor.shape) != shapes[name]:
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)!s:.100}, the "
                f"model needs {shapes[name]}"
            )
        types = READABLE_TYPES if len(tensor.shape) > 1 else VECTOR_TYPES
        if tensor.type not in types:
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name} is of type {tensor.type:.20}; supported: "
                f"{', '.join(types)}"
            )
        found[name] = tensor
    if missing := [name for name in shapes if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{path}: there is no tensor for {missing[0]}{more}")
    return found


def bytes_in_memory(tensor: GGUFTensor, dtype: str, keeps_blocks: bool) -> int:
    """Bytes that a tensor of a file takes in a model of this dtype.

    keeps_blocks: whether matrices stay blocks where there is a kernel for them (MEMORY_TYPES).
    """
    num_elements = prod(tensor.shape)
    if not (keeps_blocks and len(tensor.shape) == 2 and tensor.type in MEMORY_TYPES):
        return num_elements * DTYPE_BYTES[dtype]
    elements, block_bytes = BLOCK_SIZES[MEMORY_TYPES[tensor.type]]
    return num_elements // elements * block_bytes


def weights_in_memory(tensors: Mapping[str, GGUFTensor], dtype: str, keeps_blocks: bool) -> int:
    """bytes_in_memory of all tensors of a model, by the model's names."""
    layers: dict[str, list[GGUFTensor]] = {}
    for name, tensor in tensors.items():
        layers.setdefault(layer_of(name), []).append(tensor)
    return sum(
        bytes_in_memory(tensor, dtype, keeps_blocks and _are_kept(layer))
        for layer in layers.values()
        for tensor in layer
    )


def layer_of(name: str) -> str:
    """The name of the layer that a weight is merged into, whose blocks are kept if all can be."""
    return _MERGED.sub(lambda found: "qkv" if found[0][0] in "qkv" else "gate_up", name)


def _are_kept(tensors: Iterable[GGUFTensor]) -> bool:
    return all(tensor.type in MEMORY_TYPES for tensor in tensors)


def is_permuted(file: GGUFFile, name: str) -> bool:
    """Whether the rows of the model's tensor `name` are interleaved in the file."""
    permuted = PERMUTED.get(file.metadata["general.architecture"], ())
    return name.endswith(
        tuple(f"{part}.{kind}" for part in permuted for kind in ("weight", "bias"))
    )


def read_rope_factors(file: GGUFFile, name: str = ROPE_FACTORS) -> list[float] | None:
    """What each frequency of the rotary embedding is divided by (Llama 3), if the file says."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    count = tensor.num_bytes // 4
    if tensor.type != "F32" or len(tensor.shape) != 1 or not 0 < count <= MAX_ROPE_FACTORS:
        raise ModelLoadError(
            f"{tensor.path}: {name} must be a vector of F32, not {tensor.type} of shape "
            f"{list(tensor.shape)}"
        )
    with tensor.path.open("rb") as file_bytes:
        file_bytes.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", file_bytes.read(4 * count)))
