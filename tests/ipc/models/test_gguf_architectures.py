"""Names of tensors, against the tables of the gguf package. What the metadata becomes is tested by
test_gguf_config.py, whole models by tests/executor/models/fallback/test_gguf.py.
"""

from __future__ import annotations

import gguf
import pytest
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from quire.ipc.models.architectures import ENCODERS, NATIVE
from quire.ipc.models.fallback_architectures import FALLBACKS, REFUSED
from quire.ipc.models.gguf_architectures import (
    GGUF_ARCHITECTURES,
    REFUSED_ARCHITECTURES,
    VARIANT_KEYS,
    VARIANTS,
)

NUMBERS = {name: number for number, name in MODEL_ARCH_NAMES.items()}
NUMBERS.setdefault("bitnet-b1.58", NUMBERS["bitnet"])
NUMBERS.setdefault("deepseek32", NUMBERS["glm-dsa"])  # which has the same names
# The package's table has one model's name for a tensor that stands for another in other models.
NOT_THE_MODELS = {
    "attn_qkv": "a part of q, k and v",
    "rope_freqs": "of the configuration",
    "ssm_dt": "a bias alone",
    "exp_probs_b": "a bias alone",
    "attn_sub_norm": "of an earlier BitNet",
    "ffn_sub_norm": "of an earlier BitNet",
}
RENAMED, BARE = (".mixer.experts.", "_linear"), "ffn_norm"


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_names_are_those_of_the_gguf_package(architecture: str) -> None:
    known, number = GGUF_ARCHITECTURES[architecture], NUMBERS[architecture]
    theirs = gguf.get_tensor_name_map(number, 2)
    num_compared = 0
    for tensor in MODEL_TENSORS[number]:
        name = TENSOR_NAMES[tensor].format(bid=1)
        found = known.model_name(f"{name}.weight")
        is_compared = known.is_encoder or name.rpartition(".")[2] not in NOT_THE_MODELS
        # the conversion's code renames experts of Nemotron, and Granite's MLPs
        is_compared &= not any(part in (found or "") for part in RENAMED)
        if found is not None and is_compared:
            if known.is_encoder:  # theirs are those of the base model alone
                found = found.removeprefix(ENCODERS[known.architecture].names.base)
            # Falcon-H1's ffn_norm has no ending
            assert theirs.get_name(found, (".weight",)) in (f"{name}.weight", f"blk.1.{BARE}")
            num_compared += 1
    assert num_compared > 8


def test_every_architecture_is_a_model_that_runs() -> None:
    types = {known.architecture: name for name, known in FALLBACKS.items()}
    types |= {name: known.model_type for name, known in NATIVE.items()}
    for known in [*GGUF_ARCHITECTURES.values(), *VARIANTS.values()]:
        assert types[known.architecture] == known.model_type
    assert VARIANT_KEYS.keys() == VARIANTS.keys() < GGUF_ARCHITECTURES.keys()


def test_reasons_are_those_of_the_model_types() -> None:
    assert not REFUSED_ARCHITECTURES.keys() & GGUF_ARCHITECTURES.keys()
    for name, reason in REFUSED_ARCHITECTURES.items():
        assert name in NUMBERS
        assert "encoder" in reason or REFUSED[name.replace("-", "_")] == reason


@pytest.mark.parametrize(
    "name",
    [
        *("output", "output.scale", "blk.0.attn_q", "blk.x.attn_q.weight", "blk.01.attn_q.weight"),
        *("blk.-1.attn_q.weight", "blk..attn_q.weight", "v.blk.0.attn_q.weight", ""),
        *("blk.0.attn_rot_embd.weight", "blk.²1.attn_q.weight", "mm.0.weight"),
    ],
)
def test_names_of_other_tensors(name: str) -> None:
    assert GGUF_ARCHITECTURES["llama"].model_name(name) is None
