"""`quire bench throughput`, `latency` and `embed`: the offline engine over the same workloads.

Must not know: HTTP, command lines, the engine's internals.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidParameterError, QuireError
from ...ipc.machine import available_cores
from ...ipc.models.checkpoint import find_weight_files, read_header
from ...ipc.models.gguf import is_gguf, read_gguf
from ...ipc.params import SamplingParams
from ..model_info.model_sizes import DTYPE_BYTES
from .machine import measure_read_bandwidth
from .statistics import Summary, summarize
from .workloads import WorkloadRequest

if TYPE_CHECKING:
    from ...ipc.config import EngineConfig
    from ..llm import LLM
    from ..outputs import RequestMetrics, RequestOutput


@dataclass(frozen=True)
class Phases:
    """The time of a batch by phase, on the engine's clock in seconds, and the tokens of each
    phase.
    """

    prefill_s: float  # from the first step to the last first token
    decode_s: float  # from then to the last token
    num_prefill_tokens: int  # without those found in the prefix cache
    num_decode_tokens: int


@dataclass(frozen=True)
class Steps:
    """The time of the engine's steps in seconds, for the last 512 steps of a run."""

    count: int
    schedule_s: float
    execute_s: float
    process_s: float
    decode_step_s: float | None  # per token of each request: median of the decode-only steps
    decode_batch: float  # mean number of requests in such a step


@dataclass(frozen=True)
class OfflineRun:
    seconds: float
    num_input_tokens: int
    num_output_tokens: int
    num_failures: int
    first_error: str | None
    phases: dict[str, Summary | None]  # queued, prefill and decode time per request
    steps: Steps


def sampling_params(
    requests: list[WorkloadRequest], *, ignore_eos: bool, temperature: float, seed: int
) -> list[SamplingParams]:
    """Returns the parameters of each request, which has a seed of its own, from `seed` on."""
    return [
        SamplingParams(
            max_tokens=request.max_tokens,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed + i,
        )
        for i, request in enumerate(requests)
    ]


def engine_prompts(requests: list[WorkloadRequest]) -> list[Any]:
    """Returns texts, or token ids as LLM.generate takes them."""
    prompts = [request.prompt for request in requests]
    return [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]


def run_throughput(
    llm: LLM, requests: list[WorkloadRequest], params: list[SamplingParams], use_tqdm: bool
) -> OfflineRun:
    """Runs all requests at once.

    Raises InvalidParameterError for one that the engine refuses, before anything runs.
    """
    last_step = llm.observe(max_blocks=1)["step"]
    start = perf_counter()
    outputs = llm.generate(engine_prompts(requests), params, use_tqdm=use_tqdm)
    seconds = perf_counter() - start
    steps = summarize_steps(llm.observe(since_step=last_step, max_blocks=1)["steps"])
    failures = [output.error for output in outputs if output.error is not None]
    finished = [output.metrics for output in outputs if output.error is None]
    return OfflineRun(
        seconds,
        sum(len(output.prompt_token_ids) for output in outputs),
        _num_output_tokens(outputs),
        len(failures),
        failures[0] if failures else None,
        {
            phase: summarize(v for m in finished if (v := getattr(m, phase)) is not None)
            for phase in ("queued_time", "prefill_time", "decode_time")
        },
        steps,
    )


def summarize_steps(records: list[Any]) -> Steps:
    """Summarizes `records`, which Observer.observe returns: (step, start, schedule_s, execute_s,
    process_s, prefill tokens, decode tokens, requests, preemptions).
    """
    decodes = [record for record in records if not record[5] and record[6]]
    # a step may decode several tokens of each request
    times = summarize(sum(record[2:5]) * record[7] / record[6] for record in decodes)
    return Steps(
        len(records),
        sum(record[2] for record in records),
        sum(record[3] for record in records),
        sum(record[4] for record in records),
        times.percentiles[50] if times else None,
        sum(record[7] for record in decodes) / len(decodes) if decodes else 0.0,
    )


def run_latency(
    llm: LLM,
    requests: list[WorkloadRequest],
    params: list[SamplingParams],
    num_iters: int,
    use_tqdm: bool,
) -> tuple[list[float], list[Phases]]:
    """Runs the same batch num_iters times without prefix-cache hits, and returns the seconds and
    phases of each run. `use_tqdm` shows a progress bar on stderr if that is a terminal.
    """
    from tqdm import tqdm

    disable = None if use_tqdm else True  # None: unless it is a terminal
    prompts, seconds, phases = engine_prompts(requests), [], []
    for _ in tqdm(range(num_iters), "batches", leave=False, disable=disable):
        llm.reset_prefix_cache()
        start = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(perf_counter() - start)
        if error := next((output.error for output in outputs if output.error is not None), None):
            raise InvalidParameterError("batch", f"a request of it failed: {error}")
        metrics = [output.metrics for output in outputs if output.metrics]
        phases.append(batch_phases(metrics, _num_output_tokens(outputs)))
    return seconds, phases


def run_embed(llm: LLM, batches: list[list[str]]) -> tuple[list[float], int]:
    """Returns the seconds of each batch of texts, and the tokens of all. Raises what LLM.embed
    raises, and QuireError for a text that fails.
    """
    seconds, num_tokens = [], 0
    for texts in batches:
        start = perf_counter()
        outputs = llm.embed(texts, use_tqdm=False)
        seconds.append(perf_counter() - start)
        for output in outputs:
            if output.error is not None:
                raise QuireError(f"a text could not be embedded: {output.error}")
            num_tokens += len(output.prompt_token_ids)
    return seconds, num_tokens


def batch_phases(metrics: list[RequestMetrics], num_output_tokens: int) -> Phases:
    begin = min(m.scheduled_ts for m in metrics)
    first_tokens = max(m.first_token_ts for m in metrics)
    end = max(m.last_token_ts for m in metrics)
    num_prefill_tokens = sum(m.num_prompt_tokens - (m.num_cached_tokens or 0) for m in metrics)
    num_decode_tokens = num_output_tokens - len(metrics)
    return Phases(first_tokens - begin, end - first_tokens, num_prefill_tokens, num_decode_tokens)


def _num_output_tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


@dataclass(frozen=True)
class ReadLimit:
    """A decode step reads every weight once, so the rate of steps is limited by the read
    bandwidth.
    """

    weight_bytes: int
    bandwidth: float  # bytes per second, measured

    @property
    def max_steps_per_s(self) -> float:
        return self.bandwidth / self.weight_bytes


def measure_read_limit(config: EngineConfig) -> ReadLimit:
    """Measures the limit of an engine that is idle. Nothing else may run meanwhile.

    Weights are counted in the dtype that the engine computes in.
    """
    model = config.model_config
    weight_bytes = num_parameters(Path(model.model)) * DTYPE_BYTES[model.dtype]
    num_threads = config.device_config.num_threads or available_cores()
    return ReadLimit(weight_bytes, measure_read_bandwidth(weight_bytes, num_threads))


def num_parameters(model: Path) -> int:
    """Counts the elements of all tensors, from the headers of the weight files."""
    if is_gguf(model):
        return sum(prod(tensor.shape) for tensor in read_gguf(model).tensors.values())
    headers = map(read_header, find_weight_files(model))
    return sum(prod(tensor.shape) for header in headers for tensor in header.values())
