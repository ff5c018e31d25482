"""Guard, and every form of a client that is called by two threads, from a fork, or while it is
being closed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
from quire import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    EngineUsageError,
    LLMEngine,
    SamplingParams,
)
from quire.frontend.clients.guard import Guard
from quire.tests.client_forms import ASYNCIO, BLOCKING, blocking_engine, make_async_engine
from quire.tests.frontend.clients.driver import Driver, long_requests, make_requests

PROMPTS = [[10 + i, 20, 30 + i] for i in range(8)]
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
PROCESSOR = "quire.tests.frontend.clients.test_guard:exits"


def exits(params: SamplingParams):
    """A user's logits processor that ends the program at the third token of the request."""
    if not params.extra_args:
        return None

    def processor(prompt_token_ids, output_token_ids, logits):
        if len(output_token_ids) == 2:
            raise SystemExit("enough")
        return logits

    return processor


def in_fork(function: Callable[[], object], timeout_s: float = 60.0) -> str:
    """Return the error that function() raises in a fork of this process, or "nothing"; "hangs"
    after timeout_s.
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function()
            words = "nothing"
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        try:
            os.write(write_fd, words.encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    killer = threading.Timer(timeout_s, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with os.fdopen(read_fd) as file:
        words = file.read()
    os.waitpid(pid, 0)
    killer.cancel()
    return words or "hangs"


@pytest.fixture(scope="module", params=BLOCKING)
def engine(request, tmp_path_factory) -> Iterator[LLMEngine]:
    directory = tmp_path_factory.mktemp("guard")
    with blocking_engine(request.param, directory, logits_processors=[PROCESSOR]) as engine:
        yield engine


def llm_over(engine: LLMEngine) -> LLM:
    llm = LLM.__new__(LLM)
    llm.llm_engine, llm.session = engine, engine.session
    llm._num_requests, llm._turn = 0, Guard(waits=True)
    return llm


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---------------------------------------------------------------- with the model


@pytest.mark.sampled(step=2)
def test_a_fork_gets_an_error_and_the_parent_continues(engine) -> None:
    llm = llm_over(engine)
    before = tokens(llm.generate(PROMPTS, SHORT, use_tqdm=False))
    for call in (
        lambda: llm.generate(PROMPTS, SHORT, use_tqdm=False),
        llm.get_metrics,
        lambda: engine.add_request("a", [1], SHORT),
    ):
        assert in_fork(call).startswith(
            f"EngineUsageError: this engine belongs to process {os.getpid()}, and process "
        )
    assert in_fork(llm.close) == "nothing"
    assert tokens(llm.generate(PROMPTS, SHORT, use_tqdm=False)) == before


def test_eight_threads_on_one_llm_take_turns(engine) -> None:
    llm = llm_over(engine)
    expected = tokens(llm.generate(PROMPTS, SHORT, use_tqdm=False))
    results: dict[int, object] = {}

    def run(i: int) -> None:
        try:
            outputs = llm.generate([PROMPTS[i], PROMPTS[i - 1]], SHORT, use_tqdm=False)
            assert not llm.is_paused()
            results[i] = tokens(outputs)
        except BaseException as error:
            results[i] = traceback.format_exception(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [expected[i], expected[i - 1]] for i in range(8)}


def test_sys_exit_in_a_logits_processor_fails_only_its_request(engine) -> None:
    llm = llm_over(engine)
    [plain] = tokens(llm.generate([PROMPTS[0]], SHORT, use_tqdm=False))
    exiting = SamplingParams(max_tokens=8, ignore_eos=True, extra_args={"exit": True})
    bad, good = llm.generate([PROMPTS[1], PROMPTS[0]], [exiting, SHORT], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error == f"logits_processors: {PROCESSOR} failed: SystemExit: enough"
    assert tokens([good]) == [plain]


@pytest.mark.parametrize("client", ASYNCIO)
def test_sys_exit_in_a_logits_processor_of_an_async_engine(client) -> None:
    import asyncio

    async def run() -> tuple:
        llm: AsyncLLM = make_async_engine(client, logits_processors=[PROCESSOR])

        async def last(params: SamplingParams, name: str):
            async for output in llm.generate(PROMPTS[0], params, name):
                final = output
            return final

        try:
            exiting = SamplingParams(max_tokens=8, ignore_eos=True, extra_args={"exit": True})
            results = await asyncio.gather(last(exiting, "bad"), last(SHORT, "good"))
            forked = in_fork(lambda: asyncio.run(last(SHORT, "forked")))
            return *results, forked, await last(SHORT, "after")
        finally:
            await llm.shutdown_async()

    bad, good, forked, after = asyncio.run(run())
    assert bad.error == f"logits_processors: {PROCESSOR} failed: SystemExit: enough"
    assert len(good.outputs[0].token_ids) == 8 == len(after.outputs[0].token_ids)
    assert forked.startswith("EngineUsageError: this engine belongs to process")


# ---------------------------------------------------------------- with the fake executor

FORMS = ["inproc", "inproc codec", "process", "daemon"]


@pytest.fixture
def driver(request, tmp_path) -> Iterator[Driver]:
    driver = Driver(request.param, tmp_path, hf_overrides={"delay_s": 0.02})
    try:
        yield driver
    finally:
        driver.close()


def outcome_of(call: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    """Run the call in a thread. The list receives what it raises."""
    raised: list[str] = []

    def run() -> None:
        try:
            while True:
                call()
        except BaseException as error:
            raised.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("call", ["get_output", "pause"])
@pytest.mark.parametrize("driver", FORMS, indirect=True)
def test_closing_during_another_threads_call(driver, call) -> None:
    """Also while that thread waits for an engine that has no output."""
    client = driver.client
    for request in long_requests(max_tokens=200):
        client.add_request(request)
    wait = (
        client.get_output if call == "get_output" else lambda: client.call_utility("pause", "wait")
    )
    thread, raised = outcome_of(wait)
    time.sleep(0.2)
    client.shutdown()
    thread.join(60)
    assert raised == ["EngineDeadError: this client was shut down"]
    with pytest.raises(EngineDeadError, match="this client was shut down"):
        client.add_request(make_requests(1)[0])


@pytest.mark.parametrize("driver", FORMS, indirect=True)
def test_a_second_thread_gets_an_error(driver) -> None:
    client = driver.client
    for request in make_requests(4):
        client.add_request(request)
    client._guard.__enter__()  # as if this thread were inside a call
    try:
        for call in (
            client.get_output,
            lambda: client.call_utility("is_paused"),
            lambda: client.add_request(make_requests(1, seed=1)[0]),
            lambda: client.abort_requests(["r0"]),
            lambda: client.pace_outputs(9),
        ):
            thread, raised = outcome_of(call)
            thread.join(60)
            assert raised[0].startswith("EngineUsageError: another thread is in a call of this eng")
    finally:
        client._guard.__exit__(None, None, None)
    assert driver.collect(4).keys() == {request.request_id for request in make_requests(4)}


@pytest.mark.parametrize("driver", FORMS, indirect=True)
def test_closing_inside_a_call_of_the_same_thread(driver) -> None:
    """As a signal handler does."""
    client = driver.client
    for request in long_requests(max_tokens=200):
        client.add_request(request)
    previous = signal.signal(signal.SIGALRM, lambda *_: client.shutdown())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(EngineDeadError, match="this client was shut down"):
            while True:
                client.get_output()
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("driver", ["process", "daemon"], indirect=True)
def test_a_signal_handler_within_a_call_may_abort_and_learns_what_it_may_not(driver) -> None:
    client, requests, refused = driver.client, long_requests(max_tokens=200), []

    def handle(*_: object) -> None:
        client.abort_requests([request.request_id for request in requests])
        try:
            client.call_utility("ping")
        except EngineUsageError as error:
            refused.append(str(error))

    for request in requests:
        client.add_request(request)
    previous = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        assert client.call_utility("pause", "wait") is None  # until no request is left
    finally:
        signal.signal(signal.SIGALRM, previous)
    [sentence] = refused
    assert "can only abort requests or shut the engine down: make other calls when" in sentence
    assert client.call_utility("scheduler_state")["requests"] == []


# ---------------------------------------------------------------- the guard alone


def test_calls_of_one_thread_nest_and_close_waits_for_the_outermost() -> None:
    guard, closed = Guard(), []
    with guard:
        with guard:
            guard.close(lambda: closed.append(True), "over")
        assert closed == []
    assert closed == [True]
    guard.close(lambda: closed.append(True), "over")
    assert closed == [True, True]


def test_a_call_while_another_thread_closes_reports_the_close() -> None:
    guard, is_closing, may_end = Guard(), threading.Event(), threading.Event()

    def close() -> None:
        is_closing.set()
        may_end.wait(60)

    thread = threading.Thread(target=guard.close, args=(close, "it is over"))
    thread.start()
    is_closing.wait(60)
    with pytest.raises(EngineDeadError, match="it is over"), guard:
        pass
    may_end.set()
    thread.join()


def test_a_waiting_guard_admits_threads_one_by_one() -> None:
    guard, inside, most = Guard(waits=True), [], []

    def run() -> None:
        with guard:
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.001)
            inside.pop()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_users_can_catch_the_errors() -> None:
    assert issubclass(EngineUsageError, RuntimeError)
