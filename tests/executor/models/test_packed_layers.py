"""A start from kept packed weights gives the bits of the start that kept them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from quire.executor import model_builder
from quire.executor.models.packed_layers import PackedLayers
from quire.executor.weights.packed_cache import PackedCache, StoredArray
from quire.kernels import registry
from quire.tests.executor.driver import generate, greedy, start_executor
from quire.tests.executor.weights import test_gguf as gguf_models
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY

pytestmark = pytest.mark.skipif(
    registry.select("cpu", torch.float32).chosen["pack_quantized_linear"] != "native",
    reason=NEEDS_LIBRARY,
)
PROMPTS = [[1, 2, 3], list(range(5, 45))]
KINDS = {
    "qwen2": {},  # biases, and an embedding of its own
    "qwen3": {"tie_word_embeddings": True},
}


def outputs(executor) -> list:
    return [
        (row.output, [list(map(float, values)) for _, values, _ in row.logprobs])
        for row in generate(executor, PROMPTS, 12, greedy(logprobs=3))
    ]


def start(directory: Path, cache: Path | None, **arguments):
    settings = {"quantization": "int4", "dtype": "bfloat16"} | arguments
    return start_executor(
        directory, packed_weights_cache=None if cache is None else str(cache), **settings
    )


@pytest.fixture
def only_from_cache(monkeypatch):
    """Weights can no longer be read from the model's files."""

    def forbid() -> None:
        monkeypatch.setattr(model_builder, "load_weights", None)

    return forbid


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_start_has_the_bits_of_the_first(
    kind, quantization, tiny, tmp_path, only_from_cache, caplog
):
    directory = tiny(kind, **KINDS[kind])
    without = start(directory, None, quantization=quantization)
    first = start(directory, tmp_path, quantization=quantization)
    only_from_cache()
    with caplog.at_level(logging.INFO, logger="quire"):
        second = start(directory, tmp_path, quantization=quantization)
    assert "packed weights from" in caplog.text
    assert outputs(first) == outputs(second) == outputs(without)
    usages = [e.memory_usage()["weights_bytes"] for e in (first, second)]
    assert usages[0] == usages[1]


@pytest.mark.slow
def test_sleep_and_other_weights(tiny, tmp_path, only_from_cache):
    directory = tiny("qwen2")
    other = shutil.copytree(tiny("qwen2", seed=1), tmp_path / "other")
    expected = [outputs(start(path, None)) for path in (directory, other)]
    assert expected[0] != expected[1]
    executor = start(directory, tmp_path / "cache")
    start(other, tmp_path / "cache")
    only_from_cache()
    for tags in (["kv_cache"], ["kv_cache", "weights"]):
        executor.collective_rpc("sleep", tags)
        executor.collective_rpc("wake_up", tags)
        assert outputs(executor) == expected[0]
    for path, wanted in ((other, expected[1]), (directory, expected[0])):
        executor.collective_rpc("load_weights", str(path))
        assert outputs(executor) == wanted


def test_pages_stay_those_of_the_file(tiny, tmp_path):
    """So that processes share them, and the system may drop them."""
    directory = tiny("qwen2")
    start(directory, tmp_path)
    executor = start(directory, tmp_path)
    generate(executor, PROMPTS, 4)
    [name] = [path.name for path in tmp_path.iterdir()]
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(name))
    sizes = dict(line.split(":") for line in lines[at + 1 : at + 20])
    assert sizes["Private_Dirty"].split()[0] == sizes["Anonymous"].split()[0] == "0"
    assert int(sizes["Rss"].split()[0]) > 0


@pytest.mark.parametrize("change", ["missing", "shape", "type", "size"])
def test_arrays_of_another_model_are_replaced(change, tiny, tmp_path, monkeypatch, caplog):
    directory = tiny("qwen2")
    expected = outputs(start(directory, tmp_path))
    read = PackedCache.read

    def changed(cache: PackedCache) -> dict[str, StoredArray] | None:
        arrays = read(cache)
        assert arrays is not None
        name = next(name for name in arrays if name.endswith("#weight"))
        if change == "missing":
            del arrays[name]
        elif change == "shape":
            arrays[name] = arrays[name]._replace(shape=[1, -1])
        elif change == "type":
            arrays["model.norm.weight"] = arrays["model.norm.weight"]._replace(dtype="bits")
        else:
            arrays[name] = arrays[name]._replace(data=arrays[name].data[:-1])
        return arrays

    monkeypatch.setattr(PackedCache, "read", changed)
    before = next(tmp_path.iterdir()).stat().st_ino
    assert outputs(start(directory, tmp_path)) == expected
    assert "damaged, written again" in caplog.text
    assert next(tmp_path.iterdir()).stat().st_ino != before


def test_a_gguf_file_that_is_quantized_again(tiny, tmp_path, only_from_cache):
    directory = tiny("qwen2", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    (model := tmp_path / "model").mkdir()
    write_gguf(model / "model.gguf", directory, "Q8_0")
    cache = str(tmp_path / "cache")

    def start_file():
        settings = {"quantization": "int8", "packed_weights_cache": cache, "dtype": "bfloat16"}
        return gguf_models.start(model / "model.gguf", directory, **settings)

    first = start_file()
    only_from_cache()
    assert outputs(start_file()) == outputs(first)


def test_kernels_without_arrays_have_no_entries(tiny, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="quire"):
        start(tiny("qwen2"), tmp_path, kernels={"pack_quantized_linear": "reference"})
    assert "packed_weights_cache has no effect on this model" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_a_cache_nothing_is_kept(tiny):
    packed = PackedLayers(None, None)  # type: ignore[arg-type]
    assert packed.restored() is False and packed.arrays() == {}
    packed.keep()
