"""Drives an executor without the scheduler.

Runs whole or chunked prompts and batches of requests, and returns their tokens and
log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from quire.executor.ranks.multiproc_executor import MultiprocExecutor
from quire.executor.worker import Worker
from quire.ipc.config import EngineConfig, config_fields
from quire.ipc.lora import LoRARequest
from quire.ipc.messages import Array
from quire.ipc.models.gguf import is_gguf, read_gguf
from quire.ipc.models.gguf_config import gguf_config
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import (
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SlotLogprobs,
    SlotPromptLogprobs,
)
from quire.tests.engine_device import engine_device, engine_kernels


def make_config(model: str | Path, hf_overrides: dict | None = None, **arguments) -> EngineConfig:
    """Return a resolved configuration for the model in a directory, or in a GGUF file. `arguments`
    are the flat names of EngineArgs.
    """
    if is_gguf(Path(model)):
        hf_config = gguf_config(read_gguf(Path(model)))
    else:
        hf_config = json.loads((Path(model) / "config.json").read_text())
    hf_config |= hf_overrides or {}
    defaults = {
        "max_model_len": 256,
        "dtype": "float32",
        "device": engine_device(),
        "kernels": engine_kernels(),
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 2**24,
    }
    sections: dict[str, dict] = {"model_config": {"hf_config": hf_config}}
    fields = config_fields()
    for name, value in {**defaults, "model": str(model), **arguments}.items():
        sections.setdefault(fields[name].section, {})[name] = value
    return msgspec.convert(sections, EngineConfig)


def start_executor(model: str | Path, hf_overrides: dict | None = None, **arguments) -> Worker:
    """Start an executor: load its model and allocate its cache."""
    return start_with(make_config(model, hf_overrides, **arguments))


def start_with(config: EngineConfig) -> Worker:
    """Start an executor of a resolved configuration."""
    executor = Worker(config)
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    return executor


def to_numpy(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def read_logprobs(
    entry: SlotLogprobs | SlotPromptLogprobs,
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Return per token: ids [k + 1], log-probabilities [k + 1], rank."""
    return list(
        zip(
            to_numpy(entry.token_ids),
            to_numpy(entry.logprobs),
            to_numpy(entry.ranks).tolist(),
            strict=True,
        )
    )


def greedy(**arguments) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "seed": 0, **arguments})


@dataclass
class Row:
    """The driver's state of one request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    slot: int
    output: list[int] = field(default_factory=list)
    # per token: ids [k + 1], logprobs [k + 1], rank
    logprobs: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)
    # by index of the prompt token
    prompt_logprobs: dict[int, tuple[np.ndarray, np.ndarray, int]] = field(default_factory=dict)
    # one of each group of layers for the first tokens, one of each for the next ones, …
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    error: str | None = None
    lora_request: LoRARequest | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class Driver:
    """A scheduler without a policy: the test chooses what is scheduled. Blocks are allocated from
    the highest id down and never reordered.
    """

    def __init__(self, executor: Worker | MultiprocExecutor, num_blocks: int | None = None):
        self.executor = executor
        config = executor.config
        self.block_size = config.cache_config.block_size
        self.num_groups = len(executor.kv_cache_windows)
        max_num_seqs = config.scheduler_config.max_num_seqs
        self.free_slots = list(range(max_num_seqs))
        self.free_blocks = list(range(1, num_blocks or executor.determine_num_blocks()))
        self.rows: dict[str, Row] = {}
        self.entering: list[Row] = []
        self.freed: list[int] = []
        self.num_steps = 0

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams | None = None,
        cached_blocks: Sequence[int] = (),
        lora_request: LoRARequest | None = None,
    ) -> Row:
        """Add a request that enters with its first step. `cached_blocks` already hold the keys and
        values of its first tokens.
        """
        row = self.rows[request_id] = Row(
            request_id, list(prompt), params or greedy(), self.free_slots.pop()
        )
        row.lora_request = lora_request
        row.block_ids, row.num_computed = (
            list(cached_blocks),
            (len(cached_blocks) // self.num_groups * self.block_size),
        )
        self.entering.append(row)
        return row

    def free(self, row: Row) -> None:
        """Remove the request. Its slot and blocks are the next to be allocated."""
        del self.rows[row.request_id]
        self.freed.append(row.slot)
        self.free_slots.append(row.slot)
        self.free_blocks += row.block_ids

    def preempt(self, row: Row) -> Row:
        """Remove the request and add it again in another slot, with its output so far as part of
        its tokens.
        """
        other = self.free_slots.pop(0)
        self.free(row)
        row.slot, row.block_ids, row.num_computed = other, [], 0
        self.rows[row.request_id] = row
        self.entering.append(row)
        return row

    def step(
        self, scheduled: dict[str, int], lookahead: dict[str, int] | None = None
    ) -> ModelRunnerOutput:
        """Compute the given number of tokens of each named request, decode the lookahead tokens
        after them, and record the results.
        """
        ahead = [(lookahead or {}).get(name, 0) for name in scheduled]
        rows = [self.rows[name] for name in scheduled]
        counts = [count + more for count, more in zip(scheduled.values(), ahead, strict=True)]
        new_block_ids = [self._grow(row, count) for row, count in zip(rows, counts, strict=True)]
        entering = [row for row in self.entering if row in rows]
        self.entering = [row for row in self.entering if row not in rows]
        message = SchedulerOutput(
            step=self.num_steps,
            slots=[row.slot for row in rows],
            num_scheduled_tokens=list(scheduled.values()),
            num_computed_tokens=[row.num_computed for row in rows],
            new_block_ids=new_block_ids,
            new_requests=[
                NewRequestData(
                    row.slot,
                    row.request_id,
                    row.prompt + row.output,
                    len(row.prompt),
                    row.params,
                    lora_request=row.lora_request,
                )
                for row in entering
            ],
            freed_slots=self.freed,
            num_lookahead_tokens=ahead if lookahead else [],
        )
        self.freed, self.num_steps = [], self.num_steps + 1
        result = self.executor.execute_model(message)
        self._record(rows, counts, result)
        return result

    def _grow(self, row: Row, count: int) -> list[int]:
        num_blocks = -(-(row.num_computed + count) // self.block_size) * self.num_groups
        new = [self.free_blocks.pop() for _ in range(num_blocks - len(row.block_ids))]
        row.block_ids += new
        sent = row.block_ids if row in self.entering else new
        return [
            block_id
            for group in range(self.num_groups)
            for block_id in sent[group :: self.num_groups]
        ]

    def _record(self, rows: list[Row], counts: list[int], result: ModelRunnerOutput) -> None:
        assert len(result.num_sampled) == len(rows)
        assert sum(result.num_sampled) == len(result.token_ids)
        tokens = iter(result.token_ids)
        logprobs = {entry.slot: entry for entry in result.logprobs}
        for row, count, num_sampled in zip(rows, counts, result.num_sampled):
            row.num_computed += count
            row.error = result.errors.get(row.slot, row.error)
            is_whole = row.num_computed == row.num_tokens + num_sampled - 1
            assert num_sampled == 0 or is_whole or row.error, (
                "sampled before the prompt was complete"
            )
            for _ in range(num_sampled):
                row.output.append(next(tokens))
            if num_sampled and row.params.logprobs is not None:
                assert logprobs[row.slot].token_ids.shape[0] == num_sampled
                row.logprobs += read_logprobs(logprobs[row.slot])
        for entry in result.prompt_logprobs:
            (row,) = (row for row in rows if row.slot == entry.slot)
            row.prompt_logprobs |= dict(enumerate(read_logprobs(entry), start=entry.first_index))

    def run(self, max_tokens: int, chunk: Callable[[Row], int] | None = None) -> None:
        """Step all requests together, `chunk(row)` prompt tokens at a time (default: the whole
        prompt), until each has max_tokens.
        """
        while True:
            scheduled = {}
            for row in self.rows.values():
                if row.error is None and len(row.output) < max_tokens:
                    left = row.num_tokens - row.num_computed
                    scheduled[row.request_id] = left if chunk is None else min(left, chunk(row))
            if not scheduled:
                return
            self.step(scheduled)


def generate(
    executor: Worker | MultiprocExecutor,
    prompts: list[list[int]],
    max_tokens: int,
    params: SamplingParams | None = None,
    chunk: Callable[[Row], int] | None = None,
) -> list[Row]:
    """Run the prompts as one batch. Leave the executor's slots free for the next call."""
    driver = Driver(executor)
    rows = [driver.add(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    driver.run(max_tokens, chunk)
    executor.execute_model(
        SchedulerOutput(0, [], [], [], [], freed_slots=[row.slot for row in rows])
    )
    return rows


def check_equal(
    one: Worker, other: Worker, run: Callable[[Worker, int], list[Row]], *, num_seeds: int
) -> None:
    """Checks that both give the same tokens and log-probabilities (1e-4) for seeds 0, 1, …, and
    leave the same cache.
    """
    for seed in range(num_seeds):
        for mine, theirs in zip(run(one, seed), run(other, seed), strict=True):
            assert mine.output == theirs.output and mine.error is None
            for ours, expected in zip(mine.logprobs, theirs.logprobs, strict=True):
                np.testing.assert_allclose(ours[1], expected[1], rtol=0, atol=1e-4)
    layers = zip(one.model.attention_layers(), other.model.attention_layers(), strict=True)
    for layer, expected in layers:
        torch.testing.assert_close(layer.key_cache, expected.key_cache)
        torch.testing.assert_close(layer.value_cache, expected.value_cache)
