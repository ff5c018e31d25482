"""guidellm, a load generator: its request formats and schedules. Every request is answered and
counted.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import run

REQUIREMENTS = {"guidellm": "guidellm"}
DISTRIBUTION = "guidellm"
NUM_TOKENS = 12  # output tokens of every answer, requested with ignore_eos or min_tokens


def get_benchmark(
    address: str, model_directory: str, backend: str, profile: str, num_requests: int
) -> dict[str, Any]:
    """Return the only benchmark of the report."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
        command += [
            "--backend",
            f"kind=openai_http,target={address},{backend}",
            "--profile",
            profile,
        ]
        command += [
            "--tokenizer",
            f"kind=hf_auto,model={model_directory}",
            "--data",
            f"kind=synthetic_text,prompt_tokens=24,output_tokens={NUM_TOKENS}",
        ]
        command += [
            "--constraint",
            f"kind=max_requests,count={num_requests}",
            "--output",
            f"kind=json,path={report}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (
        num_requests,
        0,
        0,
    ), totals
    return benchmark


def answers(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    return benchmark["requests"]["successful"]


def check_chat_streams_side_by_side(address: str, model_directory: str) -> None:
    benchmark = get_benchmark(
        address,
        model_directory,
        "request_format=/v1/chat/completions",
        "kind=concurrent,streams=8",
        24,
    )
    assert {answer["output_tokens"] for answer in answers(benchmark)} == {NUM_TOKENS}
    assert all(
        answer["prompt_tokens"] >= 24 and answer["time_to_first_token_ms"] > 0
        for answer in answers(benchmark)
    )


def check_completions_with_poisson_arrivals(address: str, model_directory: str) -> None:
    benchmark = get_benchmark(
        address, model_directory, "request_format=/v1/completions", "kind=poisson,rate=8", 16
    )
    assert {answer["output_tokens"] for answer in answers(benchmark)} == {NUM_TOKENS}


def check_whole_answers_at_full_throughput(address: str, model_directory: str) -> None:
    benchmark = get_benchmark(
        address, model_directory, "stream=false", "kind=throughput,max_concurrency=32", 32
    )
    assert {answer["output_tokens"] for answer in answers(benchmark)} == {NUM_TOKENS}


def check_responses_one_after_the_other(address: str, model_directory: str) -> None:
    benchmark = get_benchmark(
        address, model_directory, "request_format=/v1/responses", "kind=synchronous", 4
    )
    assert all(0 < answer["output_tokens"] <= NUM_TOKENS for answer in answers(benchmark))


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
