"""An error at start-up reaches the caller quickly as the engine's own exception. No process is left
behind.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import psutil
import pytest
from quire import LLM, InvalidParameterError, ModelLoadError
from quire.ipc.errors import RemoteTraceback
from quire.tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory, "qwen2")
    return directory


def truncate_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def change_architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "architectures": ["NobodysForCausalLM"], "model_type": "nobody"})
    )


def remove_everything(directory: Path) -> None:
    shutil.rmtree(directory)


CASES = {  # cause -> (how to create it, arguments, exception, text in its message)
    "no such model": (remove_everything, {}, ModelLoadError, "no such directory"),
    "corrupt weights": (truncate_weights, {}, ModelLoadError, "model.safetensors"),
    "unknown architecture": (change_architecture, {}, ModelLoadError, "NobodysForCausalLM"),
    "KV cache too small": (
        lambda directory: None,
        {"kv_cache_memory_bytes": 4096},
        InvalidParameterError,
        "kv_cache_memory_bytes",
    ),
    "too few blocks": (
        lambda directory: None,
        {"num_gpu_blocks_override": 2},
        InvalidParameterError,
        "num_gpu_blocks_override",
    ),
}


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("case", CASES)
def test_the_caller_gets_the_engines_exception(case, good, tmp_path):
    spoil, arguments, expected, text = CASES[case]
    directory = shutil.copytree(good, tmp_path / "model")
    spoil(directory)
    errors, before = [], psutil.Process().children()
    for engine in ("inproc", "process"):
        begin = time.monotonic()
        with pytest.raises(expected, match=text) as caught:
            LLM(str(directory), engine=engine, **arguments)
        assert time.monotonic() - begin < 60  # well before the start-up deadline
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1]) and str(errors[0]) == str(errors[1])
    assert psutil.Process().children() == before


def test_the_engines_traceback_is_the_cause(good, tmp_path):
    directory = shutil.copytree(good, tmp_path / "model")
    truncate_weights(directory)
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(directory), engine="process")
    assert isinstance(caught.value.__cause__, RemoteTraceback) and "load_weights" in str(
        caught.value.__cause__
    )
