"""Ranks as threads of this process: each runs what a rank's process runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire.executor.ranks.local_ranks import fds_of, make_ends
from quire.executor.ranks.rank import digest_of
from quire.executor.ranks.shared_links import shared_group
from quire.executor.single_process import SingleProcessExecutor
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.tests.executor.driver import make_config


class RankThreads:
    """What Driver needs of an executor."""

    def __init__(self, model: str | Path, size: int, num_stages: int = 1, **arguments: Any):
        self.config = make_config(
            model, tensor_parallel_size=size, pipeline_parallel_size=num_stages, **arguments
        )
        self._threads = ThreadPoolExecutor(size * num_stages)
        all_ends = make_ends(self.config)
        self._fds = {fd for ends in all_ends for fd in fds_of(ends)}
        self.ranks = [SingleProcessExecutor(self.config, shared_group(ends)) for ends in all_ends]
        for rank in self.ranks:  # in turn: random weights come from the process's generator
            rank.load_model(lambda stage, fraction: None)
        num_blocks = self.determine_num_blocks()
        self.on_each(lambda rank: rank.initialize_kv_cache(num_blocks))
        self.kv_cache_windows = self.ranks[0].kv_cache_windows

    def on_each(self, call: Callable[[SingleProcessExecutor], Any]) -> list[Any]:
        return list(self._threads.map(call, self.ranks))

    def determine_num_blocks(self) -> int:
        return min(rank.determine_num_blocks() for rank in self.ranks)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        outputs = self.on_each(lambda rank: rank.execute_model(step))
        assert len({digest_of(output) for output in outputs}) == 1
        return outputs[0]

    def shutdown(self) -> None:
        self.on_each(lambda rank: rank.shutdown())
        self._threads.shutdown()
        for fd in self._fds:
            os.close(fd)
