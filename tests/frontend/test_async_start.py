"""AsyncLLM.start and shutdown_async in every form: the loop is not blocked, progress is reported, a
cancelled or failed start leaks nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from quire import AsyncLLM, EngineArgs, EngineDeadError, ModelLoadError, SamplingParams
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.clients.mp_client import MPClient
from quire.ipc.errors import EngineStartError
from quire.tests.fake_engine import COMMAND, TroubledExecutor, daemon, wait_until
from quire.tests.fakes import make_config
from quire.tests.frontend.clients.test_mp_client import state
from quire.tests.frontend.tiny_tokenizers import text_config

SMALL = EngineArgs(
    dtype="float32", max_model_len=128, max_num_seqs=2, num_gpu_blocks_override=64, num_threads=1
)


class Watcher:
    """Collects progress, and counts iterations of the loop in the meantime."""

    def __init__(self):
        self.reports: list[tuple[str, float]] = []
        self.num_turns = 0

    def __call__(self, stage: str, fraction: float) -> None:
        assert threading.current_thread() is threading.main_thread() and asyncio.get_running_loop()
        self.reports.append((stage, fraction))

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(stage for stage, _ in self.reports))

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.num_turns += 1


async def use(args: EngineArgs, engine: str) -> Watcher:
    watcher = Watcher()
    counter = asyncio.create_task(watcher.count())
    llm = await asyncio.wait_for(AsyncLLM.start(args, engine, watcher), 60)
    outputs = [
        output
        async for output in llm.generate(
            [5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), "a"
        )
    ]
    assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 3
    late = asyncio.create_task(
        anext(llm.generate([5], SamplingParams(max_tokens=None, ignore_eos=True), "b"))
    )
    await asyncio.sleep(0)
    await llm.shutdown_async()
    await llm.shutdown_async()
    with pytest.raises(EngineDeadError, match="shutdown"):
        await late
    counter.cancel()
    return watcher


@pytest.mark.parametrize("engine", ["process", "inproc"])
def test_the_bundled_model(engine):
    threads = set(threading.enumerate())
    watcher = asyncio.run(use(SMALL, engine))
    start = ["start"] if engine == "process" else []
    assert watcher.stages == [
        "model files",
        *start,
        "import",
        "load weights",
        "kv cache",
        "tokenizer",
    ]
    fractions = [fraction for stage, fraction in watcher.reports if stage == "load weights"]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and len(set(fractions)) > 1
    assert watcher.num_turns > 3
    wait_until(lambda: set(threading.enumerate()) <= threads)


def test_a_death_is_noticed_without_a_call(tmp_path):
    async def main(address: str, process) -> None:
        llm = await AsyncLLM.start(EngineArgs(on_engine_death="fail"), address)
        assert not llm.errored
        process.kill()
        while not llm.errored:
            await asyncio.sleep(0.01)
        await llm.shutdown_async()

    with daemon(tmp_path, text_config()) as (address, process):
        asyncio.run(asyncio.wait_for(main(address, process), 60))


def test_a_daemon(tmp_path):
    with daemon(tmp_path, text_config()) as (address, process):
        watcher = asyncio.run(use(EngineArgs(), address))
        assert watcher.stages[0] == "start" and watcher.stages[-1] == "tokenizer"
        with pytest.raises(EngineStartError, match="no engine listens"):
            asyncio.run(AsyncLLM.start(EngineArgs(), f"{address}-other"))
        assert process.poll() is None


def test_an_argument_that_differs_from_the_daemons_leaves_it(tmp_path):
    with daemon(tmp_path, text_config()) as (address, process):
        before = state()
        with pytest.raises(ValueError, match="max_num_seqs"):
            asyncio.run(AsyncLLM.start(EngineArgs(max_num_seqs=3), address))
        wait_until(lambda: state() == before)  # ZMQ's threads take a moment
        assert process.poll() is None


@pytest.mark.parametrize("engine", ["process", "inproc"])
def test_a_missing_model(engine):
    with pytest.raises(ModelLoadError, match="no such directory"):
        asyncio.run(AsyncLLM.start(EngineArgs("./nowhere"), engine))


def test_failures_have_the_engines_own_type():
    async def main() -> None:
        config = make_config(hf_overrides={"at_load": "fail"})
        with pytest.raises(ValueError, match="made of cheese"):
            await MPClient.start(config, command=COMMAND)
        with pytest.raises(ValueError, match="made of cheese"):
            await InprocClient.start(config, Watcher(), executor=TroubledExecutor(config))

    asyncio.run(main())


def test_a_missing_tokenizer_ends_the_engine(tmp_path):
    """The engine is ready at that time."""
    with daemon(tmp_path, text_config()) as (address, process):
        before = state()
        with pytest.raises(ModelLoadError, match="tokenizer"):
            asyncio.run(AsyncLLM.start(EngineArgs(tokenizer=str(tmp_path)), address))
        wait_until(lambda: state() == before)
        assert process.poll() is None


async def cancelled_at(start, watcher: Watcher, stage: str) -> float:
    """Cancel `start` when `stage` is reported. Return the seconds until it had ended."""
    task, counter = asyncio.create_task(start), asyncio.create_task(watcher.count())
    while stage not in watcher.stages:
        await asyncio.sleep(0.005)
        assert not task.done()
    begin = time.monotonic()
    task.cancel()
    turns = watcher.num_turns
    with pytest.raises(asyncio.CancelledError):
        await task
    counter.cancel()
    took = time.monotonic() - begin
    assert took < 0.1 or watcher.num_turns > turns
    num_reports = len(watcher.reports)
    await asyncio.sleep(0.02)
    assert len(watcher.reports) == num_reports
    return took


@pytest.mark.parametrize("stage", ["start", "load weights"])
def test_a_cancelled_start_of_a_child_leaks_nothing(stage):
    def run() -> float:
        watcher = Watcher()
        return asyncio.run(
            cancelled_at(
                MPClient.start(
                    make_config(hf_overrides={"at_load": "hang"}),
                    on_progress=watcher,
                    command=COMMAND,
                ),
                watcher,
                stage,
            )
        )

    run()
    before = state()
    assert run() < 20  # a second until SIGKILL, since the fake engine hangs
    wait_until(lambda: state() == before)


def test_a_cancelled_attachment_leaves_the_daemon(tmp_path):
    with daemon(tmp_path, make_config(hf_overrides={"at_load": "hang"})) as (address, process):
        watcher = Watcher()
        asyncio.run(cancelled_at(MPClient.start(make_config(), address, watcher), watcher, "start"))
        assert process.poll() is None


def test_a_cancelled_start_in_this_process_stops_at_the_next_report():
    class Slow(TroubledExecutor):
        is_shut_down_early = False

        def load_model(self, report) -> None:
            for i in range(4000):  # 40 s
                report("load weights", i / 4000)
                time.sleep(0.01)

        def shutdown(self) -> None:
            self.is_shut_down_early = True

    async def main() -> None:
        watcher, executor, threads = Watcher(), Slow(make_config()), set(threading.enumerate())
        assert (
            await cancelled_at(
                InprocClient.start(make_config(), watcher, executor=executor),
                watcher,
                "load weights",
            )
            < 20
        )
        assert executor.is_shut_down_early
        wait_until(lambda: set(threading.enumerate()) <= threads)

    asyncio.run(main())
