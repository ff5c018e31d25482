"""What lists of models say about the files: format, family, type of the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import LlamaFileType
from quire import ModelLoadError
from quire.frontend.model_info.weight_labels import (
    FILE_TYPE_KEY,
    FILE_TYPES,
    GUESSED,
    weight_labels,
)
from quire.tests.gguf_files import write_gguf
from quire.tests.quantized_checkpoints import FORMATS

TENSORS = {
    "token_embd.weight": ((4, 32), "Q4_0", bytes(4 * 18)),
    "output_norm.weight": ((32,), "F32", bytes(4 * 32)),
}


@pytest.mark.parametrize(
    ("metadata", "numbers"),
    [
        ({FILE_TYPE_KEY: 15}, "Q4_K_M"),
        ({FILE_TYPE_KEY: 7 + GUESSED}, "Q8_0"),
        ({FILE_TYPE_KEY: 999}, "Q4_0"),
        ({}, "Q4_0"),
    ],
)
def test_a_gguf_file(tmp_path: Path, metadata: dict[str, Any], numbers: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "gemma3"} | metadata, TENSORS)
    assert weight_labels(path, {"model_type": "gemma3_text"}) == ("gguf", "gemma3", numbers)


def test_the_names_of_file_types_are_ggmls() -> None:
    names = {int(kind): kind.name.partition("_")[2] for kind in LlamaFileType}
    names[41] = "Q2_0"  # which the package lacks
    assert GUESSED == LlamaFileType.GUESSED
    assert {number: names.get(number) for number in FILE_TYPES} == FILE_TYPES


NUMBERS = {
    "awq": "AWQ INT4",
    "gptq": "GPTQ INT4",
    "auto-round": "INT4",
    "pack-quantized": "INT4",
    "int-quantized": "INT8",
    "float-quantized": "FP8",
    "fp8": "FP8",
    "bitnet": "INT2",
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_checkpoint(tmp_path: Path, format: str) -> None:
    config = {"model_type": "qwen2", "torch_dtype": "float16"}
    config["quantization_config"] = FORMATS[format][1]()
    expected = ("safetensors", "qwen2", NUMBERS[format])
    assert weight_labels(tmp_path, config) == expected


def test_a_plain_checkpoint_and_one_that_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "dtype": "bfloat16"}
    assert weight_labels(tmp_path, config) == ("safetensors", "qwen2", "BF16")
    assert weight_labels(tmp_path, {}) == ("safetensors", "", None)
    with pytest.raises(ModelLoadError, match="quant_method"):
        weight_labels(tmp_path, config | {"quantization_config": {"quant_method": "odd"}})
