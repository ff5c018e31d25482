"""The contract of EngineClient for every form: requests, outputs, utilities, failures."""

from __future__ import annotations

import msgspec
import pytest
from quire.ipc.errors import (
    EngineDeadError,
    InvalidParameterError,
    RemoteTraceback,
)
from quire.ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from quire.ipc.params import SamplingParams
from quire.tests.frontend.clients.driver import (
    assert_expected,
    long_requests,
    make_requests,
)

pytestmark = pytest.mark.sampled(step=2)  # half of the forms in one test, the others in the next


def test_ready_contains_the_configuration(open_driver):
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
    driver, requests = open_driver(hf_overrides={"delay_s": 0.002}), long_requests()
    # rows per second: at this rate even two rows wait for the maximum delay
    driver.client.pace_outputs(20)
    for request in requests:
        driver.client.add_request(request)
    num_messages, get_output = 0, driver.get_output

    def counted() -> EngineCoreOutputs:
        nonlocal num_messages
        num_messages += 1
        outputs = get_output()
        assert len(outputs.token_steps) in (0, len(outputs.token_ids))
        return outputs

    driver.get_output = counted
    results = driver.collect(len(requests))
    assert_expected(requests, results, driver.config)
    # all requests have as many tokens, and each engine makes a step for each of them
    num_steps = driver.num_engines * max(len(tokens) for tokens, _ in results.values())
    assert num_messages < num_steps / 2


def test_deferred_rows_are_sent_before_the_engines_failure(open_driver):
    driver, told = open_driver(hf_overrides={"raise_at_step": 4}, engine_restarts=0), []
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


def test_bad_requests_affect_no_other_request(open_driver):
    driver, good = open_driver(), make_requests(4)
    params = SamplingParams(seed=0)
    bad = {
        "outside": (EngineCoreRequest("outside", [5, 97], params), "prompt_token_ids"),
        "long": (EngineCoreRequest("long", [1] * 300, params), "max_model_len"),
        "empty": (EngineCoreRequest("empty", [], params), "prompt_token_ids"),
        "unresolved": (EngineCoreRequest("unresolved", [1], SamplingParams()), "seed"),
        # not a valid message: the codec refuses it before the core sees it
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
    lengths = {"first": 250, "second": 250, "kept": 3, "third": 250}
    for request_id, max_tokens in lengths.items():
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        driver.client.add_request(EngineCoreRequest(request_id, [1, 2], params))
    driver.client.abort_requests(["nobody"])
    driver.client.abort_requests(["first", "nobody", "second"])
    driver.client.abort_requests(["first"])
    driver.client.abort_requests(["third"])
    results = driver.collect(len(lengths))
    reasons = {request_id: end.reason for request_id, (_, end) in results.items()}
    assert reasons == {
        "first": FinishReason.ABORT,
        "second": FinishReason.ABORT,
        "kept": FinishReason.LENGTH,
        "third": FinishReason.ABORT,
    }
    assert len(results["kept"][0]) == 3


def test_an_abort_directly_after_its_request(open_driver):
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
    num_engines = driver.num_engines
    assert seen["num_blocks"] == 257 * num_engines and set(seen["blocks"]) <= set("-.c")
    assert sum(seen["block_counts"].values()) == 256 * num_engines
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
    driver = open_driver(hf_overrides={"raise_at_step": 0}, engine_restarts=0)
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
