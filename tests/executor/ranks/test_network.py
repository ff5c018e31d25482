"""Ranks over TCP, as threads of this process: tokens, connections that are lost, and strangers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from quire.executor.ranks.messages import NetworkEnds
from quire.executor.ranks.multiproc_executor import MultiprocExecutor
from quire.executor.ranks.network import NetworkLinks, NetworkRanks
from quire.executor.ranks.rank import Rank
from quire.ipc.errors import EngineStartError
from quire.ipc.params import SamplingParams
from quire.ipc.sockets import connect_network, has_peer, make_context
from quire.tests.executor.driver import generate, make_config, start_executor, start_with
from quire.tests.executor.ranks.test_steps_in_flight import (
    check_equal,
    drafting,
    jobs_of,
    run_jobs,
    without_drafts_and_ranks,
)

HOST = "127.0.0.1"


class Threads:
    """Implements Launcher."""

    host = HOST

    def __init__(self, cause: str | None = None) -> None:
        self.cause = cause  # of every death
        self.links: list[NetworkLinks] = []
        self.lost: list[int] = []
        self.ends: list[NetworkEnds] = []
        self._threads: list[threading.Thread] = []

    def start(self, ends: list[NetworkEnds]) -> None:
        self.ends = ends
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in ends]
        for thread in self._threads:
            thread.start()

    def _run(self, ends: NetworkEnds) -> None:
        links = NetworkLinks(ends, HOST, lambda: self.lost.append(ends.rank))
        Rank(links, 1).run()
        links.close()

    def cause_of(self, rank: int, timeout_s: float) -> str | None:
        return self.cause

    def end(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join()


class LinksOnly(Threads):
    """No rank behind the links."""

    def start(self, ends: list[NetworkEnds]) -> None:
        self.ends = ends
        self.links = [
            NetworkLinks(one, HOST, lambda rank=one.rank: self.lost.append(rank)) for one in ends
        ]

    def end(self, timeout_s: float) -> None:
        for links in self.links:
            links.close()
        self.links = []


@pytest.fixture
def links_only(tiny) -> Iterator[tuple[NetworkRanks, LinksOnly]]:
    launcher = LinksOnly()
    ranks = NetworkRanks(make_config(tiny("qwen2"), tensor_parallel_size=2), launcher)
    yield ranks, launcher
    ranks.end(0.0)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_tokens_equal_those_of_one_rank(tiny, tp: int, pp: int) -> None:
    launcher = Threads()
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    executor = MultiprocExecutor(
        make_config(tiny("qwen2"), None, **sizes), lambda config: NetworkRanks(config, launcher)
    )
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    prompts, params = [[1, 2, 3], [7] * 40, [5, 6]], SamplingParams(temperature=0.9, seed=3)
    found = [row.output for row in generate(executor, prompts, 20, params)]
    assert len(executor.collective_rpc("memory_usage")) == tp * pp
    executor.shutdown()
    assert not launcher.lost
    one = start_executor(tiny("qwen2"))
    assert found == [row.output for row in generate(one, prompts, 20, params)]


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("mtp", 1),
        pytest.param("ngram", 2, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, marks=pytest.mark.slow),
        pytest.param("draft_model", 2, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(method: str, size: int) -> None:
    """Drafts and tokens go to the first stage over TCP."""
    config = drafting(method, size, 2, max_num_batched_tokens=64, max_num_seqs=6)
    plain, jobs, launcher = without_drafts_and_ranks(config), jobs_of(4, 4), Threads()
    jobs[0].request.prompt_token_ids[:] = [5, 9, 12] * 10
    wanted, _ = run_jobs(start_with(plain), plain, jobs)
    executor = MultiprocExecutor(config, lambda config: NetworkRanks(config, launcher))
    answers, core = run_jobs(executor, config, jobs)
    executor.shutdown()
    check_equal(wanted, answers)
    assert core.observer.get_metrics()["num_draft_tokens"] > 0 and not launcher.lost


@pytest.mark.parametrize("cause", ["its node was lost", None])
def test_a_lost_connection_is_noticed(links_only, cause: str | None) -> None:
    ranks, launcher = links_only
    causes: list[str] = []
    launcher.cause = cause
    reading = threading.Thread(target=ranks.read, args=(print, causes.append))
    reading.start()
    began = time.monotonic()
    launcher.links[1].publish("host/1", b"10.0.0.2")
    assert launcher.links[0].look_up("host/1") == b"10.0.0.2"
    launcher.links[1].close()
    while not causes and time.monotonic() < began + 60:
        time.sleep(0.01)
    lost = "its connection to 10.0.0.2 was lost"
    assert causes == [f"rank 1 of 2 is gone: {cause or lost}"]
    ranks.send(b"to the other one")
    assert launcher.links.pop(0).receive() == b"to the other one"
    ranks.stop()
    reading.join()
    assert not launcher.lost and len(causes) == 1


def test_a_rank_notices_that_the_engine_is_gone(links_only) -> None:
    ranks, launcher = links_only
    for one in (*ranks._commands, *ranks._replies):
        one.close()
    deadline = time.monotonic() + 60
    while len(launcher.lost) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(launcher.lost) == [0, 1]


def test_who_does_not_know_the_key_is_not_connected(links_only) -> None:
    ranks, launcher = links_only
    context = make_context()
    [ends, _] = launcher.ends
    assert ends.commands.startswith(f"tcp://{HOST}:") and ends.commands != ends.replies
    other_key, _ = zmq.curve_keypair()
    stranger = connect_network(context, zmq.PUSH, ends.replies, other_key)
    plain = context.socket(zmq.PUSH)
    plain.linger, plain.immediate = 0, True
    plain.connect(ends.replies)
    received: list[tuple[int, bytes]] = []
    reading = threading.Thread(target=ranks.read, args=(lambda *one: received.append(one), print))
    reading.start()
    time.sleep(0.3)
    assert not has_peer(stranger)
    assert not has_peer(plain)
    launcher.links[0].send(b"a reply")
    while not received:
        time.sleep(0.01)
    ranks.stop()
    reading.join()
    assert received == [(0, b"a reply")]
    for one in (stranger, plain):
        one.close()
    context.term()


def test_ranks_that_do_not_start(tiny, monkeypatch) -> None:
    class Nothing(LinksOnly):
        def start(self, ends: list[NetworkEnds]) -> None:
            pass

    config = make_config(tiny("qwen2"), tensor_parallel_size=2)
    with pytest.raises(EngineStartError, match="rank 0 of 2 did not start: no node has room"):
        NetworkRanks(config, Nothing("no node has room"))
    monkeypatch.setattr("quire.executor.ranks.network.START_TIMEOUT_S", 0.1)
    with pytest.raises(EngineStartError, match="rank 0 of 2 did not connect to 127.0.0.1 within"):
        NetworkRanks(config, Nothing())
