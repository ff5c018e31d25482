"""Quantized checkpoints of models that run in transformers' code, against transformers with the
weights that they stand for: greedy in fp32, token for token.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from quire import EngineArgs
from quire.executor.models.fallback.model import TransformersModel
from quire.frontend.model_info.plan import make_plan
from quire.ipc.errors import ModelLoadError
from quire.tests.executor.driver import Driver, greedy
from quire.tests.executor.models.fallback.test_model import NUM_TOKENS, assert_greedy, prompt, start
from quire.tests.executor.weights.test_gguf import needs_native
from quire.tests.quantized_checkpoints import edit_config, write_mxfp4, write_quantized
from quire.tests.tiny_fallbacks import save_tiny_fallback
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

# model_type, format and its arguments
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2, awq": ("gemma2", "awq", {}),
    "starcoder2, gptq": ("starcoder2", "gptq", {"sym": False, "desc_act": True}),
    "phi, auto-round": ("phi", "auto-round", {}),
    "cohere2, packed": ("cohere2", "pack-quantized", {"ignore": [r"re:.*\.[kv]_proj$"]}),
    "glm4, int8": ("glm4", "int-quantized", {"ignore": ["re:.*down_proj"]}),
    "gemma2, fp8": ("gemma2", "fp8", {}),
    "dots1, packed experts": ("dots1", "pack-quantized", {"ignore": [r"re:.*\.mlp\.gate$"]}),
}
SPECIAL = {"glm4": {"pad_token_id": 0}}


def make(tmp_path: Path, case: str) -> tuple[Path, Any]:
    """The quantized checkpoint, and transformers' model of the weights that it stands for."""
    model_type, format, arguments = CASES[case]
    original, directory = tmp_path / "original", tmp_path / "quantized"
    save_tiny_fallback(original, model_type, **SPECIAL.get(model_type, {}))
    meant = write_quantized(directory, original, format, **arguments)
    save_file(meant, original / "model.safetensors", metadata={"format": "pt"})
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        original, dtype=torch.float32, attn_implementation="eager"
    )
    return directory, oracle


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, oracle = make(tmp_path, case)
    with caplog.at_level(logging.INFO):
        executor = start(directory)
    assert isinstance(executor.model, TransformersModel)
    has_experts = "several weights in one tensor" in caplog.text
    assert has_experts == ("experts" in case)
    driver = Driver(executor)
    row = driver.add("row", prompt(37, 1), greedy(logprobs=2))
    driver.run(NUM_TOKENS)
    assert_greedy(oracle, row)


@needs_native
@pytest.mark.parametrize("case", ["gemma2, awq", "glm4, int8", "dots1, packed experts"])
def test_blocks_are_kept_and_planned(case: str, tmp_path: Path) -> None:
    directory, _ = make(tmp_path, case)
    executor = start(directory, dtype="bfloat16", model_impl="auto")
    args = EngineArgs(str(directory), dtype="bfloat16", max_model_len=128)
    plan = make_plan(args)
    # the bias of dots1's router is a buffer, which the worker does not count
    assert plan.keeps_blocks
    assert plan.weights_bytes == pytest.approx(executor._builder.weights_bytes, rel=1e-4)
    driver = Driver(executor)
    row = driver.add("row", prompt(30, 3))
    driver.run(4)
    assert row.error is None and len(row.output) == 4


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    stored = {k: v for k, v in (load_file(path) | tensors).items() if v is not None}
    save_file(stored, path, metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({f"{LAYER}.scales": None}, rf"no file has the tensor {LAYER}\.scales"),
        ({f"{LAYER}.scales": torch.ones(1, 64)}, rf"{LAYER}\.scales has shape \[1, 64\]"),
        (
            {f"{LAYER}.{part}": None for part in ("qweight", "qzeros", "scales")},
            rf"no file has the tensor {LAYER}\.weight",
        ),
        (
            {"model.layers.1.odd.qweight": torch.ones(64, 8, dtype=torch.int32)},
            r"no file has the tensor model\.layers\.1\.odd\.qzeros",
        ),
        (
            {"model.embed_tokens.qweight": torch.ones(64, 8, dtype=torch.int32)},
            r"model\.embed_tokens\.qweight is of type I32",
        ),
    ],
)
def test_defects_are_refused_by_name(
    tensors: dict[str, torch.Tensor | None], problem: str, tmp_path: Path
) -> None:
    directory, _ = make(tmp_path, "gemma2, awq")
    change(directory, **tensors)
    with pytest.raises(ModelLoadError, match=problem):
        start(directory)


def test_transposed_layers_are_refused(tmp_path: Path) -> None:
    save_tiny_fallback(tmp_path, "gpt2")
    edit_config(tmp_path, {"quant_method": "awq", "bits": 4})
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"
    with pytest.raises(ModelLoadError, match="is not supported for gpt2, whose linear layers are"):
        start(tmp_path)


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As OpenAI publishes them; transformers' own unpacking is the oracle."""
    original, directory = tmp_path / "original", tmp_path / "mxfp4"
    save_tiny_fallback(original, "gpt_oss")
    meant = write_mxfp4(directory, original)
    save_file(meant, original / "model.safetensors", metadata={"format": "pt"})
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        original, dtype=torch.float32, attn_implementation="eager"
    )
    with caplog.at_level(logging.INFO):
        driver = Driver(start(directory))
    plan = make_plan(EngineArgs(str(directory), dtype="float32", max_model_len=128))
    assert plan.weights_bytes >= sum(weight.nbytes for weight in meant.values())
    assert "unpacked to torch.float32: no kernel multiplies MXFP4" in caplog.text
    row = driver.add("row", prompt(37, 1), greedy(logprobs=2))
    driver.run(NUM_TOKENS)
    assert_greedy(oracle, row)
    change(directory, **{"model.layers.0.mlp.experts.down_proj_scales": None})
    with pytest.raises(ModelLoadError, match="no file has the tensor .*_scales"):
        start(directory)
