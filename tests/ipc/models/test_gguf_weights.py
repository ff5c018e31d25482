"""Tensors of GGUF files under the models' names. tests/executor/weights/test_gguf.py tests what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from struct import pack

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.checkpoint import check_checkpoint, missing_weight_files
from quire.ipc.models.gguf import GGUFFile, GGUFTensor
from quire.ipc.models.gguf_architectures import GGUF_ARCHITECTURES
from quire.ipc.models.gguf_weights import (
    MEMORY_TYPES,
    READABLE_TYPES,
    check_gguf_tensors,
    is_permuted,
    read_rope_factors,
)
from quire.kernels.reference import gguf_linear, gguf_repack
from quire.kernels.reference.gguf_blocks import TYPES
from quire.tests.gguf_checkpoints import gguf_name
from quire.tests.tiny_models import TINY

HERE = Path("model.gguf")
SAME = {"MistralForCausalLM": "LlamaForCausalLM"}
GGUF = {
    known.architecture: name
    for name, known in GGUF_ARCHITECTURES.items()
    if known.architecture in ARCHITECTURES
    and ARCHITECTURES[known.architecture].experts is None
    and known.read is None  # tests/test_gguf_hybrids.py
}


def make_file(shapes: dict[str, list[int]], architecture: str = "llama") -> GGUFFile:
    tensors = [
        GGUFTensor(gguf_name(name, architecture), tuple(shape), "F32", HERE, 1000 - i, 4)
        for i, (name, shape) in enumerate(shapes.items())
    ]
    metadata = {"general.architecture": architecture}
    return GGUFFile([HERE], metadata, {tensor.name: tensor for tensor in tensors})


def test_types_are_those_that_are_dequantized():
    assert list(READABLE_TYPES) == list(TYPES)


def test_types_that_stay_blocks_are_those_that_are_multiplied():
    assert MEMORY_TYPES.keys() <= set(READABLE_TYPES)
    kept = {type: type for type in gguf_linear.TYPES if type in READABLE_TYPES}
    assert kept | gguf_repack.TYPES == MEMORY_TYPES


@pytest.mark.parametrize("name", [*SAME, *GGUF])
def test_every_name_of_a_model_is_found(name):
    """In the order of the file, here with the last name first."""
    table = ARCHITECTURES[name]
    hf_config = TINY | {"attention_bias": name[0] == "L"}
    if name in ("Gemma3ForCausalLM", "Exaone4ForCausalLM"):
        hf_config |= {"sliding_window": 9}
    shapes = table.weight_shapes(table.parse(hf_config))
    architecture = GGUF[SAME.get(name, name)]
    assert list(check_gguf_tensors(make_file(shapes, architecture), shapes)) == list(shapes)[::-1]


def test_which_rows_are_interleaved():
    rows = "model.layers.3.self_attn.{}_proj.{}"
    for file, permuted in ((make_file({}), "qk"), (make_file({}, "qwen2"), "")):
        for kind in ("weight", "bias"):
            found = [part for part in "qkvo" if is_permuted(file, rows.format(part, kind))]
            assert "".join(found) == permuted
    assert not is_permuted(make_file({}), "model.layers.3.self_attn.q_norm.weight")


def test_rope_factors(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(40) + pack("<3f", 1, 2.5, 8))
    tensor = GGUFTensor("rope_freqs.weight", (3,), "F32", path, 40, 12)
    file = make_file({})
    assert read_rope_factors(file) is None
    file.tensors["rope_freqs.weight"] = tensor
    assert read_rope_factors(file) == [1.0, 2.5, 8.0]
    file.tensors["rope_freqs.weight"] = tensor._replace(type="F16", num_bytes=6)
    with pytest.raises(ModelLoadError, match=r"must be a vector of F32, not F16 of shape \[3\]"):
        read_rope_factors(file)


def test_a_file_in_place_of_a_directory(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelLoadError, match=r"has no model\.gguf"):
        missing_weight_files(path)
    path.write_bytes(b"GGUF")
    assert missing_weight_files(path) == []
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        check_checkpoint(path, {}, {})
