"""Three models with memory for two, each in a process of its own behind one server; and a text
encoder beside a chat model.
"""

from __future__ import annotations

import asyncio
import json
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
from quire import LLM
from quire.tests.frontend.server.conftest import running_server
from quire.tests.ipc.models.test_sentence_transformers import chain, write
from quire.tests.tiny_encoders import save_tiny_encoder
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
def server(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Each model needs 384 + 64 MiB; two whole ones fit, and the process of a third."""
    limit = 2 * (PROCESS_MIB + 65) + PROCESS_MIB
    with running_server(
        *(f"{name}={path}" for name, path in checkpoints.items()),
        *("--memory-limit", f"{limit}MiB", "--kv-cache-memory-bytes", str(64 * 2**20)),
        *("--num-threads", "1", "--keep-alive", "-1"),
        *("--batch-dir", str(tmp_path_factory.mktemp("batches"))),
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


def test_each_line_of_a_batch_goes_to_the_model_that_it_names(
    server: Any, alone: dict[Any, Any]
) -> None:
    """A model that has left memory is loaded for its lines; a name of none fails the batch."""
    url = "/v1/completions"

    def run(bodies: dict[str, Any]) -> Any:
        line = {"method": "POST", "url": url}
        rows = [json.dumps(line | {"custom_id": k, "body": one}) for k, one in bodies.items()]
        sent = {"files": {"file": "\n".join(rows).encode()}, "data": {"purpose": "batch"}}
        file = server.post("/v1/files", **sent).json()
        asked = {"endpoint": url, "completion_window": "24h", "input_file_id": file["id"]}
        batch = server.post("/v1/batches", json=asked).json()
        while (found := server.get(f"/v1/batches/{batch['id']}").json())["status"] not in (
            *("completed", "failed"),
        ):
            time.sleep(0.05)
        return found

    done = run({f"{name}{i}": body(name, i) for i in range(2) for name in "cab"})
    assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0}, done
    text = server.get(f"/v1/files/{done['output_file_id']}/content").text
    for row in map(json.loads, text.splitlines()):
        name, number = row["custom_id"]
        found = row["response"]["body"]
        assert found["model"] == name
        logprobs = found["choices"][0]["logprobs"]
        tokens = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        assert list(tokens) == alone[name, int(number)]
    wrong = run({"1": body("a", 1), "2": body("d", 1)})
    assert wrong["errors"]["data"][0]["code"] == "model_not_found" and wrong["status"] == "failed"


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


@pytest.mark.slow
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
        assert running.process.wait(timeout=60) == 130, running.log()
        assert time.monotonic() - began < 25  # drain_timeout_s is 30
        assert not loading.is_running() or loading.status() == psutil.STATUS_ZOMBIE
        assert "Traceback" not in running.log()


@pytest.mark.slow
def test_no_process_stays(checkpoints: dict[str, Path]) -> None:
    with running_server(f"a={checkpoints['a']}", "--keep-alive", "5m") as client:
        running: Any = client
        children = engines(running)
        assert len(children) == 1
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads at most 16 tokens, as its files say."""
    folder = save_tiny_encoder(tmp_path_factory.mktemp("rag") / "encoder", "bert")
    mean = {"word_embedding_dimension": 64, "pooling_mode": "mean"}
    return write(folder, chain(mean), sentence_bert_config={"max_seq_length": 16})


@pytest.fixture(scope="module")
def rag(
    checkpoints: dict[str, Path], encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A chat model and a text encoder with every option of several models, and memory for one and
    the process of the other.
    """
    options = tmp_path_factory.mktemp("options") / "options.toml"
    cache = "kv_cache_memory_bytes = 16777216"
    options.write_text(f'[encoder]\ndtype = "float32"\n[chat]\n{cache}\n')
    with running_server(
        *(f"chat={checkpoints['a']}", f"encoder={encoder}", "--default", "encoder"),
        *("--memory-limit", f"{2 * PROCESS_MIB + 10}MiB", "--keep-alive", "5m"),
        *("--sleep-after", "1m", "--model-wait-s", "60", "--model-options", str(options)),
        *("--num-threads", "1"),
    ) as client:
        yield client


@pytest.mark.slow
def test_a_text_encoder_beside_a_chat_model(rag: httpx.Client, encoder: Path) -> None:
    """The turns of a retrieval: texts, a chat, texts again. The models take turns in memory."""
    texts = ["the cat sat", "a dog"]
    with LLM(str(encoder), dtype="float32", num_threads=1, engine="inproc") as llm:
        alone = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    chat = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for phase_of_chat in ("unloaded", "sleeping"):
        found = rag.post("/v1/embeddings", json={"model": "encoder", "input": texts})
        assert found.status_code == 200, found.text
        assert [entry["embedding"] for entry in found.json()["data"]] == alone
        assert phases(rag) == {"chat": phase_of_chat, "encoder": "ready"}
        said = rag.post("/v1/chat/completions", json=chat)
        assert said.status_code == 200, said.text
        assert said.json()["usage"]["completion_tokens"] > 0
        assert phases(rag) == {"chat": "ready", "encoder": "unloaded"}
    wrong = rag.post("/v1/chat/completions", json=chat | {"model": "encoder"}).json()["error"]
    assert wrong["param"] == "model" and "generates no text" in wrong["message"]


@pytest.mark.parametrize(
    ("path", "field", "whole", "cut"),
    [
        ("/api/embed", "input", {"truncate": False}, {"truncate": True}),
        ("/v2/embed", "texts", {"truncate": "NONE"}, {"truncate": "END"}),
    ],
)
def test_a_text_that_may_not_be_cut_is_refused(
    rag: httpx.Client, path: str, field: str, whole: dict[str, Any], cut: dict[str, Any]
) -> None:
    """Although the encoder's own files say where texts are cut."""
    long = {"model": "encoder", field: ["a cat", "the cat sat on the mat " * 9]}
    refused = rag.post(path, json=long | whole)
    assert refused.status_code == 400, refused.text
    assert "at most 16 (in request 1 of 2" in refused.text
    short = {"model": "encoder", field: ["a cat"]}
    for body in (long, long | cut, short | whole):
        answer = rag.post(path, json=body)
        assert answer.status_code == 200, answer.text
