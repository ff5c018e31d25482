"""The engine at work: the last steps and their times, the requests, a map of the KV cache.

Must not know: who watches, sockets, torch.

A step has three parts. schedule: choosing the rows. execute: the model, and the executor's other
work for the step, which may be several tokens of each request. process: updating the requests,
before the rows are sent. With async_scheduling a step is scheduled while the previous one runs. Its
execution begins when it has been submitted and the previous one is done, and ends when its result
is taken: then the execute parts follow each other, and the other parts overlap with them. Where a
model has stages, several steps run at the same time, and an execute part begins with the end of the
one before: it is what the step added.

    plain       | schedule 1 | execute 1 | process 1 | schedule 2 | execute 2 | process 2 |
    overlapped  | schedule 1 | execute 1                     | execute 2                  |
                             | schedule 2                    | process 1 | schedule 3     | …
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ..ipc.counters import EngineCounters
from ..ipc.errors import InvalidParameterError
from ..ipc.step_messages import ModelRunnerOutput
from .arrivals import GatedRequest, GrammarGate
from .kv_cache.block_pool import BlockPool
from .loras import LoraRegistry
from .pause import PauseControl, Workers
from .request import Request, RequestStatus
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep
from .waves import EngineWaves

logger = logging.getLogger(__name__)

MAX_STEPS = 512  # steps kept
MAX_CELLS = 2**16  # of a map
# Upper bounds of the histogram of tokens per step, as in vLLM.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LETTERS = bytes.maketrans(bytes(range(5)), b"-.cus")  # from how busy a block is


class StepRecords:
    """A ring of the last steps. Every step writes it, which costs a microsecond; the rest is
    computed on request.
    """

    def __init__(self) -> None:
        self._ring: deque[tuple] = deque(maxlen=MAX_STEPS)
        self._executed_time = 0.0  # of the previous step
        self._num_preemptions = self._num_generation_tokens = 0  # already counted
        # Steps by their number of tokens, computed prompt tokens and sampled ones; the last count
        # is of steps with more than STEP_TOKENS.
        self._step_counts = [0] * (len(STEP_TOKENS) + 1)
        self._num_step_tokens = 0  # of all steps

    def begin(self, step: ScheduledStep, start_time: float, counters: EngineCounters) -> None:
        """Called when a step has been scheduled, from `start_time` on."""
        num_preemptions = counters.num_preemptions
        # preemptions include those of a sleep before the step
        step.scheduling = start_time, time.monotonic(), num_preemptions - self._num_preemptions
        self._num_preemptions = num_preemptions

    def execute_time(self, step: ScheduledStep) -> float:
        """When the execution began of a step that has run and is not processed yet."""
        scheduled_time = step.scheduling[1]
        return scheduled_time if scheduled_time > self._executed_time else self._executed_time

    def end(self, step: ScheduledStep, executed_time: float, counters: EngineCounters) -> None:
        """Called when a step has been processed; its result came at `executed_time`."""
        start_time, scheduled_time, num_preemptions = step.scheduling
        num_generation_tokens = counters.num_generation_tokens
        num_prefill = sum([num_tokens for _, num_tokens in step.prefills]) if step.prefills else 0
        num_decode = num_generation_tokens - self._num_generation_tokens
        self._step_counts[bisect_left(STEP_TOKENS, num_prefill + num_decode)] += 1
        self._num_step_tokens += num_prefill + num_decode
        self._ring.append(
            (
                step.output.step,
                start_time,
                scheduled_time - start_time,
                executed_time - step.execute_time,
                time.monotonic() - executed_time,
                num_prefill,
                num_decode,
                len(step.requests),
                num_preemptions,
            )
        )
        self._executed_time, self._num_generation_tokens = executed_time, num_generation_tokens

    def step_tokens(self) -> dict[str, Any]:
        """The histogram of tokens per step since the start: `bounds`, `counts` (per bucket, the
        last without a bound) and `sum`.
        """
        return {
            "bounds": list(STEP_TOKENS),
            "counts": list(self._step_counts),
            "sum": self._num_step_tokens,
        }

    def expected_s(self, num_tokens: int) -> float:
        """An estimate of the longest time of a step with this many tokens, from the last step's
        time per token.
        """
        if not self._ring:
            return 0.0
        _, _, _, execute_s, _, num_prefill_tokens, num_decode_tokens, *_ = self._ring[-1]
        return execute_s * num_tokens / max(1, num_prefill_tokens + num_decode_tokens)

    def last_times(self) -> tuple[float, float, float, float]:
        """When the execution of the last step began, and the seconds of its schedule, execute and
        process parts.
        """
        _, start_time, schedule_s, execute_s, process_s, *_ = self._ring[-1]
        return self._executed_time - execute_s, schedule_s, execute_s, process_s

    @property
    def last_step(self) -> int:
        """The number of the last step; -1 before the first."""
        return self._ring[-1][0] if self._ring else -1

    def newer_than(self, since_step: int) -> list[list]:
        """The later steps in order, each as [step, start_time, schedule_s, execute_s, process_s,
        num_prefill_tokens, num_decode_tokens, num_requests, num_preemptions].

        Prefill tokens are computed prompt tokens and those recomputed after a preemption; decode
        tokens are the sampled ones.
        """
        newer = []
        for record in reversed(self._ring):
            if record[0] <= since_step:
                break
            newer.append(list(record))
        newer.reverse()
        return newer


def log_step(
    step: ScheduledStep, output: ModelRunnerOutput, scheduler: Scheduler, records: StepRecords
) -> None:
    """Logs a step that has been processed: the queues after it, its tokens, the requests that it
    ended, and the times of its parts.
    """
    _, schedule_s, execute_s, process_s = records.last_times()
    logger.info(
        "step %d: %d running, %d waiting; %d requests, %d prompt tokens computed, %d tokens "
        "sampled, %d finished; schedule %.3f, execute %.3f, process %.3f ms",
        step.output.step,
        len(scheduler.running),
        len(scheduler.waiting) + len(scheduler.held),
        len(step.requests),
        sum(num_tokens for _, num_tokens in step.prefills),
        sum(output.num_sampled),
        sum(request.is_finished for request in step.requests),
        1e3 * schedule_s,
        1e3 * execute_s,
        1e3 * process_s,
    )


class Observer:
    """Reads the engine for clients and metrics pages."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        gate: GrammarGate,
        records: StepRecords,
        pausing: PauseControl,
        loras: LoraRegistry,
        waves: EngineWaves | None,
        count_transport: Callable[[], dict[str, int]],
    ):
        """count_transport: the counters of the engine's host, see TransportStats."""
        self._scheduler = scheduler
        self._workers = workers
        self._gate = gate
        self._records = records
        self._pausing = pausing
        self._loras = loras
        self._waves = waves
        self._count_transport = count_transport

    def observe(self, since_step: int = -1, max_blocks: int = 4096) -> dict[str, Any]:
        """The engine at work in plain values. Takes about a millisecond; call it repeatedly.

        Times are of time.monotonic().

        - "time": now.
        - "step": the number of the last step, -1 before the first.
        - "steps": those newer than `since_step`, at most the last 512, see StepRecords.newer_than.
        - "requests": see describe_requests; state "waiting", "running", "swapped", "held" (by a
          pause), "grammar" or "kv transfer".
        - "num_blocks": of the KV cache.
        - "blocks", "blocks_per_cell", "block_counts": its blocks in at most `max_blocks` letters,
          and how many are in each state, see map_blocks.
        - "counters": get_metrics(). "adapters": see LoraRegistry.status.
        """
        check_observe(since_step, max_blocks)
        pool = self._scheduler.kv_cache_manager.block_pool
        return {
            "time": time.monotonic(),
            "step": self._records.last_step,
            "steps": self._records.newer_than(since_step),
            "requests": [
                *describe_requests(self._scheduler),
                *map(_describe_gated, self._gate),
            ],
            "num_blocks": pool.num_blocks,
            **map_blocks(pool, max_blocks),
            "counters": self.get_metrics(),
            "adapters": self._loras.status(),
        }

    def scheduler_state(self) -> dict[str, Any]:
        """Which requests are in which list, and each request in plain values, for people and
        tests.
        """
        requests, manager = self._scheduler.requests.values(), self._scheduler.kv_cache_manager
        return self._scheduler.state() | {
            "requests": [
                request.describe() | {"num_blocks": len(manager.get_block_ids(request.request_id))}
                for request in requests
            ],
            "waiting_for_grammar": [gated.request.request_id for gated in self._gate],
            "is_paused": self._pausing.is_paused(),
            "pause_mode": self._pausing.mode,
            "asleep": sorted(self._pausing.asleep),
        }

    def get_metrics(self) -> dict[str, int]:
        """All gauges and counters by name; ipc/counters.py has their texts."""
        return msgspec.structs.asdict(self._scheduler.stats()) | self._count_transport()

    def status(self) -> dict[str, Any]:
        """What a metrics page shows in addition to get_metrics(), in little time.

        "asleep": what sleeps. "num_held": requests held by a pause, part of num_waiting.
        "step_tokens": see StepRecords.step_tokens. "accepted_per_pos": see Scheduler. "experts":
        (layer, imbalance, unused) of each layer with experts. "memory": sums of
        Worker.memory_usage. "loras": see LoraRegistry.status. "waves": see EngineWaves.describe.
        """
        load = self.expert_load()
        return {
            "asleep": sorted(self._pausing.asleep),
            "num_held": len(self._scheduler.held),
            "step_tokens": self._records.step_tokens(),
            "accepted_per_pos": self._scheduler.accepted_per_pos,
            "experts": [
                (layer, imbalance(tokens), unused(tokens))
                for layer, tokens in zip(load["layers"], load["tokens"])
            ],
            "loras": self._loras.status(),
            "memory": self._memory(),
            "waves": {} if self._waves is None else self._waves.describe(),
        }

    def _memory(self) -> dict[str, int]:
        ranks = self._workers.collective_rpc("memory_usage")
        return {name: sum(rank[name] for rank in ranks) for name in ranks[0]} if ranks else {}

    def expert_load(self) -> dict[str, Any]:
        """The tokens that each expert was sent since the weights were loaded.

        "layers": the layers with experts. "tokens": for each of them the tokens of its experts,
        with a token counted once for each expert that it has; prompts that are recomputed count
        again. A step that runs now may be counted in part. Both are empty for models without
        experts, and for models in transformers' code, which are not counted.
        """
        ranks = self._workers.collective_rpc("expert_load")  # those that share a layer are equal
        load = {layer: tokens for of_rank in ranks for layer, tokens in of_rank.items()}
        return {"layers": list(load), "tokens": list(load.values())}


def check_observe(since_step: Any, max_blocks: Any) -> None:
    """Raises InvalidParameterError."""
    if type(since_step) is not int or since_step < -1:
        raise InvalidParameterError(
            "since_step",
            f"must be the number of a step, or -1 for all that are kept, got {since_step!r}",
        )
    if type(max_blocks) is not int or not 1 <= max_blocks <= MAX_CELLS:
        raise InvalidParameterError(
            "max_blocks", f"must be between 1 and {MAX_CELLS}, got {max_blocks!r}"
        )


def describe_requests(scheduler: Scheduler) -> list[dict[str, Any]]:
    """The requests in order of arrival."""
    num_blocks, held = scheduler.kv_cache_manager.num_blocks_of, scheduler.held
    return [
        {
            "request_id": request_id,
            "state": _state(request, held),
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_computed_tokens": request.num_computed_tokens or request.num_swapped_tokens,
            "num_output_tokens": len(request.token_ids) - request.num_prompt_tokens,
            "max_tokens": request.max_output_tokens,
            "num_blocks": num_blocks(request_id),
            "num_cached_tokens": request.num_cached_tokens or 0,
            "num_preemptions": request.num_preemptions,
            "priority": request.key[0],
            "lora_name": None if request.adapter is None else request.adapter.name,
            "queued_time": request.queued_time,
        }
        for request_id, request in scheduler.requests.items()
    ]


def _state(request: Request, held: dict[str, Request]) -> str:
    if request.status is RequestStatus.RUNNING:
        return "running"
    if request.status is RequestStatus.SWAPPED:
        return "swapped"
    return "held" if request.request_id in held else "waiting"


def _describe_gated(gated: GatedRequest) -> dict[str, Any]:
    """A request that waits for its grammar, or for blocks of other engines: nothing of it is
    computed, and with n > 1 it is still one request.
    """
    request = gated.request
    return {
        "request_id": request.request_id,
        "state": "kv transfer" if request.structured_outputs is None else "grammar",
        "num_prompt_tokens": len(request.prompt_token_ids),
        "num_computed_tokens": 0,
        "num_output_tokens": len(request.resume_tokens),
        "max_tokens": request.sampling_params.max_tokens,
        "num_blocks": 0,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "priority": request.priority,
        "lora_name": request.lora_request.lora_name if request.lora_request else None,
        "queued_time": gated.queued_time,
    }


def map_blocks(pool: BlockPool, max_cells: int) -> dict[str, Any]:
    """The KV cache as at most `max_cells` letters, and how many blocks are in each state.

    - "blocks": one letter per cell, for the blocks up to the last that was ever used; the blocks
      after it are free. "-" the null block, "." free, "c" free and in the prefix cache, "u" used by
      one request, "s" used by several. A cell with several blocks shows the busiest, in this order.
    - "blocks_per_cell": the number of blocks of each cell; the last cell may have fewer.
    - "block_counts": "free", "cached", "used" and "shared" blocks, without the null block.
    """
    busy = b"\0" + bytes(
        [
            (3 if n == 1 else 4) if (n := block.ref_cnt) else (1 if block.block_hash is None else 2)
            for block in pool.blocks[1:]
        ]
    )
    counts = {name: busy.count(i) for i, name in enumerate(("free", "cached", "used", "shared"), 1)}
    counts["free"] += pool.num_blocks - len(busy)
    blocks_per_cell = -(-len(busy) // max_cells)
    if blocks_per_cell > 1:
        busy = bytes(
            [max(busy[i : i + blocks_per_cell]) for i in range(0, len(busy), blocks_per_cell)]
        )
    cells = busy.translate(LETTERS).decode()
    return {"blocks": cells, "blocks_per_cell": blocks_per_cell, "block_counts": counts}


def imbalance(tokens: list[int]) -> float:
    """The tokens of the busiest expert over the mean, 1.0 if all have as many, and the number of
    experts if one has all; 0.0 without tokens. tokens [E]
    """
    return max(tokens) * len(tokens) / total if (total := sum(tokens)) else 0.0


def unused(tokens: list[int]) -> float:
    """The share of experts without tokens. tokens [E]"""
    return tokens.count(0) / len(tokens)
