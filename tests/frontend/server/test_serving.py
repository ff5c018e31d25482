"""The server's process: its port opens before the model is loaded, and it ends on signals and
failures.
"""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx2 as httpx
import psutil
import pytest
from quire.frontend.engine_args import EngineArgs
from quire.frontend.server import serving
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.serving import allowed_connections, check_certificate, open_port, serve
from quire.ipc.errors import EngineStartError, InvalidParameterError
from quire.tests.fake_engine import stop, wait_until
from quire.tests.frontend.server.conftest import running_server, slow_engine, wait_until_ready


@pytest.mark.slow
def test_the_port_is_open_while_the_model_loads() -> None:
    with running_server(wait=False) as client:
        answer = client.get("/v1/models")
        if answer.status_code != 200:  # on a fast machine the model may be loaded already
            assert (
                answer.status_code == 503
                and answer.json()["error"]["code"] == "model_loading"
                and int(answer.headers["retry-after"]) >= 1
            )
        assert client.get("/health").status_code == 200
        wait_until_ready(client)
        assert client.get("/v1/models").status_code == 200


def test_ports() -> None:
    with open_port(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        with pytest.raises(InvalidParameterError, match=f"127.0.0.1:{port}"):
            open_port(ServerConfig(port=port))
    with pytest.raises(InvalidParameterError) as caught:
        open_port(ServerConfig(host="no.such.host.invalid"))
    assert caught.value.parameter == "host"


def test_unusable_certificates(tmp_path: Path) -> None:
    garbage = tmp_path / "cert.pem"
    garbage.write_text("no certificate")
    check_certificate(ServerConfig())
    for fields, parameter in (
        ({"ssl_keyfile": "k"}, "ssl_keyfile"),
        ({"ssl_ca_certs": "k"}, "ssl_ca_certs"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        ({"ssl_certfile": str(garbage), "ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        ({"ssl_certfile": str(garbage), "ssl_ca_certs": "/none"}, "ssl_ca_certs"),
        ({"ssl_certfile": "/none"}, "ssl_certfile"),
        ({"ssl_certfile": str(garbage)}, "ssl_certfile"),
    ):
        with pytest.raises(InvalidParameterError) as caught:
            check_certificate(ServerConfig(**fields))
        assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("limits", "wanted", "allowed"),
    [
        ((1024, 1_000_000), 4480, 4096),
        ((1024, 2048), 2048, 1664),
        ((256, 256), None, 95),
        ((64, 64), None, 23),
        ((65536, 65536), None, 4096),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 4096),
    ],
)
def test_connections_are_as_many_as_the_file_limit_allows(
    monkeypatch, caplog, limits: tuple[int, int], wanted: int | None, allowed: int
) -> None:
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, pair: given.append(pair))
    assert allowed_connections(ServerConfig(max_connections=4096)) == allowed
    assert given == ([] if wanted is None else [(wanted, limits[1])])
    assert (f"at most {allowed} connections" in caplog.text) == (allowed < 4096)


@pytest.mark.slow
def test_idle_clients_do_not_take_the_descriptors_of_the_start() -> None:
    with running_server(wait=False, under=("prlimit", "--nofile=128:128")) as client:
        address = ("127.0.0.1", client.base_url.port)
        idle = [socket.create_connection(address) for _ in range(300)]
        try:
            wait_until(lambda: "ready: bundled" in client.log(), timeout_s=60)
        finally:
            for connection in idle:
                connection.close()
        assert "at most 47 connections" in client.log()

        def answers() -> bool:
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:  # reset: the server still counts connections just closed
                return False

        wait_until(answers)
        body = {"prompt": "a", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200


class PanicException(BaseException):
    """As libraries in Rust raise it: it is no Exception."""


@pytest.mark.parametrize(
    "cause",
    [
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
        MemoryError("no memory"),
        PanicException("unwrap"),
        EngineStartError("the engine died"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_any_exception_of_the_start_ends_it_with_its_cause(cause, monkeypatch, caplog) -> None:
    async def fail(*_: object) -> None:
        raise cause

    monkeypatch.setattr(serving.AsyncLLM, "start", fail)
    began = time.monotonic()
    with pytest.raises(EngineStartError, match=str(cause.args[-1])):
        serve(ServerConfig(port=0), EngineArgs(), "process")
    assert time.monotonic() - began < 60
    if not isinstance(cause, EngineStartError):
        assert type(cause).__name__ in caplog.text  # with its traceback


def test_the_session_server_is_ready(server: httpx.Client) -> None:
    assert server.get("/health/ready").json()["status"] == "ready"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_the_server_has_a_lower_priority_than_its_engine(server: httpx.Client) -> None:
    def policies(process: psutil.Process) -> set[int]:
        return {os.sched_getscheduler(thread.id) for thread in process.threads()}

    process = psutil.Process(server.process.pid)
    wait_until(lambda: policies(process) == {os.SCHED_BATCH})
    [engine] = process.children()
    assert policies(engine) == {os.SCHED_OTHER}


class Streaming(threading.Thread):
    """Reads a stream to its end in a thread."""

    def __init__(self, client: httpx.Client, max_tokens: int):
        super().__init__()
        self._url = client.base_url.join("/v1/completions")
        self._body = {
            "prompt": [1, 2, 3],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                self.events += [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        except httpx.TransportError as error:
            self.events.append(type(error).__name__)


NOT_RESTARTED = ("--on-engine-death", "fail")


@contextmanager
def busy_server(
    max_tokens: int, *flags: str
) -> Iterator[tuple[httpx.Client, Streaming, subprocess.Popen]]:
    """A server with one running stream, and its engine's process."""
    with (
        slow_engine(0.05) as (address, engine),
        running_server("--engine", address, *flags) as client,
    ):
        streaming = Streaming(client, max_tokens)
        wait_until(lambda: client.get("/v1/engine/state").json()["counters"]["num_running"] == 1)
        yield client, streaming, engine


def error_of(streaming: Streaming) -> dict:
    streaming.join(timeout=60)
    return json.loads(streaming.events[-1])["error"]


def test_sigterm_lets_streams_finish_and_refuses_new_requests() -> None:
    with busy_server(60) as (client, streaming, engine):
        stop(engine.pid)  # the stream does not end before the checks
        client.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_shutting_down(client))
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert (
            answer.status_code == 503
            and answer.json()["error"]["code"] == "shutting_down"
            and int(answer.headers["retry-after"]) > 0
        )
        # the health check that is polled may be active, too
        wait_until(lambda: re.search("active requests? may finish", client.log()))
        engine.send_signal(signal.SIGCONT)
        streaming.join(timeout=60)
        assert (
            streaming.events[-1] == "[DONE]"
            and json.loads(streaming.events[-2])["choices"][0]["finish_reason"] == "length"
        )
        assert client.process.wait(timeout=60) == 0
        assert "Traceback" not in client.log()


def is_shutting_down(client: httpx.Client) -> bool:
    answer = client.get("/health/ready")
    return answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"


def engine_of(client: httpx.Client) -> psutil.Process | None:
    for child in psutil.Process(client.process.pid).children():
        with suppress(psutil.Error):
            if "quire.core.engine_proc" in child.cmdline():
                return child
    return None


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("num_streams", "flags"),
    [(0, ()), pytest.param(5, (), marks=pytest.mark.slow), (5, ("--standby",))],
)
def test_sigterm_to_every_process_as_from_systemd(num_streams: int, flags: tuple) -> None:
    """The engine finishes its requests, those that wait in the server too, and is not replaced."""
    queued = re.compile(rf"quire:num_requests_queued\S* {max(0, num_streams - 2)}")
    with running_server("--max-concurrent-requests", "2", *flags) as client:
        if flags:
            wait_until(lambda: "quire:engine_standby_ready 1.0" in client.get("/metrics").text, 60)
        engine = engine_of(client)
        engine.suspend()
        streams = [Streaming(client, 120) for _ in range(num_streams)]
        wait_until(lambda: queued.search(client.get("/metrics").text))
        processes = psutil.Process(client.process.pid).children()
        for process in (*processes, psutil.Process(client.process.pid)):
            process.send_signal(signal.SIGTERM)
        engine.resume()
        for stream in streams:
            stream.join(timeout=60)
            assert stream.events[-1] == "[DONE]"
            assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
        assert client.process.wait(timeout=60) == 0
        assert "starting" not in client.log() and "Traceback" not in client.log()


def test_streams_that_take_too_long_end_with_the_reason() -> None:
    with busy_server(5000, "--drain-timeout-s", "0.3") as (client, streaming, _):
        client.process.send_signal(signal.SIGTERM)
        assert error_of(streaming)["code"] == "shutting_down"
        assert client.process.wait(timeout=60) == 0 and "Traceback" not in client.log()


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(sent: signal.Signals, code: int) -> None:
    with busy_server(5000, "--drain-timeout-s", "300") as (client, streaming, _):
        client.process.send_signal(sent)
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        assert client.process.poll() is None
        client.process.send_signal(sent)
        assert client.process.wait(timeout=60) == code
        assert error_of(streaming)["code"] == "shutting_down" and "Traceback" not in client.log()


def test_an_engine_that_dies_ends_its_streams_and_then_the_server() -> None:
    with busy_server(5000, *NOT_RESTARTED) as (client, streaming, engine):
        engine.kill()
        error = error_of(streaming)
        assert error["code"] == "engine_dead" and error["type"] == "service_unavailable"
        assert client.process.wait(timeout=60) == 1
        assert "Traceback" not in client.log() and "\nquire: " in client.log()


@pytest.mark.slow
def test_an_engine_that_dies_while_idle() -> None:
    with (
        slow_engine(0.0) as (address, engine),
        running_server("--engine", address, *NOT_RESTARTED) as client,
    ):
        engine.kill()
        assert client.process.wait(timeout=60) == 1


def test_an_engine_that_dies_while_the_server_drains() -> None:
    with busy_server(5000, *NOT_RESTARTED) as (client, streaming, engine):
        client.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        engine.kill()
        assert error_of(streaming)["code"] == "engine_dead"
        assert client.process.wait(timeout=60) == 1
        assert "Traceback" not in client.log() and "\nquire: " in client.log()


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("restarts", [0, 1])
def test_the_last_restart_is_followed_by_the_end_of_the_server(restarts: int) -> None:
    with running_server("--engine-restarts", str(restarts)) as client:
        for i in range(restarts + 1):
            dead = engine_of(client)
            dead.kill()
            if i < restarts:
                wait_until(lambda: engine_of(client) not in (None, dead), 60)
                wait_until_ready(client)
        assert client.process.wait(timeout=60) == 1
        [cause] = [line for line in client.log().splitlines() if line.startswith("quire: ")]
        assert "killed by SIGKILL" in cause and "Traceback" not in client.log()
        assert client.log().count("starting it again") == restarts


@pytest.mark.slow
def test_a_standby_takes_over_and_is_shown() -> None:
    with running_server("--standby") as client:

        def is_ready() -> bool:
            return client.get("/v1/engine/state").json()["standby_is_ready"]

        wait_until(is_ready, 60)
        assert "quire:engine_standby_ready 1.0" in client.get("/metrics").text
        first = engine_of(client)
        first.suspend()
        stream = Streaming(client, 40)
        wait_until(lambda: client.get("/load").json()["server_load"] == 1)
        first.kill()
        stream.join(timeout=60)
        assert stream.events[-1] == "[DONE]"
        state = client.get("/v1/engine/state").json()
        assert state["restarts"] == {"SIGKILL": 1} and state["last_gap_s"] < 30
        wait_until(is_ready, 60)  # another


@contextmanager
def server_writing_to(stderr: int | IO[str], path: Path) -> Iterator[tuple[httpx.Client, Any]]:
    """A server on a Unix socket (its address is not in the log), and its process."""
    with slow_engine(0.05) as (address, _):
        command = [sys.executable, "-m", "quire", "serve", "--uds", str(path)]
        process = subprocess.Popen([*command, "--engine", address], stderr=stderr, stdout=stderr)
        try:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                wait_until(lambda: answers_ready(client), timeout_s=60)
                yield client, process
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_it_serves_with_a_full_disk_behind_its_log(tmp_path: Path) -> None:
    with (
        open("/dev/full", "w") as full,
        server_writing_to(full, tmp_path / "quire.sock") as (client, process),
    ):
        body = {"prompt": [1, 2], "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_drains_after_the_reader_of_its_log_has_ended(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    """As with `quire serve 2>&1 | tee`, where Ctrl-C ends both."""
    reader, writer = os.pipe()
    with server_writing_to(writer, tmp_path / "quire.sock") as (client, process):
        os.close(writer)
        body = {"prompt": [1, 2, 3], "max_tokens": 30, "ignore_eos": True, "stream": True}
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(client.post, "/v1/completions", json=body)
            state = "/v1/engine/state"
            wait_until(lambda: client.get(state).json()["counters"]["num_running"] or answer.done())
            os.close(reader)
            process.send_signal(sent)
            assert answer.result().text.endswith("data: [DONE]\n\n")
        assert process.wait(timeout=60) == code


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--engine", "ipc:///nowhere/engine.sock"], 1, "/nowhere/engine.sock"),
        (["--max-model-len", "64", "--num-gpu-blocks-override", "2"], 2, "num_gpu_blocks_override"),
    ],
)
def test_an_engine_that_does_not_start(flags: list[str], code: int, sentence: str) -> None:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code and "Traceback" not in ended.stderr
    assert any(
        line.startswith("quire: ") and sentence in line for line in ended.stderr.splitlines()
    ), ended.stderr


def test_a_port_in_use(server: httpx.Client) -> None:
    port = server.base_url.port
    ended = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in ended.stderr


@pytest.mark.slow
def test_a_log_of_json() -> None:
    """Check every line that server and engine write."""
    with running_server("--log-format", "json") as client:
        client.get("/v1/models")
        client.get("/health")
        wait_until(lambda: "/v1/models" in client.log())
        client.process.terminate()
        client.process.wait(timeout=60)
        lines = list(map(json.loads, client.log().splitlines()))
    messages = [line["message"] for line in lines]
    assert any(message.startswith("ready: ") for message in messages)
    [access] = [line for line in lines if line["logger"] == "quire.access"]
    assert access["path"] == "/v1/models" and access["status"] == 200
    assert access["client"].startswith("127.0.0.1:") and access["duration_ms"] >= 0


@pytest.mark.slow
def test_the_level_of_the_log() -> None:
    """Of the server and of its engine, which logs the table of kernels at level DEBUG."""
    with running_server("--log-level", "debug") as client:
        client.get("/v1/models")
        wait_until(lambda: "/v1/models" in client.log())
        detailed = client.log()
    with running_server("--log-level", "warning") as client:
        client.get("/v1/models")
        client.process.terminate()
        client.process.wait(timeout=60)
        quiet = client.log()
    assert "DEBUG quire.kernels.registry: kernels for cpu" in detailed
    assert " DEBUG " not in "".join(
        line for line in detailed.splitlines(True) if "quire." not in line
    )
    assert " INFO " not in quiet and " DEBUG " not in quiet
    assert "ready: " in quiet  # what the program tells its user is no log


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--ssl-certfile", "/nowhere/server.pem"], "/nowhere/server.pem"),
        (["--max-model-len", "64", "--num-gpu-blocks-override", "2"], "num_gpu_blocks_override"),
    ],
)
def test_the_last_line_is_json_where_the_log_is(flags: list[str], sentence: str) -> None:
    """A start that fails before the engine's, and one that fails with it."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-format", "json"]
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
    *_, last = map(json.loads, ended.stderr.splitlines())
    assert ended.returncode == 2 and sentence in last["message"]
    assert (last["level"], last["logger"]) == ("ERROR", "quire")


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    listener = open_port(ServerConfig(uds=str(path)))
    with listener, pytest.raises(InvalidParameterError) as caught:
        open_port(ServerConfig(uds=str(path)))  # another process listens there
    assert caught.value.parameter == "uds" and str(path) in str(caught.value)
    assert path.exists()  # left behind, for example by a killed server
    with slow_engine(0.0) as (address, _), tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "quire", "serve", "--uds", str(path)]
        process = subprocess.Popen([*command, "--engine", address], stderr=log)
        try:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://any.name") as client:
                wait_until(lambda: answers_ready(client))
                body = {"prompt": [1, 2], "max_tokens": 2}
                answer = client.post("/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 2
        finally:
            process.terminate()
            assert process.wait(timeout=60) == 0
        text = os.pread(log.fileno(), 10**6, 0).decode()
    assert f"http+unix://{path}" in text and "unix POST /v1/completions 200" in text
    assert not path.exists()


@pytest.mark.slow
def test_a_server_on_a_socket_survives_sighup_and_leaves_its_successors_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "quire.sock"
    with tempfile.TemporaryFile("w+") as log, server_writing_to(log, path) as (client, leaving):
        leaving.send_signal(signal.SIGHUP)  # there is no file of keys
        wait_until(lambda: "SIGHUP has no effect" in os.pread(log.fileno(), 10**6, 0).decode())
        assert client.get("/health").status_code == 200
        path.unlink()  # as an administrator who replaces a server does
        with open_port(ServerConfig(uds=str(path))):
            leaving.terminate()
            assert leaving.wait(timeout=60) == 0
            assert path.is_socket()


def answers_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_sighup_reloads_the_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    with (
        slow_engine(0.0) as (address, _),
        running_server("--engine", address, "--api-key-file", str(keys), wait=False) as client,
    ):

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return client.get("/v1/requests", headers=headers).status_code

        wait_until(lambda: status("one") == 200)
        assert status("two") == 401
        keys.write_text("two  # the new one\n")
        client.process.send_signal(signal.SIGHUP)
        wait_until(lambda: status("two") == 200)
        assert status("one") == 401
        keys.write_text("# none\n")
        client.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the keys are unchanged: api_key_file" in client.log())
        assert status("two") == 200 and status("one") == 401


@pytest.mark.slow
def test_below_a_path_of_a_reverse_proxy() -> None:
    """A proxy may strip the prefix or keep it."""
    with (
        slow_engine(0.0) as (address, _),
        running_server("--engine", address, "--root-path", "/llm") as client,
    ):
        for path in ("/llm/v1/models", "/v1/models"):
            assert client.get(path).json()["object"] == "list", path
        answer = client.post("/llm/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert answer.status_code == 200
        assert client.get("/llm/").text == client.get("/").text
        redirect = client.get("/llm", follow_redirects=False)
        assert (redirect.status_code, redirect.headers["location"]) == (307, "/llm/")
        assert client.get("/llmx/v1/models").status_code == 404
        assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("root_path", ["llm", "/llm/", "/", "/a?b"])
def test_invalid_root_paths(root_path: str) -> None:
    command = [sys.executable, "-m", "quire", "serve", "--root-path", root_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "--root-path" in ended.stderr
