"""The engine's controls end to end: clients of one daemon that pause each other, and tiny models
that sleep, wake up and load new weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time

import psutil
import pytest
from quire import (
    LLM,
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    EnginePausedError,
    InvalidParameterError,
    ModelLoadError,
    SamplingParams,
)
from quire.frontend.clients.mp_client import MPClient
from quire.ipc.messages import EngineCoreRequest
from quire.tests.fake_engine import COMMAND, daemon, open_blocking
from quire.tests.fakes import expected_output, make_config
from quire.tests.tiny_models import save_tiny_model

MIB = 2**20
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [list(range(5, 45)), [7, 8, 9], list(range(100, 130))]


# ---------------------------------------------------------------- one daemon, several clients


def request(request_id: str, max_tokens: int = 50) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1, 2, 3], SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    )


@pytest.fixture
def clients(tmp_path):
    """Open clients of one daemon."""
    config = make_config(hf_overrides={"delay_s": 0.005}, startup_timeout_s=120.0)
    opened = []
    with daemon(tmp_path, config) as (address, _):
        yield lambda: opened.append(open_blocking(MPClient.start(config, address))) or opened[-1]
        for client in opened:
            client.shutdown()


def read_all(client: MPClient, tokens: list[int]) -> None:
    while True:
        outputs = client.get_output()
        tokens += outputs.token_ids
        if outputs.finished:
            return


def reader(client: MPClient) -> tuple[threading.Thread, list[int]]:
    """Start a thread that reads one request to its end, as blocking code does."""
    tokens: list[int] = []
    thread = threading.Thread(target=read_all, args=(client, tokens))
    thread.start()
    return thread, tokens


@pytest.mark.parametrize("end", ["resume", "wake_up", "leave"])
def test_another_clients_pause_blocks_until_it_resumes(clients, end):
    mine, other = clients(), clients()
    other.call_utility(*(["sleep", 1] if end == "wake_up" else ["pause", "keep"]))
    mine.add_request(request("r"))
    thread, tokens = reader(mine)
    thread.join(0.2)
    assert thread.is_alive() and tokens == []
    if end == "leave":
        other.shutdown()
    else:
        other.call_utility(end)
    thread.join(60)
    assert not thread.is_alive()
    assert tokens == expected_output([1, 2, 3], request("r").sampling_params, [], make_config())[0]


def test_any_client_can_resume_and_a_sleep_outlasts_its_client(clients):
    mine, other, third = clients(), clients(), clients()
    mine.call_utility("pause", "keep")
    mine.add_request(request("r"))
    other.call_utility("resume")
    tokens: list[int] = []
    read_all(mine, tokens)  # it paused the engine itself, and checks before it waits
    assert len(tokens) == 50
    other.call_utility("sleep", 2)
    other.shutdown()
    assert third.call_utility("is_sleeping") is True
    third.call_utility("wake_up")
    mine.add_request(request("s", 5))
    read_all(mine, tokens)
    assert len(tokens) == 55


def test_pause_with_wait_covers_all_clients(clients):
    mine, other = clients(), clients()
    mine.add_request(request("r"))
    thread, tokens = reader(mine)
    other.add_request(request("s", 80))
    other.call_utility("pause", "wait")
    state = other.call_utility("scheduler_state")
    assert state["requests"] == [] and state["is_paused"]
    thread.join(60)
    assert len(tokens) == 50


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_a_paused_engine_can_drain(how):
    client = open_blocking(MPClient.start(make_config(startup_timeout_s=120.0), command=COMMAND))
    client.add_request(request("r"))
    client.call_utility(*(["pause", "keep"] if how == "pause" else ["sleep"]))
    thread_error: list[Exception] = []

    def wait() -> None:
        try:
            while True:
                client._run(client.client.get_output_async)
        except EngineDeadError as error:
            thread_error.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    os.kill(client.engine_pid, signal.SIGTERM)
    thread.join(60)
    assert "asked to leave" in str(thread_error[0])
    client.shutdown()


@pytest.mark.parametrize(
    "stop",
    [["pause", "keep"], ["pause", "wait"], ["sleep", 1]],
    ids=lambda stop: stop[0] + str(stop[1]),
)
def test_a_stopped_engine_with_waiting_requests_does_not_spin(stop):
    client = open_blocking(MPClient.start(make_config(startup_timeout_s=120.0), command=COMMAND))
    if stop[1] != "wait":
        client.add_request(request("r", 200))
        client.get_output()
    client.call_utility(*stop)
    client.add_request(request("held"))
    process = psutil.Process(client.engine_pid)
    client.call_utility("ping")
    before = sum(process.cpu_times()[:2])
    time.sleep(0.6)
    used_s = sum(process.cpu_times()[:2]) - before
    client.shutdown()
    assert used_s < 0.1


# ---------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [
        str(save_tiny_model(tmp_path_factory.mktemp(f"seed-{seed}"), seed=seed)) for seed in (0, 1)
    ]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def open_llm(model: str, engine: str, **arguments) -> LLM:
    return LLM(model, engine=engine, dtype="float32", max_model_len=512, num_threads=1, **arguments)


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("inproc", {}),
        ("process", {}),
        pytest.param(
            "inproc",
            {"async_scheduling": True, "num_scheduler_steps": 3},
            marks=pytest.mark.slow,
        ),
        ("inproc", {"preemption_mode": "swap", "num_gpu_blocks_override": 33}),
    ],
    ids=["inproc", "process", "overlapped", "swapping"],
)
def test_sleep_wake_and_new_weights(models, engine, arguments, tmp_path):
    with open_llm(models[1], "inproc") as fresh:
        new = tokens_of(fresh)
    with open_llm(models[0], engine, **arguments) as llm:
        old = tokens_of(llm)
        assert old != new
        for level in (1, 2):
            llm.sleep(level)
            assert llm.is_sleeping()
            with pytest.raises(EnginePausedError, match="asleep.*wake_up"):
                tokens_of(llm)
            llm.wake_up()
            assert tokens_of(llm) == old
        with pytest.raises(ModelLoadError, match="no such directory"):
            llm.load_weights("/no/such/model")
        shutil.copy(f"{models[1]}/config.json", tmp_path)
        with pytest.raises(ModelLoadError, match="model.safetensors"):
            llm.load_weights(str(tmp_path))
        assert tokens_of(llm) == old
        llm.load_weights(models[1])
        assert tokens_of(llm) == new
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.load_weights(models[0])
        llm.wake_up(["kv_cache"])
        assert tokens_of(llm) == old
        assert llm.reset_prefix_cache() is True
        [usage] = llm.collective_rpc("memory_usage")
        assert usage["kv_cache_bytes"] > 0
        with pytest.raises(InvalidParameterError, match="must be one of check_health"):
            llm.collective_rpc("no_such_method")
        assert llm.get_metrics()["num_failed_utilities"] == 2


def test_the_engine_process_releases_its_memory(models):
    """The test measures the resident memory of the child process."""
    with open_llm(models[0], "process", kv_cache_memory_bytes=96 * MIB, max_num_seqs=64) as llm:
        process = psutil.Process(llm.llm_engine.client.engine_pid)
        prompts = [[i % 300, *(j % 300 for j in range(i, i + 450))] for i in range(300)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        awake = process.memory_info().rss
        llm.sleep(1)
        asleep = process.memory_info().rss
        print(f"resident: awake {awake / MIB:.0f} MiB, asleep {asleep / MIB:.0f} MiB")
        assert awake - asleep > 0.9 * 96 * MIB
        llm.wake_up()
        assert len(tokens_of(llm)[0]) == 24


def test_generate_fails_while_the_same_program_paused_the_engine(models):
    with open_llm(models[0], "process") as llm:
        expected = tokens_of(llm)
        llm.pause("wait")
        assert llm.is_paused() and llm.scheduler_state()["pause_mode"] == "wait"
        with pytest.raises(EnginePausedError, match=r"the engine is paused: resume\(\) first"):
            tokens_of(llm)
        # the requests that could not run were aborted
        assert llm.scheduler_state()["requests"] == []
        llm.resume()
        assert tokens_of(llm) == expected


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("engine", ["inproc", "process"])
def test_asyncio(models, engine):
    async def main(llm: AsyncLLM) -> None:
        # Long enough that the engine is still busy when the next call reaches it, however late this
        # process is scheduled.
        async def finish(request_id: str, max_tokens: int = 440) -> list:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            return [output async for output in llm.generate(PROMPTS[0], params, request_id)]

        alone = (await finish("alone"))[-1].outputs[0].token_ids
        stream = llm.generate(
            PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=440, ignore_eos=True), "frozen"
        )
        await anext(stream)
        await llm.pause("keep")
        state = await llm.scheduler_state()
        [row] = state["requests"]
        assert (
            row["status"] == "running"
            and row["num_prompt_tokens"] == 40
            and row["num_blocks"] >= 3
            and state["is_paused"]
        )
        await llm.sleep(2)
        await llm.wake_up()
        assert await llm.is_paused() and not await llm.is_sleeping()
        await llm.resume()
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].token_ids == alone
        metrics = outputs[-1].metrics
        assert (
            metrics.num_preemptions == 1
            and metrics.num_recomputed_tokens >= 40
            and metrics.num_generation_tokens == 440
        )
        assert (
            min(metrics.queued_time, metrics.prefill_time, metrics.decode_time) >= 0
            and metrics.e2e_latency > metrics.decode_time > 0
        )

        params = SamplingParams(temperature=0.0, max_tokens=440, ignore_eos=True)
        running = llm.generate(PROMPTS[0], params, "running")
        await anext(running)
        waiting = asyncio.create_task(llm.pause("wait"))
        while not await llm.is_paused():
            await asyncio.sleep(0)
        late = asyncio.create_task(finish("late", 5))
        await waiting
        assert [output async for output in running][-1].outputs[0].token_ids == alone
        assert not late.done() and (await llm.get_metrics())["num_waiting"] == 1
        await llm.pause("abort")
        assert (await late)[-1].outputs[0].finish_reason == "abort"
        await llm.resume()
        await llm.load_weights(models[1])
        assert (await finish("new"))[-1].outputs[0].token_ids != alone

    llm = AsyncLLM.from_engine_args(
        EngineArgs(models[0], dtype="float32", max_model_len=512, num_threads=1), engine
    )
    try:
        asyncio.run(main(llm))
    finally:
        llm.shutdown()
