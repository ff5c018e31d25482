"""Weights from files: single files and shards give the same, every defect raises an error that
names it. Also random weights.
"""

from __future__ import annotations

import json
import re
import shutil
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from quire.executor.models import find_model
from quire.executor.models.decoder import Decoder
from quire.executor.models.layers import LayerFactory
from quire.executor.weights.loader import fill_with_random_weights, load_weights
from quire.frontend.diagnosis.model import check_model
from quire.frontend.engine_args import EngineArgs
from quire.ipc.errors import ModelLoadError
from quire.kernels import registry
from quire.tests.executor.driver import generate, start_executor
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")


def make_model(directory: Path, dtype: torch.dtype = torch.float32, **overrides) -> Decoder:
    """Return an unfilled model: every parameter is NaN, so a parameter that is not loaded is
    visible.
    """
    hf_config = json.loads((directory / "config.json").read_text()) | overrides
    found = find_model(hf_config)
    model = found.build(
        found.parse_config(hf_config),
        LayerFactory(registry.select(CPU, dtype), dtype, CPU),
        64,
    )
    for _, tensor in model.weights():
        tensor.fill_(float("nan"))
    return model


def load(
    directory: Path, dtype: torch.dtype = torch.float32, **overrides
) -> dict[str, torch.Tensor]:
    model = make_model(directory, dtype, **overrides)
    load_weights(model, directory, lambda stage, fraction: None)
    return dict(model.weights())


@pytest.fixture
def broken(tiny, tmp_path):
    """broken(change) returns a copy of a tiny checkpoint whose tensors went through
    `change(dict)`.
    """

    def make(change, kind: str = "qwen2", **arguments) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(tiny(kind, **arguments), directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return make


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_every_tensor_is_loaded_into_its_parameter(kind, num_shards, tiny):
    directory = tiny(kind, num_shards=num_shards)
    files = list(directory.glob("*.safetensors"))
    assert (len(files) > 1) == (num_shards > 1)
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    loaded = load(directory)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


PLACES = ["", "language_model.", "model.language_model.", "language_model.model.", "module.model."]


def placed(change: str, tensors: dict[str, torch.Tensor]) -> None:
    """Moves the base model to `change`; a head stays beside it."""
    wrapper = next((one for one in ("module.", "_orig_mod.") if change.startswith(one)), "")
    outer = "language_model." if change == "language_model.model." else ""
    for name in list(tensors):
        is_inner = name.startswith("model.")
        new = change + name.removeprefix("model.") if is_inner else wrapper + outer + name
        tensors[new] = tensors.pop(name)


@pytest.mark.parametrize("place", [*PLACES, "_orig_mod.model.", "_orig_mod."])
@pytest.mark.parametrize("is_tied", [True, False])
def test_prefixes_of_names_change_nothing(place, is_tied, broken, tiny):
    """Also where the head is the embedding, whose name has the prefix too."""
    expected = load(tiny("qwen2", tie_word_embeddings=is_tied))
    directory = broken(partial(placed, place), tie_word_embeddings=is_tied)
    loaded = load(directory)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    findings = {one.name: one for one in check_model(EngineArgs(str(directory)))}
    assert findings["weights"].status == "pass", findings["weights"]


@pytest.mark.parametrize("place", PLACES)
def test_a_missing_tensor_is_named_as_the_others_are(place, broken):
    """Of a tied model, whose head has no tensor of its own."""

    def change(tensors):
        placed(place, tensors)
        tensors.pop(f"{place}embed_tokens.weight")

    directory = broken(change, tie_word_embeddings=True)
    message = rf"no file has the tensor {place}embed_tokens\.weight; read"
    with pytest.raises(ModelLoadError, match=message):
        load(directory)
    findings = {one.name: one for one in check_model(EngineArgs(str(directory)))}
    assert findings["weights"].status == "fail"
    assert re.search(message, findings["weights"].detail)


def test_merged_projections_are_filled_by_rows(tiny):
    directory = tiny("qwen2")
    model = make_model(directory)
    load_weights(model, directory, lambda stage, fraction: None)
    stored = load_file(directory / "model.safetensors")
    for i, layer in enumerate(model.layers):
        for kind in ("weight", "bias"):
            expected = torch.cat(
                [stored[f"model.layers.{i}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            )
            assert torch.equal(getattr(layer.self_attn.qkv_proj, kind), expected)
        expected = torch.cat(
            [stored[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        )
        assert torch.equal(layer.mlp.gate_up_proj.weight, expected)


def test_sharded_checkpoint_generates_the_same(tiny):
    prompts = [[1, 2, 3], list(range(40))]
    outputs = [
        [row.output for row in generate(start_executor(tiny("llama", num_shards=n)), prompts, 12)]
        for n in (1, 3)
    ]
    assert outputs[0] == outputs[1]


def test_weights_are_cast_on_load(tiny):
    exact, rounded = load(tiny("qwen3")), load(tiny("qwen3"), torch.bfloat16)
    assert all(
        tensor.dtype == torch.bfloat16 and torch.equal(tensor, exact[name].bfloat16())
        for name, tensor in rounded.items()
    )
    widened = load(tiny("qwen3", dtype="bfloat16"), torch.float32)
    assert all(torch.equal(widened[name], rounded[name].float()) for name in rounded)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_loaded_tensor_releases_its_memory_and_its_source(num_shards, tiny):
    """The loader keeps no reference to a tensor when the next one is loaded."""
    directory = tiny("qwen2", num_shards=num_shards)
    model, filled, alive = make_model(directory), 0, []

    def fill(tensor: torch.Tensor, stored: torch.Tensor) -> None:
        nonlocal filled
        assert (
            stored.shape == tensor.shape
            and [reference for reference in alive if reference() is not None] == []
        )
        filled += tensor.numel()
        alive.append(weakref.ref(stored))
        # rows of a linear layer, not of a norm, whose memory the model keeps
        if tensor._base is not None:
            alive.append(weakref.ref(tensor))

    load_weights(model, directory, lambda stage, fraction: None, fill)
    assert filled == sum(tensor.numel() for _, tensor in model.weights())


def test_progress_rises_to_one(tiny):
    reports = []
    load_weights(
        make_model(tiny("qwen2", num_shards=4)),
        tiny("qwen2", num_shards=4),
        lambda *report: reports.append(report),
    )
    fractions = [fraction for stage, fraction in reports if stage == "load weights"]
    assert (
        fractions == sorted(fractions)
        and fractions[-1] == 1.0
        and len(fractions) == len(reports) > 4
    )


def test_rotary_buffers_are_ignored(broken):
    directory = broken(
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        )
    )
    assert not any(tensor.isnan().any() for tensor in load(directory).values())


def test_leftover_tensor(broken):
    directory = broken(
        lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2)})
    )
    with pytest.raises(
        ModelLoadError,
        match=r"model\.safetensors: the model has no place for tensor "
        r"model\.layers\.7\.mlp\.up_proj\.weight",
    ):
        load(directory)


def test_missing_tensors(broken):
    def drop(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.bias"]

    with pytest.raises(
        ModelLoadError,
        match=r"no file has the tensor model\.layers\.1\.self_attn\.k_proj\.bias and 1 more; read: "
        r"model\.safetensors",
    ):
        load(broken(drop))


def test_biases_missing_for_qwen2_though_the_config_denies_them(broken):
    def drop(tensors):
        for name in [name for name in tensors if name.endswith(".bias")]:
            del tensors[name]

    with pytest.raises(ModelLoadError, match=r"q_proj\.bias and 8 more"):
        load(broken(drop), attention_bias=False)


def test_wrong_shape(broken):
    directory = broken(
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 32)}
        )
    )
    with pytest.raises(
        ModelLoadError, match=r"k_proj\.weight has shape \[64, 32\], the model needs \[32, 64\]"
    ):
        load(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensor(broken, dtype):
    directory = broken(
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(dtype)})
    )
    with pytest.raises(
        ModelLoadError,
        match=r"model\.safetensors: tensor model\.norm\.weight is of type .*; supported: F64, F32, "
        r"F16, BF16",
    ):
        load(directory)


def test_tied_head(broken, tiny):
    """A stored copy of the embedding is accepted. A head that contradicts the config is refused."""
    assert "lm_head.weight" not in load(tiny("llama", tie_word_embeddings=True))
    same = broken(
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
        "llama",
        tie_word_embeddings=True,
    )
    load(same)
    tensors = load_file(same / "model.safetensors")
    tensors["lm_head.weight"][3, 3] += 1.0
    save_file(tensors, same / "model.safetensors")
    with pytest.raises(
        ModelLoadError,
        match=r"lm_head\.weight differs from the embedding, yet the config says "
        r"tie_word_embeddings",
    ):
        load(same)


def test_untied_head_missing(tiny):
    with pytest.raises(ModelLoadError, match=r"no file has the tensor lm_head\.weight;"):
        load(tiny("llama", tie_word_embeddings=True), tie_word_embeddings=False)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "long header"])
def test_corrupt_file(broken, damage):
    directory = broken(lambda tensors: None)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    damaged = {
        "truncated": content[:-100],
        "garbage": b"\x07" * 1000,
        "empty": b"",
        "long header": b"\xff" * 8 + content[8:],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: not a readable safetensors file: "
    ):
        load(directory)


def test_no_weights_at_all(broken):
    directory = broken(lambda tensors: None)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(
        ModelLoadError,
        match=r"neither model\.safetensors nor model\.safetensors\.index\.json is there, and "
        r"no GGUF file; Quire reads no other formats",
    ):
        load(directory)


@pytest.fixture
def sharded(tiny, tmp_path) -> Path:
    return shutil.copytree(tiny("qwen2", num_shards=4), tmp_path / "sharded")


def test_shard_missing(sharded):
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[1]
    (sharded / name).unlink()
    with pytest.raises(ModelLoadError, match=f"index.json: the shard {name} is not there"):
        load(sharded)


def test_tensor_in_two_shards(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    with pytest.raises(
        ModelLoadError, match=f"{second.name}: tensor {name} is also in {first.name}"
    ):
        load(sharded)


def test_dummy_weights_are_seeded_and_never_zero(tiny):
    def dummy(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        model = make_model(tiny("qwen2"), dtype)
        fill_with_random_weights(model, seed, lambda stage, fraction: None)
        return dict(model.weights())

    first, again, other, rounded = dummy(1), dummy(1), dummy(2), dummy(1, torch.bfloat16)
    for name, tensor in first.items():
        assert (
            torch.equal(tensor, again[name])
            and not torch.equal(tensor, other[name])
            and torch.equal(tensor.bfloat16(), rounded[name])
        )
        assert tensor.count_nonzero() == tensor.numel()
        mean = 1.0 if "norm" in name else 0.0
        assert 0.01 < (tensor - mean).std() < 0.03 and abs(tensor.mean() - mean) < 0.01
