"""An engine process with a real model that waits in the middle of its requests:
`python -P -m quire.tests.held_engine FILE COMPUTED`.

While FILE exists, it computes no token of a request that has COMPUTED tokens in its KV cache. A
test that kills the engine once it has seen a few tokens is then sure to interrupt its requests: on
a busy machine the engine might otherwise have finished them before the reader sees the first.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from quire.core.engine_proc import leave, main
from quire.executor.worker import Worker
from quire.ipc.config import EngineConfig
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput


def command(file: Path, num_computed: int) -> list[str]:
    return [sys.executable, "-P", "-m", "quire.tests.held_engine", str(file), str(num_computed)]


class HeldWorker(Worker):
    def __init__(self, file: Path, num_computed: int, config: EngineConfig):
        super().__init__(config)
        self.file, self.num_computed = file, num_computed

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        while (
            max(scheduler_output.num_computed_tokens, default=0) >= self.num_computed
            and self.file.exists()
        ):
            time.sleep(0.005)
        return super().execute_model(scheduler_output)


if __name__ == "__main__":
    file, num_computed = Path(sys.argv[1]), int(sys.argv[2])
    leave(main(sys.argv[3:], make_executor=partial(HeldWorker, file, num_computed)))
