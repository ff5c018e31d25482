"""How the files of a model store its weights, in the words of lists of models: the kind of file,
the family, and the type of the numbers.

Must not know: tensors' values, torch, what the engine makes of the weights, how a list is shown.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ...ipc.models.gguf import TYPES_OF_TENSORS, GGUFFile, is_gguf, read_gguf
from ...ipc.models.quantization_config import MXFP4, parse_quantization

FILE_TYPE_KEY = "general.file_type"
# GGML's number of a file's mix of types maps to its name.
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}
GUESSED = 1024  # added to the number where it was derived from the tensors
METHODS_IN_NAMES = ("awq", "gptq")  # quantization methods that models are named after
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class WeightLabels(NamedTuple):
    file_format: str  # "gguf" or "safetensors"
    family: str  # general.architecture of a GGUF file, else model_type
    numbers: str | None  # Q4_K_M, AWQ INT4, BF16; None where config.json names no dtype


def weight_labels(path: Path, hf_config: dict[str, Any]) -> WeightLabels:
    """Returns the labels of a model. `path` is its directory or GGUF file.

    Raises ModelLoadError for a GGUF file or a quantization_config that is not readable.
    """
    if is_gguf(path):
        file = read_gguf(path)
        return WeightLabels("gguf", str(file.metadata["general.architecture"]), file_type(file))
    family = hf_config.get("model_type")
    return WeightLabels(
        "safetensors", family if isinstance(family, str) else "", _number_type(hf_config)
    )


def file_type(file: GGUFFile) -> str:
    """Returns the type that the file's metadata names, or, if it names none, the type of most of
    its weights.
    """
    kinds = {tensor.type for tensor in file.tensors.values()}
    if own := kinds & TYPES_OF_TENSORS.keys():  # their numbers are those of other types
        return min(own)
    number = file.metadata.get(FILE_TYPE_KEY)
    if isinstance(number, int) and (name := FILE_TYPES.get(number & ~GUESSED)):
        return name
    weights: Counter[str] = Counter()
    for tensor in file.tensors.values():
        weights[tensor.type] += prod(tensor.shape)
    return weights.most_common(1)[0][0] if weights else "F32"


def _number_type(hf_config: dict[str, Any]) -> str | None:
    quantization = parse_quantization(hf_config)
    if quantization is None:
        dtype = hf_config.get("dtype") or hf_config.get("torch_dtype")
        return DTYPES.get(dtype, dtype) if isinstance(dtype, str) else None
    if quantization.method == MXFP4:
        return MXFP4.upper()
    numbers = sorted({f"{'FP' if f.is_float else 'INT'}{f.bits}" for _, f in quantization.formats})
    method = quantization.method.upper() if quantization.method in METHODS_IN_NAMES else ""
    return f"{method} {' + '.join(numbers)}".strip()
