"""The list of models: the bundled one, and a fake hub cache with incomplete snapshots."""

from __future__ import annotations

import json
import logging
from math import prod
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.model_info.model_cache import CachedModel, list_models
from quire.tests.gguf_files import write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float16",
}
WHOLE = {"config.json": json.dumps(CONFIG), "model.safetensors": "x" * 1000, "tokenizer.json": "{}"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add(
    cache: Path,
    name: str,
    files: dict[str, str],
    commit: str = "a" * 40,
    ref: str | None = "main",
    kind: str = "models",
) -> Path:
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        blob = repository / "blobs" / f"{commit[:4]}-{file}"
        blob.write_text(text)
        (snapshot / file).symlink_to(blob)
    if ref:
        (repository / "refs" / ref).write_text(commit)
    return repository


def listed(*names: str) -> dict[str, CachedModel]:
    models, warnings = list_models()
    assert warnings == [] and models[0].model == "bundled" and models[0].problems == []
    return {f"{model.model}@{model.revision}": model for model in models[1:]}


def test_a_missing_cache_is_not_an_error(cache: Path) -> None:
    assert listed() == {}
    cache.mkdir()
    assert listed() == {}


def test_complete_models_are_ready(cache: Path) -> None:
    add(cache, "somebody/small", WHOLE)
    add(cache, "somebody/small", WHOLE | {"model.safetensors": "y" * 7}, commit="b" * 40, ref=None)
    add(cache, "somebody/data", {"a.txt": "x"}, kind="datasets")
    models = listed()
    assert set(models) == {"somebody/small@main", f"somebody/small@{'b' * 12}"}
    model = models["somebody/small@main"]
    assert (model.weights, model.architecture, model.problems) == ("F16", "LlamaForCausalLM", [])
    assert (model.fits, model.flags) == (True, [])
    kv_bytes = (1 + 64 // 16) * 16 * 2 * 8 * 2  # with the null block; a 0.4 of what is free
    assert (
        model.needs_bytes is not None
        and 0
        <= model.needs_bytes - (384 * 2**20 + kv_bytes / 0.4)
        < 4 * (model.num_parameters or 0) + 1
    )
    assert model.num_parameters == 2 * 100 * 8 + (8 * 8 * 4 + 3 * 8 * 16 + 16) + 8
    assert (
        model.size_bytes == sum(map(len, WHOLE.values())) and Path(model.directory).name == "a" * 40
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model.safetensors": None}, "no model.safetensors"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"config.json": None}, "no config.json"),
        ({"config.json": "{"}, "config.json cannot be read"),
        (
            {"config.json": json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]})},
            "architecture GPT2LMHeadModel is not supported",
        ),
        (
            {"config.json": json.dumps({**CONFIG, "architectures": 3})},
            "architectures must be a list of names",
        ),
        (
            {"config.json": json.dumps({**CONFIG, "quantization_config": {}})},
            "quantization_config: quant_method None is not supported",
        ),
        (
            {
                "model.safetensors": None,
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
                ),
            },
            "no 1.safetensors and 1 more",
        ),
        (
            {
                "model.safetensors": None,
                "model.safetensors.index.json": json.dumps({"weight_map": {"a": 1}}),
            },
            "'1' is not the name of a file beside it",
        ),
    ],
)
def test_missing_files_and_unsupported_models_are_reported(
    changes: dict[str, Any], problem: str, cache: Path
) -> None:
    add(
        cache,
        "somebody/spoilt",
        {name: text for name, text in (WHOLE | changes).items() if text is not None},
    )
    [model] = listed().values()
    assert (
        len(model.problems) == 1
        and problem in model.problems[0]
        and str(cache) not in model.problems[0]
    )


def test_a_model_that_is_too_large(cache: Path) -> None:
    large = {**CONFIG, "vocab_size": 2**31 - 1, "hidden_size": 2**12, "num_attention_heads": 32}
    add(cache, "somebody/large", WHOLE | {"config.json": json.dumps(large)})
    [model] = listed().values()
    assert model.fits is False and model.problems == []
    assert model.needs_bytes is not None and model.needs_bytes > 2**43


def test_interrupted_downloads(cache: Path) -> None:
    repository = add(
        cache,
        "somebody/half",
        {name: text for name, text in WHOLE.items() if name != "model.safetensors"},
    )
    (repository / "blobs" / "abc.incomplete").write_text("x")
    assert listed()["somebody/half@main"].problems == [
        "1 interrupted download",
        "no model.safetensors",
    ]


def test_unknown_keys_are_not_logged_for_a_list(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(cache, "somebody/new", WHOLE | {"config.json": json.dumps({**CONFIG, "some_new_key": 1})})
    with caplog.at_level(logging.WARNING):
        listed()
    assert not caplog.records


def test_a_damaged_cache_is_a_warning(cache: Path) -> None:
    (cache / "models--somebody--nothing").mkdir(parents=True)
    models, warnings = list_models()
    assert len(models) == 1 and len(warnings) == 1 and "\n" not in warnings[0]


def test_gguf_files_are_listed_by_their_quantization(cache: Path) -> None:
    repository = add(cache, "org/g", {"README.md": ""})
    (snapshot,) = (repository / "snapshots").iterdir()
    metadata = {"general.architecture": "llama"} | {
        f"llama.{key}": value
        for key, value in {
            "context_length": 64,
            "embedding_length": 8,
            "feed_forward_length": 16,
            "block_count": 1,
            "attention.head_count": 2,
        }.items()
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (100, 8), "output_norm": (8,)}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{part}"] = (8, 8)
    shapes |= {"blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,), "blk.0.ffn_down": (8, 16)}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8)}
    tensors = {f"{n}.weight": (shape, "F32", bytes(4 * prod(shape))) for n, shape in shapes.items()}
    for name in ("g-Q4_K_M.gguf", "odd.gguf"):
        write_gguf(repository / "blobs" / name, metadata, tensors)
        (snapshot / name).symlink_to(repository / "blobs" / name)
    (snapshot / "g-Q8_0.gguf").write_text("GGUF")
    found = listed()
    assert list(found) == ["org/g:Q4_K_M@main", "org/g:Q8_0@main", "org/g/odd.gguf@main"]
    good = found["org/g:Q4_K_M@main"]
    assert (good.weights, good.architecture, good.problems) == ("F32", "LlamaForCausalLM", [])
    assert good.size_bytes == (repository / "blobs" / "g-Q4_K_M.gguf").stat().st_size
    (problem,) = set(found["org/g:Q8_0@main"].problems)
    assert "not a readable GGUF file" in problem
