"""Streamed, whole and offline answers are equal, text and log-probabilities, for the same seed:
with a child engine, in-process, and with a daemon.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from quire import LLM, SamplingParams
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.routes.test_completions import events

PROMPTS = ["Once upon a time", "What is 7 + 8?", "The €uro and the 🙂 are characters"]
NUM_TOKENS = 12
SETTINGS = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1234, "top_p": 0.9}]
CLOSE = 2e-4  # of log-probabilities: other batches and cached prefixes sum in another order


@pytest.fixture(scope="module")
def offline() -> list[dict[str, list[dict[str, Any]]]]:
    """Return per setting the completions and chats of LLM, each {"text", "token_ids",
    "logprobs"}.
    """
    with LLM(engine="inproc") as llm:
        found = []
        for setting in SETTINGS:
            params = SamplingParams(
                **{"top_k": 50, "top_p": 0.9} | setting, max_tokens=NUM_TOKENS, logprobs=2
            )
            completions = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
            chats = [
                llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0]
                for prompt in PROMPTS
            ]
            found.append(
                {
                    "completions": [plain(output) for output in completions],
                    "chats": [plain(output) for output in chats],
                }
            )
        return found


def plain(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    own = [next(iter(position.values())).logprob for position in completion.logprobs]
    return {"text": completion.text, "token_ids": completion.token_ids, "logprobs": own}


@pytest.fixture(scope="module", params=["process", "inproc", "daemon"])
def over(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    if request.param == "process":
        yield request.getfixturevalue("server")
    elif request.param == "inproc":
        with running_server("--engine", "inproc") as client:
            yield client
    else:
        path = tmp_path_factory.mktemp("daemon") / "engine.sock"
        with subprocess.Popen(
            [sys.executable, "-m", "quire", "engine", "--listen", f"ipc://{path}"],
            stderr=subprocess.DEVNULL,
        ) as daemon:
            try:
                wait_for(path, daemon)
                with running_server("--engine", f"ipc://{path}") as client:
                    yield client
            finally:
                daemon.terminate()


def wait_for(path: Path, daemon: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert daemon.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def read_completion(answer: httpx.Response, streams: bool) -> dict[str, Any]:
    choices = [c["choices"][0] for c in events(answer)] if streams else answer.json()["choices"]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [i for choice in choices for i in choice["token_ids"]],
        "logprobs": [
            p
            for choice in choices
            if choice["logprobs"]
            for p in choice["logprobs"]["token_logprobs"]
        ],
    }


def read_chat(answer: httpx.Response, streams: bool) -> dict[str, Any]:
    choices = [c["choices"][0] for c in events(answer)] if streams else answer.json()["choices"]
    return {
        "text": "".join(
            (choice["delta"] if streams else choice["message"]).get("content") or ""
            for choice in choices
        ),
        "token_ids": [i for choice in choices for i in choice.get("token_ids", [])],
        "logprobs": [
            entry["logprob"]
            for choice in choices
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ],
    }


@pytest.mark.sampled
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_completions(over: httpx.Client, offline: list, streams: bool) -> None:
    for setting, expected in zip(SETTINGS, offline, strict=True):
        for prompt, wanted in zip(PROMPTS, expected["completions"], strict=True):
            body = {
                "prompt": prompt,
                "max_tokens": NUM_TOKENS,
                "logprobs": 2,
                "return_token_ids": True,
                "stream": streams,
            } | setting
            check(read_completion(over.post("/v1/completions", json=body), streams), wanted)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_chats(over: httpx.Client, offline: list, streams: bool) -> None:
    for setting, expected in zip(SETTINGS, offline, strict=True):
        for prompt, wanted in zip(PROMPTS, expected["chats"], strict=True):
            messages = [{"role": "user", "content": prompt}]
            fields = {
                "messages": messages,
                "max_tokens": NUM_TOKENS,
                "logprobs": True,
                "top_logprobs": 2,
                "return_token_ids": True,
                "stream": streams,
            }
            check(
                read_chat(over.post("/v1/chat/completions", json=fields | setting), streams), wanted
            )


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert (found["text"], found["token_ids"]) == (wanted["text"], wanted["token_ids"])
    assert found["logprobs"] == pytest.approx(wanted["logprobs"], abs=CLOSE)
