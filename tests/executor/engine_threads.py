"""Engines that share experts, as threads of this process, each with a driver of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from quire.executor.ranks.rounds import PendingRanks, Then
from quire.executor.worker import Worker
from quire.ipc.config import EngineConfig
from quire.ipc.models.expert_parallel import check_expert_parallel
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.tests.executor.driver import make_config
from quire.tests.executor.rank_threads import RankThreads


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


class SharingRanks(RankThreads):
    """The ranks of an engine, whose experts are divided with those of a second engine. That one has
    no requests and takes part in each pass.
    """

    def __init__(self, config: EngineConfig):
        """`config` is that of one engine, resolved."""
        self._folder = TemporaryDirectory()
        sharing = {"data_parallel_size": 2, "enable_expert_parallel": True}
        device = msgspec.structs.replace(config.device_config, **sharing)
        config = msgspec.structs.replace(config, device_config=device)
        check_expert_parallel(config)
        own, other = (_of(config, rank, Path(self._folder.name)) for rank in range(2))
        super().__init__(own)
        self._other = RankThreads(other)
        self._pool = ThreadPoolExecutor(1)
        joined = self._pool.submit(self._other.call, "join_engines")
        self.call("join_engines")
        joined.result()
        self._attending = self._pool.submit(self._attend)

    def _attend(self) -> None:
        while any(self._other.call("meet_engines", False)):
            self._other.call("join_pass")

    def _submit(self, output: SchedulerOutput, then: Then) -> PendingRanks:
        assert all(self.call("meet_engines", True))
        return super()._submit(output, then)

    def shutdown(self) -> None:
        if not self._attending.done():
            self.call("meet_engines", False)
            self._attending.result()
            self._pool.shutdown()
            self._other.shutdown()
            self._folder.cleanup()
        super().shutdown()


def _of(config: Any, rank: int, directory: Path) -> Any:
    device = msgspec.structs.replace(
        config.device_config, data_parallel_rank=rank, expert_group=str(directory)
    )
    return msgspec.structs.replace(config, device_config=device)
