"""Pause and resume: which requests continue, which are held, what a call returns and when."""

import random

import pytest
from quire.ipc.errors import EnginePausedError, InvalidParameterError
from quire.ipc.messages import (
    EngineCoreRequest,
    FinishReason,
    UtilityCall,
    UtilityResult,
    child_request_id,
)
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import assert_nothing_left, collect, make_core, run, step
from quire.tests.core.pausing import (
    assert_finished,
    call,
    every_form,
    expected,
    long_request,
    make_request,
    started,
)


@every_form
def test_keep_freezes_and_resume_continues(form):
    core, requests, received = started(**form)
    call(core, "pause", "keep", received=received)
    assert call(core, "is_paused") is True
    late = long_request(9, max_tokens=requests[0].sampling_params.max_tokens)
    core.add_request(late)
    assert not core.has_work() and core.step_fn() == (None, False)
    state = core.observer.scheduler_state()
    assert sorted(state["running"] + state["waiting"] + state.get("swapped", [])) == [
        "r0",
        "r1",
        "r2",
    ]
    assert (state["held"], state["pause_mode"]) == (["r9"], "keep")
    num_steps, num_preemptions = (
        len(core.executor.steps),
        core.observer.get_metrics()["num_preemptions"],
    )
    call(core, "resume")
    assert call(core, "is_paused") is False
    assert_finished(core, [*requests, late], received)
    assert len(core.executor.steps) > num_steps and (
        form or core.observer.get_metrics()["num_preemptions"] == num_preemptions == 0
    )


def test_abort_ends_all_requests_and_holds_the_next():
    core = make_core(max_num_seqs=2)
    for i in range(4):
        core.add_request(long_request(i), client_index=i % 2)
    answers: dict = {}
    for client, outputs in step(core).items():
        collect(outputs, answers.setdefault(client, {}))
    paused = core.call_utility("pause", ["abort"], 1)
    core.add_request(long_request(7), client_index=0)
    assert not paused.done()  # the rows are sent first
    for client, outputs in step(core).items():
        collect(outputs, answers.setdefault(client, {}))
    assert paused.result(0) is None
    ended = answers[0] | answers[1]
    assert sorted(ended) == ["r0", "r1", "r2", "r3"] and {
        answer.reason for answer in ended.values()
    } == {FinishReason.ABORT}
    assert not core.has_work() and core.observer.scheduler_state()["held"] == ["r7"]
    call(core, "resume")
    assert run(core)[0]["r7"].tokens == expected(core, long_request(7))


def test_wait_finishes_present_requests_and_answers_after_the_last_row():
    core, requests, received = started(
        num_requests=5, max_num_seqs=2
    )  # three of them have not started
    paused = core.call_utility("pause", ["wait"], 3)
    late = long_request(9)
    core.add_request(late)
    answers = {0: received}
    while not paused.done():
        outputs, model_executed = core.step_fn()
        collect(outputs[0], answers[0])
        assert not paused.done()
        core.post_step(model_executed)
    assert all(
        received[request.request_id].tokens == expected(core, request) for request in requests
    )
    assert "r9" not in received and not core.has_work()
    call(core, "resume")
    assert_finished(core, [late], received)


def test_wait_without_requests_returns_at_once():
    assert call(make_core(), "pause", "wait") is None


def test_wait_ends_if_the_last_request_leaves_with_its_client():
    core = make_core()
    core.add_request(make_request(max_tokens=100), client_index=4)
    step(core)
    paused = core.call_utility("pause", ["wait"], 0)
    assert not paused.done()
    core.drop_client(4)
    assert paused.result(0) is None and core.pausing.is_paused()


@every_form
def test_resume_ends_a_wait_with_an_error(form):
    core, requests, received = started(**form)
    paused = core.call_utility("pause", ["wait"], 0)
    call(core, "resume")
    with pytest.raises(EnginePausedError, match="before pause"):
        paused.result(0)
    assert_finished(core, requests, received)


@every_form
def test_a_wait_can_be_frozen_and_continues(form):
    core, requests, received = started(**form)
    waits = core.call_utility("pause", ["wait"], 0)
    call(core, "pause", "keep", client_index=1, received=received)
    assert not core.has_work() and not waits.done()
    again = core.call_utility("pause", ["wait"], 1)
    answers = run(core, {0: received})
    assert waits.done() and again.done() and all(answer.reason for answer in answers[0].values())


def test_refusals_and_aborts_are_answered_during_a_pause():
    core, requests, received = started()
    call(core, "pause", "keep")
    core.add_request(make_request("bad", prompt=()))
    core.add_request(make_request("held"))
    core.add_request(make_request("held"))  # in use, though the request has not started
    core.abort_requests(["r1", "held"])
    outputs = step(core)[0]
    reasons = {(outputs.request_ids[end.row], end.reason) for end in outputs.finished}
    error, abort = FinishReason.ERROR, FinishReason.ABORT
    assert reasons == {("bad", error), ("held", error), ("held", abort), ("r1", abort)}
    assert core.observer.scheduler_state()["held"] == [] and not core.has_work()


def test_held_requests_keep_the_order_of_priority_and_arrival():
    core = make_core(scheduling_policy="priority", max_num_seqs=1)
    call(core, "pause", "keep")
    for i, priority in enumerate([1, 0, 1, -1]):
        core.add_request(
            EngineCoreRequest(
                f"r{i}",
                [1, 2],
                SamplingParams(temperature=0.0, seed=0, max_tokens=1),
                priority=priority,
            )
        )
    call(core, "resume")
    order = []
    while core.has_work():
        order += step(core)[0].request_ids
    assert order == ["r3", "r1", "r0", "r2"]


def test_a_pause_ends_with_the_last_client_that_requested_it():
    core = make_core()
    for client_index in (3, 4):
        call(core, "pause", "keep", client_index=client_index)
    core.add_request(make_request(), client_index=0)
    core.drop_client(3)
    core.drop_client(7)  # this client did not request the pause
    assert not core.has_work()
    core.drop_client(4)
    assert run(core)[0]["r"].tokens == expected(core, make_request())


@pytest.mark.parametrize("mode", ["stop", "", None, 1, ["abort"]])
def test_unknown_modes_are_refused(mode):
    core = make_core()
    with pytest.raises(
        InvalidParameterError, match="mode: must be one of abort, wait, keep"
    ) as caught:
        call(core, "pause", mode)
    assert caught.value.parameter == "mode" and not core.pausing.is_paused()


def test_the_reason_why_no_rows_come():
    core, requests, received = started()
    assert call(core, "stall_reason") is None
    call(core, "pause", "keep")
    assert call(core, "stall_reason") == "the engine is paused: resume() first"
    core.abort_requests(["r0"])
    reason = core.call_utility("stall_reason", [])
    assert not reason.done()  # a row is pending, so output does come
    step(core)
    assert reason.result(0) == "the engine is paused: resume() first"
    call(core, "sleep", 1)
    assert call(core, "stall_reason") == "the engine is asleep (kv_cache): wake_up() first"


def test_answers_are_sent_once_at_once_or_later():
    core, requests, received = started()
    answers: list[UtilityResult] = []
    core.answer_utility(UtilityCall(1, "ping"), 0, answers.append)
    core.answer_utility(UtilityCall(2, "pause", ["wait"]), 0, answers.append)
    core.answer_utility(UtilityCall(3, "no such thing"), 0, answers.append)
    assert [answer.call_id for answer in answers] == [1, 3] and answers[
        1
    ].failure.parameter == "method"
    run(core, {0: received})
    assert [answer.call_id for answer in answers] == [1, 3, 2] and answers[2] == UtilityResult(2)
    core.answer_utility(UtilityCall(4, "resume"), 0, answers.append)
    assert core.observer.get_metrics()["num_failed_utilities"] == 1


def test_a_later_failure_is_answered_and_counted():
    core, _, _ = started()
    answers: list[UtilityResult] = []
    core.answer_utility(UtilityCall(1, "pause", ["wait"]), 0, answers.append)
    core.answer_utility(UtilityCall(2, "resume"), 0, answers.append)
    assert [answer.call_id for answer in answers] == [1, 2] and answers[
        0
    ].failure.error_type == "EnginePausedError"
    assert core.observer.get_metrics()["num_failed_utilities"] == 1


@pytest.mark.sampled
@every_form
@pytest.mark.parametrize("seed", range(4))
def test_no_pause_and_no_sleep_changes_an_output(form, seed):
    rng, core = random.Random(seed), make_core(**form)
    requests = [
        make_request(
            f"r{i}",
            rng.randint(1, 30),
            [rng.randrange(97) for _ in range(rng.randint(1, 60))],
            n=rng.choice([1, 1, 3]),
        )
        for i in range(20)
    ]
    received: dict = {}
    arriving, paused, asleep, num_steps = list(requests), False, False, 0
    while arriving or core.has_work() or paused or asleep:
        if arriving and rng.random() < 0.5:
            core.add_request(arriving.pop(0))
        for method, argument in (
            ("pause", "keep"),
            ("pause", "wait"),
            ("sleep", 1),
            ("sleep", 2),
            ("reset_prefix_cache", True),
        ):
            if rng.random() < 0.03 and not (method == "pause" and asleep):
                core.call_utility(method, [argument])
        if rng.random() < 0.3:
            core.call_utility("resume", [])
        if rng.random() < 0.3:
            core.call_utility("wake_up", [])
        paused, asleep = core.pausing.is_paused(), core.pausing.is_sleeping()
        for outputs in step(core).values():
            collect(outputs, received)
        num_steps += 1
        assert num_steps < 5000, core.observer.scheduler_state()
    for request in requests:
        n = request.sampling_params.n  # greedy, so the completions of one request are alike
        for name in (
            [request.request_id]
            if n == 1
            else [child_request_id(request.request_id, i) for i in range(n)]
        ):
            assert received[name].tokens == expected(core, request)
    assert_nothing_left(core)


@pytest.mark.parametrize(
    "call_for",
    [
        ["pause", "keep"],
        ["sleep", 1],
        ["load_weights", "/new"],
        ["collective_rpc", "check_health"],
        ["execute_dummy_batch"],
    ],
)
def test_a_step_that_fails_while_a_utility_waits_ends_the_engine(call_for):
    """Overlapped: the step is in flight when the call arrives. If its error were taken for the
    call's own, the requests would hang.
    """
    core, _, _ = started(async_scheduling=True)
    core.executor.thread.submit(lambda: None).result()  # the step before has ended
    core.executor.raise_at_step = 0
    step(core)  # submits the failing step
    answers: list[UtilityResult] = []
    with pytest.raises(RuntimeError, match="scripted failure"):
        core.answer_utility(UtilityCall(1, call_for[0], call_for[1:]), 0, answers.append)
    assert answers == []


@pytest.mark.parametrize("form", [{}, {"async_scheduling": True}], ids=["plain", "overlapped"])
def test_asking_why_no_rows_come_does_not_wait_for_rows(form):
    core, _, received = started(**form)
    assert core.call_utility("stall_reason", []).result(0) is None
    call(core, "pause", "keep", received=received)
    call(core, "resume")
    assert core.call_utility("stall_reason", []).result(0) is None
