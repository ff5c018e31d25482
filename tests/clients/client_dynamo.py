"""Dynamo: its frontend before two workers with examples/dynamo/quire_backend.py. Discovery through
files, so there is no other service.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass
class Running:
    address: str  # of the frontend
    home: Path  # with the logs
    workers: list[subprocess.Popen]
    add_worker: Callable[[], None]


@contextlib.contextmanager
def processes(model_directory: str) -> Iterator[Running]:
    """A frontend and two workers."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        home = Path(folder)
        environment = os.environ | {
            "DYN_FILE_KV": str(home / "discovery"),
            # between the end of routing and cleanup, in which most streams would end
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
        }

        def start(name: str, *words: str) -> subprocess.Popen:
            log = started.enter_context((home / f"{name}.log").open("w"))
            command = [sys.executable, *words, "--discovery-backend", "file"]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        port = free_port()
        routing = ("--router-mode", "kv", "--http-port", str(port), "--migration-limit", "3")
        start("frontend", "-m", "dynamo.frontend", *routing)
        workers: list[subprocess.Popen] = []

        def add_worker() -> None:
            model = ("--model", model_directory, "--served-model-name", "quire")
            events = ("--kv-events-port", str(free_port()))
            workers.append(start(f"worker-{len(workers)}", str(BACKEND), *model, *events))

        add_worker()
        add_worker()
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: num_workers(home) == 2 and "quire" in read(address + "/v1/models"), home)
        wait_until(lambda: complete(address, "Hello", max_tokens=1), home)
        yield Running(address, home, workers, add_worker)


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
    with processes(model_directory) as running:
        has_same_tokens(address, running.address)
        refuses(running.address)
        sends_a_prefix_to_its_worker(running.address)
        drains(running)
        survives_a_worker(address, running)


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


def streams(pool: ThreadPoolExecutor, address: str, num_tokens: int) -> list[Future[str]]:
    body = GREEDY | {"max_tokens": num_tokens, "min_tokens": num_tokens, "stream": True}
    prompts = [f"{number} Once upon a time" for number in range(6)]
    bodies = [body | {"prompt": prompt} for prompt in prompts]
    return [pool.submit(read, address + "/v1/completions", one) for one in bodies]


def drains(running: Running) -> None:
    """SIGTERM to one worker: its streams end as they should, the other one goes on."""
    with ThreadPoolExecutor(6) as pool:
        answers = streams(pool, running.address, num_tokens=1500)
        time.sleep(0.5)
        assert not any(answer.done() for answer in answers)
        running.workers[0].terminate()
        texts = [text_of(answer.result()) for answer in answers]
    assert all(len(text.split()) > 200 for text in texts), list(map(len, texts))
    exit_code = running.workers[0].wait(timeout=60)
    log = (running.home / "worker-0.log").read_text()
    assert exit_code == 0, (exit_code, log[-3000:])
    assert "Engine cleanup complete" in log and "Traceback" not in log, log[-3000:]
    assert complete(running.address, "Once", max_tokens=4)["usage"]["completion_tokens"] == 4


def survives_a_worker(quire: str, running: Running) -> None:
    """SIGKILL to one of two workers: Dynamo continues its streams on the other one, and Quire gives
    the tokens that it would have given there.
    """
    running.add_worker()
    wait_until(lambda: num_workers(running.home) == 2, running.home)
    with ThreadPoolExecutor(6) as pool:
        expected = [text_of(answer.result()) for answer in streams(pool, quire, num_tokens=1500)]
        answers = streams(pool, running.address, num_tokens=1500)
        time.sleep(0.5)
        assert not any(answer.done() for answer in answers)
        running.workers[1].kill()
        texts = [text_of(answer.result()) for answer in answers]
    assert texts == expected


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
