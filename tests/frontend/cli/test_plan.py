"""`quire plan` as a command: the text, the JSON, the exit code, and the plan below an engine's
error.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from quire import EngineArgs
from quire.frontend.cli.plan import plan_beneath
from quire.frontend.model_info import gpu_memory
from quire.ipc.errors import NotEnoughMemoryError
from quire.tests.frontend.cli.command import call

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}  # (Qwen3-8B)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_the_plan_as_text(model: str, capsys: pytest.CaptureFixture) -> None:
    code, out, err = call(capsys, "plan", model, "--memory", "24GiB", "--dtype", "bfloat16")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{model}: Qwen3ForCausalLM, 8.19B parameters, context 40,960 tokens"
    figures = {
        name.strip(): rest.split()
        for line in lines[2:]
        if "   " in line.strip()
        for name, rest in [line.strip().split("   ", 1)]
    }
    assert figures["memory, as named"] == ["24.0", "GiB"]
    assert figures["weights, bfloat16"][:5] == ["15.3", "GiB", "float32:", "30.5", "GiB,"]
    assert figures["KV cache"] == ["3.3", "GiB", "144.0", "KiB", "per", "token"]
    assert figures["requests of 4,096 tokens at once"] == ["5"]
    assert (
        figures["longest context"][1:3] == ["tokens;", "max_model_len=40,960"] and "in total" in out
    )
    assert lines[-1].startswith(f"quire serve {model} --dtype bfloat16 --max-model-len ")


def test_a_plan_for_a_gpu(model: str, capsys: pytest.CaptureFixture) -> None:
    code, out, err = call(
        capsys, "plan", model, "--device", "cuda", "--memory", "24GiB", "--kv-cache-dtype", "fp8"
    )
    assert (code, err) == (0, "")
    figures = {
        name.strip(): rest.split()
        for line in out.splitlines()[2:]
        if "   " in line.strip()
        for name, rest in [line.strip().split("   ", 1)]
    }
    assert figures["the GPU's memory, as named"] == ["24.0", "GiB"]
    assert figures["in use or left to others"] == ["2.4", "GiB", "gpu_memory_utilization=0.9"]
    assert figures["activations and graphs, an estimate"][2:] == [
        "the",
        "engine",
        "measures",
        "it",
        "when",
        "it",
        "starts",
    ]
    assert figures["KV cache"][2:] == ["72.0", "KiB", "per", "token"]
    assert out.splitlines()[-1] == f"quire serve {model} --kv-cache-dtype fp8 --device cuda"
    code, out, _ = call(capsys, "plan", model, "--device", "cuda", "--memory", "16GiB")
    assert (
        code == 1
        and "missing" in out
        and "It does not fit: max_model_len=40,960 needs at least 25." in out
    )


def test_without_a_gpu_its_memory_is_required(
    model: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "CUDA_LIBRARY", "libnothing.so.1")
    code, out, err = call(capsys, "plan", model, "--device", "cuda")
    assert (
        (code, out) == (2, "")
        and err.startswith("quire: device: cuda: the memory of an NVIDIA GPU cannot be read")
        and "--memory 80GiB" in err
    )


def test_the_suggested_command_works(model: str, capsys: pytest.CaptureFixture) -> None:
    stated = json.loads(
        call(capsys, "plan", model, "--memory", "24GiB", "--dtype", "bfloat16", "--json")[1]
    )
    assert (
        not stated["fits"]
        and stated["num_parameters"] == 8_190_735_360
        and stated["weights_bytes"] == 2 * stated["num_parameters"]
    )
    words = shlex.split(stated["command"])
    assert words[:2] == ["quire", "serve"]
    memory = "--memory", "24GiB"  # this machine may have less
    again = json.loads(call(capsys, "plan", *words[2:], *memory, "--json")[1])
    assert again["fits"] and again["max_model_len"] == stated["longest_context"]
    assert stated["kv_cache_bytes"] == 0 < again["kv_cache_bytes"]


def test_a_model_that_cannot_fit_reports_the_memory_that_it_needs(
    model: str, capsys: pytest.CaptureFixture
) -> None:
    code, out, _ = call(capsys, "plan", model, "--memory", "8GiB", "--dtype", "float32")
    assert (
        code == 1
        and "missing" in out
        and "It does not fit: max_model_len=40,960 needs at least 59.0 GiB." in out
        and "quire serve" not in out
    )
    code, out, _ = call(capsys, "plan", model, "--memory", "30GiB", "--dtype", "float32")
    assert code == 0 and f"As bfloat16 it does:\n\nquire serve {model} --dtype bfloat16 " in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--memory lots",
            "quire plan: argument --memory: must be a number of bytes such as 24GiB, 500MB or "
            "1048576, got 'lots'",
        ),
        ("./nowhere", "quire: model './nowhere': there is no such directory"),
        (
            "--max-model-len 99999",
            "quire: max_model_len: must be at most 4096, the context of the model, got 99999",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture
) -> None:
    code, out, err = call(capsys, "plan", *arguments.split())
    assert (code, out) == (2, "") and err.startswith(sentence) and err.count("\n") == 1


def test_an_out_of_memory_error_is_followed_by_the_plan(
    capsys: pytest.CaptureFixture,
) -> None:
    code, out, err = call(
        capsys,
        "generate",
        "x",
        "--kv-cache-memory-bytes",
        "1MiB",
        "--dtype",
        "float32",
        "--engine",
        "inproc",
    )
    assert (code, out) == (2, "")
    sentence, _, plan = err.partition("\n\n")
    assert sentence.startswith(
        "quire: kv_cache_memory_bytes: one sequence of max_model_len=4096 tokens needs 257 "
        "KV-cache blocks"
    )
    assert sentence.endswith("lower max_model_len to at most 176") and "\n" not in sentence
    assert plan.startswith("bundled: Qwen2ForCausalLM, 3.99M parameters")
    assert plan.endswith(
        "quire serve bundled --dtype float32 --max-model-len 176 --kv-cache-memory-bytes 1048576\n"
    )


@pytest.mark.slow
def test_a_server_that_cannot_start_prints_the_plan() -> None:
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "1MiB",
        "--dtype",
        "float32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    sentence, plan = done.stderr.split("quire: kv_cache_memory_bytes: ")[1].split("\n\n", 1)
    assert "at most 176" in sentence and plan.endswith(
        "quire serve bundled --dtype float32 --max-model-len 176 --kv-cache-memory-bytes 1048576\n"
    )


def test_a_daemon_reports_what_it_will_refuse(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "quire",
        "engine",
        "--listen",
        f"ipc://{tmp_path}/x.sock",
        "--kv-cache-memory-bytes",
        "1MiB",
        "--dtype",
        "float32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    first, _, refusal = done.stderr.partition(
        "quire serve bundled --dtype float32 --max-model-len 176 --kv-cache-memory-bytes 1048576\n"
    )
    assert (
        done.returncode == 2
        and "quire engine: it will probably not fit\n\nbundled: Qwen2ForCausalLM" in first
    )
    assert "at most 176" in refusal and "Traceback" not in refusal


@pytest.mark.parametrize(("num_bytes", "has_plan"), [(2**20, True), (40 * 10**12, False)])
def test_a_refused_size_of_the_cache_is_not_recommended(num_bytes: int, has_plan: bool) -> None:
    """The plan below an engine's error ends with a command to copy."""
    arguments = {"kv_cache_memory_bytes": num_bytes}
    refusal = NotEnoughMemoryError("kv_cache_memory_bytes", "is too large")
    with (
        pytest.raises(NotEnoughMemoryError) as caught,
        plan_beneath(EngineArgs(**arguments), arguments),
    ):
        raise refusal
    notes = getattr(caught.value, "__notes__", [])
    assert [f"--kv-cache-memory-bytes {num_bytes}" in note for note in notes] == [True] * has_plan
