"""Hundreds of hostile clients: they are refused within their limits, good requests are hardly
slower, and memory is released.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.hostile import HEAD, SLOW, exchange

MIB = 2**20
TIMEOUT_S = 1.5  # of the server for heads and bodies


@pytest.fixture(scope="module")
def loaded_server() -> Iterator[httpx.Client]:
    with running_server(
        "--header-timeout-s", f"{TIMEOUT_S}", "--body-timeout-s", f"{TIMEOUT_S}", "--no-access-log"
    ) as client:
        yield client


def good_latency_s(client: httpx.Client) -> float:
    began = time.perf_counter()
    answer = client.post(
        "/v1/completions",
        json={"prompt": "The little fox", "max_tokens": 8, "ignore_eos": True, "temperature": 0},
    )
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    return time.perf_counter() - began


@contextmanager
def attack(port: int, count: int) -> Iterator[dict[str, Any]]:
    """Open `count` connections of each slow kind. Afterwards the dict contains their results."""
    command = [sys.executable, "-m", "quire.tests.frontend.server.hostile", str(port), str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = {}
    try:
        yield report
        report |= json.loads(process.communicate("\n", timeout=60)[0])
    finally:
        process.kill()
        process.wait()


def memory_of(client: httpx.Client) -> int:
    return psutil.Process(client.process.pid).memory_info().rss


def num_connections(client: httpx.Client) -> int:
    return len(
        [
            c
            for c in psutil.Process(client.process.pid).net_connections("tcp")
            if c.status == "ESTABLISHED"
        ]
    )


def interleaved(
    client: httpx.Client, count: int, num_rounds: int, num_requests: int, hold_s: float
) -> tuple[float, float, list[dict]]:
    """Return (median latency without attack, the same under attack, the results of the
    attackers).
    """
    peace, war, reports = [], [], []
    for _ in range(num_rounds):
        peace += [good_latency_s(client) for _ in range(num_requests)]
        with attack(client.base_url.port, count) as report:
            wait_until(lambda: num_connections(client) > 0.9 * count * len(SLOW), timeout_s=60)
            ends_at = time.monotonic() + hold_s
            while time.monotonic() < ends_at:
                war.append(good_latency_s(client))
        reports.append(report)
        wait_until(lambda: num_connections(client) < 5, timeout_s=30)
    return statistics.median(peace), statistics.median(war), reports


def check_slow_clients(
    client: httpx.Client, count: int, num_rounds: int, hold_s: float, most_times: float
) -> None:
    for _ in range(5):
        good_latency_s(client)
    memory = memory_of(client)
    peace_s, war_s, reports = interleaved(client, count, num_rounds, 20, hold_s)
    print(
        f"\n{count * len(SLOW)} slow connections: median {1000 * peace_s:.1f} ms in peace, "
        f"{1000 * war_s:.1f} ms under attack; "
        f"memory {memory / MIB:.0f} MiB before, {memory_of(client) / MIB:.0f} after; {reports[-1]}"
    )
    assert war_s <= most_times * peace_s
    for report in reports:
        ends = {
            end.split(": ")[0]: {e.split(": ")[1] for e in report["ends"] if e.startswith(end)}
            for end in report["ends"]
        }
        if hold_s > 2 * TIMEOUT_S:  # all of them met their deadline
            assert ends == {"silent": {"closed"}} | dict.fromkeys(
                set(SLOW) - {"silent"}, {"408"}
            ), ends
            assert max(report["longest_ms"].values()) < 1000 * (TIMEOUT_S + 5), report
    wait_until(lambda: memory_of(client) < memory + 32 * MIB, timeout_s=20)


@pytest.mark.slow
def test_slow_clients(loaded_server: httpx.Client) -> None:
    """The short form: smaller numbers, and a looser bound, since other tests may run in
    parallel.
    """
    check_slow_clients(
        loaded_server, count=40, num_rounds=1, hold_s=2 * TIMEOUT_S + 0.5, most_times=4.0
    )


@pytest.mark.slow
def test_a_thousand_slow_clients(loaded_server: httpx.Client) -> None:
    check_slow_clients(
        loaded_server, count=200, num_rounds=5, hold_s=2 * TIMEOUT_S + 0.5, most_times=2.0
    )


def with_length(body: bytes) -> tuple[bytes, bytes]:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body


# Name -> (what is sent, repetitions of the last piece, status, a part of the answer)
LARGE: dict[str, tuple[Callable[[], tuple[bytes, ...]], int, int, bytes]] = {
    "10 MB header": (lambda: (HEAD + b"X: ", b"a" * 1_000_000), 10, 431, b"headers_too_large"),
    "100,000 headers": (
        lambda: (HEAD, b"X-Header: value\r\n" * 1000),
        100,
        431,
        b"headers_too_large",
    ),
    "200 MB body": (
        lambda: (HEAD + b"Content-Length: 200000000\r\n\r\n", b"x" * 1_000_000),
        200,
        413,
        b"request_too_large",
    ),
    "200 MB chunked": (
        lambda: (
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
            b"F4240\r\n" + b"x" * 1_000_000 + b"\r\n",
        ),
        200,
        413,
        b"request_too_large",
    ),
    "1,000,000 prompts": (
        lambda: with_length(b'{"prompt": [' + b",".join([b'"a"'] * 1_000_000) + b"]}"),
        1,
        400,
        b"array_above_max_length",
    ),
    "1,000,000 empty prompts": (
        lambda: with_length(b'{"prompt": [' + b",".join([b"[]"] * 1_000_000) + b"]}"),
        1,
        400,
        b"array_above_max_length",
    ),
    "nested 10,000 deep": (
        lambda: with_length(b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
        1,
        400,
        b"invalid_type",
    ),
    "nested 10,000 deep elsewhere": (
        lambda: with_length(
            b'{"prompt": "a", "x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}"
        ),
        1,
        400,
        b"invalid_json",
    ),
    "30 MB prompt": (
        lambda: with_length(b'{"prompt": "' + b"word " * 6_000_000 + b'"}'),
        1,
        400,
        b"context_length_exceeded",
    ),
    "10,000,000 token ids": (
        lambda: with_length(b'{"prompt": [' + b"1," * 10_000_000 + b"1]}"),
        1,
        400,
        b"array_above_max_length",
    ),
    "1,000,000 unknown fields": (
        lambda: with_length(b"{" + b",".join(b'"f%d":1' % i for i in range(1_000_000)) + b"}"),
        1,
        400,
        b"array_above_max_length",
    ),
}


@pytest.fixture(scope="module")
def memory_before(loaded_server: httpx.Client) -> int:
    good_latency_s(loaded_server)
    return memory_of(loaded_server)


@pytest.mark.parametrize("name", LARGE)
def test_large_requests(loaded_server: httpx.Client, memory_before: int, name: str) -> None:
    make, repeat, status, piece = LARGE[name]
    pieces = make()
    got, answer = exchange(loaded_server.base_url.port, *pieces, repeat=repeat)
    assert got == status and piece in answer, answer[-500:]
    assert b"x-request-id" in answer
    wait_until(lambda: memory_of(loaded_server) < memory_before + 64 * MIB, timeout_s=20)
    good_latency_s(loaded_server)
