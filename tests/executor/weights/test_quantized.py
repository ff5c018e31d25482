"""Weights of quantized checkpoints: the formats' formulas in numpy, and greedy tokens equal to
transformers' with the same weights; every defect raises an error that names it.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quire import EngineArgs
from quire.executor.models import find_model
from quire.executor.models.layers import LayerFactory
from quire.executor.weights.loader import load_weights
from quire.executor.weights.packed_rows import PackedRows
from quire.executor.weights.quantized import QuantizedWeights, pack_weight
from quire.frontend.model_info.plan import make_plan
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.quantization_config import parse_quantization
from quire.kernels import registry
from quire.tests.executor.driver import generate, start_executor
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY
from quire.tests.quantized_checkpoints import FORMATS, write_quantized
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "awq, 32": ("awq", {}),
    "awq, 128": ("awq", {"group_size": 128}),
    "gptq, 64": ("gptq", {"group_size": 64}),
    "gptq, 16": ("gptq", {"group_size": 16}),
    "gptq, per channel": ("gptq", {"group_size": -1}),
    "gptq, asymmetric": ("gptq", {"sym": False}),
    "gptq, act-order": ("gptq", {"sym": False, "desc_act": True}),
    "gptq, v2": ("gptq", {"sym": False, "version": 2}),
    "gptq, 8 bits": ("gptq", {"bits": 8}),
    "auto-round": ("auto-round", {}),
    "gptq, head": ("gptq", {"group_size": 128, "has_head": True}),
    "packed, head": ("pack-quantized", {"group_size": 128, "has_head": True}),
    "packed, asymmetric": ("pack-quantized", {"symmetric": False}),
    "packed, per channel": ("pack-quantized", {"group_size": -1}),
    "packed, 8 bits": ("pack-quantized", {"bits": 8}),
    "int8": ("int-quantized", {}),
    "int8, fp32 scales": ("int-quantized", {"dtype": torch.float32}),
    "int8, asymmetric": ("int-quantized", {"symmetric": False}),
    "fp8, per tensor": ("float-quantized", {"scales_of": "tensor"}),
    "fp8, per channel": ("float-quantized", {"scales_of": "channel"}),
    "fp8, static": ("float-quantized", {"activations": "static", "scales_of": "channel"}),
    "fp8, compressed blocks": ("float-quantized", {"scales_of": "block"}),
    "fp8, blocks": ("fp8", {}),
    "bitnet": ("bitnet", {}),
    "bitnet, auto": ("bitnet", {"linear_class": "autobitlinear"}),
    "bitnet, online": ("bitnet", {"linear_class": "autobitlinear", "mode": "online"}),
}
PROMPTS = [[1, 2, 3], list(range(5, 100))]
needs_native = pytest.mark.skipif(
    registry.select(CPU, torch.bfloat16).chosen["pack_gguf_linear"] != "native",
    reason=NEEDS_LIBRARY,
)


@pytest.fixture(scope="session")
def checkpoint(tiny, tmp_path_factory):
    """checkpoint(case) returns a quantized checkpoint, what it stands for, and its original."""
    made: dict[str, tuple[Path, dict[str, torch.Tensor], Path]] = {}

    def make(case: str) -> tuple[Path, dict[str, torch.Tensor], Path]:
        if case not in made:
            format, arguments = CASES[case]
            original = tiny("qwen2", **SIZES)
            directory = tmp_path_factory.mktemp("quantized") / "model"
            made[case] = (
                directory,
                write_quantized(directory, original, format, **arguments),
                original,
            )
        return made[case]

    return make


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    config = json.loads((directory / "config.json").read_text())
    found = find_model(config)
    make = LayerFactory(registry.select(CPU, dtype), dtype, CPU)
    model = found.build(found.parse_config(config), make, 64)
    for _, tensor in model.weights():
        tensor.fill_(float("nan"))
    load_weights(
        model, directory, lambda stage, fraction: None, quantization=parse_quantization(config)
    )
    return dict(model.weights())


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_formats_formula(case, checkpoint):
    directory, meant, _ = checkpoint(case)
    loaded = load(directory)
    assert loaded.keys() == meant.keys()
    assert [name for name in meant if not torch.equal(loaded[name], meant[name])] == []


@pytest.mark.parametrize(
    "case", ["awq, 128", "gptq, act-order", "packed, asymmetric", "int8", "fp8, blocks"]
)
def test_greedy_tokens_are_those_of_transformers(case, checkpoint):
    directory, meant, original = checkpoint(case)
    model: Any = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    model.load_state_dict(meant, strict=not model.config.tie_word_embeddings)
    expected = [
        model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    executor = start_executor(directory)
    assert [row.output for row in generate(executor, PROMPTS, 16)] == expected


def test_quantization_on_top_is_that_of_the_dequantized_weights(checkpoint, tmp_path):
    directory, meant, original = checkpoint("fp8, blocks")
    dense = tmp_path / "dense"
    shutil.copytree(original, dense)
    save_file(meant, dense / "model.safetensors", metadata={"format": "pt"})
    outputs = [
        [row.output for row in generate(executor, PROMPTS, 16)]
        for executor in (start_executor(path, quantization="int8") for path in (dense, directory))
    ]
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    ("case", "type"),
    [
        ("awq, 128", "INT4_128"),
        ("gptq, 64", "INT4_32"),
        ("gptq, per channel", "INT4_128"),
        ("packed, asymmetric", "INT4_32"),
        ("packed, 8 bits", "Q8_0"),
        ("gptq, 8 bits", "Q8_0"),
        ("int8", "Q8_0"),
        ("int8, fp32 scales", "Q8_0 do not hold"),
        ("int8, asymmetric", "Q8_0 do not hold"),
        ("gptq, act-order", "act-order"),
        ("gptq, 16", "groups of 16"),
        ("fp8, per tensor", "no kernel multiplies fp8"),
        ("fp8, per tensor", "FP8_128"),
        ("fp8, per channel", "FP8_128"),
        ("fp8, per channel", "FP8_128_TOKEN"),
        ("fp8, static", "FP8_128"),
        ("fp8, static", "FP8_128_STATIC"),
        ("fp8, compressed blocks", "FP8_128"),
        ("fp8, blocks", "FP8_128"),
        ("fp8, blocks", "FP8_128_GROUP"),
        ("bitnet", "INT2_128"),
        ("bitnet, auto", "INT2_128"),
        ("bitnet, online", "INT2_128"),
    ],
)
def test_what_is_packed_and_why_something_is_not(case, type, checkpoint, caplog):
    caplog.set_level(logging.INFO)
    directory, meant, _ = checkpoint(case)
    config = json.loads((directory / "config.json").read_text())
    name = "model.layers.0.mlp.down_proj.weight"
    shapes = {name: list(meant[name].shape)}
    stored = {
        part: tensor
        for part, tensor in load_file(directory / "model.safetensors").items()
        if part.startswith(name.removesuffix("weight"))
    }
    is_fp8, in_fp8 = type.startswith("FP8"), type.startswith("FP8_128_")
    quantization = parse_quantization(config, keeps_fp8=is_fp8, quantizes_to_fp8=in_fp8)
    weights = QuantizedWeights(shapes, quantization, set(stored))
    stored = {part: tensor for part, tensor in stored.items() if weights.weight_of(part)}
    results = [weights.add(part, tensor, torch.bfloat16) for part, tensor in stored.items()]
    assert all(result is None for result in results[:-1])
    weight = results[-1]
    if isinstance(weight, PackedRows):
        assert weight.type == type
        assert torch.equal(weight.dequantized(torch.float32), meant[name])
        if type.endswith("_STATIC"):
            assert (weight.rows[:, 4:8].clone().view(torch.float32) == 0.25).all()
    else:
        assert weight is not None and weight.dtype == torch.bfloat16
        assert torch.equal(weight, meant[name].bfloat16()) and type in caplog.text


def test_fp8_as_transformers_stores_it_by_tensor():
    """As in Ministral 3: weight_scale_inv and activation_scale, in bf16, of no dimension."""
    torch.manual_seed(0)
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    name, layer = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj"
    stored = {
        name: torch.randn(8, 32).to(torch.float8_e4m3fn),
        f"{layer}.weight_scale_inv": torch.tensor(0.5).bfloat16(),
        f"{layer}.activation_scale": torch.tensor(0.25).bfloat16(),
    }
    config = {"quantization_config": config}
    for on_a_gpu in (True, False):
        found = parse_quantization(config, keeps_fp8=on_a_gpu, quantizes_to_fp8=on_a_gpu)
        weights = QuantizedWeights({name: [8, 32]}, found, set(stored))
        kept = {part: tensor for part, tensor in stored.items() if weights.weight_of(part)}
        assert len(kept) == 2 + on_a_gpu
        *_, weight = [weights.add(part, tensor, torch.bfloat16) for part, tensor in kept.items()]
        if on_a_gpu:
            assert weight.type == "FP8_32_STATIC"
            weight = weight.dequantized(torch.bfloat16)
        assert torch.equal(weight, (stored[name].float() / 2).bfloat16())


@pytest.mark.parametrize(
    ("stored", "words"),
    [({}, "has no input_scale or activation_scale"), ({"input_scale": [0.0]}, "positive.*got 0")],
)
def test_a_static_scale_must_be_there_and_positive(stored, words):
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    weight = torch.zeros(8, 32).to(torch.float8_e4m3fn)
    [found] = [f for _, f in parse_quantization({"quantization_config": config}).formats]
    parts = {part: torch.tensor(scale) for part, scale in stored.items()}
    parts |= {"weight": weight, "weight_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=words):
        pack_weight(found, [8, 32], parts, torch.bfloat16, keeps_fp8=True)


def test_the_log_says_once_what_is_unpacked_and_why(checkpoint, caplog):
    caplog.set_level(logging.INFO)
    directory, _, _ = checkpoint("gptq, act-order")
    load(directory, torch.bfloat16)
    told = [record.getMessage() for record in caplog.records if "unpacked" in record.getMessage()]
    assert len(told) == 1 and "act-order" in told[0] and "torch.bfloat16" in told[0]


# ---------------------------------------------------------------- layers on blocks


def build(directory: Path, dtype: torch.dtype = torch.bfloat16):
    """A model as the executor builds it, and its factory."""
    config = json.loads((directory / "config.json").read_text())
    found = find_model(config)
    make = LayerFactory(registry.select(CPU, dtype), dtype, CPU)
    model = found.build(found.parse_config(config), make, 64)
    quantization = parse_quantization(config)
    load_weights(model, directory, lambda stage, fraction: None, make.fill, quantization)
    return model, make


KEPT = ["awq, 128", "gptq, head", "gptq, asymmetric", "packed, per channel", "int8"]
kept = pytest.mark.parametrize("case", KEPT)


@needs_native
@kept
def test_layers_multiply_blocks_as_they_are(case, checkpoint):
    directory, meant, _ = checkpoint(case)
    model, _ = build(directory)
    for layer, names in (
        (model.layers[0].self_attn.qkv_proj, [f"self_attn.{part}_proj" for part in "qkv"]),
        (model.layers[0].mlp.down_proj, ["mlp.down_proj"]),
    ):
        weight = torch.cat([meant[f"model.layers.0.{name}.weight"] for name in names])
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = x.double() @ weight.double().T
        if layer.bias is not None:
            exact += layer.bias.double()
        error = (layer.logits(x).double() - exact).square().mean().sqrt()
        assert 0 < error < 0.01 * exact.square().mean().sqrt()  # of x in 8 bits


@needs_native
@kept
def test_bits_do_not_depend_on_chunks_batch_mates_or_the_native_program(case, checkpoint):
    directory, _, _ = checkpoint(case)
    executor = start_executor(directory, dtype="bfloat16")
    together = [row.output for row in generate(executor, PROMPTS, 16)]
    alone = [generate(executor, [prompt], 16)[0].output for prompt in PROMPTS]
    cut = [row.output for row in generate(executor, PROMPTS, 16, chunk=lambda row: 7)]
    by_operation = start_executor(directory, dtype="bfloat16", kernels={"rms_norm": "cpu"})
    assert together == alone == cut
    assert together == [row.output for row in generate(by_operation, PROMPTS, 16)]


@needs_native
@pytest.mark.parametrize("ignored", [[], ["re:.*v_proj"], ["re:.*0.mlp.up_proj", "re:.*o_proj"]])
def test_the_plan_counts_the_bytes_in_memory(ignored, tiny, tmp_path):
    """Also where a part of a merged layer is not quantized."""
    directory = tmp_path / "model"
    write_quantized(directory, tiny("qwen2", **SIZES), "int-quantized", ignore=ignored)
    make = build(directory)[1]
    plan = make_plan(EngineArgs(str(directory), dtype="bfloat16"))
    assert plan.weights_bytes == make.weights_bytes


# ---------------------------------------------------------------- what is refused

LAYER = "model.layers.1.mlp.up_proj"


def edited(checkpoint, tmp_path: Path, case: str, **tensors: torch.Tensor | None) -> Path:
    """A copy of a checkpoint whose tensors of LAYER are replaced, or removed where they are
    None.
    """
    directory = tmp_path / "edited"
    shutil.copytree(checkpoint(case)[0], directory)
    stored = load_file(directory / "model.safetensors")
    for part, tensor in tensors.items():
        stored.pop(f"{LAYER}.{part}", None)
        if tensor is not None:
            stored[f"{LAYER}.{part}"] = tensor
    save_file(stored, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("case", "tensors", "message"),
    [
        ("awq, 32", {"scales": None}, f"no file has the tensor {LAYER}.scales"),
        (
            "awq, 32",
            {"scales": torch.zeros(4, 384)},
            rf"{LAYER}.scales has shape \[4, 384\], the model needs \[8, 384\]",
        ),
        (
            "awq, 32",
            {"qweight": torch.zeros(256, 48)},
            f"{LAYER}.qweight is of type F32; supported: I32$",
        ),
        ("awq, 32", {"weight": torch.zeros(384, 256)}, f"no place for tensor {LAYER}.weight"),
        (
            "gptq, act-order",
            {"g_idx": torch.full((256,), 8, dtype=torch.int32)},
            f"quantized tensors of {LAYER}.weight: its index of groups leads out of the scales",
        ),
        (
            "packed, asymmetric",
            {"weight_zero_point": None},
            f"no file has the tensor {LAYER}.weight_zero_point",
        ),
        (
            "int8",
            {"weight_scale": torch.zeros(3, 1)},
            r"weight_scale has shape \[3, 1\], the model needs \[384, 1\] or \[384\]",
        ),
        (
            "fp8, blocks",
            {"weight_scale_inv": torch.zeros(2, 2)},
            r"weight_scale_inv has shape \[2, 2\], the model needs \[3, 2\]",
        ),
        (
            "fp8, per tensor",
            {"weight": torch.zeros(384, 256, dtype=torch.int8)},
            f"{LAYER}.weight is of type I8; supported: F8_E4M3$",
        ),
        (
            "bitnet",
            {"weight_scale": torch.zeros(1)},
            f"quantized tensors of {LAYER}.weight: its weight_scale must be positive and finite",
        ),
    ],
)
def test_defects_are_named(case, tensors, message, checkpoint, tmp_path):
    with pytest.raises(ModelLoadError, match=message):
        load(edited(checkpoint, tmp_path, case, **tensors))


def test_a_checkpoint_that_is_not_quantized_has_no_such_tensors(checkpoint, tmp_path):
    directory = shutil.copytree(checkpoint("awq, 32")[0], tmp_path / "copy")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="no place for tensor .*qweight"):
        load(directory)


def test_every_format_is_covered():
    assert {format for format, _ in CASES.values()} == FORMATS.keys()
