"""Ranks as threads of this process: each runs what a rank's process runs. On a fake GPU, tensors go
through torch.distributed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quire.executor.offload.kv_offload import KVOffload
from quire.executor.ranks.local_ranks import fds_of, make_ends
from quire.executor.ranks.measuring import open_swap_space, share_pass_times
from quire.executor.ranks.messages import Kept, MoveBlocks, Sampled, Step
from quire.executor.ranks.multiproc_executor import trace_of_all
from quire.executor.ranks.offload import RanksOffload
from quire.executor.ranks.rank import move_blocks, open_offload, run_step
from quire.executor.ranks.rounds import PendingRanks, Rounds, Then
from quire.executor.ranks.shared_links import shared_group
from quire.executor.ranks.torch_links import local_group
from quire.executor.worker import Worker
from quire.ipc.block_offload import Beginning
from quire.ipc.config import EngineConfig
from quire.ipc.lora import LoRARequest
from quire.ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from quire.ipc.trace import RanksTrace
from quire.tests.executor.driver import make_config
from quire.tests.fake_gpu import enter_thread


class RankThreads:
    """What Driver and EngineCore need of an executor."""

    burst_weights_bytes = 0

    @classmethod
    def of(cls, model: str | Path, size: int, num_stages: int = 1, **arguments: Any) -> RankThreads:
        return cls(
            make_config(
                model, tensor_parallel_size=size, pipeline_parallel_size=num_stages, **arguments
            )
        )

    def __init__(self, config: EngineConfig):
        """`config` is resolved."""
        self.config = config
        self.max_num_seqs = self.config.scheduler_config.max_num_seqs
        is_on_cpu = config.device_config.device == "cpu"
        all_ends = make_ends(self.config, has_store=not is_on_cpu)
        # torch opens a store once more, some time later: it stays open
        self._fds = {fd for ends in all_ends for fd in fds_of(ends) if fd != ends.store}
        self._size = config.device_config.tensor_parallel_size
        enter = None if is_on_cpu else enter_thread
        self._threads = [ThreadPoolExecutor(1, initializer=enter) for _ in all_ends]
        self._sampled: list[Sampled] = []
        self._running: deque[PendingRanks] = deque()
        self._rounds: Rounds | None = None
        if len(all_ends) > self._size and config.scheduler_config.speculative_config is None:
            self._rounds = Rounds(self._submit, self._finish_oldest)
        self.offload: RanksOffload | None = None
        if is_on_cpu:
            groups = [shared_group(ends) for ends in all_ends]
        else:  # which wait for each other
            join = partial(local_group, timeout_s=60.0, device=torch.device("cuda", 0))
            joins = [one.submit(join, ends) for one, ends in zip(self._threads, all_ends)]
            groups = [one.result() for one in joins]
        self.ranks = [Worker(self.config, group) for group in groups]
        for rank in self.ranks:  # in turn: random weights come from the process's generator
            rank.load_model(lambda stage, fraction: None)
        num_blocks = self.determine_num_blocks()
        self.initialize_kv_cache(num_blocks)
        self.kv_cache_windows = self.ranks[0].kv_cache_windows
        rooms = [rank.num_state_checkpoints for rank in self.ranks]
        self.num_state_checkpoints = min((room for room in rooms if room is not None), default=None)

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """No rank dies without this process."""

    def check_health(self) -> None:
        self.on_each(lambda rank: rank.check_health())

    def load_model(self, report: Callable[[str, float], None]) -> None:
        """It is loaded."""

    def on_each(self, call: Callable[[Worker], Any]) -> list[Any]:
        return [future.result() for future in self._begin(call)]

    def _begin(self, call: Callable[[Worker], Any]) -> list[Future[Any]]:
        pairs = zip(self._threads, self.ranks, strict=True)
        return [thread.submit(call, rank) for thread, rank in pairs]

    def determine_num_blocks(self) -> int:
        return min(self.call("determine_num_blocks"))

    def initialize_kv_cache(self, num_blocks: int) -> int:
        num_bytes = sum(self.on_each(lambda rank: rank.initialize_kv_cache(num_blocks)))
        share_pass_times(self.call, self.config)
        return num_bytes

    def initialize_swap_space(self) -> tuple[int, PreemptionCosts]:
        return open_swap_space(self.call, self.config)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.on_each(lambda rank: getattr(rank, method)(*args))

    def execute_dummy_batch(self) -> None:
        self.on_each(lambda rank: rank.execute_dummy_batch())

    def initialize_offload(self) -> RanksOffload | KVOffload | None:
        if len(self.ranks) == 1:  # as a process of its own
            return self.ranks[0].initialize_offload()
        if self.config.cache_config.kv_offloading_size:
            opened = self.on_each(open_offload)
            self.offload = RanksOffload(self, opened, self.config.cache_config)
        return self.offload

    def ask(self, command: MoveBlocks) -> list[Kept]:
        while self._running:
            self._finish_oldest()
        return self.on_each(lambda rank: move_blocks(rank, command))

    def submit(self, command: MoveBlocks, on_reply: Callable[[list[Kept]], None]) -> None:
        replies = self._begin(lambda rank: move_blocks(rank, command))
        self._add(lambda: on_reply([reply.result() for reply in replies]))

    def fetch(self, beginning: Beginning) -> Future[None]:
        found = [rank.offload.fetch(beginning) for rank in self.ranks if rank.offload is not None]
        fetches, done = [one for one in found if one is not None], Future[None]()

        def end(_: Future[None]) -> None:
            wait(fetches)
            if done.set_running_or_notify_cancel():
                done.set_result(None)

        done.add_done_callback(lambda _: [one.cancel() for one in fetches])
        if fetches:
            fetches[-1].add_done_callback(end)
        else:
            done.set_result(None)
        return done

    def check_grammar(
        self, params: Any, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        """Of the last stage's first rank; the others compile it, too."""
        checks = [rank.check_grammar(params, is_known=is_known, owner=owner) for rank in self.ranks]
        for check in checks[:-1]:
            check.exception()
        return checks[-1]

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return [
            one for part in self.on_each(lambda r: r.collective_rpc(method, *args)) for one in part
        ]

    def read_lora(self, request: LoRARequest) -> Future[str]:
        reads = [rank.read_lora(request) for rank in self.ranks]
        done: Future[str] = Future()
        done.set_result("|".join(read.result() for read in reads))
        return done

    def add_lora(self, request: LoRARequest) -> bool:
        return all(self.on_each(lambda rank: rank.add_lora(request)))

    def remove_lora(self, lora_int_id: int) -> bool:
        return all(self.call("remove_lora", lora_int_id))

    def list_loras(self) -> set[int]:
        return set(self.call("list_loras")[0])

    def start_trace(self, num_steps: int) -> None:
        self.call("start_trace", num_steps)

    def end_trace(self) -> RanksTrace:
        return trace_of_all(self.call("end_trace"))

    def submit_model(self, output: SchedulerOutput) -> PendingRanks:
        """Begins a step. Results are asked for in the order of the steps."""
        if self._rounds is not None:
            return self._rounds.submit(output)
        return self._submit(output, lambda take: take())

    def _submit(self, output: SchedulerOutput, then: Then) -> PendingRanks:
        step, self._sampled = Step(output, self._sampled), []
        replies = self._begin(lambda rank: run_step(rank, step))

        def take() -> ModelRunnerOutput:
            of_all = [reply.result() for reply in replies]
            done = of_all[-self._size :]
            assert len({one.digest for one in done}) == 1
            if self.offload is not None:
                self.offload.note([one.kept for one in of_all])
            result = done[0].output
            assert result is not None
            if len(self.ranks) > self._size:
                self._sampled.append(done[0].sampled())
            return result

        return self._add(lambda: then(take))

    def _add(self, take: Callable[[], Any]) -> PendingRanks:
        self._running.append(PendingRanks(self._finish_oldest, take))
        return self._running[-1]

    def _finish_oldest(self) -> None:
        pending = self._running.popleft()
        pending.output.set_result(pending.take())

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.submit_model(step).result()

    def shutdown(self) -> None:
        """May be called twice."""
        if not self._fds:
            return
        self.on_each(lambda rank: rank.shutdown())
        for thread in self._threads:
            thread.shutdown()
        while self._fds:
            os.close(self._fds.pop())
