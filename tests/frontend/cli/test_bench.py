"""`quire bench`: its modes, their common flags, and that importing it is cheap."""

import json
import subprocess
import sys

import pytest
from quire.frontend.bench.options import WorkloadOptions
from quire.frontend.cli.bench import MODES
from quire.frontend.cli.bench_flags import options_of, settings_of
from quire.frontend.cli.bench_serve import serve_parser
from quire.tests.frontend.cli import command

HEAVY = {"torch", "numpy", "asyncio", "uvloop", "httptools", "tokenizers", "tqdm", "zmq", "psutil"}


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "bench", *arguments)


def test_modes(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0 and all(f"quire bench {mode}" in out for mode in MODES)
    assert call(capsys)[0] == 2
    assert call(capsys, "speed") == (
        2,
        "",
        "quire bench: unknown mode 'speed'; the modes are serve, throughput, latency, embed, cpu\n",
    )


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("embed", "cpu")])
def test_help_is_short_and_help_all_is_not(mode: str, capsys: pytest.CaptureFixture) -> None:
    """Of the modes that generate text."""
    _, short, _ = call(capsys, mode, "--help")
    _, full, _ = call(capsys, mode, "--help-all")
    assert "--ignore-eos" in short and "--temperature" not in short and "--temperature" in full
    flags = [
        word for line in short.splitlines() if (word := line.strip().split(" ")[0]).startswith("--")
    ]
    assert len(flags) <= 20


@pytest.mark.parametrize("mode", MODES)
def test_help_imports_nothing_heavy(mode: str) -> None:
    code = f"""
import sys, json
from quire.__main__ import main
try:
    main(["bench", "{mode}", "--help"])
except SystemExit:
    print(json.dumps(list(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert set(json.loads(done.stdout.splitlines()[-1])) & HEAVY == set()


def test_flags_become_the_workload() -> None:
    words = (
        "--dataset-name prefix --num-prompts 3 --input-len 40 --output-len 5 --range-ratio 0.5 "
        "--prefix-len 10 --num-prefixes 2 --token-ids --seed 4"
    )
    options = options_of(WorkloadOptions, serve_parser([]).parse(words.split()))
    assert (options.dataset_name, options.num_prompts, options.input_len, options.output_len) == (
        "prefix",
        3,
        40,
        5,
    )
    assert (
        options.range_ratio,
        options.prefix_len,
        options.num_prefixes,
        options.token_ids,
        options.seed,
    ) == (0.5, 10, 2, True, 4)


def test_settings_hold_every_flag_but_the_key() -> None:
    settings = settings_of(
        serve_parser([]).parse(["--api-key", "secret", "--goodput", "ttft:1", "tpot:2"])
    )
    assert "secret" not in json.dumps(settings, allow_nan=False)
    assert settings["request_rate"] == "inf" and settings["goodput"] == ["ttft:1", "tpot:2"]
