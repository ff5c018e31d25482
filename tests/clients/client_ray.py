"""Ray Serve: examples/ray_serve on a Ray cluster of two nodes on this machine, one of which is
killed under load.
"""

import contextlib
import json
import os
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checks import ANSWER, QUESTION, run

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_serve"
sys.path.insert(0, str(EXAMPLE))
os.environ["PYTHONPATH"] = str(EXAMPLE)  # of Ray's workers
os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import ray  # noqa: E402
from app import Arguments, build  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

REQUIREMENTS = {"ray": "ray[serve]"}
DISTRIBUTION = "ray"
USES_QUIRE = True
NUM_STREAMS = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@contextlib.contextmanager
def cluster_of_two() -> Iterator[tuple[Cluster, Any, str]]:
    """Yield the cluster, its second node, and the address of Serve's proxy, on the first one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"ingress": 1}, "include_dashboard": False},
    )
    second = cluster.add_node(num_cpus=2)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        yield cluster, second, f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def deploy(model_directory: str, **fields: Any) -> None:
    arguments = Arguments(
        model=model_directory,
        max_replicas=2,
        max_replicas_per_node=1,
        ingress_resources={"ingress": 0.01},
        **fields,
    )
    serve.run(build(arguments))


def num_replicas() -> int:
    [app] = serve.status().applications.values()
    return app.deployments["Replica"].replica_states.get("RUNNING", 0)


def wait_until(holds: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.2)


def post(address: str, path: str, begun: list[str] | None = None, **body: Any) -> str:
    """The whole answer. `begun` gets its first line, when it is there."""
    data = json.dumps({"model": "quire"} | body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        first = answer.readline().decode()
        if begun is not None:
            begun.append(first)
        return first + answer.read().decode()


def read_stream(stream: str) -> tuple[str, str]:
    """(text, how it ended: a finish reason, or the code of an error)"""
    text, end, ids = "", "", set()
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return text, event["error"]["code"]
            ids.add(event["id"])
            for choice in event["choices"]:
                assert not end, "an event after the last one"
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                end = choice.get("finish_reason") or ""
    assert len(ids) == 1 and stream.endswith("data: [DONE]\n\n"), stream[-300:]
    return text, end


def check_ray_serve(address: str, model_directory: str) -> None:
    """One check, since starting a cluster takes most of the time."""
    with cluster_of_two() as (cluster, second, ray_address):
        deploy(model_directory, min_replicas=2, engine_args={"max_num_seqs": 32})
        wait_until(lambda: num_replicas() == 2)
        answers_as_quire(address, ray_address)
        keeps_conversations_on_their_replica(ray_address)
        aborts_what_a_client_leaves(ray_address)
        survives_a_node(address, ray_address, lambda: cluster.remove_node(second, False))
        cluster.add_node(num_cpus=2)
        wait_until(lambda: num_replicas() == 2)
        grows_with_load(ray_address, model_directory)


def answers_as_quire(quire: str, ray_address: str) -> None:
    body = {"messages": QUESTION, "max_tokens": 16, "temperature": 0}
    chat = json.loads(post(ray_address, CHAT, **body))["choices"][0]
    assert (chat["message"]["content"], chat["finish_reason"]) == (ANSWER, "stop")
    assert read_stream(post(ray_address, CHAT, **body, stream=True)) == (ANSWER, "stop")
    with urllib.request.urlopen(ray_address + "/v1/models", timeout=60) as models:
        assert json.load(models)["data"][0]["id"] == "quire"
    for wrong, status in (({"temperature": -1}, 400), ({"model": "other"}, 404)):
        try:
            post(ray_address, COMPLETIONS, prompt="Once", **wrong)
        except urllib.error.HTTPError as error:
            assert error.code == status, error.read()
        else:
            raise AssertionError("it was not refused")


def keeps_conversations_on_their_replica(ray_address: str) -> None:
    """Later turns find the earlier ones in the prefix cache, and both replicas have some."""
    num_found = num_turns = 0
    for number in range(8):
        first = f"Tell me a long story about {number} foxes and their {number} friends."
        messages = [{"role": "user", "content": first}]
        for turn in range(4):
            body = {"messages": messages, "max_tokens": 40, "temperature": 0}
            answer = json.loads(post(ray_address, CHAT, **body))
            details = answer["usage"]["prompt_tokens_details"] or {}
            num_turns += turn > 0
            num_found += turn > 0 and details.get("cached_tokens", 0) >= 16 * turn
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "Go on."})
    assert num_found >= 0.95 * num_turns, (num_found, num_turns)


def aborts_what_a_client_leaves(ray_address: str) -> None:
    host, port = ray_address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True})
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        assert b"200 OK" in client.recv(4096)
    wait_until(lambda: num_aborted(ray_address) == 1, timeout_s=20)


def num_aborted(ray_address: str) -> int:
    """Each replica knows its own requests, so several scrapes ask both."""
    pattern = re.compile(r'^quire:request_success_total{.*finished_reason="abort".*} (\S+)$', re.M)
    counts = []
    for _ in range(6):
        with urllib.request.urlopen(ray_address + "/metrics", timeout=60) as answer:
            [count] = pattern.findall(answer.read().decode())
            counts.append(int(float(count)))
    return max(counts)


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Streams that can be resumed, and every eighth one that cannot."""
    for number in range(NUM_STREAMS):
        body: dict[str, Any] = {"max_tokens": 700, "ignore_eos": True, "seed": number}
        body["temperature"] = 0.8 if number % 2 else 0
        if number % 8 == 7:
            yield COMPLETIONS, body | {"prompt": f"{number} Once upon a time", "logprobs": 1}
        elif number % 4 < 2:
            yield COMPLETIONS, body | {"prompt": f"{number} Once upon a time"}
        else:
            messages = [{"role": "user", "content": f"A story of {number} hens, please."}]
            yield CHAT, body | {"messages": messages}


def survives_a_node(quire: str, ray_address: str, kill: Callable[[], None]) -> None:
    wanted = list(requests())
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        before = pool.map(lambda one: post(quire, one[0], **one[1], stream=True), wanted)
        expected = [read_stream(stream) for stream in before]
        begun: list[str] = []  # half of them are on each node
        streams = [
            pool.submit(post, ray_address, one[0], begun, **one[1], stream=True) for one in wanted
        ]
        wait_until(lambda: len(begun) > 0.75 * NUM_STREAMS)
        assert not all(stream.done() for stream in streams)
        began = time.monotonic()
        kill()
        found = [read_stream(stream.result()) for stream in streams]
        took_s = time.monotonic() - began
    num_errors = 0
    for (_, body), of_quire, of_ray in zip(wanted, expected, found, strict=True):
        if "logprobs" in body and of_ray[1] == "replica_gone":
            assert of_quire[0].startswith(of_ray[0])
            num_errors += 1
        else:
            assert of_ray == of_quire, (body, of_ray[1], of_quire[1])
    ingress = serve.get_deployment_handle("Ingress", "default")
    num_resumed = ingress.counts.remote().result()["num_resumed"]
    print(f"{num_resumed} resumed, {num_errors} failed, {took_s:.1f} s", file=sys.stderr)
    assert num_resumed + num_errors > 0, "no stream was on the killed node"


def grows_with_load(ray_address: str, model_directory: str) -> None:
    fast = {"upscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 1}
    serve.delete("default")
    deploy(model_directory, min_replicas=1, target_ongoing_requests=2, autoscaling=fast)
    wait_until(lambda: num_replicas() == 1)
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(post, ray_address, COMPLETIONS, **body) for _ in range(12)]
        wait_until(lambda: num_replicas() == 2)
        for answer in answers:
            assert json.loads(answer.result())["usage"]["completion_tokens"] == 3000


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
