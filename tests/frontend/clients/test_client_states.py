"""The contract of EngineClient for every form: pause, sleep, weights, statistics."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from quire.ipc.counters import SchedulerStats, TransportStats
from quire.ipc.errors import (
    EngineDeadError,
    EnginePausedError,
    InvalidParameterError,
    ModelLoadError,
)
from quire.ipc.messages import (
    FinishReason,
)
from quire.tests.fakes import expected_output, weights_digest
from quire.tests.frontend.clients.driver import (
    FORMS,
    assert_expected,
    long_requests,
    start_requests,
)

# all forms: test_client.py
pytestmark = pytest.mark.sampled(step=3)


def test_pause_keep_and_resume(open_driver):
    driver, requests, collector = start_requests(open_driver)
    driver.call("pause", "keep")
    assert driver.call("is_paused") is True
    late = msgspec.structs.replace(requests[0], request_id="late")
    driver.client.add_request(late)
    state = driver.call("scheduler_state")
    assert (sorted(state["running"]), state["held"], state["is_paused"], state["pause_mode"]) == (
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
    driver, requests, collector = start_requests(open_driver)
    driver.call("pause", "abort")
    late = msgspec.structs.replace(requests[0], request_id="late")
    driver.client.add_request(late)
    results = collector.until_finished(requests)
    assert {end.reason for _, end in results.values()} == {
        FinishReason.ABORT
    } and "late" not in results
    driver.call("resume")
    assert_expected([late], collector.until_finished([*requests, late]), driver.config)


@pytest.mark.sampled
@pytest.mark.parametrize("overlapped", [False, True])
def test_pause_wait_returns_when_everything_has_finished(open_driver, overlapped):
    driver, requests, collector = start_requests(open_driver, async_scheduling=overlapped)
    driver.call("pause", "wait")
    state = driver.call("scheduler_state")
    assert state["running"] == state["waiting"] == [] and state["pause_mode"] == "wait"
    late = msgspec.structs.replace(requests[0], request_id="late")
    driver.client.add_request(late)
    assert_expected(requests, collector.until_finished(requests), driver.config)
    assert driver.call("scheduler_state")["held"] == ["late"]
    driver.call("resume")
    assert_expected([late], collector.until_finished([*requests, late]), driver.config)


@pytest.mark.sampled
@pytest.mark.parametrize("overlapped", [False, True])
def test_waiting_while_the_caller_paused_the_engine(open_driver, overlapped):
    """Blocking code that waits for outputs would deadlock if its own pause or sleep prevents them,
    so it gets an error. In asyncio another task may resume, so it waits.
    """
    driver, requests, collector = start_requests(open_driver, async_scheduling=overlapped)
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

            outputs = driver.runner.run(asyncio.wait_for(both(), 60))
            with_this_first = iter([outputs])
            get_output, driver.get_output = driver.get_output, lambda it=with_this_first: next(it)
            collector.take()
            driver.get_output = get_output
    assert_expected(requests, collector.until_finished(requests), driver.config)


@pytest.mark.sampled
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(open_driver, level):
    driver, requests, collector = start_requests(open_driver)
    driver.call("sleep", level)
    assert driver.call("is_sleeping") is True
    usage = driver.call("collective_rpc", "memory_usage")
    assert usage == [{"kv_cache_bytes": 0}] * driver.num_engines
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
    driver, requests, collector = start_requests(open_driver)
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
def test_a_cancelled_wait_leaves_the_pause_and_the_engine(open_driver):
    driver, requests, collector = start_requests(open_driver)

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
    # slow steps: the call waits before the engine fails
    overrides = {"raise_at_step": 3, "delay_s": 0.05}
    driver = open_driver(hf_overrides=overrides, engine_restarts=0)
    driver.client.add_request(long_requests(1)[0])
    with pytest.raises(EngineDeadError, match="scripted failure"):
        driver.call("pause", "wait")


def test_metrics_have_the_same_names_in_every_form(open_driver):
    driver, requests, collector = start_requests(open_driver)
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
