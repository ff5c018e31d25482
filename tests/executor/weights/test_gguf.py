"""Weights from GGUF files: greedy tokens equal transformers' with the weights in the file; every
defect raises an error that names it.
"""

from __future__ import annotations

import json
import logging
import shutil
import struct
from math import prod
from pathlib import Path

import gguf
import msgspec
import pytest
import torch
from quire.executor import device as devices
from quire.executor.models import find_model
from quire.executor.models.layers import LayerFactory
from quire.executor.weights.gguf import PackedRows, halves_apart
from quire.executor.weights.loader import load_weights
from quire.executor.worker import Worker
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.plan import make_plan
from quire.frontend.model_info.weight_labels import file_type
from quire.ipc.errors import ModelLoadError, NotEnoughMemoryError
from quire.ipc.models.gguf import read_gguf
from quire.ipc.models.gguf_weights import bytes_in_memory
from quire.kernels import registry
from quire.kernels.reference.gguf_blocks import TYPES
from quire.kernels.reference.gguf_repack import from_i2_s
from quire.tests.executor.driver import generate, make_config, start_executor
from quire.tests.gguf_checkpoints import frequency_factors, gguf_name, write_gguf
from quire.tests.gguf_files import write_gguf as write_tensors
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY
from quire.tests.kernels.test_gguf_blocks import expected_weights, random_blocks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
# rows of whole blocks of 256
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": ("llama", {"head_dim": 64}),
    "llama, tied": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "bitnet": ("bitnet", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"head_dim": 64, "tie_word_embeddings": True}),
}
needs_native = pytest.mark.skipif(
    registry.select(CPU, torch.bfloat16).chosen["pack_gguf_linear"] != "native",
    reason=NEEDS_LIBRARY,
)
PROMPTS = [[1, 2, 3], list(range(5, 100))]


@pytest.fixture
def checkpoint(tiny):
    def make(kind: str) -> Path:
        name, overrides = KINDS[kind]
        return tiny(name, **SIZES, **overrides)

    return make


def rope_overrides(directory: Path) -> dict:
    """Return what the configuration of the GGUF file says of the rotary embedding."""
    config = json.loads((directory / "config.json").read_text())
    factors = frequency_factors(config)
    if factors is None:
        return {}
    theta = config["rope_parameters"]["rope_theta"]
    rope = {"rope_type": "factors", "rope_theta": theta, "factors": factors.tolist()}
    return {"rope_parameters": rope}


def start(path: Path, directory: Path, **arguments) -> Worker:
    """Start an executor of the model with the config of `directory` and the weights of `path`."""
    config = make_config(directory, rope_overrides(directory), **arguments)
    model_config = msgspec.structs.replace(config.model_config, model=str(path))
    executor = Worker(msgspec.structs.replace(config, model_config=model_config))
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    return executor


def load(path: Path, directory: Path, **overrides) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with the config of `directory`, loaded from the file
    at `path`.
    """
    config = json.loads((directory / "config.json").read_text())
    config |= rope_overrides(directory) | overrides
    found = find_model(config)
    make = LayerFactory(registry.select(CPU, torch.float32), torch.float32, CPU)
    model = found.build(found.parse_config(config), make, 64)
    for _, tensor in model.weights():
        tensor.fill_(float("nan"))
    load_weights(model, path, lambda stage, fraction: None)
    return dict(model.weights())


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_lands_in_its_place(kind, checkpoint, tmp_path):
    directory, path = checkpoint(kind), tmp_path / "model.gguf"
    written = write_gguf(path, directory)
    loaded = load(path, directory)
    stored = load_file(directory / "model.safetensors")
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], written[name]) for name in stored)
    assert all(torch.allclose(loaded[name], stored[name], rtol=3e-7) for name in stored)


def i2_s(numbers: torch.Tensor, scale: float) -> bytes:
    """A tensor of -1, 0 and 1 as bitnet.cpp stores it."""
    stored = (numbers.to(torch.uint8) + 1).view(-1, 4, 32)
    packed = stored[:, 0] << 6 | stored[:, 1] << 4 | stored[:, 2] << 2 | stored[:, 3]
    return packed.numpy().tobytes() + struct.pack("<f", scale) + bytes(28)


def test_a_model_of_bitnet_cpp(checkpoint, tmp_path):
    directory, tensors, meant = checkpoint("bitnet"), {}, {}
    for name, values in load_file(directory / "model.safetensors").items():
        is_ternary, meant[name] = values.dim() == 2 and "proj" in name, values
        content, scale = values.numpy().tobytes(), 1.25 + len(tensors) / 8
        if is_ternary:
            numbers = (values / values.abs().mean()).round().clamp(-1, 1)
            content, meant[name] = i2_s(numbers, scale), numbers * scale
        kind = "I2_S" if is_ternary else "F32"
        tensors[gguf_name(name, "bitnet-b1.58")] = tuple(values.shape), kind, content
    path = tmp_path / "m.gguf"
    write_tensors(path, {"general.architecture": "bitnet-b1.58"}, tensors)
    loaded = load(path, directory)
    assert loaded.keys() == meant.keys()
    assert all(torch.equal(loaded[name], meant[name]) for name in meant)
    tensor = read_gguf(path).tensors["blk.0.ffn_down.weight"]
    in_memory = bytes_in_memory(tensor, "bfloat16", keeps_blocks=True)
    assert in_memory == prod(tensor.shape) // 128 * 34 and file_type(read_gguf(path)) == "I2_S"


@pytest.mark.parametrize("scale", [1e5, 1e-9, float("nan"), float("inf")])
def test_a_scale_of_i2_s_must_fit_into_fp16(scale):
    data = torch.frombuffer(bytearray(i2_s(torch.zeros(2, 128), scale)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="is beyond fp16"):
        from_i2_s(data, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "llama 3", "gemma3"])
def test_greedy_tokens_are_those_of_transformers(kind, type, checkpoint, tmp_path):
    directory, path = checkpoint(kind), tmp_path / "model.gguf"
    stored = write_gguf(path, directory, type)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict(stored, strict=not model.config.tie_word_embeddings)
    expected = [
        model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    executor = start(path, directory)
    assert [row.output for row in generate(executor, PROMPTS, 16)] == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_on_top_is_that_of_the_dequantized_weights(quantization, checkpoint, tmp_path):
    directory, path = checkpoint("llama"), tmp_path / "model.gguf"
    stored = write_gguf(path, directory, "Q8_0")
    dense = shutil.copytree(directory, tmp_path / "dense")
    save_file(stored, dense / "model.safetensors")
    outputs = [
        [row.output for row in generate(executor, PROMPTS, 16)]
        for executor in (
            start_executor(dense, quantization=quantization),
            start(path, directory, quantization=quantization),
        )
    ]
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------- what is refused


def rewrite(path: Path, change) -> Path:
    """The tensors of a file went through `change(dict of name -> (array, type))`."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: (t.data.copy(), t.tensor_type) for t in reader.tensors}
    change(tensors)
    changed = path.with_name("changed.gguf")
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(changed, tensors.pop("architecture", architecture))
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


F32, I8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.I8


def drop(*names: str):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name: str, array: torch.Tensor, kind=F32):
    return lambda tensors: tensors.update({name: (array.numpy(), kind)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("output_norm.weight"), r"there is no tensor for model\.norm\.weight$"),
        (
            drop("blk.1.attn_k.weight", "blk.0.ffn_up.weight"),
            r"no tensor for model\.layers\.0\.mlp\.up_proj\.weight and 1 more",
        ),
        (put("blk.7.ffn_up.weight", torch.ones(2, 2)), r"no place for tensor blk\.7\.ffn_up"),
        (put("blk.0.attn_sinks.weight", torch.ones(4)), r"no place for tensor blk\.0\.attn_sinks"),
        (
            put("blk.0.attn_k.weight", torch.ones(256, 64)),
            r"attn_k\.weight has shape \[256, 64\], the model needs \[128, 256\]",
        ),
        (
            put("output.weight", torch.ones(320, 256, dtype=torch.int8), I8),
            r"output\.weight is of type I8; supported: F32, F16",
        ),
        (
            put("rope_freqs.weight", torch.ones(32)),
            r"the configuration ignores its rope_freqs\.weight",
        ),
        (put("rope_freqs.weight", torch.ones(2, 4)), r"rope_freqs\.weight must be a vector of F32"),
        (
            lambda tensors: tensors.update(architecture="mamba"),
            r"architecture 'mamba' is not supported; supported: llama, qwen2, "
            r"qwen3, gemma3",
        ),
    ],
)
def test_defects_are_refused_by_name(change, message, checkpoint, tmp_path):
    directory, path = checkpoint("llama"), tmp_path / "model.gguf"
    write_gguf(path, directory)
    with pytest.raises(ModelLoadError, match=message):
        load(rewrite(path, change), directory)


def test_factors_that_the_configuration_expects(checkpoint, tmp_path):
    directory, path = checkpoint("llama 3"), tmp_path / "model.gguf"
    write_gguf(path, directory)
    with pytest.raises(ModelLoadError, match=r"it has no rope_freqs\.weight, which the conf"):
        load(rewrite(path, drop("rope_freqs.weight")), directory)


@needs_native
def test_the_log_says_what_is_done(checkpoint, tmp_path, caplog):
    directory, path = checkpoint("qwen2"), tmp_path / "model.gguf"
    write_gguf(path, directory, "TQ2_0", {"lm_head.weight": "MXFP4"})
    caplog.set_level(logging.INFO, logger="quire")
    build(path, directory, torch.bfloat16)
    assert "model.gguf: matrices in TQ2_0 (15), MXFP4 (1)" in caplog.text
    assert caplog.text.count("weights of type TQ2_0 are packed again as INT2_128") == 1
    assert "MXFP4 are" not in caplog.text
    build(path, directory, torch.float32)
    assert caplog.text.count("weights of type TQ2_0 are unpacked to torch.float32") == 1


# ---------------------------------------------------------------- blocks that are kept


def build(path: Path, directory: Path, dtype: torch.dtype, quantization: str | None = None):
    """A model as the executor builds it, and its factory."""
    config = json.loads((directory / "config.json").read_text()) | rope_overrides(directory)
    found = find_model(config)
    make = LayerFactory(registry.select(CPU, dtype), dtype, CPU, quantization)
    model = found.build(found.parse_config(config), make, 64)
    load_weights(model, path, lambda stage, fraction: None, make.fill)
    return model, make


@needs_native
@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q4_1"])
def test_layers_multiply_blocks_as_they_are(type, checkpoint, tmp_path):
    """Also where the rows of q and k are permuted in the file, and the head is tied."""
    directory, path = checkpoint("llama, tied"), tmp_path / "model.gguf"
    stored = write_gguf(path, directory, type)
    model, make = build(path, directory, torch.bfloat16)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    qkv = model.layers[0].self_attn.qkv_proj
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    for layer, parts in ((qkv, names), (model.lm_head, ["model.embed_tokens.weight"])):
        weight = torch.cat([stored[name] for name in parts])
        exact = x.double() @ weight.double().T
        error = (layer.logits(x).double() - exact).square().mean().sqrt()
        assert 0 < error < 0.01 * exact.square().mean().sqrt()  # of x in 8 bits
    ids = torch.tensor([5, 0, 9])
    embedded = model.embed_tokens(ids)
    assert torch.equal(embedded, stored["model.embed_tokens.weight"][ids].bfloat16())
    vectors = sum(2 * t.numel() for t in stored.values() if t.dim() == 1)
    packed = sum(t.numel() for t in stored.values() if t.dim() == 2)
    bits = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5}[type]
    assert make.weights_bytes == vectors + packed * bits / 8


@needs_native
def test_an_embedding_of_its_own_stays_blocks(checkpoint, tmp_path):
    directory, path = checkpoint("qwen2"), tmp_path / "model.gguf"
    stored = write_gguf(path, directory, "Q4_0")
    model, _ = build(path, directory, torch.bfloat16)
    ids = torch.tensor([5, 0, 9])
    rows = stored["model.embed_tokens.weight"][ids].bfloat16()
    assert torch.equal(model.embed_tokens(ids), rows)
    with pytest.raises(RuntimeError, match="packed"):
        model.embed_tokens.weight


@needs_native
@pytest.mark.parametrize("type", ["IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_S", "NVFP4", "Q1_0"])
def test_types_without_kernels_are_packed_again(type, checkpoint, tmp_path):
    directory, path = checkpoint("qwen2"), tmp_path / "model.gguf"
    write_gguf(path, directory)
    # every other block has an extreme scale
    blocks = random_blocks(type, 2 * 320 * 256 // TYPES[type].columns, 1)[::2].reshape(320, -1)
    path = rewrite(path, put("output.weight", blocks, gguf.GGMLQuantizationType[type]))
    weight = torch.from_numpy(expected_weights(type, blocks.numpy()))
    assert torch.equal(load(path, directory)["lm_head.weight"], weight)
    model, _ = build(path, directory, torch.bfloat16)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ weight.double().T
    error = (model.lm_head.logits(x).double() - exact).square().mean().sqrt()
    assert 0 < error < 0.01 * exact.square().mean().sqrt()  # of x in 8 bits


# names whose types differ from the rest, and the layers that are no blocks for that reason
MIXTURES: list[tuple[str, dict[str, str]]] = [
    ("Q4_0", {}),
    ("Q4_K", {"model.embed_tokens.weight": "Q8_0", "lm_head.weight": "Q4_1"}),
    ("Q8_0", {f"model.layers.{i}.self_attn.v_proj.weight": "F16" for i in (0, 1)}),
    ("Q8_0", {"model.layers.1.mlp.up_proj.weight": "TQ2_0", "lm_head.weight": "BF16"}),
    ("Q4_1", {"model.embed_tokens.weight": "F16"}),
    ("F16", {}),
]


@needs_native
@pytest.mark.parametrize(("type", "others"), MIXTURES)
def test_the_plan_counts_the_bytes_in_memory(type, others, checkpoint, tmp_path):
    directory, path = checkpoint("qwen2"), tmp_path / "model.gguf"
    write_gguf(path, directory, type, others)
    for dtype in ("bfloat16", "float32"):
        make = build(path, directory, getattr(torch, dtype))[1]
        assert make_plan(EngineArgs(str(path), dtype=dtype)).weights_bytes == make.weights_bytes
    make = build(path, directory, torch.bfloat16, "int8")[1]
    stated = make_plan(EngineArgs(str(path), quantization="int8", dtype="bfloat16"))
    assert stated.weights_bytes == make.weights_bytes


@needs_native
def test_a_file_that_fits_only_as_blocks_is_loaded(checkpoint, tmp_path, monkeypatch):
    directory, path = checkpoint("qwen2"), tmp_path / "model.gguf"
    write_gguf(path, directory, "Q4_0")
    needed = build(path, directory, torch.bfloat16)[1].weights_bytes
    config = make_config(directory, dtype="bfloat16")
    model_config = msgspec.structs.replace(config.model_config, model=str(path))
    config = msgspec.structs.replace(config, model_config=model_config)
    for free, message in ((needed, None), (needed - 1, "as blocks of the file, .* are free")):
        worker = Worker(config)
        monkeypatch.setattr(devices, "free_bytes", lambda device, free=free: free)
        if message is None:
            worker.load_model(lambda stage, fraction: None)
        else:
            with pytest.raises(NotEnoughMemoryError, match=message):
                worker.load_model(lambda stage, fraction: None)
        monkeypatch.undo()


@needs_native
@pytest.mark.parametrize("type", ["Q8_0", "Q5_0", "Q4_K"])
def test_a_recorded_step_has_the_tokens_of_single_operations(type, checkpoint, tmp_path):
    directory, path = checkpoint("qwen2"), tmp_path / "model.gguf"
    write_gguf(path, directory, type)
    arguments = {"dtype": "bfloat16"}
    outputs = [
        [row.output for row in generate(executor, PROMPTS, 16)]
        for executor in (
            start(path, directory, **arguments),
            start(path, directory, **arguments, kernels={"rms_norm": "cpu"}),
        )
    ]
    assert outputs[0] == outputs[1]


def test_other_types_and_float32_are_unpacked(checkpoint, tmp_path):
    directory, path = checkpoint("qwen2"), tmp_path / "model.gguf"
    write_gguf(path, directory, "Q8_0")
    for dtype, quantization in ((torch.float32, None), (torch.bfloat16, "int4")):
        assert not build(path, directory, dtype, quantization)[1].keeps_blocks("Q8_0")
    assert not build(path, directory, torch.bfloat16)[1].keeps_blocks("F16")


def test_packed_rows_are_put_in_order():
    """Rows stay packed: two heads of six rows."""
    rows = torch.arange(12, dtype=torch.uint8).view(12, 1).expand(-1, 34).contiguous()
    ordered = halves_apart(PackedRows(rows, "Q8_0"), 2)
    assert ordered.type == "Q8_0" and ordered.rows[:, 0].tolist() == [
        *(0, 2, 4, 1, 3, 5),
        *(6, 8, 10, 7, 9, 11),
    ]
