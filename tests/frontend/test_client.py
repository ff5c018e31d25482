"""The contract of EngineClient, held against every form of it: in this process (with and without the codec), a child, a daemon; blocking and asyncio.
May know: EngineClient, the fake executor and its oracle.
Must not know: how any form does it."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from quire.frontend.client import EngineClient
from quire.frontend.inproc_client import InprocClient
from quire.frontend.llm_engine import make_client
from quire.frontend.mp_client import MPClient
from quire.ipc.errors import EngineDeadError, InvalidParameterError, RemoteTraceback
from quire.ipc.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.ipc.params import SamplingParams
from quire.tests.fake_engine import COMMAND, TroubledExecutor, daemon
from quire.tests.fakes import expected_output, make_config

FORMS = ["inproc", "inproc async", "inproc codec", "inproc codec async", "process", "process async", "daemon", "daemon async"]


class Driver:
    """One client, used the way its form is meant to be used."""

    def __init__(self, form: str, directory, **arguments):
        self.config = make_config(startup_timeout_s=30.0, **arguments)
        self.runner = asyncio.Runner() if form.endswith("async") else None
        self.daemon = None
        if form.startswith("inproc"):
            self.client: EngineClient = InprocClient(self.config, executor=TroubledExecutor(self.config), round_trip="codec" in form)
        elif form.startswith("process"):
            self.client = MPClient(self.config, asyncio_mode=self.runner is not None, command=COMMAND)
        else:
            self.daemon = daemon(directory, self.config)
            address, self.process = self.daemon.__enter__()
            self.client = MPClient(make_config(startup_timeout_s=30.0), address, asyncio_mode=self.runner is not None)

    def get_output(self) -> EngineCoreOutputs:
        if self.runner is None:
            return self.client.get_output()
        return self.runner.run(asyncio.wait_for(self.client.get_output_async(), 20))

    def call(self, method: str, *args):
        if self.runner is None:
            return self.client.call_utility(method, *args)
        return self.runner.run(asyncio.wait_for(self.client.call_utility_async(method, *args), 20))

    def close(self) -> None:
        self.client.shutdown()
        if self.runner is not None:
            self.runner.close()
        if self.daemon is not None:
            self.daemon.__exit__(None, None, None)

    def collect(self, num_requests: int) -> dict[str, tuple[list[int], object]]:
        """Outputs until that many have finished: id -> (tokens, Finished). Checks epochs, and that every row begins where its last one ended."""
        tokens: dict[str, list[int]] = {}
        finished = {}
        while len(finished) < num_requests:
            outputs = self.get_output()
            assert outputs.epoch == self.client.ready.epoch
            start = 0
            for request_id, first_index, count in zip(outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True):
                have = tokens.setdefault(request_id, [])
                assert first_index == len(have) and request_id not in finished
                have += outputs.token_ids[start : start + count]
                start += count
            finished |= {outputs.request_ids[end.row]: end for end in outputs.finished}
        return {request_id: (tokens[request_id], end) for request_id, end in finished.items()}


@pytest.fixture(params=FORMS)
def form(request) -> str:
    return request.param


@pytest.fixture
def open_driver(form, tmp_path):
    drivers = []

    def open_(**arguments) -> Driver:
        drivers.append(Driver(form, tmp_path, **arguments))
        return drivers[-1]

    yield open_
    for driver in drivers:
        driver.close()


def make_requests(num_requests: int, seed: int = 0) -> list[EngineCoreRequest]:
    rng = random.Random(seed)
    return [
        EngineCoreRequest(
            f"r{i}",
            [rng.randrange(97) for _ in range(rng.randint(1, 60))],
            SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(2**40), max_tokens=rng.randint(1, 20), logprobs=rng.choice([None, 3])),
            eos_token_ids=[rng.randrange(97)],
        )
        for i in range(num_requests)
    ]


def assert_expected(requests: list[EngineCoreRequest], results: dict, config) -> None:
    for request in requests:
        tokens, reason, stop_reason = expected_output(request.prompt_token_ids, request.sampling_params, request.eos_token_ids, config)
        got, end = results[request.request_id]
        assert (got, end.reason, end.stop_reason) == (tokens, reason, stop_reason)


def test_ready_tells_the_configuration(open_driver):
    driver = open_driver(max_model_len=128)
    assert driver.client.ready.config == driver.config
    assert driver.client.ready.num_blocks == 257


def test_outputs(open_driver):
    driver, requests = open_driver(), make_requests(40)
    for request in requests:
        driver.client.add_request(request)
    assert_expected(requests, driver.collect(40), driver.config)
    assert driver.call("scheduler_state")["running"] == []
    assert driver.call("check_integrity") is True


def test_logprobs_are_arrays(open_driver):
    driver = open_driver()
    driver.client.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(temperature=0.0, seed=0, max_tokens=1, logprobs=2)))
    outputs = driver.get_output()
    [row] = outputs.logprobs
    assert (row.token_ids.dtype, tuple(row.token_ids.shape)) == ("i4", (1, 3))
    assert memoryview(row.token_ids.data).cast("B").cast("i")[0] == outputs.token_ids[0]
    assert list(memoryview(row.logprobs.data).cast("B").cast("f")) == [-0.5, -1.0, -1.5]


def test_bad_requests_cost_nobody_else(open_driver):
    driver, good = open_driver(), make_requests(4)
    params = SamplingParams(seed=0)
    bad = {
        "outside": (EngineCoreRequest("outside", [5, 97], params), "prompt_token_ids"),
        "long": (EngineCoreRequest("long", [1] * 300, params), "max_model_len"),
        "empty": (EngineCoreRequest("empty", [], params), "prompt_token_ids"),
        "unresolved": (EngineCoreRequest("unresolved", [1], SamplingParams()), "seed"),
        "words": (EngineCoreRequest("words", [1, "two"], params), ""),  # no message at all: a codec refuses it before the core sees it
        "unsupported": (EngineCoreRequest("unsupported", [1], SamplingParams(seed=0, frequency_penalty=1.0)), "frequency_penalty"),
    }
    for pair in zip([*good, None, None], bad.values(), strict=True):
        for request in (pair[0], pair[1][0]):
            if request is not None:
                driver.client.add_request(request)
    results = driver.collect(len(good) + len(bad))
    assert_expected(good, results, driver.config)
    for request_id, (_, parameter) in bad.items():
        tokens, end = results[request_id]
        assert tokens == [] and end.reason == FinishReason.ERROR and parameter in end.error


def test_abort(open_driver):
    driver = open_driver(hf_overrides={"delay_s": 0.02})
    driver.client.add_request(EngineCoreRequest("long", [1, 2], SamplingParams(seed=0, max_tokens=250)))
    driver.client.add_request(EngineCoreRequest("short", [1, 2], SamplingParams(seed=0, max_tokens=3)))
    driver.client.abort_requests(["nobody"])
    driver.client.abort_requests(["long", "nobody"])
    driver.client.abort_requests(["long"])
    results = driver.collect(2)
    assert results["long"][1].reason == FinishReason.ABORT
    assert results["short"][1].reason == FinishReason.LENGTH and len(results["short"][0]) == 3


def test_an_abort_right_behind_its_request(open_driver):
    driver = open_driver(hf_overrides={"delay_s": 0.02})
    for i in range(20):
        driver.client.add_request(EngineCoreRequest(f"r{i}", [1, 2], SamplingParams(seed=0, max_tokens=200)))
        driver.client.abort_requests([f"r{i}"])
    assert {end.reason for _, end in driver.collect(20).values()} == {FinishReason.ABORT}


def test_utilities_between_outputs(open_driver):
    driver, requests = open_driver(), make_requests(10)
    for request in requests:
        driver.client.add_request(request)
        assert driver.call("ping") == "pong"
    results = driver.collect(10)
    assert_expected(requests, results, driver.config)
    metrics = driver.call("get_metrics")
    assert metrics["num_generation_tokens"] == sum(len(tokens) for tokens, _ in results.values())
    assert metrics["num_bad_frames"] == 0


def test_utility_errors(open_driver):
    driver = open_driver()
    with pytest.raises(InvalidParameterError, match="must be one of") as caught:
        driver.call("shutdown")
    assert caught.value.parameter == "method" and isinstance(caught.value.__cause__, RemoteTraceback)
    with pytest.raises(InvalidParameterError, match="does not take"):
        driver.call("ping", 1)
    assert driver.call("ping") == "pong"


def test_a_failed_step_kills_the_engine(open_driver):
    driver = open_driver(hf_overrides={"raise_at_step": 0})
    driver.client.add_request(make_requests(1)[0])
    with pytest.raises(EngineDeadError, match="scripted failure"):
        driver.collect(1)
    for use in (driver.get_output, lambda: driver.call("ping"), lambda: driver.client.add_request(make_requests(1)[0])):
        with pytest.raises(EngineDeadError, match="scripted failure"):
            use()


def test_shutdown_twice(open_driver):
    driver = open_driver()
    driver.client.add_request(EngineCoreRequest("long", [1, 2], SamplingParams(seed=0, max_tokens=200)))
    driver.client.shutdown()
    driver.client.shutdown()
    for use in (driver.get_output, lambda: driver.call("ping"), lambda: driver.client.abort_requests(["long"])):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()


def test_messages_are_not_changed(open_driver):
    driver, [request] = open_driver(), make_requests(1)
    before = msgspec.msgpack.encode(request)
    driver.client.add_request(request)
    driver.collect(1)
    assert msgspec.msgpack.encode(request) == before


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "proces", "ipc://", "ipc://@abstract", "ipc:///" + "x" * 120])
def test_make_client_refuses_other_addresses(address):
    with pytest.raises(InvalidParameterError) as caught:
        make_client(make_config(), address)
    assert caught.value.parameter == "engine"


def test_make_client_finds_no_daemon(tmp_path):
    with pytest.raises(EngineDeadError, match="no engine listens"):
        make_client(make_config(), f"ipc://{tmp_path}/nobody.sock")
