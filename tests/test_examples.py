"""The programs in examples/ run offline and print what they promise."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from quire import LLM, SamplingParams
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server
from quire.tests.scripted_server import HANG, answer, scripted_server
from starlette.requests import Request
from starlette.testclient import TestClient

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}

# program -> what its output must match
PROMISES = {
    "offline_batch.py": (
        r"One day, a little fox.*\n.* tokens in [\d.]+ ms\n(.*\n)+\d+ tokens generated"
    ),
    "streaming.py": r"\w+ \w+",
    "asyncio_requests.py": r"Once upon a time,? \w+(.*\n)+aborted after: '.{30}'",
    "shared_daemon.py": r"this program: Once upon a time.*\n(.*\n)*another program: One day",
    "structured_output.py": (
        r"JSON: {'name': '.*', 'age': \d+, 'city': '.*', 'job': '.*'}\nsum: \d+ \+ \d+ = \d+\n"
        r"choice: (yes|no)"
    ),
    "tool_loop.py": r"add\({\"a\": ?12, ?\"b\": ?30}\) = 42\nanswer: The result is 42\.",
    "logits_processor.py": (
        r"=False: '.*', [1-9]\d* immediate repeats\n.*=True: '.*', 0 immediate repeats"
    ),
    "custom_kernel.py": r"the kernel ran [1-9]\d* times\nsame tokens as the reference: True",
    "small_engine.py": r"Once upon a time, .+\nOne day, a little fox .+",
    "live_observation.py": (
        r"step \d+: \d requests hold \d+ of (.*\n)+3200 tokens; 4 requests finished"
    ),
}


def test_every_program_is_tested_and_listed() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    # vector_store.py needs packages of its own: tests/clients/client_qdrant.py runs it
    others = {"web_app.py", "vector_store.py", "prefill_proxy.py"}
    assert programs == {*PROMISES, *others} and len(programs) == 13
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == programs


def run_program(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    return subprocess.run(
        [sys.executable, EXAMPLES / program],
        cwd=directory,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


Results = dict[str, Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """Run the selected programs, two at a time: most of their time is start-up on one core."""
    selected = [
        item.callspec.params["program"]
        for item in request.session.items
        if getattr(item, "originalname", None) == "test_programs" and item.path == request.path
    ]
    directory = tmp_path_factory.mktemp("examples")
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run_program, name, directory / name) for name in selected}
        pool.shutdown(cancel_futures=True)


@pytest.mark.sampled(step=6)
@pytest.mark.timeout(360)
@pytest.mark.parametrize("program", PROMISES)
def test_programs(program: str, results: Results) -> None:
    done = results[program].result()
    assert done.returncode == 0, done.stderr
    assert re.search(PROMISES[program], done.stdout), done.stdout


def test_the_small_engine_gives_the_texts_of_llm() -> None:
    example = runpy.run_path(str(EXAMPLES / "small_engine.py"))
    prompts = ["Once upon a time", "12 + 30 =", "One day, a little fox"] * 3
    engine = example["SmallEngine"](max_num_seqs=4, max_num_batched_tokens=16)
    try:
        for number, prompt in enumerate(prompts):
            engine.add(prompt, max_tokens=5 + number, temperature=0.0 if number % 2 else 0.8)
        texts = engine.run()
    finally:
        engine.close()
    params = [
        SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=5 + number, seed=0)
        for number in range(len(prompts))
    ]
    with LLM(engine="inproc") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert texts == [output.outputs[0].text for output in outputs]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_example_of_a_processor_fails_if_it_does_nothing(tmp_path: Path) -> None:
    text = (EXAMPLES / "logits_processor.py").read_text()
    effect = "logits[last] = -torch.inf"
    assert text.count(effect) == 1
    program = tmp_path / "logits_processor.py"
    program.write_text(text.replace(effect, "pass"))
    done = run_program(str(program), tmp_path / "here")
    assert done.returncode == 1 and done.stderr.endswith("the processor did not run\n")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_web_application(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "web_app.py", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"

    def read(path: str) -> str | None:
        assert app.poll() is None, "the application has ended"
        try:
            with urllib.request.urlopen(address + path, timeout=60) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError:
            raise
        except OSError:
            return None  # not listening yet

    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT) as app:
        try:
            wait_until(lambda: read("/health") is not None, timeout_s=120)
            assert read("/health") == '{"ready":true}'
            text = read("/complete?prompt=" + urllib.parse.quote("Once upon a time"))
            assert text is not None and len(text.split()) > 5
            with pytest.raises(urllib.error.HTTPError, match="400"):
                read("/complete?prompt=" + "word%20" * 5000)
        finally:
            app.terminate()
            app.wait(timeout=60)
    assert app.returncode == 0 or app.returncode == -15


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_prefill_proxy(tmp_path: Path) -> None:
    transfer = {"kv_role": "kv_producer", "endpoint": f"ipc://{tmp_path}/kv"}
    pull = {"kv_role": "kv_consumer", "peers": [transfer["endpoint"]]}
    body = {"prompt": "Once upon a time there was a fox. " * 8, "max_tokens": 8, "temperature": 0}
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                running_server("--engine", "inproc", "--kv-transfer-config", json.dumps(one))
            )
            for one in (transfer, pull)
        )
        expected = decode.post("/v1/completions", json=body | {"prompt": "One day"}).json()
        example = runpy.run_path(str(EXAMPLES / "prefill_proxy.py"))
        proxy = example["Proxy"](str(prefill.base_url), str(decode.base_url), 60.0)
        client = stack.enter_context(TestClient(example["make_app"](proxy)))
        answer = client.post("/v1/completions", json=body | {"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, end = [line[6:] for line in answer.text.splitlines() if line]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        direct = decode.post("/v1/completions", json=body).json()
        assert (text, end) == (direct["choices"][0]["text"], "[DONE]")
        pulled = re.search(r"num_blocks_pulled\S* (\d+)", client.get("/metrics").text)
        assert pulled is not None and int(pulled[1]) >= 4
        assert client.post("/v1/completions", json={"prompt": 1}).status_code == 400
        prefill.process.kill()
        prefill.process.wait()
        answer = client.post("/v1/completions", json=body | {"prompt": "One day"})
        assert answer.json()["choices"] == expected["choices"]
        decode.process.kill()
        decode.process.wait()
        assert client.post("/v1/completions", json=body).status_code == 502


@pytest.mark.parametrize("hanging", ["prefill", "decode"])
def test_the_prefill_proxy_ends_what_a_client_that_has_left_asked_for(hanging: str) -> None:
    async def leave() -> tuple[list[int], int]:
        scripts = {"prefill": [answer("{}")], "decode": [answer("{}")]} | {hanging: [HANG]}
        async with (
            scripted_server(scripts["prefill"]) as (prefill_url, prefill),
            scripted_server(scripts["decode"]) as (decode_url, decode),
        ):
            example = runpy.run_path(str(EXAMPLES / "prefill_proxy.py"))
            proxy = example["Proxy"](prefill_url, decode_url, 60.0)
            waiting = {"prefill": prefill, "decode": decode}[hanging]
            messages = [{"type": "http.request", "body": b'{"prompt": "One day"}'}]

            async def receive() -> dict:
                if messages:
                    return messages.pop()
                while not waiting.num_open:
                    await asyncio.sleep(0.01)
                return {"type": "http.disconnect"}

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
            scope |= {"query_string": b"", "root_path": "", "server": ("proxy", 80)}
            left = await asyncio.wait_for(proxy.answer(Request(scope, receive)), 20)
            async with asyncio.timeout(20):
                while waiting.num_open:  # until its connection ends
                    await asyncio.sleep(0.01)
            await proxy.close()
            return [len(prefill.requests), len(decode.requests)], left.status_code

    assert asyncio.run(leave()) == ([1, hanging == "decode"], 499)
