"""Adapters of the bundled model, end to end: every kind of client, reloads, restarts, the server,
the command line, and what many loads leave behind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from quire import LLM, InvalidParameterError, LLMEngine, LoRARequest, SamplingParams
from quire.executor.weights.lora_files import read_adapter
from quire.frontend.model_info.model_files import find_model_directory
from quire.tests.client_forms import ASYNCIO, BLOCKING, blocking_engine, make_async_engine
from quire.tests.frontend.server.conftest import running_server
from quire.tests.lora_adapters import adapted_weights, random_pairs, write_peft

PROMPT = "Once upon a time there was a little girl who lived in a house by the sea. One day"
SETTINGS = dict(enable_lora=True, max_loras=2, max_cpu_loras=3, block_size=8)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
NUM_ADAPTERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("adapters")
    weights = adapted_weights(Path(find_model_directory("bundled")))
    for i in range(1, NUM_ADAPTERS + 1):
        write_peft(found / f"a{i}", random_pairs(weights, seed=i, size=0.1))
    return found


def adapter(folder: Path, number: int, **fields) -> LoRARequest | None:
    if not number:
        return None
    return LoRARequest(f"a{number}", number, str(folder / f"a{number}"), **fields)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine="inproc", num_threads=1, max_model_len=384, dtype="float32", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM, folder: Path) -> dict[tuple[int, int], tuple[int, ...]]:
    """The tokens of each adapter (0: none) with GREEDY and SAMPLED, each request by itself."""
    found = {}
    for number in range(NUM_ADAPTERS + 1):
        for i, params in enumerate((GREEDY, SAMPLED)):
            [output] = llm.generate(PROMPT, params, False, lora_request=adapter(folder, number))
            found[number, i] = tuple(output.outputs[0].token_ids)
    greedy = [found[number, 0] for number in range(NUM_ADAPTERS + 1)]
    assert len(set(greedy)) == NUM_ADAPTERS + 1, "the adapters change nothing"
    return found


def submit(engine: LLMEngine, folder: Path, alone) -> None:
    """All requests of `alone` at once."""
    for number, i in alone:
        params = (GREEDY, SAMPLED)[i]
        request_id = f"{number}-{i}"
        engine.add_request(request_id, PROMPT, params, lora_request=adapter(folder, number))


def finish(engine: LLMEngine) -> dict[tuple[int, int], tuple[int, ...]]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            number, _, i = output.request_id.partition("-")
            found[int(number), int(i)] = tuple(output.outputs[0].token_ids)
    return found


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("client", BLOCKING)
def test_a_mixed_batch_gives_what_each_gives_alone(client, folder, alone, tmp_path) -> None:
    with blocking_engine(client, tmp_path, **SETTINGS) as engine:
        submit(engine, folder, alone)
        assert finish(engine) == alone
        assert len(engine.list_loras()) == 3
        engine.call_utility("check_integrity")
        with pytest.raises(InvalidParameterError, match="lora_path: .*nowhere"):
            engine.add_lora(LoRARequest("none", 9, str(tmp_path / "nowhere")))


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("client", ASYNCIO)
def test_asyncio(client, folder, alone) -> None:
    async def run() -> None:
        engine = make_async_engine(client, **SETTINGS)

        async def one(number: int, i: int) -> tuple[tuple[int, int], tuple[int, ...]]:
            params, request_id = (GREEDY, SAMPLED)[i], f"{number}-{i}"
            lora = adapter(folder, number)
            async for output in engine.generate(PROMPT, params, request_id, lora_request=lora):
                last = output
            return (number, i), tuple(last.outputs[0].token_ids)

        assert dict(await asyncio.gather(*(one(*key) for key in alone))) == alone
        await engine.shutdown_async()

    asyncio.run(run())


def test_hits_in_the_prefix_cache_stay_within_a_generation(llm, folder, alone, tmp_path) -> None:
    shutil.copytree(folder / "a1", place := tmp_path / "a")
    lora = LoRARequest("again", 50, str(place))

    def ask() -> tuple[tuple[int, ...], int]:
        [output] = llm.generate(PROMPT, GREEDY, False, lora_request=lora)
        return tuple(output.outputs[0].token_ids), output.num_cached_tokens

    assert ask() == (alone[1, 0], 0)
    tokens, num_cached = ask()
    assert tokens == alone[1, 0] and num_cached >= 8
    shutil.copytree(folder / "a2", place, dirs_exist_ok=True)
    assert ask()[0] == alone[1, 0]  # nobody has loaded it
    llm.add_lora(LoRARequest("again", 50, str(place), load_inplace=True))
    assert ask() == (alone[2, 0], 0)
    assert llm.remove_lora(50)


@pytest.mark.slow
def test_a_killed_engine_continues_with_the_adapters(folder, alone, tmp_path) -> None:
    with blocking_engine("process", tmp_path, **SETTINGS) as engine:
        engine.add_lora(LoRARequest("kept", 99, str(folder / "a1")))
        submit(engine, folder, alone)
        for _ in range(6):
            engine.step()
        os.kill(engine.client.engine_pid, signal.SIGKILL)
        assert finish(engine) == alone
        assert engine.get_metrics()["num_engine_restarts"] == 1
        engine.call_utility("check_integrity")


def test_adapters_come_and_go_under_a_stream(llm, folder, alone) -> None:
    """The stream has a token in every step, whatever is loaded and removed beside it."""
    engine = llm.llm_engine
    long = SamplingParams(temperature=0.0, seed=0, max_tokens=120, ignore_eos=True)
    engine.add_request("0-0", PROMPT, long, lora_request=adapter(folder, 1))
    num_tokens, tokens = 0, ()
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            tokens = tuple(output.outputs[0].token_ids)
        assert len(tokens) > num_tokens or step == 0 or not tokens
        num_tokens = len(tokens)
        number = 2 + step % 3
        engine.add_lora(adapter(folder, number, load_inplace=step % 2 == 0))
        if step % 4 == 3:
            engine.remove_lora(number)
    assert len(tokens) == 120 and tokens[:24] == alone[1, 0]
    engine.call_utility("check_integrity")


def test_steps_do_not_wait_while_an_adapter_is_read(llm, folder, alone, monkeypatch) -> None:
    """Files are read by another thread, and adapters are put in place between steps: each step has
    a token of the stream, however long reading takes.
    """
    engine, may_read, readers, placed = llm.llm_engine, threading.Event(), [], []
    executor = engine.client._engine.core.executor
    put = executor.loras._put

    def read(*arguments):
        readers.append(threading.get_ident())
        assert may_read.wait(60)
        return read_adapter(*arguments)

    def watch(place: int, number: int) -> None:
        placed.append(threading.get_ident())
        put(place, number)

    monkeypatch.setattr("quire.executor.loras.read_adapter", read)
    monkeypatch.setattr(executor.loras, "_put", watch)
    long = SamplingParams(temperature=0.0, seed=0, max_tokens=150, ignore_eos=True)
    engine.add_request("0-0", PROMPT, long)
    fresh = LoRARequest("fresh", 70, str(folder / "a2"))
    engine.add_request("2-0", PROMPT, GREEDY, lora_request=fresh)
    counts, tokens = [], {}

    def step() -> None:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] = tuple(output.outputs[0].token_ids)
        counts.append(len(tokens.get("0-0", ())))

    while not counts or counts[-1] < 100:
        step()
        assert len(counts) < 5 or counts[-1] > counts[-2]
    assert len(readers) == 1 and "2-0" not in tokens and not placed
    may_read.set()
    while engine.has_unfinished_requests():
        step()
    assert tokens["0-0"][:24] == alone[0, 0] and tokens["2-0"] == alone[2, 0]
    assert len(placed) == 1 and readers != [threading.get_ident()] and readers != placed
    assert engine.remove_lora(70)


def cycle(llm: LLM, folder: Path, count: int) -> None:
    for i in range(count):
        number = 1 + i % NUM_ADAPTERS
        llm.add_lora(adapter(folder, number, load_inplace=i % 3 == 0))
        if i % 10 == 0:
            llm.generate(PROMPT, GREEDY, False, lora_request=adapter(folder, number))
        llm.remove_lora(number)


@pytest.mark.parametrize(
    "count", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_cycles_of_loading_and_removing_leave_nothing(llm: LLM, folder: Path, count: int) -> None:
    process = psutil.Process()
    for lora_int_id in llm.list_loras():
        llm.remove_lora(lora_int_id)
    cycle(llm, folder, 20)  # memory that is taken once
    llm.reset_prefix_cache()
    gc.collect()
    before = process.num_fds(), threading.active_count(), process.memory_info().rss
    cycle(llm, folder, count)
    llm.reset_prefix_cache()
    gc.collect()
    num_fds, num_threads, rss = (
        process.num_fds(),
        threading.active_count(),
        process.memory_info().rss,
    )
    assert (num_fds, num_threads) == before[:2]
    # an adapter has 1.2 MB; what a leak of all would leave is far more
    assert rss - before[2] < min(30, 0.3 * count) * 2**20
    assert llm.list_loras() == set()
    state = llm.scheduler_state()
    assert state["num_free_blocks"] == llm.llm_engine.client.ready.num_blocks - 1
    assert state["num_cached_blocks"] == 0
    assert llm.call_utility("collective_rpc", "memory_usage", [])
    llm.call_utility("check_integrity")


@pytest.mark.parametrize(
    "count", [24, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_many_adapters_on_disk_take_turns_in_memory(llm, folder, tmp_path, count: int) -> None:
    weights = adapted_weights(Path(find_model_directory("bundled")), ["q_proj"])
    weights = dict(list(weights.items())[:1])
    for i in range(count):
        write_peft(tmp_path / f"{i}", random_pairs(weights, rank=1, seed=i, size=1.0), rank=1)
    loras = [LoRARequest(f"n{i}", 1000 + i, str(tmp_path / f"{i}")) for i in range(count)]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=3)
    together = llm.generate([PROMPT] * count, params, False, lora_request=loras)
    assert len(llm.list_loras()) == 3
    for lora, output in list(zip(loras, together))[:: max(1, count // 24)]:
        [one] = llm.generate(PROMPT, params, False, lora_request=lora)
        assert one.outputs[0].token_ids == output.outputs[0].token_ids and output.error is None
    llm.call_utility("check_integrity")


# ---------------------------------------------------------------- the server, the command line


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[httpx.Client]:
    flags = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "384")
    names = ("--lora-modules", f"one={folder / 'a1'}", f"two={folder / 'a2'}")
    with running_server(*flags, *names, "--max-loras", "2", "--admin") as client:
        yield client


def test_over_http(server: httpx.Client, folder: Path, alone, llm: LLM) -> None:
    names = [card["id"] for card in server.get("/v1/models").json()["data"]]
    assert names[1:] == ["one", "two"]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    for number, model in enumerate(names):
        answer = server.post("/v1/completions", json=body | {"model": model}).json()
        assert answer["choices"][0]["text"] == llm.tokenizer.decode(list(alone[number, 0]))
    said = []
    for model in names:
        chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 9}
        answer = server.post("/v1/chat/completions", json=chat | {"model": model})
        assert answer.status_code == 200 and answer.json()["model"] == model
        said.append(answer.json()["choices"][0]["message"]["content"])
    assert len(set(said)) == 3
    load = {"lora_name": "three", "lora_path": str(folder / "a3")}
    assert server.post("/v1/load_lora_adapter", json=load).status_code == 200
    answer = server.post("/v1/completions", json=body | {"model": "three"}).json()
    assert answer["choices"][0]["text"] == llm.tokenizer.decode(list(alone[3, 0]))
    bad = {"lora_name": "bad", "lora_path": "/nowhere/at/all"}
    answer = server.post("/v1/load_lora_adapter", json=bad)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "lora_path", error
    assert "/nowhere/at/all" in error["message"] and "\n" not in error["message"]


@pytest.mark.slow
def test_a_server_with_a_bad_adapter_ends_with_one_sentence() -> None:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--dtype", "float32"]
    done = subprocess.run(
        [*command, "--lora-modules", "one=/nowhere/at/all"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    [last] = [line for line in done.stderr.splitlines() if "lora_modules" in line]
    assert "one" in last and "/nowhere/at/all" in last and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_line(folder: Path, alone, llm: LLM) -> None:
    command = [sys.executable, "-m", "quire", "generate", PROMPT, "--lora", str(folder / "a1")]
    flags = ["--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--dtype", "float32"]
    done = subprocess.run(
        [*command, *flags, "--num-threads", "1", "--no-echo"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == llm.tokenizer.decode(list(alone[1, 0])).strip()
