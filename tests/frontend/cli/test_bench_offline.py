"""`quire bench throughput` and `latency` with the bundled model: figures, files, errors."""

import json
from pathlib import Path

import pytest
from quire.frontend.bench.offline import Phases, ReadLimit, Steps
from quire.frontend.cli.bench_offline import format_phases, format_steps
from quire.tests.frontend.cli import command

ENGINE = ["--engine", "inproc", "--max-model-len", "128", "--num-threads", "1"]


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "bench", *arguments)


def test_throughput(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, out, err = call(
        capsys,
        "throughput",
        "--num-prompts",
        "4",
        "--input-len",
        "12",
        "--output-len",
        "5",
        "--json",
        str(path),
        *ENGINE,
    )
    assert (code, err) == (0, "")
    assert out.startswith("4 requests in ") and "20 out: " in out
    assert (
        "execute " in out
        and "decode-only step of 4 requests: " in out
        and "reading the weights once takes" in out
    )
    assert "prefill, first step to first token" in out and "decode, first to last token" in out
    found = json.loads(path.read_text())
    assert (found["num_output_tokens"], found["num_failures"], found["settings"]["input_len"]) == (
        20,
        0,
        12,
    )
    assert found["machine"]["num_cores"] >= 1 and found["phases"]["prefill_time"]["count"] == 4


def test_latency(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = [
        "--batch-size",
        "2",
        "--input-len",
        "12",
        "--output-len",
        "5",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
        "--json",
        str(path),
    ]
    code, out, _ = call(capsys, "latency", *words, *ENGINE)
    assert code == 0 and out.startswith("2 x (12 tokens in, 5 out), 3 times; ms\n")
    assert "% of its limit" in out
    found = json.loads(path.read_text())
    assert (
        len(found["seconds"]) == len(found["phases"]) == 3 and found["read_limit"]["bandwidth"] > 0
    )
    assert (
        found["phases"][0]["num_prefill_tokens"] == 24
        and found["phases"][0]["num_decode_tokens"] == 8
    )


def test_rates_are_compared_with_the_limit() -> None:
    phases = [
        Phases(prefill_s=0.5, decode_s=2.0, num_prefill_tokens=100, num_decode_tokens=800)
    ] * 3
    text = format_phases(phases, ReadLimit(weight_bytes=10**9, bandwidth=1e11), batch_size=8)
    assert "prefill 200 tokens/s, decode 400 tokens/s" in text
    assert (
        "decode 50 steps/s read 50.00 GB/s of weights; this machine reads 1000.0 MB at 100.00 "
        "GB/s: 50 % of its limit" in text
    )


def test_a_decode_of_zero_duration_has_no_rate() -> None:
    text = format_phases(
        [Phases(prefill_s=0.5, decode_s=0.0, num_prefill_tokens=100, num_decode_tokens=4)],
        ReadLimit(1, 1.0),
        batch_size=1,
    )
    assert text == "prefill 200 tokens/s (median); all tokens were produced in one step"


def test_steps_are_compared_with_the_limit() -> None:
    text = format_steps(
        Steps(9, 0.1, 0.7, 0.2, 0.02, 8.0), ReadLimit(weight_bytes=10**9, bandwidth=1e11)
    )
    assert text.splitlines() == [
        "the last 9 steps: schedule 10.0 %, execute 70.0 %, process 20.0 %",
        "decode-only step of 8 requests: 20.00 ms (median); reading the "
        "weights once takes 10.00 ms on this machine",
    ]
    assert (
        format_steps(Steps(0, 0.0, 0.0, 0.0, None, 0.0), ReadLimit(1, 1.0))
        == "the last 0 steps: schedule 0.0 %, execute 0.0 %, process 0.0 %"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("latency --batch-size 0", "quire: --batch-size: must be at least 1, got 0"),
        ("latency --output-len 1", "quire: --output-len: must be at least 2, got 1"),
        ("latency --num-iters 0", "quire: --num-iters: must be at least 1, got 0"),
        (
            "latency --engine inproc --skip-tokenizer-init",
            "quire: skip_tokenizer_init: the tokenizer is needed to generate prompts",
        ),
        (
            "throughput --dataset-name sharegpt",
            "quire: --dataset-path: goes with --dataset-name sharegpt, which needs it",
        ),
        ("throughput --engine inproc --max-model-len 64 --num-prompts 1", "quire: "),
        ("throughput --base-url x", "unknown flag --base-url;"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture
) -> None:
    command.assert_refused(capsys, f"bench {arguments}", sentence)
