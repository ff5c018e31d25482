"""Drives any form of an EngineClient with the fake executor: in this process, a child, a daemon;
blocking and asyncio.
"""

from __future__ import annotations

import asyncio
import random

from quire.frontend.clients.client import EngineClient
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.clients.mp_client import MPClient
from quire.frontend.clients.replicas.client import ReplicasClient
from quire.frontend.supervision.supervised_client import SupervisedClient
from quire.ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    RequestTiming,
)
from quire.ipc.params import SamplingParams
from quire.tests.fake_engine import COMMAND, TroubledExecutor, daemon, open_blocking
from quire.tests.fakes import expected_output, make_config
from quire.tests.round_trip import RoundTripClient

FORMS = [
    "inproc",
    "inproc async",
    "inproc codec",
    "inproc codec async",
    "process",
    "process async",
    "daemon",
    "daemon async",
    "supervised",
    "supervised async",
    "replicas",
    "replicas async",
]
NUM_REPLICAS = 2


class Driver:
    """One client, used in the way that its form is meant to be used."""

    def __init__(self, form: str, directory, **arguments):
        self.num_engines = NUM_REPLICAS if form.startswith("replicas") else 1
        arguments = {"startup_timeout_s": 120.0, "data_parallel_size": self.num_engines} | arguments
        self.config = make_config(**arguments)
        self.runner = asyncio.Runner() if form.endswith("async") else None
        self.daemon = None
        if form.startswith("inproc"):
            kind = RoundTripClient if "codec" in form else InprocClient
            self.client: EngineClient = kind(self.config, executor=TroubledExecutor(self.config))
        elif form.startswith("replicas"):
            self.client = self._open(self._start_replicas())
        elif form.startswith("process"):
            self.client = self._open(MPClient.start(self.config, command=COMMAND))
        elif form.startswith("supervised"):
            self.client = self._open(self._start_supervised())
        else:
            self.daemon = daemon(directory, self.config)
            address, self.process = self.daemon.__enter__()
            config = make_config(startup_timeout_s=120.0)
            self.client = self._open(MPClient.start(config, address))

    def _open(self, starting) -> EngineClient:
        return open_blocking(starting) if self.runner is None else self.runner.run(starting)

    async def _start_supervised(self) -> EngineClient:
        first = await MPClient.start(self.config, command=COMMAND)
        return SupervisedClient(first, self.config, command=COMMAND)

    async def _start_replicas(self) -> EngineClient:
        # engines in this process start at once; tests of replicas/ have processes
        engines = [
            InprocClient(self.config, executor=TroubledExecutor(self.config))
            for _ in range(NUM_REPLICAS)
        ]
        makers = [lambda place, engine=engine: engine for engine in engines]
        return ReplicasClient(makers, engines[0].ready, self.config)

    def get_output(self) -> EngineCoreOutputs:
        if self.runner is None:
            return self.client.get_output()
        return self.runner.run(asyncio.wait_for(self.client.get_output_async(), 60))

    def call(self, method: str, *args):
        if self.runner is None:
            return self.client.call_utility(method, *args)
        return self.runner.run(asyncio.wait_for(self.client.call_utility_async(method, *args), 60))

    def close(self) -> None:
        self.client.shutdown()
        if self.runner is not None:
            self.runner.close()
        if self.daemon is not None:
            self.daemon.__exit__(None, None, None)

    def collect(self, num_requests: int) -> dict[str, tuple[list[int], object]]:
        """Read outputs until `number` requests have finished: id -> (tokens, Finished). Check
        epochs, and that every row continues where the last one ended.
        """
        tokens: dict[str, list[int]] = {}
        finished = {}
        while len(finished) < num_requests:
            outputs = self.get_output()
            assert outputs.epoch == self.client.ready.epoch
            start = 0
            for request_id, first_index, count in zip(
                outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True
            ):
                have = tokens.setdefault(request_id, [])
                assert first_index == len(have) and request_id not in finished
                have += outputs.token_ids[start : start + count]
                start += count
            finished |= {outputs.request_ids[end.row]: end for end in outputs.finished}
        return {request_id: (tokens[request_id], end) for request_id, end in finished.items()}


def make_requests(num_requests: int, seed: int = 0) -> list[EngineCoreRequest]:
    rng = random.Random(seed)
    return [
        EngineCoreRequest(
            f"r{i}",
            [rng.randrange(97) for _ in range(rng.randint(1, 60))],
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(2**40),
                max_tokens=rng.randint(1, 20),
                logprobs=rng.choice([None, 3]),
            ),
            eos_token_ids=[rng.randrange(97)],
        )
        for i in range(num_requests)
    ]


def assert_expected(requests: list[EngineCoreRequest], results: dict, config) -> None:
    for request in requests:
        tokens, reason, stop_reason = expected_output(
            request.prompt_token_ids, request.sampling_params, request.eos_token_ids, config
        )
        got, end = results[request.request_id]
        assert (got, end.reason, end.stop_reason) == (tokens, reason, stop_reason)


def long_requests(num_requests: int = 4, max_tokens: int = 60) -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            f"r{i}",
            [(i * 31 + j * 7) % 97 for j in range(40)],
            SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens),
        )
        for i in range(num_requests)
    ]


class Collector:
    """The tokens and ends of this driver's requests, collected over several reads."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}
        self.timings: dict[str, RequestTiming] = {}

    def take(self) -> None:
        outputs = self.driver.get_output()
        start = 0
        for request_id, first_index, count in zip(
            outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True
        ):
            have = self.tokens.setdefault(request_id, [])
            assert first_index == len(have) and request_id not in self.finished
            have += outputs.token_ids[start : start + count]
            start += count
        self.finished |= {outputs.request_ids[end.row]: end for end in outputs.finished}
        self.timings |= {outputs.request_ids[timing.row]: timing for timing in outputs.timings}

    def until_finished(self, requests: list[EngineCoreRequest]) -> dict:
        while len(self.finished) < len(requests):
            self.take()
        return {
            request_id: (self.tokens[request_id], end) for request_id, end in self.finished.items()
        }


def start_requests(open_driver, **arguments) -> tuple[Driver, list[EngineCoreRequest], Collector]:
    """Start four requests."""
    driver, requests = open_driver(hf_overrides={"delay_s": 0.005}, **arguments), long_requests()
    collector = Collector(driver)
    for request in requests:
        driver.client.add_request(request)
    while len(collector.tokens) < len(requests):
        collector.take()
    return driver, requests, collector
