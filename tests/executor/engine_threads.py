"""Engines that share experts, as threads of this process, each with a driver of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from quire.executor.worker import Worker
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.tests.executor.driver import make_config


class Sharing(Worker):
    """Meets the other engines before each step, as the core does."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        assert self.meet_engines(True)
        return super().execute_model(scheduler_output)

    def attend(self) -> None:
        """Takes part until no engine has work."""
        while self.meet_engines(False):
            self.join_pass()


class EngineThreads:
    def __init__(self, model: str | Path, directory: Path, size: int = 2, **arguments: Any):
        directory.mkdir(exist_ok=True)
        config = make_config(
            model, data_parallel_size=size, enable_expert_parallel=True, **arguments
        )
        self._threads = ThreadPoolExecutor(size)
        self.engines = [Sharing(_of(config, rank, directory)) for rank in range(size)]
        for engine in self.engines:  # in turn: random weights come from the process's generator
            engine.load_model(lambda stage, fraction: None)
            engine.initialize_kv_cache(engine.determine_num_blocks())
        self.on_each([lambda engine: engine.join_engines()] * size)

    def on_each(self, calls: Sequence[Callable[[Sharing], Any]]) -> list[Any]:
        """A call for each engine, all at once."""
        return list(self._threads.map(lambda call, engine: call(engine), calls, self.engines))

    def run(self, works: Sequence[Callable[[Sharing], Any]]) -> list[Any]:
        """Each engine's own work; who is done takes part in that of the others."""

        def then_attend(work: Callable[[Sharing], Any]) -> Callable[[Sharing], Any]:
            def call(engine: Sharing) -> Any:
                result = work(engine)
                engine.attend()
                return result

            return call

        return self.on_each([then_attend(work) for work in works])

    def shutdown(self) -> None:
        for engine in self.engines:
            engine.shutdown()
        self._threads.shutdown()


def _of(config: Any, rank: int, directory: Path) -> Any:
    device = msgspec.structs.replace(
        config.device_config, data_parallel_rank=rank, expert_group=str(directory)
    )
    return msgspec.structs.replace(config, device_config=device)
