"""The phases of the offline benchmarks, from handmade metrics and from the bundled model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import LLM
from quire.frontend.bench.offline import (
    ReadLimit,
    batch_phases,
    measure_read_limit,
    num_parameters,
    run_latency,
    run_throughput,
    sampling_params,
    summarize_steps,
)
from quire.frontend.bench.options import WorkloadOptions
from quire.frontend.bench.workloads import WorkloadRequest, make_requests
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.model_info.model_sizes import DTYPE_BYTES
from quire.frontend.outputs import RequestMetrics
from quire.ipc.params import SamplingParams
from quire.tests.gguf_checkpoints import write_gguf


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine="inproc", max_model_len=256, num_threads=1) as llm:
        yield llm


def workload(llm: LLM, **options) -> tuple[list[WorkloadRequest], list[SamplingParams]]:
    requests = make_requests(WorkloadOptions(**options), llm.get_tokenizer())
    return requests, sampling_params(requests, ignore_eos=True, temperature=0.0, seed=0)


def test_throughput(llm: LLM) -> None:
    requests, params = workload(llm, num_prompts=5, input_len=20, output_len=6)
    run = run_throughput(llm, requests, params, use_tqdm=False)
    assert (run.num_output_tokens, run.num_failures, run.first_error) == (30, 0, None)
    assert run.num_input_tokens == sum(request.num_prompt_tokens for request in requests)
    assert {phase: summary.count for phase, summary in run.phases.items()} == {
        "queued_time": 5,
        "prefill_time": 5,
        "decode_time": 5,
    }
    assert 0 < run.phases["decode_time"].max < run.seconds
    assert (
        run.steps.count >= 2
        and 0 < run.steps.schedule_s + run.steps.execute_s + run.steps.process_s < run.seconds
    )
    assert run.steps.decode_batch == 5 and 0 < run.steps.decode_step_s < run.seconds


def test_steps_are_summed_and_decode_only_steps_are_separate() -> None:
    prefill, mixed = (4, 0.0, 1.0, 2.0, 3.0, 100, 0, 5, 0), (7, 9.0, 0.0, 9.0, 0.0, 8, 3, 4, 0)
    steps = summarize_steps(
        [prefill, (5, 6.0, 0.5, 1.0, 0.5, 0, 5, 5, 0), (6, 8.0, 1.0, 6.0, 1.0, 0, 6, 3, 0), mixed]
    )
    assert (steps.count, steps.schedule_s, steps.execute_s, steps.process_s) == (4, 2.5, 18.0, 4.5)
    assert (steps.decode_step_s, steps.decode_batch) == (3.0, 4.0)
    assert summarize_steps([]).decode_step_s is None


def test_batches_of_latency_have_no_cache_hits_from_each_other(llm: LLM) -> None:
    requests, params = workload(llm, num_prompts=3, input_len=40, output_len=4, token_ids=True)
    seconds, phases = run_latency(llm, requests, params, 2, use_tqdm=False)
    assert len(seconds) == len(phases) == 2
    assert [(phase.num_prefill_tokens, phase.num_decode_tokens) for phase in phases] == [
        (120, 9)
    ] * 2
    assert all(0 < phase.prefill_s + phase.decode_s <= took for phase, took in zip(phases, seconds))


def test_phases_of_a_batch() -> None:
    first = RequestMetrics(
        0.0,
        scheduled_ts=10.0,
        first_token_ts=12.0,
        last_token_ts=20.0,
        num_prompt_tokens=30,
        num_cached_tokens=16,
    )
    second = RequestMetrics(
        0.0, scheduled_ts=11.0, first_token_ts=13.0, last_token_ts=19.0, num_prompt_tokens=30
    )
    phases = batch_phases([first, second], num_output_tokens=12)
    assert (
        phases.prefill_s,
        phases.decode_s,
        phases.num_prefill_tokens,
        phases.num_decode_tokens,
    ) == (3.0, 7.0, 44, 10)


def test_the_limit_is_bandwidth_over_weights(llm: LLM) -> None:
    directory = find_model_directory("bundled")
    size = (directory / "model.safetensors").stat().st_size
    config = llm.llm_engine.config
    limit = measure_read_limit(config)
    assert limit.weight_bytes == num_parameters(directory) * DTYPE_BYTES[config.model_config.dtype]
    # stored in 2 or 4 bytes each, behind a header
    assert size / 4 - 4096 < num_parameters(directory) <= size / 2
    assert ReadLimit(1000, 5000.0).max_steps_per_s == 5.0 and limit.max_steps_per_s > 0


def test_parameters_of_a_gguf_file_are_counted_too(tmp_path: Path) -> None:
    directory = find_model_directory("bundled")
    write_gguf(tmp_path / "model.gguf", directory, "Q8_0")
    assert num_parameters(tmp_path / "model.gguf") == num_parameters(directory)
