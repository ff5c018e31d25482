"""Several server processes on one port, over one engine."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from quire.frontend.cli import serve as cli
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.meters import Meters
from quire.frontend.server.totals import SharedTotals, Totals, end_totals
from quire.ipc.errors import InvalidParameterError
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server

BODY = {"prompt": "One day", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def children_of(client: httpx.Client, module: str) -> list[psutil.Process]:
    children = psutil.Process(client.process.pid).children()
    return [child for child in children if f"quire.{module}" in child.cmdline()]


def ask(client: httpx.Client, **changes: object) -> httpx.Response:
    """Over a connection of its own, which any server may accept."""
    return httpx.post(client.base_url.join("/v1/completions"), json=BODY | changes, timeout=60)


def test_texts_counters_and_the_end(server: httpx.Client) -> None:
    expected = ask(server).json()["choices"][0]["text"]
    count = re.compile(r'quire:request_success_total\{.*"length".*\} (\S+)')

    def counts(client: httpx.Client) -> set[str]:  # whichever server is scraped
        urls = [client.base_url.join("/metrics")] * 4
        return {value for url in urls for value in count.findall(httpx.get(url).text)}

    with running_server("--api-server-count", "2", "-dp", "2") as client:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(client), range(16)))
            assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected}
            sampled = list(pool.map(lambda _: ask(client, temperature=1, max_tokens=30), range(16)))
        assert len({answer.json()["choices"][0]["text"] for answer in sampled}) == 16
        wait_until(lambda: counts(client) == {"32.0"})
        state = client.base_url.join("/v1/engine/state")
        wait_until(lambda: {httpx.get(state).json()["num_finished"] for _ in range(4)} == {32})
        answer = client.get("/v1/requests")
        assert answer.status_code == 400 and "one process" in answer.json()["error"]["message"]
        children = psutil.Process(client.process.pid).children(recursive=True)
        assert re.search(r'quire:replica_up\{engine="1".*\} 1', client.get("/metrics").text)
        engine, other = children_of(client, "core.engine_proc")
        assert other.cmdline()[5] == engine.cmdline()[5] + ".1"
        folder = Path(engine.cmdline()[engine.cmdline().index("--listen") + 1][6:]).parent
        assert folder.is_dir()
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(timeout=60) == 0
        assert not any(child.is_running() for child in children) and not folder.exists()
        assert "Traceback" not in client.log()


@pytest.mark.slow
def test_a_dead_server_is_replaced_and_a_dead_engine_loses_nothing() -> None:
    with running_server("--api-server-count", "2") as client:
        whole = ask(client, max_tokens=600).json()["choices"][0]["text"]
        with ThreadPoolExecutor(4) as pool:
            [engine] = children_of(client, "core.engine_proc")
            engine.suspend()
            running = [pool.submit(ask, client, max_tokens=600) for _ in range(4)]
            wait_until(lambda: client.get("/load").json()["server_load"] == 4)
            engine.kill()
            assert {one.result().json()["choices"][0]["text"] for one in running} == {whole}
        state = client.base_url.join("/v1/engine/state")

        def gaps() -> set[float | None]:  # as any process tells
            return {httpx.get(state).json()["last_gap_s"] for _ in range(8)}

        wait_until(lambda: len(gaps()) == 1)
        assert gaps() != {None}
        victim, other = children_of(client, "frontend.server.member")
        victim.kill()
        wait_until(lambda: "killed by SIGKILL; starting it again" in client.log())
        wait_until(lambda: len(children_of(client, "frontend.server.member")) == 2, timeout_s=60)
        assert other.is_running() and ask(client).status_code == 200


def test_sums_keep_the_counts_of_the_dead(tmp_path: Path) -> None:
    def totals(num_requests: int, num_running: int) -> Totals:
        one = Totals(started=float(num_running), meters=Meters())
        for _ in range(num_requests):
            one.meters.http_began()
            one.meters.http_ended("GET", "/x", 200, 0.1, 0)
        one.meters.http_began()
        one.gauges["num_running"] = num_running
        one.restarts["daemon"] = num_requests
        one.last_gap = (7.0 + num_requests, 0.25 * num_requests)
        return one

    first, second = SharedTotals(tmp_path, "1"), SharedTotals(tmp_path, "2")
    second.publish(totals(3, 7))
    for end, num_running, num_active, started in ((False, 12, 2, 5.0), (True, 5, 1, 5.0)):
        if end:
            end_totals(tmp_path, "2")
        found = first.of_all(totals(2, 5))
        assert found.meters.http_requests["GET", "/x", 200] == 5
        assert sum(found.meters.http_durations["GET", "/x"].counts) == 5
        assert found.meters.num_http_requests == num_active
        assert found.gauges["num_running"] == num_running
        assert found.restarts == {"daemon": 3} and found.started == started
        assert found.last_gap == (10.0, 0.75)


@pytest.mark.parametrize(
    ("flags", "parameter"),
    [
        (["--admin"], "admin"),
        (["--api-key-file", "/no/such/file"], "api_key_file"),
        (["--max-stored-responses", "5"], "max_stored_responses"),
        (["--engine", "inproc"], "engine"),
        (["--standby"], "standby"),
        (["a=bundled", "b=bundled"], "api_server_count"),
    ],
)
def test_what_needs_one_process_is_refused_before_the_start(
    flags: list[str], parameter: str
) -> None:
    arguments = cli.make_parser(flags).parse(["--api-server-count", "2", "--port", "0", *flags])
    with pytest.raises(InvalidParameterError) as caught:
        cli.run(arguments)
    assert caught.value.parameter == parameter


def test_limits_are_divided() -> None:
    assert ServerConfig(api_server_count=3).share(1024) == 342
