"""What steps of a model cost on this machine, beside the machine's limits: a program, `python -m
quire.executor.step_costs`.

Must not know: the scheduler, text, what the figures are shown as.

A job comes as JSON on stdin, its result leaves as JSON on stdout (frontend/bench/cpu.py starts it).
Nothing is prefilled before a decode is measured: the rows are handed to the executor as if their
context had been found in the prefix cache, whose contents cost nothing.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

import msgspec

from ..ipc.config import EngineConfig, resolved
from ..ipc.models.kv_layout import make_layout
from ..ipc.params import SamplingParams
from ..ipc.step_messages import NewRequestData, SchedulerOutput
from ..kernels.cpu.limits import Multiplier, Reader, gemm_flops, read_bandwidth
from .worker import Worker

# Decodes take turns with readings of as many bytes and with products, so that what is compared was
# measured side by side.
STEPS_OF_TURN, READS_OF_TURN = 4, 4
MAX_TURNS = 12
# of one measurement; the rows of a decode have room for them
MAX_STEPS = MAX_TURNS * (1 + STEPS_OF_TURN)
# more than any cache holds, so that memory need not hold large weights twice
MAX_READ_BYTES = 2**30


class Job(msgspec.Struct):
    config: EngineConfig  # max_num_seqs and the KV cache suffice for what is asked
    decode: list[tuple[int, int]] = []  # (rows, tokens before each)
    prefill: list[int] = []  # tokens of a prompt
    seconds: float = 1.0  # for each measurement
    # bytes that are read beside decodes, as matrices are multiplied; 0: neither
    weights_bytes: int = 0
    measure_limits: bool = False  # of 1, 2, … threads, and of products


class Turn(msgspec.Struct):
    """Seconds of each step, or of each whole prompt, and what was found right after them."""

    seconds: list[float]
    read_bandwidth: list[float] = []  # bytes per second
    gemm_flops: list[float] = []  # operations per second


class Times(msgspec.Struct):
    batch: int
    context: int
    turns: list[Turn]

    @property
    def seconds(self) -> list[float]:
        return [seconds for turn in self.turns for seconds in turn.seconds]


class Result(msgspec.Struct):
    num_threads: int
    decode: list[Times] = []
    prefill: list[Times] = []
    read_bandwidth: dict[int, float] = {}  # threads -> bytes per second
    gemm_flops: dict[str, float] = {}  # type of the numbers -> operations per second


class StepTimer:
    """Plays the scheduler for an executor without other users."""

    def __init__(
        self,
        executor: Worker,
        config: EngineConfig,
        vocab_size: int,
        meters: tuple[Reader, Multiplier] | None = None,
    ):
        """`meters`: they take turns with decodes."""
        self._executor = executor
        self._meters = meters
        self._block_size = config.cache_config.block_size
        self._layout = make_layout(config, executor.kv_cache_windows)
        self._budget = resolved(config.scheduler_config.max_num_batched_tokens)
        self._vocab_size = vocab_size

    def decode(self, batch: int, context: int, seconds: float) -> Times:
        """Steps of `batch` rows that have `context` tokens before them, greedy."""
        ids = itertools.count(1)
        block_ids = [self._tables(ids, context, context + MAX_STEPS + 2) for _ in range(batch)]
        first = SchedulerOutput(
            step=0,
            slots=list(range(batch)),
            num_scheduled_tokens=[1] * batch,
            num_computed_tokens=[context] * batch,
            new_block_ids=block_ids,
            new_requests=[self._request(row, context + 1) for row in range(batch)],
        )
        times, end = Times(batch, context, []), time.perf_counter() + seconds
        steps = itertools.chain(
            [first], (self._decodes(first, context + i) for i in range(1, MAX_STEPS))
        )
        while not times.turns or (time.perf_counter() < end and len(times.turns) < MAX_TURNS):
            # not timed: what took its turn before has the caches, and its threads may look for more
            # to do
            self._run(next(steps))
            times.turns.append(Turn([self._run(next(steps)) for _ in range(STEPS_OF_TURN)]))
            if self._meters:
                reader, multiplier = self._meters
                times.turns[-1].read_bandwidth = reader.rates(READS_OF_TURN)
                times.turns[-1].gemm_flops = multiplier.rates(READS_OF_TURN)
        self._free(batch)
        return times

    def prefill(self, num_tokens: int, seconds: float) -> Times:
        """A prompt of so many tokens, in the pieces that a step may take."""
        times, end = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            new = [self._request(0, num_tokens)]
            total = 0.0
            block_ids = self._tables(itertools.count(1), 0, num_tokens)
            for start in range(0, num_tokens, self._budget):
                count = min(self._budget, num_tokens - start)
                total += self._run(
                    SchedulerOutput(
                        step=0,
                        slots=[0],
                        num_scheduled_tokens=[count],
                        num_computed_tokens=[start],
                        new_block_ids=[[] if start else block_ids],
                        new_requests=[] if start else new,
                    )
                )
            times.append(total)
            self._free(1)
        return Times(1, num_tokens, [Turn(times)])

    def _tables(self, ids: Iterator[int], num_computed: int, num_tokens: int) -> list[int]:
        """The next ids as blocks of a request in every group of layers, the null block where a
        window has been.
        """
        table = []
        for window in self._layout.windows:
            first = self._layout.first_seen(window, num_computed)
            num_more = -(-num_tokens // self._block_size) - first
            table += [0] * first + list(itertools.islice(ids, num_more))
        return table

    def _decodes(self, first: SchedulerOutput, num_computed: int) -> SchedulerOutput:
        batch = len(first.slots)
        return SchedulerOutput(
            step=0,
            slots=first.slots,
            num_scheduled_tokens=first.num_scheduled_tokens,
            num_computed_tokens=[num_computed] * batch,
            new_block_ids=[[]] * batch,
        )

    def _request(self, slot: int, num_tokens: int) -> NewRequestData:
        token_ids = [(7 + slot + 31 * i) % self._vocab_size for i in range(num_tokens)]
        return NewRequestData(
            slot, str(slot), token_ids, num_tokens, SamplingParams(temperature=0.0, seed=0)
        )

    def _run(self, step: SchedulerOutput) -> float:
        start = time.perf_counter()
        result = self._executor.execute_model(step)
        seconds = time.perf_counter() - start
        if result.errors:
            raise RuntimeError(f"a row failed: {next(iter(result.errors.values()))}")
        return seconds

    def _free(self, batch: int) -> None:
        self._executor.execute_model(SchedulerOutput(step=0, freed_slots=list(range(batch))))


def run(job: Job) -> Result:
    """Limits first: nothing else has touched the machine's memory then."""
    executor = Worker(job.config)
    result = Result(executor.num_threads)
    num_bytes = min(job.weights_bytes, MAX_READ_BYTES)
    if job.measure_limits:
        _measure_limits(job, result, num_bytes)
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    timer = StepTimer(
        executor,
        job.config,
        job.config.model_config.hf_config["vocab_size"],
        _meters(job, num_bytes) if num_bytes else None,
    )
    result.decode = [timer.decode(batch, context, job.seconds) for batch, context in job.decode]
    result.prefill = [timer.prefill(num_tokens, job.seconds) for num_tokens in job.prefill]
    executor.shutdown()
    return result


def _meters(job: Job, num_bytes: int) -> tuple[Reader, Multiplier]:
    import torch

    quantized = job.config.model_config.quantization is not None
    return Reader(num_bytes), Multiplier(
        [torch.bfloat16, torch.float32] + [torch.int8] * quantized, job.seconds
    )


def _measure_limits(job: Job, result: Result, num_bytes: int) -> None:
    import torch

    threads = {1, 2, 4, result.num_threads} | set(range(8, result.num_threads, 8))
    for num_threads in sorted(count for count in threads if count <= result.num_threads):
        result.read_bandwidth[num_threads] = read_bandwidth(num_bytes, num_threads, job.seconds)
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        result.gemm_flops[str(dtype).removeprefix("torch.")] = gemm_flops(dtype, job.seconds)


def main() -> None:
    result = run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job))
    sys.stdout.buffer.write(msgspec.json.encode(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
