"""The load generator: arrivals by seed and rate, the concurrency limit, conversations,
interruption.
"""

import asyncio
import itertools
from statistics import mean, pvariance
from time import perf_counter, process_time
from typing import Any

import pytest
from quire.frontend.bench.load import LoadReport, LoadRunner, arrival_times
from quire.frontend.bench.openai_client import Outcome
from quire.frontend.bench.workloads import WorkloadRequest


def gaps(rate: float, burstiness: float, seed: int = 0) -> list[float]:
    times = [0.0, *arrival_times(4000, rate, burstiness, seed)]
    assert times == sorted(times)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert (
        arrival_times(50, 3.0, 1.0, seed=7)
        == arrival_times(50, 3.0, 1.0, seed=7)
        != arrival_times(50, 3.0, 1.0, seed=8)
    )


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """The squared coefficient of variation of a gamma distribution is 1 / shape; for shape 1,
    Poisson arrivals, it is 1.
    """
    found = gaps(20.0, burstiness)
    assert mean(found) == pytest.approx(1 / 20, rel=0.15)
    assert pvariance(found) / mean(found) ** 2 == pytest.approx(1 / burstiness, rel=0.25)


def test_without_a_rate_all_arrive_at_once() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


class Server:
    """Answers after an iteration of the event loop and records its requests."""

    def __init__(self, failures: tuple[int, ...] = ()):
        self.asked: list[Any] = []
        self.times: list[float] = []
        self.under_way = self.peak = 0
        self.failures = failures
        self.gate: asyncio.Event | None = None  # None: open

    async def send(self, prompt: Any, max_tokens: int) -> Outcome:
        index = len(self.asked)
        self.asked.append(prompt)
        self.times.append(perf_counter())
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(0))
        finally:
            self.under_way -= 1
        return Outcome(
            start=self.times[-1],
            end=perf_counter(),
            text=f"answer {index}",
            failure="timeout" if index in self.failures else None,
        )


def requests(count: int, *follow_ups: str) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"prompt {i}", 5, 8, follow_ups) for i in range(count)]


def run(
    server: Server,
    asked: list[WorkloadRequest],
    times: list[float] | None = None,
    as_messages: bool = False,
    max_concurrency: int | None = None,
) -> LoadReport:
    runner = LoadRunner(server.send, as_messages=as_messages, max_concurrency=max_concurrency)
    return asyncio.run(runner.run(asked, times or [0.0] * len(asked)))


def test_outcomes_are_in_the_order_of_the_requests() -> None:
    server = Server()
    report = run(server, requests(20))
    assert [outcome.text for outcome in report.outcomes] == [f"answer {i}" for i in range(20)]
    assert (report.peak_concurrency, server.peak, report.was_interrupted) == (20, 20, False)
    # the workload's count, since the server gave none
    assert {outcome.num_prompt_tokens for outcome in report.outcomes} == {5}


def test_the_limit_holds() -> None:
    server = Server()
    report = run(server, requests(20), max_concurrency=3)
    assert (server.peak, report.peak_concurrency, len(report.outcomes)) == (3, 3, 20)


def test_delay_by_the_limit_is_not_counted_as_the_clients() -> None:
    async def send(prompt: Any, max_tokens: int) -> Outcome:
        await asyncio.sleep(0.05)
        return Outcome(start=0.0)

    report = asyncio.run(
        LoadRunner(send, as_messages=False, max_concurrency=2).run(requests(20), [0.0] * 20)
    )
    assert len(report.send_delays) == 20 and report.duration_s > 0.4
    assert sorted(report.send_delays)[10] < 0.15  # it would be 0.25


def test_no_request_is_early() -> None:
    server, times = Server(), [0.0, 0.03, 0.03, 0.06]
    before = perf_counter()
    report = run(server, requests(4), times)
    assert [at - before >= due for at, due in zip(server.times, times)] == [True] * 4
    assert len(report.send_delays) == 4 and min(report.send_delays) >= 0


def test_a_conversation_of_messages_carries_the_answers() -> None:
    server = Server()
    report = run(server, requests(1, "second", "third"), as_messages=True)
    assert [message["content"] for message in server.asked[-1]] == [
        "prompt 0",
        "answer 0",
        "second",
        "answer 1",
        "third",
    ]
    assert [message["role"] for message in server.asked[-1]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert len(report.outcomes) == 3 and len(server.asked[0]) == 1


def test_a_conversation_of_completions_is_one_growing_text() -> None:
    server = Server()
    run(server, requests(1, "second"))
    assert server.asked == ["prompt 0", "prompt 0answer 0\nsecond"]


def test_a_failure_ends_its_conversation() -> None:
    server = Server(failures=(1,))
    report = run(server, requests(1, "second", "third"))
    assert [outcome.failure for outcome in report.outcomes] == [None, "timeout"]


def test_an_interrupted_run_keeps_what_has_ended() -> None:
    async def main() -> tuple[LoadReport, Server]:
        server = Server()
        ended: list[Outcome] = []
        runner = LoadRunner(
            server.send, as_messages=False, max_concurrency=2, on_outcome=ended.append
        )

        def on_outcome(outcome: Outcome) -> None:
            ended.append(outcome)
            if len(ended) == 5:
                server.gate = asyncio.Event()  # later requests wait forever
                asyncio.get_running_loop().call_later(0.01, runner.interrupt)

        runner._on_outcome = on_outcome
        return await runner.run(requests(20), [0.0] * 20), server

    report, server = asyncio.run(main())
    assert report.was_interrupted and server.under_way == 0
    ended = [outcome for outcome in report.outcomes if outcome is not None]
    assert 5 <= len(ended) <= 7 and len(report.outcomes) == 20


def test_a_blocked_event_loop_is_detected() -> None:
    async def send(prompt: Any, max_tokens: int) -> Outcome:
        await asyncio.sleep(0)
        end = process_time() + 0.2
        while process_time() < end:
            pass
        await asyncio.sleep(0)
        return Outcome(start=0.0)

    report = asyncio.run(LoadRunner(send, as_messages=False).run(requests(1), [0.0]))
    assert max(report.lags) > 0.1
    assert report.client_cpu_s >= 0.2 and report.duration_s >= 0.2
