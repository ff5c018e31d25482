"""A worker sleeps, wakes up and loads other weights. Memory is really released, and later results
are right.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from quire.executor.worker import Worker
from quire.ipc.errors import ModelLoadError
from quire.tests.executor.driver import generate, start_executor

PROMPTS = [[1, 2, 3], list(range(5, 45))]
MIB = 2**20


def outputs(executor: Worker) -> list[list[int]]:
    return [row.output for row in generate(executor, PROMPTS, 12)]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tags", [["kv_cache"], ["kv_cache", "weights"]])
def test_the_same_model_wakes_up(tiny, kind, tags):
    executor = start_executor(tiny(kind))
    before, usage = outputs(executor), executor.memory_usage()
    executor.collective_rpc("sleep", tags)
    with pytest.raises(RuntimeError, match="the worker sleeps: its kv_cache"):
        executor.check_health()
    with pytest.raises(RuntimeError, match="sleeps"):
        executor.execute_dummy_batch()
    asleep = executor.memory_usage()
    assert asleep["kv_cache_bytes"] == 0 and (asleep["weights_bytes"] == 0) == ("weights" in tags)
    executor.collective_rpc("wake_up", ["weights", "kv_cache"])
    executor.check_health()
    assert outputs(executor) == before
    after = executor.memory_usage()
    assert [after[name] for name in ("kv_cache_bytes", "weights_bytes")] == [
        usage[name] for name in ("kv_cache_bytes", "weights_bytes")
    ]


def test_random_weights_wake_up_as_they_were(tiny, tmp_path):
    shutil.copy(tiny() / "config.json", tmp_path)
    executor = start_executor(tmp_path, load_format="dummy", seed=3)
    before = outputs(executor)
    executor.collective_rpc("sleep", ["kv_cache", "weights"])
    executor.collective_rpc("wake_up", ["weights"])
    executor.collective_rpc("wake_up", ["kv_cache"])
    assert outputs(executor) == before


# In a process of its own, whose memory nothing else changes.
SLEEP_AND_WAKE_UP = """
import json, sys
from quire.ipc.machine import resident_bytes
from quire.tests.executor.driver import start_executor

executor = start_executor(sys.argv[1], load_format="dummy", kv_cache_memory_bytes=128 * 2**20)

def write_everywhere():
    for layer in executor.model.attention_layers():
        layer.key_cache.fill_(1.0)
        layer.value_cache.fill_(1.0)
    return resident_bytes()

resident = [write_everywhere()]
for tag in ("kv_cache", "weights"):
    executor.collective_rpc("sleep", [tag])
    resident.append(resident_bytes())
executor.collective_rpc("wake_up", ["weights", "kv_cache"])
print(json.dumps([*resident, write_everywhere()]))
"""


@pytest.mark.slow
def test_sleep_releases_memory(tiny, tmp_path):
    """With a cache of 128 MiB, fully written, and 80 MiB of weights, the process shrinks by that
    much and grows again.
    """
    config = json.loads((tiny() / "config.json").read_text()) | {
        "vocab_size": 20_000,
        "hidden_size": 512,
        "num_hidden_layers": 1,
        "layer_types": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-P", "-c", SLEEP_AND_WAKE_UP, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    awake, light_sleep, deep_sleep, again = json.loads(done.stdout)
    assert awake - light_sleep > 0.9 * 128 * MIB
    assert light_sleep - deep_sleep > 0.8 * 75 * MIB
    assert again - deep_sleep > 0.9 * (128 + 75) * MIB


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_weights_compute_what_a_fresh_engine_computes(tiny, dtype):
    executor, fresh = (start_executor(tiny(seed=seed), dtype=dtype) for seed in (0, 1))
    old, new = outputs(executor), outputs(fresh)
    assert old != new
    executor.collective_rpc("load_weights", str(tiny(seed=1)))
    assert outputs(executor) == new
    executor.collective_rpc("sleep", ["kv_cache", "weights"])
    executor.collective_rpc("wake_up", ["weights", "kv_cache"])
    assert outputs(executor) == new  # not the model that the configuration names
    executor.collective_rpc("load_weights", str(tiny(seed=0, num_shards=3)))
    assert outputs(executor) == old


def damaged(directory, source, problem: str):
    """Copy a checkpoint and break one thing. Return the text that the error must contain."""
    for path in source.iterdir():
        shutil.copy(path, directory)
    weights, config = (
        directory / "model.safetensors",
        json.loads((source / "config.json").read_text()),
    )
    if problem == "no weights":
        weights.unlink()
        return "neither model.safetensors"
    if problem == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1000])
        return "not a readable safetensors file"
    if problem == "tensor missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.layers.2.mlp.down_proj.weight"]
        save_file(tensors, weights)
        return "no file has the tensor model.layers.2.mlp.down_proj.weight"
    if problem == "other architecture":
        config["architectures"] = ["LlamaForCausalLM"]
    elif problem == "other rope":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
        config.pop("rope_theta", None)
    elif problem == "no config":
        (directory / "config.json").write_text("{")
        return "cannot be read"
    (directory / "config.json").write_text(json.dumps(config))
    return {
        "other architecture": "the architecture is LlamaForCausalLM, the engine runs "
        "Qwen2ForCausalLM",
        "other rope": "rope is ",
    }[problem]


@pytest.mark.parametrize(
    "problem",
    ["no weights", "cut short", "tensor missing", "other architecture", "other rope", "no config"],
)
def test_incomplete_or_foreign_weights_leave_the_old_ones(tiny, tmp_path, problem):
    executor = start_executor(tiny(seed=0))
    before = outputs(executor)
    message = damaged(tmp_path, tiny(seed=1), problem)
    with pytest.raises(ModelLoadError, match=message):
        executor.collective_rpc("load_weights", str(tmp_path))
    assert outputs(executor) == before


def test_weights_of_another_size_are_refused(tiny):
    executor = start_executor(tiny())
    before = outputs(executor)
    with pytest.raises(ModelLoadError, match="hidden_size is 32, the engine runs a model with 64"):
        executor.collective_rpc("load_weights", str(tiny(hidden_size=32)))
    assert outputs(executor) == before


def test_a_directory_with_only_weights_is_enough(tiny, tmp_path):
    shutil.copy(tiny(seed=1) / "model.safetensors", tmp_path)
    executor = start_executor(tiny(seed=0))
    executor.collective_rpc("load_weights", str(tmp_path))
    assert outputs(executor) == outputs(start_executor(tiny(seed=1)))


def test_the_cache_survives_new_weights(tiny):
    """The worker does not change the cache. Its contents are stale, and the core must reset the
    prefix cache.
    """
    executor = start_executor(tiny(seed=0))
    [layer, *_] = executor.model.attention_layers()
    layer.key_cache.fill_(2.0)
    executor.collective_rpc("load_weights", str(tiny(seed=1)))
    [other, *_] = executor.model.attention_layers()
    assert (
        other is not layer
        and torch.equal(other.key_cache, layer.key_cache)
        and other.key_cache.data_ptr() == layer.key_cache.data_ptr()
    )
