"""The contract of EngineClient, held against every form of it: in this process (with and without
the codec), a child, a daemon; blocking and asyncio.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from quire.frontend.clients.client import EngineClient
from quire.frontend.clients.connect import make_client
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.clients.mp_client import MPClient
from quire.ipc.errors import (
    EngineDeadError,
    EnginePausedError,
    InvalidParameterError,
    ModelLoadError,
    RemoteTraceback,
)
from quire.ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    RequestTiming,
    SchedulerStats,
    TransportStats,
)
from quire.ipc.params import SamplingParams
from quire.tests.fake_engine import COMMAND, TroubledExecutor, daemon
from quire.tests.fakes import expected_output, make_config, weights_digest

FORMS = [
    "inproc",
    "inproc async",
    "inproc codec",
    "inproc codec async",
    "process",
    "process async",
    "daemon",
    "daemon async",
]


class Driver:
    """One client, used the way its form is meant to be used."""

    def __init__(self, form: str, directory, **arguments):
        self.config = make_config(startup_timeout_s=30.0, **arguments)
        self.runner = asyncio.Runner() if form.endswith("async") else None
        self.daemon = None
        if form.startswith("inproc"):
            self.client: EngineClient = InprocClient(
                self.config, executor=TroubledExecutor(self.config), round_trip="codec" in form
            )
        elif form.startswith("process"):
            self.client = MPClient(
                self.config, asyncio_mode=self.runner is not None, command=COMMAND
            )
        else:
            self.daemon = daemon(directory, self.config)
            address, self.process = self.daemon.__enter__()
            self.client = MPClient(
                make_config(startup_timeout_s=30.0), address, asyncio_mode=self.runner is not None
            )

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
        """Outputs until that many have finished: id -> (tokens, Finished).

        Checks epochs, and that every row begins where its last one ended.
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


def test_rows_of_several_steps_may_come_together(open_driver):
    driver, requests = open_driver(hf_overrides={"delay_s": 0.002}), make_requests(40)
    # rows in a second: even two of them wait the longest time there is
    driver.client.pace_outputs(20)
    for request in requests:
        driver.client.add_request(request)
    num_messages, get_output = 0, driver.get_output

    def counted() -> EngineCoreOutputs:
        nonlocal num_messages
        num_messages += 1
        outputs = get_output()
        assert sum(row.token_ids.shape[0] for row in outputs.logprobs) <= len(
            outputs.token_ids
        ) and len(outputs.token_steps) in (0, len(outputs.token_ids))
        return outputs

    driver.get_output = counted
    results = driver.collect(40)
    assert_expected(requests, results, driver.config)
    assert num_messages < sum(len(tokens) for tokens, _ in results.values()) / 2


def test_what_is_held_comes_before_the_engines_failure(open_driver):
    driver, told = open_driver(hf_overrides={"raise_at_step": 4}), []
    driver.client.pace_outputs(1)
    driver.client.add_request(
        EngineCoreRequest("a", [1, 2], SamplingParams(seed=0, max_tokens=200))
    )
    with pytest.raises(EngineDeadError, match="scripted failure"):
        while True:
            told += driver.get_output().token_ids
    assert len(told) == 4


def test_logprobs_are_arrays(open_driver):
    driver = open_driver()
    driver.client.add_request(
        EngineCoreRequest(
            "a", [1, 2, 3], SamplingParams(temperature=0.0, seed=0, max_tokens=1, logprobs=2)
        )
    )
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
        # no message at all: a codec refuses it before the core sees it
        "words": (EngineCoreRequest("words", [1, "two"], params), ""),
        "no token": (
            EngineCoreRequest("no token", [1], SamplingParams(seed=0, allowed_token_ids=[97])),
            "allowed_token_ids",
        ),
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
    driver.client.add_request(
        EngineCoreRequest("long", [1, 2], SamplingParams(seed=0, max_tokens=250))
    )
    driver.client.add_request(
        EngineCoreRequest("short", [1, 2], SamplingParams(seed=0, max_tokens=3))
    )
    driver.client.abort_requests(["nobody"])
    driver.client.abort_requests(["long", "nobody"])
    driver.client.abort_requests(["long"])
    results = driver.collect(2)
    assert results["long"][1].reason == FinishReason.ABORT
    assert results["short"][1].reason == FinishReason.LENGTH and len(results["short"][0]) == 3


def test_an_abort_right_behind_its_request(open_driver):
    driver = open_driver(hf_overrides={"delay_s": 0.02})
    for i in range(20):
        driver.client.add_request(
            EngineCoreRequest(f"r{i}", [1, 2], SamplingParams(seed=0, max_tokens=200))
        )
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


def test_observe(open_driver):
    driver, requests = open_driver(), make_requests(10)
    for request in requests:
        driver.client.add_request(request)
    driver.collect(10)
    seen = driver.call("observe", -1, 100)
    assert seen["requests"] == [] and [record[0] for record in seen["steps"]] == list(
        range(seen["step"] + 1)
    )
    assert all(type(record) is list and len(record) == 9 for record in seen["steps"])
    assert seen["num_blocks"] == 257 and set(seen["blocks"]) <= set("-.c")
    assert sum(seen["block_counts"].values()) == 256
    assert seen["counters"] == driver.call("get_metrics")
    assert driver.call("observe", seen["step"])["steps"] == []
    with pytest.raises(InvalidParameterError, match="max_blocks: must be between") as caught:
        driver.call("observe", 0, 0)
    assert caught.value.parameter == "max_blocks"


def test_utility_errors(open_driver):
    driver = open_driver()
    with pytest.raises(InvalidParameterError, match="must be one of") as caught:
        driver.call("shutdown")
    assert caught.value.parameter == "method" and isinstance(
        caught.value.__cause__, RemoteTraceback
    )
    with pytest.raises(InvalidParameterError, match="does not take"):
        driver.call("ping", 1)
    assert driver.call("ping") == "pong"


def test_a_failed_step_kills_the_engine(open_driver):
    driver = open_driver(hf_overrides={"raise_at_step": 0})
    driver.client.add_request(make_requests(1)[0])
    with pytest.raises(EngineDeadError, match="scripted failure"):
        driver.collect(1)
    for use in (
        driver.get_output,
        lambda: driver.call("ping"),
        lambda: driver.client.add_request(make_requests(1)[0]),
    ):
        with pytest.raises(EngineDeadError, match="scripted failure"):
            use()


def test_shutdown_twice(open_driver):
    driver = open_driver()
    driver.client.add_request(
        EngineCoreRequest("long", [1, 2], SamplingParams(seed=0, max_tokens=200))
    )
    driver.client.shutdown()
    driver.client.shutdown()
    for use in (
        driver.get_output,
        lambda: driver.call("ping"),
        lambda: driver.client.abort_requests(["long"]),
    ):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()


def test_messages_are_not_changed(open_driver):
    driver, [request] = open_driver(), make_requests(1)
    before = msgspec.msgpack.encode(request)
    driver.client.add_request(request)
    driver.collect(1)
    assert msgspec.msgpack.encode(request) == before


# ---------------------------------------------------------------- pause, sleep, weights, statistics


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
    """Tokens and ends of this driver's requests, gathered in several goes."""

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


def begin(open_driver, **arguments) -> tuple[Driver, list[EngineCoreRequest], Collector]:
    """Four requests, under way."""
    driver, requests = open_driver(hf_overrides={"delay_s": 0.005}, **arguments), long_requests()
    collector = Collector(driver)
    for request in requests:
        driver.client.add_request(request)
    while len(collector.tokens) < len(requests):
        collector.take()
    return driver, requests, collector


def test_pause_keep_and_resume(open_driver):
    driver, requests, collector = begin(open_driver)
    driver.call("pause", "keep")
    assert driver.call("is_paused") is True
    late = msgspec.structs.replace(requests[0], request_id="late")
    driver.client.add_request(late)
    state = driver.call("scheduler_state")
    assert (state["running"], state["held"], state["is_paused"], state["pause_mode"]) == (
        ["r0", "r1", "r2", "r3"],
        ["late"],
        True,
        "keep",
    )
    computed = [request["num_computed_tokens"] for request in state["requests"]]
    assert driver.call("ping") == "pong"
    assert [
        request["num_computed_tokens"] for request in driver.call("scheduler_state")["requests"]
    ] == computed
    driver.call("resume")
    assert driver.call("is_paused") is False
    assert_expected([*requests, late], collector.until_finished([*requests, late]), driver.config)
    assert driver.call("check_integrity") is True


def test_pause_abort(open_driver):
    driver, requests, collector = begin(open_driver)
    driver.call("pause", "abort")
    late = msgspec.structs.replace(requests[0], request_id="late")
    driver.client.add_request(late)
    results = collector.until_finished(requests)
    assert {end.reason for _, end in results.values()} == {
        FinishReason.ABORT
    } and "late" not in results
    driver.call("resume")
    assert_expected([late], collector.until_finished([*requests, late]), driver.config)


@pytest.mark.parametrize("overlapped", [False, True])
def test_pause_wait_returns_when_everything_has_finished(open_driver, overlapped):
    driver, requests, collector = begin(open_driver, async_scheduling=overlapped)
    driver.call("pause", "wait")
    state = driver.call("scheduler_state")
    assert state["running"] == state["waiting"] == [] and state["pause_mode"] == "wait"
    late = msgspec.structs.replace(requests[0], request_id="late")
    driver.client.add_request(late)
    assert_expected(requests, collector.until_finished(requests), driver.config)
    assert driver.call("scheduler_state")["held"] == ["late"]
    driver.call("resume")
    assert_expected([late], collector.until_finished([*requests, late]), driver.config)


@pytest.mark.parametrize("overlapped", [False, True])
def test_waiting_for_oneself(open_driver, overlapped):
    """Blocking code that waits for outputs while its own pause or sleep keeps them from coming is
    told so. In asyncio another task may resume, so there one waits.
    """
    driver, requests, collector = begin(open_driver, async_scheduling=overlapped)
    for stop, go_on, reason in (("pause", "resume", "paused"), ("sleep", "wake_up", "asleep")):
        driver.call(stop, *(["keep"] if stop == "pause" else []))
        if driver.runner is None:
            with pytest.raises(EnginePausedError, match=f"the engine is {reason}.*{go_on}"):
                while True:
                    collector.take()
            driver.call(go_on)
        else:

            async def both(go_on=go_on):
                reader = asyncio.create_task(driver.client.get_output_async())
                await driver.client.call_utility_async("ping")
                await driver.client.call_utility_async(go_on)
                return await reader

            outputs = driver.runner.run(asyncio.wait_for(both(), 20))
            with_this_first = iter([outputs])
            get_output, driver.get_output = driver.get_output, lambda it=with_this_first: next(it)
            collector.take()
            driver.get_output = get_output
    assert_expected(requests, collector.until_finished(requests), driver.config)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(open_driver, level):
    driver, requests, collector = begin(open_driver)
    driver.call("sleep", level)
    assert driver.call("is_sleeping") is True
    assert driver.call("collective_rpc", "memory_usage") == [{"kv_cache_bytes": 0}]
    state = driver.call("scheduler_state")
    assert (
        state["running"] == []
        and state["asleep"] == ["kv_cache", "weights"][:level]
        and state["kv_cache_usage"] == 0.0
    )
    driver.call("wake_up")
    assert driver.call("is_sleeping") is False
    assert_expected(requests, collector.until_finished(requests), driver.config)
    assert all(timing.num_preemptions == 1 for timing in collector.timings.values())
    assert driver.call("get_metrics")["num_preemptions"] == 4


def test_new_weights(open_driver):
    driver, requests, collector = begin(open_driver)
    with pytest.raises(ModelLoadError, match="/models/missing"):
        driver.call("load_weights", "/models/missing")
    assert_expected(requests, collector.until_finished(requests), driver.config)
    driver.call("load_weights", "/models/new")
    again = [
        msgspec.structs.replace(request, request_id=f"again-{request.request_id}")
        for request in requests
    ]
    for request in again:
        driver.client.add_request(request)
    results = driver.collect(len(again))
    for request in again:
        tokens = expected_output(
            request.prompt_token_ids,
            request.sampling_params,
            [],
            driver.config,
            weights_digest("/models/new"),
        )[0]
        assert results[request.request_id][0] == tokens


@pytest.mark.parametrize("form", [form for form in FORMS if "async" in form])
def test_a_wait_that_is_cancelled_leaves_the_pause_and_the_engine(open_driver):
    driver, requests, collector = begin(open_driver)

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(driver.client.call_utility_async("pause", "wait"), 0.02)

    driver.runner.run(give_up())
    assert driver.call("is_paused") is True
    assert_expected(requests, collector.until_finished(requests), driver.config)
    driver.call("resume")
    assert driver.call("is_paused") is False


def test_errors_of_the_utilities_that_change_the_engine(open_driver):
    driver = open_driver()
    for method, arguments, parameter in (
        ("pause", ["now"], "mode"),
        ("sleep", [3], "level"),
        ("wake_up", [["everything"]], "tags"),
        ("load_weights", [5], "path"),
        ("collective_rpc", ["shutdown"], "method"),
        ("collective_rpc", ["sleep", [["weights"]]], "method"),
        ("resume", [1], "args"),
    ):
        with pytest.raises(InvalidParameterError) as caught:
            driver.call(method, *arguments)
        assert caught.value.parameter == parameter
    assert driver.call("get_metrics")["num_failed_utilities"] == 7


def test_a_death_ends_a_wait(open_driver):
    driver = open_driver(hf_overrides={"raise_at_step": 3})
    driver.client.add_request(long_requests(1)[0])
    with pytest.raises(EngineDeadError, match="scripted failure"):
        driver.call("pause", "wait")


def test_metrics_have_the_same_names_everywhere(open_driver):
    driver, requests, collector = begin(open_driver)
    collector.until_finished(requests)
    metrics = driver.call("get_metrics")
    names = {
        field.name
        for struct in (SchedulerStats, TransportStats)
        for field in msgspec.structs.fields(struct)
    }
    assert metrics.keys() == names and all(type(value) is int for value in metrics.values())
    assert (
        metrics["num_finished_length"],
        metrics["num_generation_tokens"],
        metrics["num_prompt_tokens"],
    ) == (4, 240, 160)
    assert all(
        0 < t.queued_time <= t.scheduled_time <= t.first_token_time < t.last_token_time
        for t in collector.timings.values()
    )


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5555", "proces", "ipc://", "ipc://@abstract", "ipc:///" + "x" * 120],
)
def test_make_client_refuses_other_addresses(address):
    with pytest.raises(InvalidParameterError) as caught:
        make_client(make_config(), address)
    assert caught.value.parameter == "engine"


def test_make_client_finds_no_daemon(tmp_path):
    with pytest.raises(EngineDeadError, match="no engine listens"):
        make_client(make_config(), f"ipc://{tmp_path}/nobody.sock")
