"""Three models with memory for two, each in a process of its own behind one server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from quire.tests.frontend.server.conftest import running_server
from quire.tests.tiny_models import save_tiny_model

NAMES = {"a": "qwen2", "b": "llama", "c": "qwen3"}
PROCESS_MIB = 384  # planned for each engine beside its weights and cache


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_tiny_model(folder / name, kind, seed=seed)
        for seed, (name, kind) in enumerate(NAMES.items())
    }


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path]) -> Iterator[httpx.Client]:
    """Each model needs 384 + 64 MiB; two whole ones fit, and the process of a third."""
    limit = 2 * (PROCESS_MIB + 65) + PROCESS_MIB
    with running_server(
        *(f"{name}={path}" for name, path in checkpoints.items()),
        *("--memory-limit", f"{limit}MiB", "--kv-cache-memory-bytes", str(64 * 2**20)),
        *("--num-threads", "1", "--keep-alive", "-1"),
    ) as client:
        yield client


def body(name: str, number: int, max_tokens: int = 8) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": f"the {number}",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }


def said(answer: httpx.Response) -> list[Any]:
    """The tokens and the bits of their log-probabilities."""
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def engines(server: Any) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def phases(server: httpx.Client) -> dict[str, str]:
    return server.get("/health/ready").json()["models"]


@pytest.fixture(scope="module")
def alone(server: httpx.Client) -> dict[tuple[str, int], list[Any]]:
    """What each model says to each prompt, one request at a time."""
    found = {}
    for name in NAMES:
        for number in range(4):
            answer = server.post("/v1/completions", json=body(name, number))
            found[name, number] = said(answer)
    assert phases(server) == {"a": "sleeping", "b": "ready", "c": "ready"}
    return found


def test_fifty_requests_over_three_models(server: Any, alone: dict[Any, Any]) -> None:
    """All answer, and what runs beside them changes no bit."""

    async def work() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            chosen = [("abc"[i % 3], i % 4) for i in range(50)]
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body(*one)) for one in chosen)
            )

    answers = asyncio.run(work())
    for i, answer in enumerate(answers):
        assert said(answer) == alone["abc"[i % 3], i % 4], i
    assert len(engines(server)) == 3
    log = server.log()
    figures = re.findall(r"quire serve: (ready|awake|asleep|unloaded): (\w), after (\S+ s)", log)
    for what, name, duration in figures:
        print(f"{what:<9} {name} {duration}")
    assert {what for what, _, _ in figures} == {"ready", "awake", "asleep"}


def test_a_killed_engine_harms_no_other(server: Any, alone: dict[Any, Any]) -> None:
    """Not the stream of another model either, which runs meanwhile."""
    server.post("/api/generate", json={"model": "c", "keep_alive": 0})
    before = set(engines(server))
    said(server.post("/v1/completions", json=body("c", 0)))
    [of_c] = set(engines(server)) - before
    other = next(name for name in "ab" if phases(server)[name] == "ready")

    async def work() -> tuple[httpx.Response, str]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            long = asyncio.create_task(
                client.post("/v1/completions", json=body(other, 1, max_tokens=600))
            )
            stream = {"stream": True, "logprobs": None}
            request = body("c", 1, max_tokens=1900) | stream
            async with client.stream("POST", "/v1/completions", json=request) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    if not text:
                        os.kill(of_c.pid, signal.SIGKILL)
                    text += piece
            return await long, text

    survivor, text = asyncio.run(work())
    assert said(survivor)[:8] == alone[other, 1]
    assert '"error"' not in text and text.rstrip().endswith("data: [DONE]")
    assert said(server.post("/v1/completions", json=body("c", 2))) == alone["c", 2]


def test_a_client_that_leaves_while_its_model_loads(server: Any, alone: dict[Any, Any]) -> None:
    server.post("/api/generate", json={"model": "a", "keep_alive": 0})
    assert phases(server)["a"] == "unloaded"
    with pytest.raises(httpx.TimeoutException):
        server.post("/v1/completions", json=body("a", 0), timeout=0.2)
    assert said(server.post("/v1/completions", json=body("a", 3))) == alone["a", 3]
    assert server.get("/load").json() == {"server_load": 0}


def test_what_is_too_large_says_what_would_help(
    server: Any, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Two models, one with a cache larger than the limit; Ctrl-C while the other loads."""
    options = tmp_path / "options.toml"
    options.write_text("[large]\nkv_cache_memory_bytes = 8589934592\n")
    with running_server(
        *(f"large={checkpoints['a']}", f"small={checkpoints['b']}"),
        *("--memory-limit", "1GiB", "--model-options", str(options), "--default", "small"),
        wait=False,
    ) as client:
        answer = client.post("/v1/completions", json=body("large", 0))
        error = answer.json()["error"]
        assert answer.status_code == 503 and error["code"] == "not_enough_memory"
        assert "It needs 8.38 GiB" in error["message"] and "of 1.00 GiB" in error["message"]
        assert client.get("/health/ready").status_code == 503
        running: Any = client
        [loading] = engines(running)
        running.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert running.process.wait(timeout=20) == 130, running.log()
        assert time.monotonic() - began < 10
        assert not loading.is_running() or loading.status() == psutil.STATUS_ZOMBIE
        assert "Traceback" not in running.log()


def test_no_process_stays(checkpoints: dict[str, Path]) -> None:
    with running_server(f"a={checkpoints['a']}", "--keep-alive", "5m") as client:
        running: Any = client
        children = engines(running)
        assert len(children) == 1
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=20) == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
