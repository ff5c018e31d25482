"""Dynamo: its frontend before two workers with examples/dynamo/quire_backend.py. Discovery through
files, so there is no other service.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checks import ANSWER, QUESTION, run

# Without dependencies: one, aisimulate, is not on PyPI and is not imported by frontend and worker.
REQUIREMENTS = {
    "dynamo": "--no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 redis zstandard aiohttp "
    "aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl"
}
DISTRIBUTION = "ai-dynamo"
USES_QUIRE = True
BACKEND = Path(__file__).resolve().parents[2] / "examples" / "dynamo" / "quire_backend.py"
GREEDY = {"model": "quire", "temperature": 0}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def processes(model_directory: str) -> Iterator[tuple[str, list[subprocess.Popen], Path]]:
    """Yield the frontend's address, the workers, and the folder with the logs."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        home = Path(folder)
        environment = os.environ | {"DYN_FILE_KV": str(home / "discovery")}

        def start(name: str, *words: str) -> subprocess.Popen:
            log = started.enter_context((home / f"{name}.log").open("w"))
            command = [sys.executable, *words, "--discovery-backend", "file"]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        port = free_port()
        routing = ("--router-mode", "kv", "--http-port", str(port))
        start("frontend", "-m", "dynamo.frontend", *routing)
        workers = []
        for index in range(2):
            model = ("--model", model_directory, "--served-model-name", "quire")
            events = ("--kv-events-port", str(free_port()))
            workers.append(start(f"worker-{index}", str(BACKEND), *model, *events))
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: num_workers(home) == 2 and "quire" in read(address + "/v1/models"), home)
        wait_until(lambda: complete(address, "Hello", max_tokens=1), home)
        yield address, workers, home


def num_workers(home: Path) -> int:
    return sum("generate" in str(path) for path in (home / "discovery").rglob("*instances/*"))


def wait_until(holds: Any, home: Path, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if holds():
                return
        if time.monotonic() > deadline:
            raise AssertionError("".join(log.read_text()[-3000:] for log in home.glob("*.log")))
        time.sleep(0.2)


def read(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def complete(address: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = GREEDY | {"prompt": prompt} | fields
    return json.loads(read(address + "/v1/completions", body))


def text_of(stream: str) -> str:
    """The text of a stream of completions."""
    assert '"error"' not in stream and "event: error" not in stream, stream[-1000:]
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"], stream[-500:]
    return "".join(choice["text"] or "" for choice in choices)


def check_dynamo(address: str, model_directory: str) -> None:
    """One check, since starting frontend and workers takes most of the time."""
    with processes(model_directory) as (dynamo, workers, home):
        has_same_tokens(address, dynamo)
        refuses(dynamo)
        sends_a_prefix_to_its_worker(dynamo)
        drains(dynamo, workers, home)


def has_same_tokens(quire: str, dynamo: str) -> None:
    for prompt in ("Once upon a time", "One day, a little fox"):
        fields = {"max_tokens": 24, "logprobs": 2}
        one, other = (complete(where, prompt, **fields) for where in (quire, dynamo))
        for field in ("text", "finish_reason"):
            assert one["choices"][0][field] == other["choices"][0][field], (one, other)
        logprobs = [found["choices"][0]["logprobs"]["token_logprobs"] for found in (one, other)]
        assert all(abs(a - b) < 1e-4 for a, b in zip(*logprobs, strict=True))
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [one["usage"][n] for n in names] == [other["usage"][n] for n in names]
        sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 24}
        texts = [
            complete(where, prompt, **sampled)["choices"][0]["text"] for where in (quire, dynamo)
        ]
        assert texts[0] == texts[1]
    body = GREEDY | {"messages": QUESTION, "max_tokens": 16}
    chat = json.loads(read(dynamo + "/v1/chat/completions", body))["choices"][0]
    assert (chat["message"]["content"], chat["finish_reason"]) == (ANSWER, "stop")
    stopped = complete(dynamo, "Once upon a time", max_tokens=40, stop=["girl"])["choices"][0]
    assert "girl" not in stopped["text"] and stopped["finish_reason"] == "stop"


def refuses(dynamo: str) -> None:
    """What Quire refuses is an error of the client, and later requests are answered."""
    body = GREEDY | {"messages": QUESTION, "max_tokens": 4, "guided_regex": "(a"}
    try:
        read(dynamo + "/v1/chat/completions", body)
    except urllib.error.HTTPError as error:
        assert error.code == 400 and "regex" in (said := error.read().decode()), said
    else:
        raise AssertionError("it was not refused")
    assert complete(dynamo, "Once", max_tokens=4)["usage"]["completion_tokens"] == 4


def sends_a_prefix_to_its_worker(dynamo: str) -> None:
    """By the KV events: what was computed on one worker is found there, whichever it was."""
    found = set()
    for story in range(6):
        prompt = f"{story} foxes and {story} hens. " * 20
        used = []
        for _ in range(4):
            answer = complete(dynamo, prompt, max_tokens=2, nvext={"extra_fields": ["worker_id"]})
            used.append(json.dumps(answer["nvext"]["worker_id"], sort_keys=True))
            time.sleep(0.3)  # the events arrive a moment later
        assert len(set(used[1:])) == 1 and used[0] == used[1], used
        found.add(used[0])
    assert len(found) == 2, found  # and new prompts go to both


def drains(dynamo: str, workers: list[subprocess.Popen], home: Path) -> None:
    """SIGTERM to one worker: its streams end as they should, the other one goes on."""
    body = GREEDY | {"max_tokens": 3500, "stream": True, "min_tokens": 3500}
    prompts = [f"{number} Once upon a time" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        streams = [
            pool.submit(read, dynamo + "/v1/completions", body | {"prompt": prompt})
            for prompt in prompts
        ]
        time.sleep(0.5)
        assert not any(stream.done() for stream in streams)
        workers[0].terminate()
        texts = [text_of(stream.result()) for stream in streams]
    assert all(len(text.split()) > 200 for text in texts), list(map(len, texts))
    assert workers[0].wait(timeout=60) == 0
    log = (home / "worker-0.log").read_text()
    assert "Engine cleanup complete" in log and not re.search("Traceback", log), log[-3000:]
    assert complete(dynamo, "Once", max_tokens=4)["usage"]["completion_tokens"] == 4


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
